//! [`Observed`] is the outcome of one run, read from the files in the folder of the run.

use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::{fs, io};

use harness_allocator::units::Bytes;
use harness_gpu_settings::attempts::{self, Attempt};
use harness_gpu_settings::latency::Latency;

use crate::doubts::Doubt;
use crate::errors::{ErrorFrame, OutOfMemoryError, failed_calls};
use crate::files::numbered;
use crate::hang::{Hang, processes};
use crate::machine::Machine;
use crate::process::End;
use crate::record::{Process, Record, SlowCalls, struck};
use crate::torch_record::{Caller, PEAK_ALLOCATED, TorchRecord};

const LAST_LINES: usize = 10;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TrialEnd {
    /// By itself.
    By(End),
    /// It exceeded its time limit and was killed.
    Hang,
}

#[derive(Clone, Debug, PartialEq)]
pub struct Observed {
    pub ending: TrialEnd,
    /// `true` if it began as a copy of another run, or copies of it were made: all of them drew the
    /// same random numbers until then.
    pub is_copy: bool,
    /// Number of processes that used the GPU.
    pub processes: usize,
    pub caller: Caller,
    /// Peak bytes that one process held on one device.
    pub peak_reserved: Bytes,
    /// Peak bytes of PyTorch's allocator, or of another library's, summed over processes. `None` if
    /// a library does not publish them, as the next three figures.
    pub peak_allocated: Option<Bytes>,
    /// Bytes of the allocator at the end, summed over processes; also `None` if no process reported
    /// them. If a library does not publish them, those held from the driver.
    pub allocated_at_end: Option<Bytes>,
    pub retries: Option<u64>,
    pub ooms: Option<u64>,
    /// The process whose errors are unknown, if there is one, and why.
    pub unreported: Option<String>,
    /// Driver calls that allocate or free device memory.
    pub driver_calls: u64,
    /// Kernels, graphs, copies, host functions and records submitted. Not counted on a real GPU.
    pub submitted: u64,
    /// Whether a process read the amount of free memory. Unknown on a real GPU.
    pub reads_free_memory: bool,
    /// Calls of all processes that were slowed down on request.
    pub slow_calls: Vec<SlowCalls>,
    /// Device allocation attempts, in order, of the process that made the most.
    pub attempts: Vec<Attempt>,
    /// Calls of the same process that create handles, plans and modules of libraries, and that can
    /// fail on request, in order.
    pub calls_of_libraries: Vec<Attempt>,
    /// Out of memory errors of the same process, in order.
    pub errors: Vec<OutOfMemoryError>,
    /// Call stacks of those of its calls of libraries that failed on request, in order.
    pub failed_calls: Vec<Vec<ErrorFrame>>,
    /// The same of each device: of the process with the most attempts on it, which is a rank if
    /// there are several.
    pub ranks: Vec<RankAttempts>,
    /// The ranks that wait forever, if the run was stopped because of them.
    pub hang: Option<Hang>,
    /// The TCP port at which the ranks met.
    pub port: Option<u16>,
    /// The line of standard error by which a process could not use a port, if kept.
    pub port_in_use: Option<String>,
    /// `true` if an OutOfMemoryError ended a process.
    pub ended_out_of_memory: bool,
    /// `true` if such a process exited while it handled the error.
    pub caught_out_of_memory: bool,
    /// `true` if the first process exited with code 0 while it handled an out of memory error.
    pub ended_in_handler: bool,
    /// `true` if the error of a library that could not create a handle, a plan or a module ended a
    /// process.
    pub ended_by_library: bool,
    /// Another exception that ended a process.
    pub error: Option<String>,
    /// `true` if a process in which an attempt failed on request ended in an unknown way. The exit
    /// code of the program is that of its only process.
    pub is_end_unknown: bool,
    /// A slow module of torch that it imported late.
    pub late_import: Option<String>,
    /// The last lines of its standard error, if kept.
    pub last_lines: Vec<String>,
    /// Why its figures may differ from those on a GPU.
    pub doubts: Vec<Doubt>,
}

/// Device allocation attempts and out of memory errors of a rank, in order.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct RankAttempts {
    /// Its number without `CUDA_VISIBLE_DEVICES`.
    pub device: u32,
    pub attempts: Vec<Attempt>,
    pub calls_of_libraries: Vec<Attempt>,
    pub errors: Vec<OutOfMemoryError>,
    pub failed_calls: Vec<Vec<ErrorFrame>>,
}

impl RankAttempts {
    /// The attempts and calls of libraries on the rank's own device.
    pub(crate) fn of_device(&self) -> [Vec<Attempt>; 2] {
        [&self.attempts, &self.calls_of_libraries].map(|all| {
            all.iter()
                .filter(|attempt| attempt.number == self.device)
                .copied()
                .collect()
        })
    }
}

impl Machine {
    /// Reads the files in the folder of a run. `error_output` is the file with its standard error,
    /// if kept.
    pub fn read(
        &self,
        run: &Path,
        (end, ending): (End, TrialEnd),
        error_output: Option<&Path>,
    ) -> io::Result<(Record, Observed)> {
        let record = Record::read(run, end, self)?;
        let observed = Observed::read(run, &self.counters(run), &record, ending, error_output)?;
        Ok((record, observed))
    }
}

impl Observed {
    /// Returns whether a process could not use a port, perhaps because a parallel run has it.
    pub(crate) fn lacks_port(&self) -> bool {
        self.port_in_use.is_some() || self.error.as_deref().is_some_and(is_of_port)
    }

    /// Reads the folder of a run, and the folder of its processes' counters.
    pub(crate) fn read(
        folder: &Path,
        counters: &Path,
        record: &Record,
        ending: TrialEnd,
        error_output: Option<&Path>,
    ) -> io::Result<Self> {
        let processes = &record.processes;
        let torches = || {
            processes
                .iter()
                .filter_map(|process| process.torch.as_ref())
        };
        let devices = || processes.iter().flat_map(|process| &process.devices);
        let peak_reserved = devices().map(|device| device.peak_reserved).max();
        let sum = |name: &str| {
            reports(record)
                .map(|torch| torch.figure(name))
                .sum::<Option<u64>>()
        };
        let ranks = attempts_of_ranks(folder, counters)?;
        let most = ranks
            .iter()
            .rev()
            .max_by_key(|rank| rank.attempts.len())
            .cloned()
            .unwrap_or_default();
        Ok(Self {
            ending,
            is_copy: false,
            processes: processes
                .iter()
                .filter(|process| process.used_gpu())
                .count(),
            peak_reserved: Bytes(peak_reserved.unwrap_or_default()),
            peak_allocated: sum(PEAK_ALLOCATED).map(Bytes),
            caller: record.caller(),
            allocated_at_end: allocated_at_end(record),
            retries: sum("num_alloc_retries"),
            ooms: ooms(record),
            unreported: record.unreported(),
            driver_calls: devices().map(|device| device.mallocs + device.frees).sum(),
            submitted: processes.iter().map(|process| process.submitted).sum(),
            reads_free_memory: processes.iter().any(|process| process.reads_free_memory),
            slow_calls: processes
                .iter()
                .flat_map(|process| process.slow_calls.clone())
                .collect(),
            attempts: most.attempts,
            calls_of_libraries: most.calls_of_libraries,
            errors: most.errors,
            failed_calls: most.failed_calls,
            ranks,
            hang: record.hang.clone(),
            ended_out_of_memory: torches().any(|torch| torch.ended_out_of_memory),
            caught_out_of_memory: torches().any(|torch| torch.ended_out_of_memory && torch.caught),
            ended_in_handler: record.ended_in_handler(),
            ended_by_library: torches().any(|torch| torch.ended_by_library),
            error: error(record),
            is_end_unknown: processes.len() > 1
                && processes
                    .iter()
                    .any(|process| !process.has_reported() && process.has_injected_failures()),
            port: processes::port(folder)?,
            port_in_use: error_output.map_or(Ok(None), port_in_use)?,
            late_import: torches().find_map(|torch| torch.late_import.clone()),
            last_lines: error_output.map_or_else(|| Ok(Vec::new()), last_lines)?,
            doubts: Doubt::of(record),
        })
    }

    pub fn latency_not_reached<'a>(&self, latencies: &'a [Latency]) -> Option<&'a Latency> {
        latencies
            .iter()
            .find(|latency| struck(&self.slow_calls, latency) == 0)
    }

    /// Returns this run with the attempts and errors of a rank in place of those of the process
    /// with the most.
    #[must_use]
    pub(crate) fn of_rank(&self, rank: Option<u32>) -> Cow<'_, Self> {
        let Some(rank) = rank else {
            return Cow::Borrowed(self);
        };
        let found = self.ranks.iter().find(|of| of.device == rank);
        let (of_device, errors, failed_calls) = found
            .map(|rank| {
                (
                    rank.of_device(),
                    rank.errors.clone(),
                    rank.failed_calls.clone(),
                )
            })
            .unwrap_or_default();
        let [attempts, calls_of_libraries] = of_device;
        Cow::Owned(Self {
            attempts,
            calls_of_libraries,
            errors,
            failed_calls,
            ..self.clone()
        })
    }
}

/// Reads the process with the most attempts on each device, which the process mostly uses. In a
/// tie, the lowest process ID wins.
fn attempts_of_ranks(folder: &Path, counters: &Path) -> io::Result<Vec<RankAttempts>> {
    let mut most: BTreeMap<u32, (u32, Vec<Attempt>)> = BTreeMap::new();
    for (pid, path) in numbered(counters, "", attempts::ENDING)? {
        let made = Attempt::read(&path)?;
        // A process may fall back to the CPU after the first failed call of a library.
        let calls = made.iter().filter(|attempt| attempt.call.is_of_library());
        let used = on_device(&made).chain(calls);
        let devices: BTreeSet<u32> = used.map(|attempt| attempt.number).collect();
        let of = |device: u32, made: &[Attempt]| {
            on_device(made)
                .filter(|attempt| attempt.number == device)
                .count()
        };
        let Some(device) = devices
            .into_iter()
            .rev()
            .max_by_key(|device| of(*device, &made))
        else {
            continue;
        };
        if most
            .get(&device)
            .is_none_or(|(_, other)| of(device, other) < of(device, &made))
        {
            most.insert(device, (pid, made));
        }
    }
    let rank = |(device, (pid, all)): (u32, (u32, Vec<Attempt>))| {
        let errors = OutOfMemoryError::of_process(folder, pid)
            .into_iter()
            .map(|error| {
                let before = all
                    .iter()
                    .take(usize::try_from(error.attempts).unwrap_or(usize::MAX));
                OutOfMemoryError {
                    attempts: before
                        .filter(|attempt| attempt.call.requests_device_memory())
                        .count() as u64,
                    ..error
                }
            });
        let calls_of_libraries = all
            .iter()
            .filter(|attempt| attempt.call.is_of_library() && attempt.call.can_fail())
            .copied()
            .collect();
        RankAttempts {
            device,
            errors: errors.collect(),
            failed_calls: failed_calls(folder, pid),
            attempts: on_device(&all).copied().collect(),
            calls_of_libraries,
        }
    };
    Ok(most.into_iter().map(rank).collect())
}

/// Reports of processes. A process that only imported another library has no figures of a GPU.
fn reports(record: &Record) -> impl Iterator<Item = &TorchRecord> {
    let counts = |process: &&Process| {
        let torch = process.torch.as_ref();
        process.used_gpu() || torch.is_some_and(|torch| torch.other_library.is_none())
    };
    let counting = record.processes.iter().filter(counts);
    counting.filter_map(|process| process.torch.as_ref())
}

/// Counts the out of memory errors of all processes. A program that calls CUDA itself gets each
/// failure.
fn ooms(record: &Record) -> Option<u64> {
    match record.caller() {
        Caller::Program => {
            let devices = record.processes.iter().flat_map(|process| &process.devices);
            Some(devices.map(|device| device.failed).sum())
        }
        Caller::Torch | Caller::Library { .. } => reports(record).map(TorchRecord::ooms).sum(),
    }
}

/// Sums the bytes of the allocators of all processes. A process that did not use a GPU has none.
fn allocated_at_end(record: &Record) -> Option<Bytes> {
    let reporting = || {
        record
            .processes
            .iter()
            .filter(|process| process.torch.is_some())
    };
    reporting().next()?;
    reporting()
        .map(|process| {
            let known = process.torch.as_ref()?.allocated_at_end();
            known.or_else(|| (!process.used_gpu()).then_some(0))
        })
        .sum::<Option<u64>>()
        .map(Bytes)
}

fn on_device(attempts: &[Attempt]) -> impl Iterator<Item = &Attempt> {
    attempts
        .iter()
        .filter(|attempt| attempt.call.requests_device_memory())
}

/// Returns the exception, other than an OutOfMemoryError, that ended a process. Processes with
/// injected failures come first. If one of them ran out of memory, exceptions of others follow from
/// that.
fn error(record: &Record) -> Option<String> {
    let torches = |is_injected: bool| {
        let processes = record
            .processes
            .iter()
            .filter(move |process| process.has_injected_failures() == is_injected);
        processes.filter_map(|process| process.torch.as_ref())
    };
    let of = |is_injected: bool| torches(is_injected).find_map(|torch| torch.error.clone());
    of(true).or_else(|| {
        if torches(true).any(|torch| torch.ended_out_of_memory) {
            None
        } else {
            of(false)
        }
    })
}

fn is_of_port(line: &str) -> bool {
    line.contains("EADDRINUSE") || line.contains("Address already in use")
}

fn port_in_use(path: &Path) -> io::Result<Option<String>> {
    let text = fs::read(path)?;
    Ok(String::from_utf8_lossy(&text)
        .lines()
        .find(|line| is_of_port(line))
        .map(|line| line.trim().to_owned()))
}

fn last_lines(path: &Path) -> io::Result<Vec<String>> {
    let text = fs::read(PathBuf::from(path))?;
    let text = String::from_utf8_lossy(&text);
    let lines: Vec<&str> = text
        .lines()
        .map(str::trim_end)
        .filter(|line| !line.is_empty())
        .collect();
    Ok(lines[lines.len().saturating_sub(LAST_LINES)..]
        .iter()
        .map(|line| (*line).to_owned())
        .collect())
}

#[cfg(test)]
mod tests;
