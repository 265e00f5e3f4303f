//! PyTorch's own allocator, in a process of its own that takes its turn among the arms: `ci/torch_reference.py`, and what it is asked.
//!
//! One JSON object a line goes each way; the script documents them. It is compiled in, so that one program file is enough on a GPU machine.

use std::collections::{BTreeMap, BTreeSet};
use std::process::Command;
use std::time::Duration;

use harness_allocator::allocator::{AllocatorKind, AllocatorSpec, MemoryFraction};
use harness_allocator::units::Bytes;
use serde::{Deserialize, Serialize};

use crate::child::{ChildProcess, Patience};
use crate::suite::Suite;

const SCRIPT: &str = include_str!("../../../ci/torch_reference.py");

/// To import torch and open the device, a cold file system needs most of a minute. The longest request gives back a thousand segments, which
/// is far below a second.
const PATIENCE: Patience = Patience { start: Duration::from_secs(180), answer: Duration::from_secs(60) };
/// The variable with the settings of PyTorch's allocator (<https://docs.pytorch.org/docs/stable/cuda_environment_variables.html>), and the
/// one of versions before 2.9.
const SETTINGS: [&str; 2] = ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"];
/// The variable that takes the cache away.
const NO_CACHE: &str = "PYTORCH_NO_CUDA_MEMORY_CACHING";

/// How often it is started at most: what one request breaks another may survive, and a run must not be spent on importing torch.
const STARTS: u32 = 3;

/// PyTorch with the settings of one of the suite's arms.
#[derive(Clone, Debug, PartialEq)]
pub struct TorchArm {
    /// As in records: `torch`, and behind it the arm that it stands beside, where that has settings.
    pub name: String,
    /// In the form of `PYTORCH_ALLOC_CONF`.
    pub settings: String,
}

/// PyTorch as each arm of the suite that is its allocator; as it is by default where there is none.
#[must_use]
pub fn torch_arms(suite: &Suite) -> Vec<TorchArm> {
    let mut arms: Vec<TorchArm> = Vec::new();
    let default = AllocatorSpec::from(AllocatorKind::Caching);
    for ours in suite.arms.iter().filter(|arm| arm.is_pytorch()) {
        // A share of the device is what each arm is given anyway.
        let settings = ours.effective().filter(|config| config.memory_fraction == MemoryFraction::ALL).map(|config| config.to_string());
        if let Some(settings) = settings.filter(|settings| arms.iter().all(|other| other.settings != *settings)) {
            let name = if ours.is_equivalent_to(&default) { "torch".to_owned() } else { format!("torch_{ours}") };
            arms.push(TorchArm { name, settings });
        }
    }
    if arms.is_empty() {
        arms.push(TorchArm { name: "torch".to_owned(), settings: String::new() });
    }
    arms
}

#[derive(Clone, Copy, Debug, Serialize)]
pub(crate) struct Question<'a> {
    #[serde(flatten)]
    pub(crate) task: Task<'a>,
    /// The memory that it may take meanwhile.
    pub(crate) memory: Bytes,
}

/// What can be measured; sizes are those of single requests.
#[derive(Clone, Copy, Debug, Serialize)]
#[serde(tag = "do", rename_all = "snake_case")]
pub(crate) enum Task<'a> {
    /// `case` as suites name it; `batch` pairs of allocation and free are timed together, where pairs are.
    Latency { case: &'static str, size: Bytes, batch: u64 },
    /// With so many segments in the cache.
    EmptyCache { segments: u64, size: Bytes },
    /// From a request that fails with all memory taken to the end of the next good step.
    Recovery { size: Bytes },
    /// `batch` cycles of allocation, `record_stream` for so many streams and free are timed together.
    RecordStream { streams: u64, size: Bytes, batch: u64 },
    /// Allocation, work on the memory and free in a loop, in the device's time; so many turns are timed together.
    Pipeline { size: Bytes, turns: u64 },
    /// A pass over the trace of this name.
    Trace { trace: &'a str },
}

/// An allocation trace that it is to keep.
#[derive(Serialize)]
#[serde(tag = "do", rename = "load")]
struct Load<'a> {
    trace: &'a str,
    /// One line each, as in a file.
    events: &'a [String],
    /// How many requests may fail: an allocator that refuses requests has no figures, as with ours.
    refused: u64,
}

#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(untagged)]
pub(crate) enum Answer {
    Done(Samples),
    Skipped { skipped: String },
    Failed { failed: String },
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
pub(crate) struct Samples {
    /// Picoseconds for one operation.
    pub(crate) samples_ps: Vec<u64>,
    #[serde(flatten)]
    pub(crate) pass: Option<Pass>,
}

/// What a pass over a trace came to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
pub(crate) struct Pass {
    /// Allocations, failed ones included, and frees. Each sample is the mean of so many.
    pub(crate) operations: u64,
    /// The most memory that it had reserved, in bytes.
    pub(crate) reserved: u64,
    /// What of that was not allocated then, in bytes.
    pub(crate) unused: u64,
}

/// What it says first.
#[derive(Deserialize)]
struct Greeting {
    /// Why PyTorch cannot be measured here, where it cannot.
    unavailable: Option<String>,
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

    /// PyTorch with these settings, in the form of `PYTORCH_ALLOC_CONF`; started where it is not running yet, or not any more, which takes some
    /// seconds.
    ///
    /// # Errors
    /// A sentence: why it cannot be measured here.
    pub fn with(&mut self, settings: &str) -> Result<&mut Torch, String> {
        let (python, ordinal) = self.place.as_ref().map_err(String::clone)?;
        let start = || Torch::start(python, *ordinal, settings);
        let (torch, starts) = self.running.entry(settings.to_owned()).or_insert_with(|| (start(), 1));
        if *starts < STARTS && torch.as_ref().is_ok_and(|torch| !torch.process.is_running()) {
            (*torch, *starts) = (start(), *starts + 1);
        }
        torch.as_mut().map_err(|reason| reason.clone())
    }
}

/// PyTorch, running. It ends with its standard input, so also when this program is killed.
#[derive(Debug)]
pub struct Torch {
    process: ChildProcess,
    /// Names of the traces that it has.
    traces: BTreeSet<String>,
}

impl Torch {
    fn start(python: &str, ordinal: u32, settings: &str) -> Result<Self, String> {
        let arguments = ["-u".to_owned(), "-c".to_owned(), SCRIPT.to_owned(), ordinal.to_string()];
        let mut command = Command::new(python);
        // Somebody's own settings must not decide what is compared.
        command.env_remove(NO_CACHE);
        for variable in SETTINGS {
            command.env(variable, settings);
        }
        let (process, greeting) = ChildProcess::start("PyTorch", command.args(arguments), Some(ordinal), PATIENCE)?;
        match greeting {
            Greeting { unavailable: Some(reason) } => Err(reason),
            Greeting { unavailable: None } => Ok(Self { process, traces: BTreeSet::new() }),
        }
    }

    /// Whether it keeps a trace of this name.
    pub(crate) fn has(&self, trace: &str) -> bool {
        self.traces.contains(trace)
    }

    /// Gives it a trace to keep, without doing anything with it.
    pub(crate) fn load(&mut self, trace: &str, events: &[String]) -> Answer {
        let answer = self.ask(&Load { trace, events, refused: 0 });
        if matches!(answer, Answer::Done(_)) {
            self.traces.insert(trace.to_owned());
        }
        answer
    }

    /// Asks and waits for the answer.
    pub(crate) fn ask(&mut self, question: &impl Serialize) -> Answer {
        if !self.process.is_running() {
            return Answer::Skipped { skipped: "PyTorch stopped answering earlier".to_owned() };
        }
        self.process.ask(question).unwrap_or_else(|failed| Answer::Failed { failed })
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;
    use crate::scripts::program;

    const QUESTION: Question<'_> = Question { task: Task::Latency { case: "hit", size: Bytes::mib(2), batch: 10 }, memory: Bytes::gib(1) };

    /// A program that stands for Python.
    fn python(script: &str) -> (tempfile::TempDir, String) {
        let (folder, path) = program("python", script);
        (folder, path.to_string_lossy().into_owned())
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
        // The first digits of the question: size and batch.
        assert_eq!(torch.ask(&QUESTION), Answer::Done(Samples { samples_ps: vec![209_715_210], pass: None }));
        assert_eq!(torch.ask(&QUESTION), Answer::Skipped { skipped: "not known here".to_owned() });
        assert_eq!(torch.ask(&QUESTION), Answer::Failed { failed: "RuntimeError: no".to_owned() });
    }

    /// One that goes on, as where it waits for a device that does not answer, would go on with what it holds of the device.
    #[test]
    fn a_process_that_gives_no_answer_or_a_wrong_one_fails_once_and_has_ended_when_the_next_one_is_measured() {
        let cases = [
            ("", "PyTorch ended without an answer"),
            ("read q; echo hello", "PyTorch answered `hello`"),
            ("read q; exec sleep 1000", "PyTorch gave no answer in 0.1 s"),
            ("read q; echo hello; exec sleep 1000", "PyTorch answered `hello`"),
        ];
        for (script, expected) in cases {
            let mut torch = start(&format!("{GREETING}\n{script}")).unwrap();
            if expected.contains("0.1 s") {
                torch.process.patience.answer = Duration::from_millis(100);
            }
            let Answer::Failed { failed } = torch.ask(&QUESTION) else { panic!("{script}") };
            // Where it ended before it was asked, the pipe is broken.
            assert!(failed.starts_with(expected) || failed.contains("Broken pipe"), "{failed}");
            assert!(torch.process.has_ended(), "{script}: it was ended and waited for");
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
        let import = "echo 'Traceback (most recent call last):' >&2; echo 'ImportError: libcudart.so.12 is missing' >&2; exit 1";
        assert_eq!(start(import).unwrap_err(), "PyTorch ended without an answer: ImportError: libcudart.so.12 is missing");
        assert_eq!(Torches::missing("no GPU").with("").unwrap_err(), "no GPU");
        let missing = Torch::start("/no/such/python", 0, "").unwrap_err();
        assert!(missing.starts_with("`/no/such/python` cannot be started: "), "{missing}");
    }
}
