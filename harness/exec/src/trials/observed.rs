//! [`Observed`]: what was seen of one run, put together from the files that its processes left in the folder of the run.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use harness_allocator::units::Bytes;
use harness_gpu_settings::attempts::{self, Attempt};
use harness_gpu_settings::calls::FaultyCall;
use harness_gpu_settings::latency::Latency;
use serde::{Deserialize, Serialize};

use crate::limited::counters_folder;
use crate::process::End;
use crate::record::{Record, SlowCalls, numbered, struck};

/// Lines of the error output that are kept.
const LAST_LINES: usize = 10;

/// How a run ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ending {
    /// By itself.
    By(End),
    /// Not in the time that it had; it was killed.
    Hang,
}

/// What was seen of one run.
#[derive(Clone, Debug, PartialEq)]
#[allow(missing_docs, reason = "the names say what they are")]
pub struct Observed {
    pub ending: Ending,
    /// Processes that used the GPU.
    pub processes: usize,
    /// The most bytes that a process held of a device.
    pub peak_reserved: Bytes,
    /// Bytes of PyTorch's allocator in use, all processes together, the most at one time.
    pub peak_allocated: Bytes,
    /// Bytes of PyTorch's allocator in use at the end, all processes together; `None` where no process told.
    pub allocated_at_end: Option<Bytes>,
    /// `num_alloc_retries`, all processes together.
    pub retries: u64,
    /// `num_ooms`, all processes together.
    pub ooms: u64,
    /// Calls of the driver to get and give back device memory.
    pub driver_calls: u64,
    /// Kernels, graphs, copies, host functions and records submitted; on a real GPU they are not counted.
    pub submitted: u64,
    /// Calls that took longer because that was asked for, of all processes.
    pub slow_calls: Vec<SlowCalls>,
    /// Attempts to get device memory, in order, of the process that made the most.
    pub attempts: Vec<Attempt>,
    /// Out of memory errors, in order, of the same process.
    pub errors: Vec<OutOfMemory>,
    /// Whether an OutOfMemoryError that nobody caught ended a process.
    pub ended_out_of_memory: bool,
    /// The end of what it wrote to standard error, where that was kept.
    pub last_lines: Vec<String>,
}

/// An out of memory error of PyTorch, as the hook saw it.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
pub struct OutOfMemory {
    /// Attempts of the process to get memory so far, those of host memory included.
    pub attempts: u64,
    /// The stack without PyTorch's own code, innermost first.
    pub frames: Vec<Frame>,
}

impl OutOfMemory {
    /// Those of a process, in order. Empty where none was noted.
    pub(crate) fn of_process(folder: &Path, pid: u32) -> Vec<Self> {
        let text = fs::read_to_string(folder.join(format!("ooms-{pid}.jsonl"))).unwrap_or_default();
        // A line that a killed process could not write to its end says nothing.
        text.lines().filter_map(|line| serde_json::from_str(line).ok()).collect()
    }
}

/// A place in a Python program.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[allow(missing_docs, reason = "the names say what they are")]
pub struct Frame {
    pub file: String,
    pub line: u64,
    pub name: String,
}

impl Frame {
    /// The file without its folders, and the line.
    #[must_use]
    pub fn short(&self) -> String {
        let name = Path::new(&self.file).file_name().map_or(self.file.as_str().into(), |name| name.to_string_lossy());
        format!("{name}:{}", self.line)
    }
}

impl Observed {
    /// Reads the folder of a run on simulated GPUs whose record was put together.
    ///
    /// # Errors
    /// That it cannot be read.
    pub fn read(folder: &Path, record: &Record, ending: Ending, error_output: Option<&Path>) -> io::Result<Self> {
        Self::of_folders(folder, folder, record, ending, error_output)
    }

    /// The same of a run on a real GPU.
    ///
    /// # Errors
    /// That it cannot be read.
    pub fn read_limited(folder: &Path, record: &Record, ending: Ending, error_output: Option<&Path>) -> io::Result<Self> {
        Self::of_folders(folder, &counters_folder(folder), record, ending, error_output)
    }

    fn of_folders(folder: &Path, counters: &Path, record: &Record, ending: Ending, error_output: Option<&Path>) -> io::Result<Self> {
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

    /// The first of these latencies that no call had.
    #[must_use]
    pub fn latency_not_reached<'a>(&self, latencies: &'a [Latency]) -> Option<&'a Latency> {
        latencies.iter().find(|latency| struck(&self.slow_calls, latency) == 0)
    }

    /// Sizes of the attempts to get device memory.
    #[must_use]
    pub fn sizes(&self) -> Vec<Bytes> {
        self.attempts.iter().map(|attempt| attempt.size).collect()
    }

    /// The last line of the error output that is not empty.
    #[must_use]
    pub fn last_line(&self) -> &str {
        self.last_lines.last().map_or("", String::as_str)
    }
}

/// Of the process with the most attempts to get device memory; of several, of that with the lowest number.
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
        OutOfMemory { attempts: before.filter(|attempt| attempt.call != FaultyCall::HostAlloc).count() as u64, ..error }
    });
    let errors = errors.collect();
    Ok((on_device(&all).copied().collect(), errors))
}

fn on_device(attempts: &[Attempt]) -> impl Iterator<Item = &Attempt> {
    attempts.iter().filter(|attempt| attempt.call != FaultyCall::HostAlloc)
}

fn last_lines(path: &Path) -> io::Result<Vec<String>> {
    let text = fs::read(PathBuf::from(path))?;
    let text = String::from_utf8_lossy(&text);
    let lines: Vec<&str> = text.lines().map(str::trim_end).filter(|line| !line.is_empty()).collect();
    Ok(lines[lines.len().saturating_sub(LAST_LINES)..].iter().map(|line| (*line).to_owned()).collect())
}

#[cfg(test)]
mod tests;
