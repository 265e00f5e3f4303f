//! [`Observed`] is the outcome of one run, read from the files in the folder of the run.

use std::path::{Path, PathBuf};
use std::{fs, io};

use harness_allocator::units::Bytes;
use harness_gpu_settings::attempts::{self, Attempt};
use harness_gpu_settings::{calls::Call, latency::Latency};
use serde::{Deserialize, Serialize};

use crate::process::End;
use crate::record::{Record, SlowCalls, numbered, struck};

const LAST_LINES: usize = 10;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ending {
    /// By itself.
    By(End),
    /// It exceeded its time limit and was killed.
    Hang,
}

#[derive(Clone, Debug, PartialEq)]
pub struct Observed {
    pub ending: Ending,
    /// Number of processes that used the GPU.
    pub processes: usize,
    /// Peak bytes that one process held on one device.
    pub peak_reserved: Bytes,
    /// Peak bytes of PyTorch's allocator, summed over processes.
    pub peak_allocated: Bytes,
    /// Bytes of PyTorch's allocator at the end, summed over processes; `None` if no process reported them.
    pub allocated_at_end: Option<Bytes>,
    pub retries: u64,
    pub ooms: u64,
    /// Driver calls that allocate or free device memory.
    pub driver_calls: u64,
    /// Kernels, graphs, copies, host functions and records submitted. Not counted on a real GPU.
    pub submitted: u64,
    /// Calls of all processes that were slowed down on request.
    pub slow_calls: Vec<SlowCalls>,
    /// Device allocation attempts, in order, of the process that made the most.
    pub attempts: Vec<Attempt>,
    /// Out of memory errors of the same process, in order.
    pub errors: Vec<OutOfMemory>,
    /// `true` if an uncaught OutOfMemoryError ended a process.
    pub ended_out_of_memory: bool,
    /// The last lines of its standard error, if kept.
    pub last_lines: Vec<String>,
}

/// An OutOfMemoryError of PyTorch, as recorded by the hook.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
pub struct OutOfMemory {
    /// Allocation attempts of the process before the error, including host memory.
    pub attempts: u64,
    /// The call stack without PyTorch's own frames, innermost first.
    pub frames: Vec<Frame>,
}

impl OutOfMemory {
    /// Reads the errors of a process, in order. Empty if none was recorded.
    pub(crate) fn of_process(folder: &Path, pid: u32) -> Vec<Self> {
        let text = fs::read_to_string(folder.join(format!("ooms-{pid}.jsonl"))).unwrap_or_default();
        // Ignores a line truncated by the process's end.
        text.lines().filter_map(|line| serde_json::from_str(line).ok()).collect()
    }
}

/// A line in a Python program.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Frame {
    pub file: String,
    pub line: u64,
    pub name: String,
}

impl Frame {
    /// Returns the file name without folders, and the line.
    pub fn short(&self) -> String {
        let name = Path::new(&self.file).file_name().map_or(self.file.as_str().into(), |name| name.to_string_lossy());
        format!("{name}:{}", self.line)
    }
}

impl Observed {
    /// Reads the folder of a run, and the folder of its processes' counters.
    pub(crate) fn read(folder: &Path, counters: &Path, record: &Record, ending: Ending, error_output: Option<&Path>) -> io::Result<Self> {
        let torches = || record.processes.iter().filter_map(|process| process.torch.as_ref());
        let devices = || record.processes.iter().flat_map(|process| &process.devices);
        let sum = |name: &str| torches().map(|torch| torch.sum(name)).sum();
        let (attempts, errors) = attempts_and_errors(folder, counters)?;
        Ok(Self {
            ending,
            processes: record.processes.iter().filter(|process| process.used_gpu()).count(),
            peak_reserved: Bytes(devices().map(|device| device.peak_reserved).max().unwrap_or_default()),
            peak_allocated: Bytes(sum("allocated_bytes.all.peak")),
            allocated_at_end: torches().next().map(|_| Bytes(sum("allocated_bytes.all.current"))),
            retries: sum("num_alloc_retries"),
            ooms: sum("num_ooms"),
            driver_calls: devices().map(|device| device.mallocs + device.frees).sum(),
            submitted: record.processes.iter().map(|process| process.submitted).sum(),
            slow_calls: record.processes.iter().flat_map(|process| process.slow_calls.clone()).collect(),
            attempts,
            errors,
            ended_out_of_memory: torches().any(|torch| torch.ended_out_of_memory),
            last_lines: error_output.map_or_else(|| Ok(Vec::new()), last_lines)?,
        })
    }

    pub fn latency_not_reached<'a>(&self, latencies: &'a [Latency]) -> Option<&'a Latency> {
        latencies.iter().find(|latency| struck(&self.slow_calls, latency) == 0)
    }

    pub fn sizes(&self) -> Vec<Bytes> {
        self.attempts.iter().map(|attempt| attempt.size).collect()
    }

    /// Returns the last nonempty line of the error output.
    pub fn last_line(&self) -> &str {
        self.last_lines.last().map_or("", String::as_str)
    }
}

/// Reads the process with the most device allocation attempts. In a tie, the lowest process ID wins.
fn attempts_and_errors(folder: &Path, counters: &Path) -> io::Result<(Vec<Attempt>, Vec<OutOfMemory>)> {
    let mut most: (u32, Vec<Attempt>) = Default::default();
    for (pid, path) in numbered(counters, "", attempts::ENDING)? {
        let made = Attempt::read(&path)?;
        if on_device(&made).count() > on_device(&most.1).count() {
            most = (pid, made);
        }
    }
    let (pid, all) = most;
    let errors = OutOfMemory::of_process(folder, pid).into_iter().map(|error| {
        let before = all.iter().take(usize::try_from(error.attempts).unwrap_or(usize::MAX));
        OutOfMemory { attempts: before.filter(|attempt| attempt.call != Call::HostAlloc).count() as u64, ..error }
    });
    let errors = errors.collect();
    Ok((on_device(&all).copied().collect(), errors))
}

fn on_device(attempts: &[Attempt]) -> impl Iterator<Item = &Attempt> {
    attempts.iter().filter(|attempt| attempt.call != Call::HostAlloc)
}

fn last_lines(path: &Path) -> io::Result<Vec<String>> {
    let text = fs::read(PathBuf::from(path))?;
    let text = String::from_utf8_lossy(&text);
    let lines: Vec<&str> = text.lines().map(str::trim_end).filter(|line| !line.is_empty()).collect();
    Ok(lines[lines.len().saturating_sub(LAST_LINES)..].iter().map(|line| (*line).to_owned()).collect())
}

#[cfg(test)]
mod tests;
