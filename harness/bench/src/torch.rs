//! PyTorch's own allocator, in a process of its own that takes its turn among the arms: `ci/torch_reference.py`, and the talk with it.
//!
//! One JSON object a line goes each way; the script documents them. It is compiled in, so that one program file is enough on a GPU machine.

use std::collections::{BTreeMap, BTreeSet};
use std::io::{BufRead as _, BufReader, Write as _};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::{Duration, Instant};

use harness_allocator::units::Bytes;
use harness_cuda::machine::nvml_at;
use serde::{Deserialize, Serialize};

const SCRIPT: &str = include_str!("../../../ci/torch_reference.py");

/// How long it may take to import torch and open the device: a cold file system needs most of a minute.
const START: Duration = Duration::from_secs(180);
/// How long one answer may take. The longest request gives back a thousand segments, which is far below a second.
const ANSWER: Duration = Duration::from_secs(60);
/// How long its end is waited for: to take a context of many gigabytes down takes the driver some seconds at most.
const END: Duration = Duration::from_secs(20);

/// The variable with the settings of PyTorch's allocator (<https://docs.pytorch.org/docs/stable/cuda_environment_variables.html>), and the
/// one of versions before 2.9.
const SETTINGS: [&str; 2] = ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"];
/// The variable that takes the cache away.
const NO_CACHE: &str = "PYTORCH_NO_CUDA_MEMORY_CACHING";

/// How often it is started at most: what one request breaks another may survive, and a night must not be spent on importing torch.
const STARTS: u32 = 3;

/// What is asked of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Question<'a> {
    /// What to do.
    #[serde(flatten)]
    pub task: Task<'a>,
    /// The memory that it may take meanwhile, in bytes.
    pub memory: Bytes,
}

/// What it can do.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(tag = "do", rename_all = "snake_case")]
pub enum Task<'a> {
    /// One allocation of this size.
    Latency {
        /// As suites name it.
        case: &'static str,
        /// In bytes.
        size: Bytes,
        /// Pairs of allocation and free to time together, where that is what is timed.
        batch: u64,
    },
    /// `empty_cache` with so many segments in the cache.
    EmptyCache {
        /// How many.
        segments: u64,
        /// How large each is, in bytes.
        size: Bytes,
    },
    /// From a request that fails with all memory taken to the end of the next good step.
    Recovery {
        /// What each request asks for, in bytes.
        size: Bytes,
    },
    /// Memory that other streams use too.
    RecordStream {
        /// How many.
        streams: u64,
        /// What each request asks for, in bytes.
        size: Bytes,
        /// Cycles of allocation, `record_stream` and free to time together.
        batch: u64,
    },
    /// Allocation, work on the memory and free in a loop, in the device's time.
    Pipeline {
        /// What each request asks for, in bytes.
        size: Bytes,
        /// Turns of the loop to time together.
        turns: u64,
    },
    /// Keep an allocation trace, without doing anything with it.
    Load {
        /// Its name from then on.
        trace: &'a str,
        /// Its operations, one line each, as in a file.
        events: &'a [String],
        /// How many requests have to fail with out of memory, where it would not mean the same otherwise.
        refused: u64,
    },
    /// A pass over a trace that was loaded.
    Trace {
        /// Which.
        trace: &'a str,
    },
}

/// What it answers.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(untagged)]
pub enum Answer {
    /// It did it.
    Done(Samples),
    /// It cannot do that.
    Skipped {
        /// Why.
        skipped: String,
    },
    /// It tried and failed.
    Failed {
        /// What was seen.
        failed: String,
    },
}

/// What was measured.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
pub struct Samples {
    /// Picoseconds for one operation.
    pub samples_ps: Vec<u64>,
    /// Of a trace: how many operations each sample is the mean of, and the memory that they took.
    #[serde(flatten)]
    pub pass: Option<Pass>,
}

/// What a pass over a trace came to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
pub struct Pass {
    /// Allocations, failed ones included, and frees.
    pub operations: u64,
    /// The most memory that it had reserved, in bytes.
    pub reserved: u64,
    /// What of that was not allocated then.
    pub unused: u64,
}

/// What it says first.
#[derive(Deserialize)]
#[serde(untagged)]
enum Greeting {
    Here { version: String, note: String },
    Unavailable { unavailable: String },
}

/// PyTorch under each of the settings that it is wanted with: a process each, since some settings are read only once.
#[derive(Debug)]
pub struct Torches {
    /// The interpreter and the number of the CUDA device; or why there can be none.
    place: Result<(String, u32), String>,
    /// By settings, with the number of times that it was started.
    running: BTreeMap<String, (Result<Torch, String>, u32)>,
}

impl Torches {
    /// With this interpreter, on the CUDA device of this number. Nothing is started yet.
    #[must_use]
    pub fn new(python: &str, ordinal: u32) -> Self {
        Self { place: Ok((python.to_owned(), ordinal)), running: BTreeMap::new() }
    }

    /// Where it cannot be had, for this reason.
    #[must_use]
    pub fn missing(reason: impl Into<String>) -> Self {
        Self { place: Err(reason.into()), running: BTreeMap::new() }
    }

    /// PyTorch with these settings, started where it is not running yet, or not any more, which takes some seconds.
    ///
    /// # Errors
    /// A sentence: why it cannot be measured here.
    pub fn with(&mut self, settings: &str) -> Result<&mut Torch, String> {
        let (python, ordinal) = self.place.as_ref().map_err(String::clone)?;
        let start = || start_on_a_gpu(python, *ordinal, settings);
        let (torch, starts) = self.running.entry(settings.to_owned()).or_insert_with(|| (start(), 1));
        if *starts < STARTS && torch.as_ref().is_ok_and(|torch| torch.input.is_none()) {
            (*torch, *starts) = (start(), *starts + 1);
        }
        torch.as_mut().map_err(|reason| reason.clone())
    }
}

/// Starts it, and learns its number on the device, so that it is not taken for somebody else's process.
fn start_on_a_gpu(python: &str, ordinal: u32, settings: &str) -> Result<Torch, String> {
    let nvml = nvml_at(ordinal).ok();
    let before = nvml.as_ref().and_then(|nvml| nvml.process_numbers().ok());
    let torch = Torch::start(python, ordinal, settings)?;
    if let (Some(nvml), Some(before)) = (nvml, before) {
        nvml.notice_child(&before);
    }
    Ok(torch)
}

/// PyTorch, running. It ends with its standard input, so also when this program is killed.
#[derive(Debug)]
pub struct Torch {
    child: Child,
    /// `None` once it was ended.
    input: Option<ChildStdin>,
    /// How long one answer may take.
    patience: Duration,
    lines: Receiver<String>,
    version: String,
    note: String,
    /// Names of the traces that it has.
    traces: BTreeSet<String>,
}

impl Torch {
    /// Starts it with this interpreter, for the CUDA device of this number, with these settings in the form of `PYTORCH_ALLOC_CONF`.
    ///
    /// # Errors
    /// A sentence: why PyTorch cannot be measured here.
    pub fn start(python: &str, ordinal: u32, settings: &str) -> Result<Self, String> {
        let arguments = ["-u".to_owned(), "-c".to_owned(), SCRIPT.to_owned(), ordinal.to_string()];
        let mut command = Command::new(python);
        // Somebody's own settings must not decide what is compared.
        command.env_remove(NO_CACHE);
        for variable in SETTINGS {
            command.env(variable, settings);
        }
        command.args(arguments).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null());
        let mut child = command.spawn().map_err(|error| format!("`{python}` cannot be started: {error}"))?;
        let (Some(input), Some(output)) = (child.stdin.take(), child.stdout.take()) else {
            return Err(format!("`{python}` has no standard input and output"));
        };
        let (send, lines) = channel();
        std::thread::spawn(move || {
            // Ends with the process, or when nobody listens any more.
            BufReader::new(output).lines().map_while(Result::ok).try_for_each(|line| send.send(line))
        });
        let mut torch = Self {
            child,
            input: Some(input),
            patience: ANSWER,
            lines,
            version: String::new(),
            note: String::new(),
            traces: BTreeSet::new(),
        };
        match torch.hear(START)? {
            Greeting::Here { version, note } => (torch.version, torch.note) = (version, note),
            Greeting::Unavailable { unavailable } => return Err(unavailable),
        }
        Ok(torch)
    }

    /// Its version, as in `2.11.0`.
    #[must_use]
    pub fn version(&self) -> &str {
        &self.version
    }

    /// How its figures are to be read.
    #[must_use]
    pub fn note(&self) -> &str {
        &self.note
    }

    /// Whether it keeps a trace of this name.
    #[must_use]
    pub fn has(&self, trace: &str) -> bool {
        self.traces.contains(trace)
    }

    /// Gives it a trace to keep: its operations, one line each as in a file, and how many requests have to fail with out of memory, where it
    /// would not mean the same otherwise.
    pub fn load(&mut self, trace: &str, events: &[String], refused: u64) -> Answer {
        let answer = self.say(&Task::Load { trace, events, refused });
        if matches!(answer, Answer::Done(_)) {
            self.traces.insert(trace.to_owned());
        }
        answer
    }

    /// Asks and waits for the answer. After an answer that makes no sense, or none in time, it is ended: what it was doing would go on beside
    /// what is measured next, and the memory that it holds would be missing there.
    pub fn ask(&mut self, question: &Question<'_>) -> Answer {
        self.say(question)
    }

    fn say(&mut self, question: &impl Serialize) -> Answer {
        let Some(input) = &mut self.input else {
            return Answer::Skipped { skipped: "PyTorch stopped answering earlier".to_owned() };
        };
        let asked = serde_json::to_string(question).map_err(|error| error.to_string());
        let sent = asked.and_then(|line| writeln!(input, "{line}").and_then(|()| input.flush()).map_err(|error| error.to_string()));
        sent.and_then(|()| self.hear(self.patience)).unwrap_or_else(|failed| {
            self.end();
            Answer::Failed { failed }
        })
    }

    fn hear<T: for<'a> Deserialize<'a>>(&self, patience: Duration) -> Result<T, String> {
        let line = self.lines.recv_timeout(patience).map_err(|error| match error {
            RecvTimeoutError::Timeout => format!("PyTorch gave no answer in {} s", patience.as_secs_f64()),
            RecvTimeoutError::Disconnected => "PyTorch ended without an answer".to_owned(),
        })?;
        serde_json::from_str(&line).map_err(|error| format!("PyTorch answered `{line}`: {error}"))
    }

    /// Ends it at once, and waits until it is gone and has given its memory back. It is waited for in vain where it hangs in the driver.
    fn end(&mut self) {
        self.input = None;
        self.child.kill().ok();
        let began = Instant::now();
        while matches!(self.child.try_wait(), Ok(None)) && began.elapsed() < END {
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

impl Drop for Torch {
    fn drop(&mut self) {
        self.end();
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use std::fs;
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;

    const QUESTION: Question<'_> = Question { task: Task::Latency { case: "hit", size: Bytes::mib(2), batch: 10 }, memory: Bytes::gib(1) };

    /// A program that stands for Python: it ignores its arguments and does what the shell script says.
    fn python(script: &str) -> (tempfile::TempDir, String) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("python");
        fs::write(&path, format!("#!/bin/sh\n{script}\n")).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
        let name = path.to_string_lossy().into_owned();
        (folder, name)
    }

    fn start(script: &str) -> Result<Torch, String> {
        let (_folder, python) = python(script);
        Torch::start(&python, 0, "")
    }

    const GREETING: &str = r#"echo '{"arm": "torch", "version": "2.11.0", "note": "from Python"}'"#;

    #[test]
    fn each_question_is_answered_with_samples_a_reason_or_a_failure() {
        let answers = r#"
            read q; echo "{\"samples_ps\": [$(echo "$q" | tr -dc 0-9 | cut -c1-9)]}"
            read q; echo '{"skipped": "not known here"}'
            read q; echo '{"failed": "RuntimeError: no"}'"#;
        let mut torch = start(&format!("{GREETING}{answers}")).unwrap();
        assert_eq!((torch.version(), torch.note()), ("2.11.0", "from Python"));
        // The first digits of the question: size and batch.
        assert_eq!(torch.ask(&QUESTION), Answer::Done(Samples { samples_ps: vec![209_715_210], pass: None }));
        assert_eq!(torch.ask(&QUESTION), Answer::Skipped { skipped: "not known here".to_owned() });
        assert_eq!(torch.ask(&QUESTION), Answer::Failed { failed: "RuntimeError: no".to_owned() });
    }

    #[test]
    fn a_process_that_ends_early_or_answers_nonsense_fails_once_and_is_asked_no_more() {
        for (script, expected) in [("", "PyTorch ended without an answer"), ("read q; echo hello", "PyTorch answered `hello`")] {
            let mut torch = start(&format!("{GREETING}\n{script}")).unwrap();
            let Answer::Failed { failed } = torch.ask(&QUESTION) else { panic!("{script}") };
            // Where it ended before it was asked, the pipe is broken.
            assert!(failed.starts_with(expected) || failed.contains("Broken pipe"), "{failed}");
            assert!(matches!(torch.ask(&QUESTION), Answer::Skipped { .. }));
        }
    }

    /// As where it waits for a device that does not answer: it would go on, with what it holds of the device.
    #[test]
    fn a_process_that_gives_no_answer_or_a_wrong_one_has_ended_when_the_next_one_is_measured() {
        for (script, expected) in [("", "PyTorch gave no answer in 0.1 s"), ("echo hello; ", "PyTorch answered `hello`")] {
            let mut torch = start(&format!("{GREETING}\nread q; {script}exec sleep 1000")).unwrap();
            if script.is_empty() {
                torch.patience = Duration::from_millis(100);
            }
            assert!(matches!(torch.child.try_wait(), Ok(None)), "it runs");
            let Answer::Failed { failed } = torch.ask(&QUESTION) else { panic!("{script}") };
            assert!(failed.starts_with(expected), "{failed}");
            assert!(matches!(torch.child.try_wait(), Ok(Some(_))), "{script}: it was ended and waited for");
            assert!(matches!(torch.ask(&QUESTION), Answer::Skipped { .. }));
        }
    }

    #[test]
    fn a_process_that_ended_is_started_again_for_the_next_question_but_not_for_ever() {
        let (_folder, python) = python(&format!("{GREETING}\nread q; echo '{{\"samples_ps\": [1]}}'; read q"));
        let mut torches = Torches::new(&python, 0);
        for _ in 0..STARTS {
            assert!(matches!(torches.with("").unwrap().ask(&QUESTION), Answer::Done(_)));
            assert!(matches!(torches.with("").unwrap().ask(&QUESTION), Answer::Failed { .. }), "it read this one and ended");
        }
        assert!(matches!(torches.with("").unwrap().ask(&QUESTION), Answer::Skipped { .. }), "three are enough");
        assert!(matches!(torches.with("expandable_segments:True").unwrap().ask(&QUESTION), Answer::Done(_)), "another has its own three");
    }

    #[test]
    fn where_pytorch_cannot_be_measured_the_reason_is_told() {
        assert_eq!(start(r#"echo '{"unavailable": "this Python has no torch"}'"#).unwrap_err(), "this Python has no torch");
        assert_eq!(start("exit 1").unwrap_err(), "PyTorch ended without an answer");
        assert_eq!(Torches::missing("no GPU").with("").unwrap_err(), "no GPU");
        let missing = Torch::start("/no/such/python", 0, "").unwrap_err();
        assert!(missing.starts_with("`/no/such/python` cannot be started: "), "{missing}");
    }
}
