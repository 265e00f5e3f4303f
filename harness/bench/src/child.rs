//! A process that takes its turn among the arms, and the talk with it: one JSON object a line each way over its standard input and output.
//! What it writes to its standard error is kept, so that a failure can say why.

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::process::{Child, ChildStderr, ChildStdin, Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use serde::Serialize;
use serde::de::DeserializeOwned;

/// How long its end is waited for: to take a context of many gigabytes down takes the driver some seconds at most.
const END: Duration = Duration::from_secs(20);
/// How long the last words on its standard error are waited for.
const LAST_WORDS: Duration = Duration::from_millis(500);
/// Bytes of its standard error that are kept, from the end.
const KEPT: usize = 4096;
/// Bytes of one answer at most.
const LINE: u64 = 16 << 20;

/// See the module. It is ended when it is dropped.
#[derive(Debug)]
pub(crate) struct Talker {
    /// As messages call it.
    name: &'static str,
    child: Child,
    /// `None` once it was ended.
    input: Option<ChildStdin>,
    lines: Receiver<String>,
    errors: Arc<Mutex<Vec<u8>>>,
    reader: Option<std::thread::JoinHandle<()>>,
    /// How long one answer may take.
    pub(crate) patience: Duration,
}

impl Talker {
    /// Starts a command.
    ///
    /// # Errors
    /// A sentence: why it cannot be started.
    pub(crate) fn start(name: &'static str, command: &mut Command, patience: Duration) -> Result<Self, String> {
        let program = command.get_program().to_string_lossy().into_owned();
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().map_err(|error| format!("`{program}` cannot be started: {error}"))?;
        let (Some(input), Some(output), Some(stderr)) = (child.stdin.take(), child.stdout.take(), child.stderr.take()) else {
            return Err(format!("`{program}` has no standard input, output and error"));
        };
        let (send, lines) = channel();
        std::thread::spawn(move || {
            // Ends with the process, or when nobody listens any more.
            let mut output = BufReader::new(output);
            loop {
                let mut line = String::new();
                match output.by_ref().take(LINE).read_line(&mut line) {
                    Ok(1..) if send.send(line.trim_end().to_owned()).is_ok() => {}
                    _ => return,
                }
            }
        });
        let errors = Arc::default();
        let reader = Some(keep_last(stderr, Arc::clone(&errors)));
        Ok(Self { name, child, input: Some(input), lines, errors, reader, patience })
    }

    /// Whether it can be asked something.
    pub(crate) const fn is_running(&self) -> bool {
        self.input.is_some()
    }

    /// Asks and waits for the answer. After an answer that makes no sense, or none in time, it is ended: what it was doing would go on beside
    /// what is measured next, and the memory that it holds would be missing there.
    ///
    /// # Errors
    /// A sentence: what was seen instead of an answer.
    pub(crate) fn ask<T: DeserializeOwned>(&mut self, question: &impl Serialize) -> Result<T, String> {
        let Some(input) = &mut self.input else { return Err(format!("{} stopped answering earlier", self.name)) };
        let asked = serde_json::to_string(question).map_err(|error| error.to_string());
        let sent = asked.and_then(|line| writeln!(input, "{line}").and_then(|()| input.flush()).map_err(|error| error.to_string()));
        let answer = sent.and_then(|()| self.hear(self.patience));
        if answer.is_err() {
            self.end();
        }
        answer
    }

    /// Waits for a line that nobody asked for.
    ///
    /// # Errors
    /// A sentence: what was seen instead.
    pub(crate) fn hear<T: DeserializeOwned>(&mut self, patience: Duration) -> Result<T, String> {
        let name = self.name;
        let line = self.lines.recv_timeout(patience).map_err(|error| match error {
            RecvTimeoutError::Timeout => format!("{name} gave no answer in {} s{}", patience.as_secs_f64(), self.last_words()),
            RecvTimeoutError::Disconnected => format!("{name} ended without an answer{}", self.last_words()),
        })?;
        serde_json::from_str(&line).map_err(|error| format!("{name} answered `{line}`: {error}"))
    }

    /// The last lines of its standard error, as in `: ImportError: libcudart.so.12 …`; empty where it said nothing.
    fn last_words(&mut self) -> String {
        let began = Instant::now();
        while self.reader.as_ref().is_some_and(|reader| !reader.is_finished()) && began.elapsed() < LAST_WORDS {
            std::thread::sleep(Duration::from_millis(1));
        }
        let errors = String::from_utf8_lossy(&self.errors.lock().unwrap_or_else(PoisonError::into_inner)).into_owned();
        let lines: Vec<&str> = errors.lines().map(str::trim).filter(|line| !line.is_empty()).collect();
        // The last line of a traceback is the error itself.
        lines.last().map_or_else(String::new, |last| format!(": {last}"))
    }

    /// Ends it at once, and waits until it is gone and has given its memory back. It is waited for in vain where it hangs in the driver.
    pub(crate) fn end(&mut self) {
        self.input = None;
        self.child.kill().ok();
        let began = Instant::now();
        while matches!(self.child.try_wait(), Ok(None)) && began.elapsed() < END {
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    #[cfg(test)]
    pub(crate) fn has_ended(&mut self) -> bool {
        matches!(self.child.try_wait(), Ok(Some(_)))
    }
}

impl Drop for Talker {
    fn drop(&mut self) {
        self.end();
    }
}

fn keep_last(mut stderr: ChildStderr, kept: Arc<Mutex<Vec<u8>>>) -> std::thread::JoinHandle<()> {
    std::thread::spawn(move || {
        let mut piece = [0; KEPT];
        while let Ok(read @ 1..) = stderr.read(&mut piece) {
            let mut kept = kept.lock().unwrap_or_else(PoisonError::into_inner);
            kept.extend_from_slice(&piece[..read]);
            let surplus = kept.len().saturating_sub(KEPT);
            kept.drain(..surplus);
        }
    })
}
