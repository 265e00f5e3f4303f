//! [`Record`]: what the processes of a program did on the simulated GPU, put together from the files that they left in the folder of the run.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use harness_gpu_settings::calls::SlowCall;
use harness_gpu_settings::counters::{DeviceCounters, ProcessCounters};
use harness_gpu_settings::latency::Latency;
use harness_gpu_settings::ledger::Ledger;
use harness_gpu_settings::limits::Limits;
use harness_gpu_settings::settings::Settings;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::launch;
use crate::limited::counters_folder;
use crate::process::End;

/// A run, as `--record` writes it.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Record {
    /// The program's exit code; 128 + n where signal n ended it.
    pub exit_code: u8,
    /// The signal that ended it.
    pub signal: Option<u8>,
    /// The simulated GPU by its profile's name; a real one as in `cuda:0`.
    pub gpu: String,
    /// Everything that was set for the machine, or the limits, in one line.
    pub settings: String,
    /// By device: the most bytes that all processes held at one time, contexts included. Empty where the devices were shared with other programs.
    pub peak_held: Vec<u64>,
    /// The processes that used the GPU or imported torch, by number.
    pub processes: Vec<Process>,
}

/// One process.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[allow(missing_docs, reason = "the names say what they are")]
pub struct Process {
    pub pid: u32,
    /// What torch told at the end; `None` where the process did not import it, or was ended before it could tell.
    pub torch: Option<TorchRecord>,
    /// The devices, where it used the GPU.
    pub devices: Vec<DeviceRecord>,
    /// Kernels, graphs, copies, host functions and records submitted; on a real GPU they are not counted.
    pub submitted: u64,
    /// Calls that took longer because that was asked for.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub slow_calls: Vec<SlowCalls>,
    /// Functions that were called and have no model.
    pub not_modelled: Vec<String>,
}

/// Calls of a function that took longer because that was asked for.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct SlowCalls {
    /// The function.
    pub call: &'static str,
    /// How many there were.
    pub calls: u64,
}

/// What torch tells of itself.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TorchRecord {
    /// `torch.__version__`.
    pub version: String,
    /// The process's rank, where it has one.
    pub rank: Option<String>,
    /// Whether an OutOfMemoryError that nobody caught ended it.
    pub ended_out_of_memory: bool,
    /// `torch.cuda.memory_stats()` of each device that was used, by index.
    pub memory_stats: BTreeMap<String, Map<String, Value>>,
    /// Why there are no statistics.
    pub problem: Option<String>,
    /// The last lines of the traceback of what ended the process, where an exception did.
    #[serde(default)]
    pub traceback: Vec<String>,
}

/// One device, by one process's account.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[allow(missing_docs, reason = "the names say what they are")]
pub struct DeviceRecord {
    pub index: usize,
    /// Its memory in bytes.
    pub memory: u64,
    /// The most bytes that the process ever held.
    pub peak_reserved: u64,
    /// Allocations asked of the driver, failed ones included.
    pub mallocs: u64,
    /// Allocations given back to the driver.
    pub frees: u64,
    /// Allocations that the driver refused, injected failures included.
    pub failed: u64,
    /// Allocations that failed because that was asked for.
    pub injected: u64,
}

/// A memory snapshot that a process left.
#[derive(Clone, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "the names say what they are")]
pub struct SnapshotFile {
    pub pid: u32,
    /// Its rank, where it has one.
    pub rank: Option<String>,
    /// Where it lies, in the folder of the run.
    pub path: PathBuf,
    /// Whether an OutOfMemoryError that nobody caught ended the process.
    pub ended_out_of_memory: bool,
}

impl Record {
    /// Reads the folder of a run on simulated GPUs.
    ///
    /// # Errors
    /// That it cannot be read.
    pub fn read(run: &Path, end: End, settings: &Settings) -> io::Result<Self> {
        Self::of_folders(run, run, end, (settings.gpu.name.to_owned(), settings.to_string(), settings.devices))
    }

    /// Reads the folder of a run on a real GPU.
    ///
    /// # Errors
    /// That it cannot be read.
    pub fn read_limited(run: &Path, end: End, ordinal: u32, limits: &Limits) -> io::Result<Self> {
        Self::of_folders(run, &counters_folder(run), end, (format!("cuda:{ordinal}"), limits.to_string(), 0))
    }

    fn of_folders(run: &Path, counters: &Path, end: End, (gpu, settings, devices): (String, String, u32)) -> io::Result<Self> {
        let mut processes: BTreeMap<u32, Process> = BTreeMap::new();
        let process =
            |pid: u32| Process { pid, torch: None, devices: Vec::new(), submitted: 0, slow_calls: Vec::new(), not_modelled: Vec::new() };
        for ProcessCounters { pid, devices, submitted, slow, not_modelled } in ProcessCounters::read_folder(counters)? {
            let devices = devices.iter().enumerate().map(|(index, counters)| DeviceRecord::new(index, counters)).collect();
            let slow_calls = slow.into_iter().map(|(call, calls)| SlowCalls { call: call.name(), calls }).collect();
            processes.insert(pid, Process { devices, submitted, slow_calls, not_modelled, ..process(pid) });
        }
        for (pid, path) in numbered(run, "torch-", ".json")? {
            // One that a process could not write to its end says nothing.
            let torch = serde_json::from_slice(&fs::read(path)?).ok();
            processes.entry(pid).or_insert_with(|| process(pid)).torch = torch;
        }
        let signal = match end {
            End::Code(_) => None,
            End::Signal(signal) => Some(signal),
        };
        let peak_held = match Ledger::open(&launch::own_ledger(run)) {
            Ok(ledger) => (0..devices).map(|device| ledger.peak(device).0).collect(),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Vec::new(),
            Err(error) => return Err(error),
        };
        let processes = processes.into_values().collect();
        Ok(Self { exit_code: end.exit_code(), signal, gpu, settings, peak_held, processes })
    }

    /// Calls that took longer by this latency, all processes together.
    #[must_use]
    pub fn slow_calls(&self, latency: &Latency) -> u64 {
        struck(self.processes.iter().flat_map(|process| &process.slow_calls), latency)
    }

    /// The first of these latencies that no call had.
    #[must_use]
    pub fn latency_not_reached<'a>(&self, latencies: &'a [Latency]) -> Option<&'a Latency> {
        latencies.iter().find(|latency| self.slow_calls(latency) == 0)
    }

    /// The processes that used the GPU.
    pub(crate) fn used(&self) -> impl Iterator<Item = &Process> {
        self.processes.iter().filter(|process| process.used_gpu())
    }

    /// The snapshots in the folder of a run: first those of processes that ended out of memory, else by number.
    ///
    /// # Errors
    /// That the folder cannot be read.
    pub fn snapshots(&self, run: &Path) -> io::Result<Vec<SnapshotFile>> {
        let told = |pid: u32| self.processes.iter().find(|process| process.pid == pid).and_then(|process| process.torch.as_ref());
        let found = numbered(run, "snapshot-", ".pickle")?.into_iter().map(|(pid, path)| SnapshotFile {
            pid,
            rank: told(pid).and_then(|torch| torch.rank.clone()),
            path,
            ended_out_of_memory: told(pid).is_some_and(|torch| torch.ended_out_of_memory),
        });
        let mut found: Vec<_> = found.collect();
        found.sort_by_key(|snapshot| (!snapshot.ended_out_of_memory, snapshot.pid));
        Ok(found)
    }
}

impl Process {
    /// Whether it asked a device for memory, or called what only programs for GPUs call.
    #[must_use]
    pub fn used_gpu(&self) -> bool {
        self.devices.iter().any(|device| device.mallocs > 0) || !self.not_modelled.is_empty()
    }
}

impl TorchRecord {
    /// A figure of the statistics, summed over devices.
    #[must_use]
    pub fn sum(&self, name: &str) -> u64 {
        self.memory_stats.values().filter_map(|stats| stats.get(name)?.as_u64()).sum()
    }
}

impl DeviceRecord {
    fn new(index: usize, counters: &DeviceCounters) -> Self {
        let DeviceCounters { memory, peak, mallocs, frees, failed, injected, .. } = *counters;
        Self { index, memory: memory.0, peak_reserved: peak.0, mallocs, frees, failed, injected }
    }
}

/// How many of these calls took longer by this latency.
pub(crate) fn struck<'a>(calls: impl IntoIterator<Item = &'a SlowCalls>, latency: &Latency) -> u64 {
    let is_slow = |calls: &&SlowCalls| SlowCall::ALL.into_iter().any(|call| call.name() == calls.call && latency.is_of(call));
    calls.into_iter().filter(is_slow).map(|calls| calls.calls).sum()
}

/// Files named by the number of a process, in its order.
pub(crate) fn numbered(folder: &Path, begin: &str, end: &str) -> io::Result<Vec<(u32, PathBuf)>> {
    let mut found = Vec::new();
    for entry in fs::read_dir(folder)? {
        let entry = entry?;
        let name = entry.file_name();
        let number = name.to_str().and_then(|name| name.strip_prefix(begin)?.strip_suffix(end)?.parse().ok());
        found.extend(number.map(|pid| (pid, entry.path())));
    }
    found.sort();
    Ok(found)
}

#[cfg(test)]
mod tests;
