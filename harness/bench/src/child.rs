//! A child process that takes its turn in each round.

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::{Duration, Instant};
use std::{fs::File, os::unix::fs::FileExt as _};

use harness_cuda::machine::nvml_at;
use serde::{Serialize, de::DeserializeOwned};

/// Time to wait for its exit. The driver takes seconds to destroy a context of many gigabytes.
const END: Duration = Duration::from_secs(20);
/// Bytes read from the end of its standard error.
const ERROR_TAIL: usize = 4096;
/// Maximum bytes of an answer.
const LINE: u64 = 16 << 20;

#[derive(Clone, Copy, Debug)]
pub(crate) struct Patience {
    pub(crate) start: Duration,
    pub(crate) answer: Duration,
}

#[derive(Debug)]
pub(crate) struct ChildProcess {
    name: &'static str,
    child: Child,
    input: Option<ChildStdin>,
    lines: Receiver<String>,
    errors: File,
    pub(crate) patience: Patience,
}

impl ChildProcess {
    /// Starts a command and waits for its first line. If it uses the CUDA device `ordinal`, its
    /// process number there is recorded, so the monitor does not count it as foreign.
    pub(crate) fn start<T: DeserializeOwned>(
        name: &'static str,
        command: &mut Command,
        ordinal: Option<u32>,
        patience: Patience,
    ) -> Result<(Self, T), String> {
        let nvml = ordinal.and_then(|ordinal| nvml_at(ordinal).ok());
        let before = nvml.as_ref().and_then(|nvml| nvml.process_numbers().ok());
        let process = Self::spawn(name, command, patience)?;
        let greeting = process.read(patience.start)?;
        // Without the list of earlier processes, the new one cannot be identified.
        if let (Some(nvml), Some(before)) = (nvml, before) {
            nvml.notice_child(&before);
        }
        Ok((process, greeting))
    }

    fn spawn(
        name: &'static str,
        command: &mut Command,
        patience: Patience,
    ) -> Result<Self, String> {
        let program = command.get_program().to_string_lossy().into_owned();
        let failed = |error| format!("`{program}` cannot be started: {error}");
        let errors = tempfile::tempfile().map_err(failed)?;
        command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(errors.try_clone().map_err(failed)?);
        let mut child = command.spawn().map_err(failed)?;
        let (Some(input), Some(output)) = (child.stdin.take(), child.stdout.take()) else {
            return Err(format!("`{program}` has no standard input and output"));
        };
        Ok(Self {
            name,
            child,
            input: Some(input),
            lines: lines_of(output),
            errors,
            patience,
        })
    }

    pub(crate) const fn is_running(&self) -> bool {
        self.input.is_some()
    }

    /// Sends a question and waits for the answer. If the answer is invalid or late, the process is
    /// killed, because it would keep running and holding memory during the next measurement.
    pub(crate) fn ask<T: DeserializeOwned>(
        &mut self,
        question: &impl Serialize,
    ) -> Result<T, String> {
        let Some(input) = &mut self.input else {
            return Err(format!("{} stopped answering earlier", self.name));
        };
        let line = serde_json::to_string(question).map_err(|error| error.to_string());
        let sent = line.and_then(|line| {
            writeln!(input, "{line}")
                .and_then(|()| input.flush())
                .map_err(|error| error.to_string())
        });
        let answer = sent.and_then(|()| self.read(self.patience.answer));
        if answer.is_err() {
            self.end();
        }
        answer
    }

    fn read<T: DeserializeOwned>(&self, patience: Duration) -> Result<T, String> {
        let name = self.name;
        let line = self
            .lines
            .recv_timeout(patience)
            .map_err(|error| match error {
                RecvTimeoutError::Timeout => format!(
                    "{name} gave no answer in {} s{}",
                    patience.as_secs_f64(),
                    self.last_error()
                ),
                RecvTimeoutError::Disconnected => {
                    format!("{name} ended without an answer{}", self.last_error())
                }
            })?;
        serde_json::from_str(&line).map_err(|error| format!("{name} answered `{line}`: {error}"))
    }

    /// The last line of its standard error, as in `: ImportError: libcudart.so.12 …`; empty if it
    /// wrote nothing.
    fn last_error(&self) -> String {
        let mut tail = [0; ERROR_TAIL];
        let length = self.errors.metadata().map_or(0, |metadata| metadata.len());
        // Unreadable output is omitted. Reading does not move the child's write position.
        let read = self
            .errors
            .read_at(&mut tail, length.saturating_sub(ERROR_TAIL as u64))
            .unwrap_or_default();
        let tail = String::from_utf8_lossy(&tail[..read]);
        tail.lines()
            .map(str::trim)
            .rfind(|line| !line.is_empty())
            .map_or_else(String::new, |line| format!(": {line}"))
    }

    /// Kills it and waits until it is gone and its memory is released. The wait is limited, because
    /// it may hang in the driver.
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

/// The lines of a child's standard output, read by another thread. The thread ends with the child,
/// or when the receiver is dropped.
pub fn lines_of(output: ChildStdout) -> Receiver<String> {
    let (send, lines) = channel();
    std::thread::spawn(move || {
        let mut output = BufReader::new(output);
        loop {
            let mut line = String::new();
            match output.by_ref().take(LINE).read_line(&mut line) {
                Ok(1..) if send.send(line.trim_end().to_owned()).is_ok() => {}
                _ => return,
            }
        }
    });
    lines
}

impl Drop for ChildProcess {
    fn drop(&mut self) {
        self.end();
    }
}
