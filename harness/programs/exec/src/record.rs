//! [`Record`] describes what the processes of a program did on the GPU. It is read from the files
//! in the folder of the run.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::{fmt, fs, io};

use harness_allocator::units::Bytes;
use harness_gpu_settings::collectives::SIZES;
use harness_gpu_settings::counters::{DeviceCounters, ProcessCounters};
use harness_gpu_settings::{
    calls::Call, latency::Latency, ledger::Ledger, shared_memory::HOOKED, torch_statistics,
};
use serde::{Deserialize, Serialize};

use crate::ahead::{self, PeakAhead};
use crate::files::{numbered, numbered_lines, own_ledger, read_lines};
use crate::machine_memory::MachineMemory;
use crate::torch_record::{AdaptedEngine, Caller, PEAK_ALLOCATED, Statistics, TorchRecord};
use crate::{errors::ErrorFrame, hang::Hang, machine::Machine, outlived, process::End, torch};

/// A run, as `--record` writes it.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Record {
    /// The program's exit code; 128 + n if signal n ended it.
    pub exit_code: u8,
    pub signal: Option<u8>,
    /// The simulated GPU's profile name, or a real GPU such as `cuda:0`.
    pub gpu: String,
    /// All settings of the machine, or the limits, on one line.
    pub settings: String,
    /// Peak bytes held by all processes together, contexts included, by device. Empty if other
    /// programs shared the devices.
    pub peak_held: Vec<u64>,
    /// How much of the machine's memory the processes used, if the GPU shares it with the host.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub machine_memory: Option<MachineMemory>,
    /// What a second run found. `None` if peaks do not depend on the timing of the GPU, or if
    /// there was no second run.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub host_ahead: Option<HostAhead>,
    /// The ranks that wait forever, if the run was stopped because of them.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub hang: Option<Hang>,
    /// The first collective whose size differs between ranks. `None` with computed values, where it
    /// is an error.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub different_sizes: Option<String>,
    /// Processes that could use the GPU, or did, and still ran when the program had ended. They
    /// were ended then.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub outlived: Vec<String>,
    /// The processes that used the GPU or imported torch, in the order of their starts.
    pub processes: Vec<Process>,
    /// The programs that Python processes started without the variables of the run, so without the
    /// simulated GPU, and where.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub without_variables: Vec<StartedProgram>,
    /// Where code of ours failed within a process of Python, which went on as without it.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub own_errors: Vec<OwnError>,
    /// The first effect of a process outside of the program, such as `writes log.txt`. A second
    /// run would repeat it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub effect: Option<String>,
    /// `true` if the program is Python with the hook, not a shell whose effects are unknown.
    #[serde(skip)]
    pub is_watched: bool,
}

/// An exception of our own code in a process of Python. It never reaches the program.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct OwnError {
    pub error: String,
    #[serde(flatten)]
    pub at: ErrorFrame,
}

impl fmt::Display for OwnError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} at {}", self.error, self.at.short())
    }
}

/// A program that a process of Python started.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct StartedProgram {
    pub program: String,
    #[serde(flatten)]
    pub at: ErrorFrame,
}

impl fmt::Display for StartedProgram {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "`{}` at {}", self.program, self.at.short())
    }
}

/// The result of a run whose host runs ahead of the GPU, so freed memory waits longest for other
/// streams.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct HostAhead {
    /// Peak bytes held by all processes together, contexts included, by device.
    pub peak_held: Vec<u64>,
    pub exit_code: u8,
}

#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Process {
    pub pid: u32,
    /// Those of torch and other frameworks for GPUs that the process imported. `None` if the hook
    /// did not run, as in processes without Python.
    #[serde(skip)]
    pub imports: Option<Vec<String>>,
    /// The file name of the program that the process executed. Empty on a real GPU, and if the
    /// process did not use the GPU.
    #[serde(skip)]
    pub program: String,
    /// The first call that the GPU refused for another reason than its memory, and the error.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub refusal: Option<(String, u64)>,
    /// torch's statistics. `None` if the process did not import torch, or was killed before it used
    /// the GPU.
    pub torch: Option<TorchRecord>,
    pub devices: Vec<DeviceRecord>,
    /// Kernels, graphs, copies, host functions and records submitted. Not counted on a real GPU.
    pub submitted: u64,
    /// Whether the process read the amount of free memory. Unknown on a real GPU.
    #[serde(skip)]
    pub reads_free_memory: bool,
    /// How often the process read values from the GPU that only real kernels would have computed:
    /// later branches may differ. 0 with computed values.
    pub uncomputed_reads: u64,
    /// The lines of the first of these reads, in their order.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub uncomputed_reads_at: Vec<ErrorFrame>,
    /// How often freed memory waited for the work of another stream. Then peaks depend on the
    /// timing of the GPU. Not counted on a real GPU.
    pub waits_of_frees: u64,
    /// The peaks of a host that keeps up, or runs ahead, on each device on which frees waited.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub peaks_by_timing: Vec<PeakAhead>,
    /// Why these are unknown although frees waited.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub not_replayed: Option<&'static str>,
    /// The first lines that asked whether the GPU had finished work for which the host had not
    /// waited, in their order. Then peaks can depend on its timing too.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub polled_at: Vec<ErrorFrame>,
    /// How often CUDA graphs requested device memory for their nodes. How much a GPU takes for them
    /// is assumed.
    pub graph_requests: u64,
    /// How many bytes a workspace of cuDNN may be smaller and larger than its estimate. Zeros if no
    /// workspace was estimated.
    pub cudnn_workspace_bounds: [u64; 2],
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub slow_calls: Vec<SlowCalls>,
    /// Failed calls that request host memory, or memory of a library.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub failed_calls: Vec<FailedCalls>,
    /// Functions that were called and have no model.
    pub not_modelled: Vec<String>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct SlowCalls {
    pub call: &'static str,
    pub calls: u64,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct FailedCalls {
    pub call: &'static str,
    pub failed: u64,
    /// Those of them with an injected failure.
    pub injected: u64,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct DeviceRecord {
    pub index: usize,
    pub memory: u64,
    /// Peak bytes held by the process.
    pub peak_reserved: u64,
    /// Allocation calls to the driver, including failed ones.
    pub mallocs: u64,
    pub frees: u64,
    /// Allocations that failed, including injected failures.
    pub failed: u64,
    pub injected: u64,
}

/// A memory snapshot written by a process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SnapshotFile {
    pub pid: u32,
    pub rank: Option<String>,
    pub path: PathBuf,
    /// `true` if an uncaught OutOfMemoryError ended the process.
    pub ended_out_of_memory: bool,
    /// `true` if the process wrote it at an out of memory error and was killed before it could
    /// write another one.
    pub is_of_error: bool,
}

impl Process {
    const fn has_read_uncomputed(&self) -> bool {
        self.uncomputed_reads > 0
    }

    fn of_counters(counters: ProcessCounters, run: &Path) -> Self {
        let pid = counters.pid;
        let devices = counters.devices.iter().enumerate();
        let slow = |(call, calls): (Call, u64)| SlowCalls {
            call: call.name(),
            calls,
        };
        let failed = |(call, [failed, injected]): (Call, [u64; 2])| FailedCalls {
            call: call.name(),
            failed,
            injected,
        };
        Self {
            pid,
            devices: devices
                .map(|(index, counters)| DeviceRecord::new(index, counters))
                .collect(),
            submitted: counters.submitted,
            reads_free_memory: counters.memory_reads > 0,
            uncomputed_reads: counters.uncomputed_reads,
            uncomputed_reads_at: read_lines(&run.join(format!("reads-{pid}.jsonl"))),
            waits_of_frees: counters.waits_of_frees,
            polled_at: read_lines(&run.join(format!("polls-{pid}.jsonl"))),
            graph_requests: counters.graph_requests,
            cudnn_workspace_bounds: counters.workspace_bounds,
            slow_calls: counters.slow.into_iter().map(slow).collect(),
            failed_calls: counters.failed_calls.into_iter().map(failed).collect(),
            not_modelled: counters.not_modelled,
            program: counters.program,
            refusal: counters.refusal,
            ..Self::default()
        }
    }

    /// Returns what is known if the process used the GPU with torch or another library, and was
    /// killed before it could report its statistics.
    pub fn unreported(&self) -> Option<String> {
        let torch = self
            .torch
            .as_ref()
            .filter(|torch| torch.statistics == Statistics::AtLeast && self.used_gpu())?;
        let known = Bytes(torch.sum(PEAK_ALLOCATED));
        let known = if known == Bytes::ZERO {
            String::new()
        } else {
            format!("; it is at least {known}")
        };
        let library = torch.other_library.as_ref();
        let library = library.map_or("torch", |library| library.name.as_str());
        Some(format!(
            "process {} ended before {library} could report, so its allocated peak and its errors \
             are unknown{known}",
            self.pid
        ))
    }

    /// Returns whether the process ran its exit handlers, so it is known how it ended.
    pub fn has_reported(&self) -> bool {
        self.torch
            .as_ref()
            .is_some_and(|torch| torch.statistics == Statistics::Reported)
    }

    pub(crate) fn has_injected_failures(&self) -> bool {
        self.devices.iter().any(|device| device.injected > 0)
            || self.failed_calls.iter().any(|call| call.injected > 0)
    }

    /// Returns whether workspaces of cuDNN were estimated.
    pub fn has_estimates(&self) -> bool {
        self.cudnn_workspace_bounds != [0; 2]
    }

    /// The bounds of the allocated peak, if workspaces of cuDNN were estimated: a convolution at
    /// the peak may need less or more.
    pub fn bounds_of_peak(&self) -> Option<[Bytes; 2]> {
        let [below, above] = self.cudnn_workspace_bounds;
        let peak = self.torch.as_ref()?.sum(PEAK_ALLOCATED);
        (peak > 0 && below + above > 0)
            .then(|| [Bytes(peak.saturating_sub(below)), Bytes(peak + above)])
    }
}

/// The text of the first file that a process wrote for this reason.
fn first_text(run: &Path, name: &str) -> io::Result<Option<String>> {
    numbered(run, name, "")?
        .first()
        .map(|(_, path)| fs::read_to_string(path))
        .transpose()
}

/// Adds the allocator's own statistics to what the hooks of the processes wrote.
fn add_statistics(run: &Path, processes: &mut BTreeMap<u32, Process>) -> io::Result<()> {
    let mut kept = torch_statistics::read_folder(run)?;
    for process in processes.values_mut() {
        let kept = kept.remove(&process.pid).flatten();
        // Without the hook, as with Python's option -I, only the allocator's memory is there.
        // What it contains is not of another library.
        process.torch = process
            .torch
            .take()
            .filter(|torch| kept.is_none() || torch.other_library.is_none())
            .or_else(|| kept.is_some().then(TorchRecord::unnamed))
            .map(|torch| torch.complete(kept));
    }
    Ok(())
}

/// Replays the processes whose frees waited for other streams, with a host that runs ahead.
fn add_peaks_by_timing(run: &Path, processes: &mut [Process], machine: &Machine) {
    let Some(settings) = ahead::settings(machine) else {
        return;
    };
    // What contexts, libraries and other processes hold is not left to torch.
    let held = |device: u32| {
        let index = device as usize;
        let held = processes.iter().flat_map(|process| &process.devices);
        let held = held.filter(|device| device.index == index && device.mallocs > 0);
        held.map(|device| device.peak_reserved + settings.context_overhead.0)
            .sum::<u64>()
    };
    let of_process = |process: &Process| {
        let reserved = |device: u32| {
            let stats = process
                .torch
                .as_ref()?
                .memory_stats
                .get(&device.to_string())?;
            stats.get("reserved_bytes.all.peak")?.as_u64()
        };
        let available = |device: u32| {
            let others = held(device).saturating_sub(reserved(device).unwrap_or(0));
            settings.memory.saturating_sub(Bytes(others))
        };
        ahead::of_process(run, process.pid, settings, reserved, available)
    };
    let replayed: Vec<_> = processes
        .iter()
        .map(|process| (process.waits_of_frees > 0).then(|| of_process(process)))
        .collect();
    for (process, replayed) in processes.iter_mut().zip(replayed) {
        match replayed {
            Some(Ok(peaks)) => process.peaks_by_timing = peaks,
            Some(Err(why)) => process.not_replayed = Some(why),
            None => {}
        }
    }
}

impl Record {
    /// What figures of a process depend on, to follow them; empty if they are exact. What a process
    /// without a GPU read may decide what any other does.
    pub fn unless(&self, process: &Process) -> &'static str {
        let mut others = self.processes.iter();
        if process.has_read_uncomputed()
            || others.any(|other| other.has_read_uncomputed() && !other.used_gpu())
        {
            ", unless a branch depends on a value below"
        } else {
            ""
        }
    }

    /// Returns how the program ended if values can be the cause: by an exit code or a hang, after
    /// it read values that nothing computed, and without injected failures, a signal or a lack of
    /// memory.
    pub fn end_by_values(&self) -> Option<String> {
        let torches = || {
            self.processes
                .iter()
                .filter_map(|process| process.torch.as_ref())
        };
        let has_read = self.processes.iter().any(Process::has_read_uncomputed);
        if !has_read
            || !self.has_torch()
            || self.processes.iter().any(Process::has_injected_failures)
            || torches().any(|torch| torch.ended_out_of_memory)
        {
            return None;
        }
        match &self.hang {
            Some(hang) => hang
                .ranks
                .iter()
                .all(|rank| rank.out_of_memory.is_none())
                .then(|| "in a hang of its ranks".to_owned()),
            // A shell passes on a signal as 128 + n.
            None if self.exit_code == 0 || self.exit_code > 128 => None,
            None => Some(match torches().find_map(|torch| torch.error.as_ref()) {
                Some(error) => format!("with `{error}`"),
                None => format!("with exit code {}", self.exit_code),
            }),
        }
    }

    /// Returns why figures of the program are unknown: a process was killed before it could report,
    /// or outlived the program.
    pub fn unreported(&self) -> Option<String> {
        let killed = self.processes.iter().find_map(Process::unreported);
        killed.or_else(|| self.of_outlived().next())
    }

    /// Describes each process that outlived the program.
    pub(crate) fn of_outlived(&self) -> impl Iterator<Item = String> {
        self.outlived.iter().map(|process| {
            format!(
                "{process} still ran when the program had ended, and was ended too, so its later \
                 use of the GPU is unknown"
            )
        })
    }

    /// Describes each engine that was not tested or could not be adapted, once.
    pub fn warnings_of_engines(&self) -> BTreeSet<String> {
        let torches = self.used().filter_map(|process| process.torch.as_ref());
        torches
            .flat_map(|torch| &torch.engines)
            .filter_map(AdaptedEngine::warning)
            .collect()
    }

    /// Whether a process imported torch. Only its operations can be computed on the CPU.
    pub fn has_torch(&self) -> bool {
        let is_torch = |torch: &TorchRecord| torch.other_library.is_none();
        let mut processes = self.processes.iter();
        processes.any(|process| process.torch.as_ref().is_some_and(is_torch))
    }

    /// What raises out of memory errors in the processes that used a GPU.
    pub(crate) fn caller(&self) -> Caller {
        let torches = || self.used().filter_map(|process| process.torch.as_ref());
        let library = torches().find_map(|torch| torch.other_library.as_ref());
        let is_bare = |process: &Process| {
            // The hook lists the libraries that a Python imported.
            let has_no_library = !torch::is_python(process.program.as_ref())
                || process.imports.as_ref().is_some_and(Vec::is_empty);
            process.torch.is_none() && !process.program.is_empty() && has_no_library
        };
        if torches().any(|torch| torch.other_library.is_none()) {
            Caller::Torch
        } else if let Some(library) = library {
            Caller::Library {
                name: library.name.clone(),
                shows_errors: library.errors.is_some(),
            }
        } else if self.used().next().is_some() && self.used().all(is_bare) {
            Caller::Program
        } else {
            Caller::Torch
        }
    }

    /// Whether peaks can depend on the timing of the GPU.
    pub fn depends_on_timing(&self) -> bool {
        self.waits_of_frees() > 0 || self.used().any(|process| !process.polled_at.is_empty())
    }

    /// How often freed memory waited for the work of another stream, in all processes.
    pub fn waits_of_frees(&self) -> u64 {
        self.used().map(|process| process.waits_of_frees).sum()
    }

    /// Returns why a second run could do harm. The text follows the words "the program".
    pub fn obstacle_to_repetition(&self) -> Option<&str> {
        let unwatched = || {
            (!self.is_watched)
                .then_some("begins with another program than Python, whose effects are unknown")
        };
        self.effect.as_deref().or_else(unwatched)
    }

    pub fn read(run: &Path, end: End, machine: &Machine) -> io::Result<Self> {
        let (gpu, devices) = match machine {
            Machine::Simulated(settings) => (settings.gpu.name.clone(), settings.devices),
            Machine::Real(ordinal, _) => (format!("cuda:{ordinal}"), 0),
        };
        let mut processes: BTreeMap<u32, Process> = BTreeMap::new();
        for counters in ProcessCounters::read_folder(&machine.counters(run))? {
            processes.insert(counters.pid, Process::of_counters(counters, run));
        }
        for (pid, path) in numbered(run, "torch-", ".json")? {
            // A killed process may leave a truncated file, which is ignored.
            let torch = serde_json::from_slice(&fs::read(path)?).ok();
            let process = processes.entry(pid).or_insert_with(|| Process {
                pid,
                ..Process::default()
            });
            process.torch = torch;
        }
        let hooked = numbered(run, HOOKED, "")?;
        let mut is_watched = false;
        for (pid, path) in hooked {
            let text = fs::read_to_string(path)?;
            let mut words = text.split(' ').map(str::to_owned);
            is_watched |= words.next() == Some(std::process::id().to_string());
            processes
                .entry(pid)
                .and_modify(|process| process.imports = Some(words.collect()));
        }
        add_statistics(run, &mut processes)?;
        let peak_held = match Ledger::open(&own_ledger(run)) {
            Ok(ledger) => (0..devices).map(|device| ledger.peak(device).0).collect(),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Vec::new(),
            Err(error) => return Err(error),
        };
        let mut processes: Vec<Process> = processes.into_values().collect();
        // The kernel counts to the highest process ID, and begins again with free low ones.
        let own = std::process::id();
        processes.sort_by_key(|process| (process.pid < own, process.pid));
        add_peaks_by_timing(run, &mut processes, machine);
        // An interactive session shows an error and goes on: only the exit code of the first
        // process shows that no exception ended it.
        let torches = processes
            .iter_mut()
            .filter_map(|process| process.torch.as_mut());
        if let Some(torch) = torches
            .min_by_key(|torch| torch.started)
            .filter(|_| end.exit_code() == 0)
        {
            torch.ended_out_of_memory = false;
            torch.traceback.clear();
        }
        Ok(Self {
            exit_code: end.exit_code(),
            signal: end.signal(),
            gpu,
            settings: machine.to_string(),
            peak_held,
            machine_memory: MachineMemory::read(run, machine.memory())?,
            host_ahead: None,
            hang: Hang::read(run)?,
            different_sizes: first_text(run, SIZES)?,
            outlived: outlived::read(run)?,
            processes,
            without_variables: numbered_lines(run, WITHOUT_VARIABLES)?,
            own_errors: numbered_lines(run, OWN_ERRORS)?,
            effect: first_text(run, EFFECT)?,
            is_watched,
        })
    }

    /// Returns whether the process that began first exited with code 0 while it handled an out of
    /// memory error.
    pub(crate) fn ended_in_handler(&self) -> bool {
        let torches = self.processes.iter().flat_map(|process| &process.torch);
        torches
            .min_by_key(|torch| torch.started)
            .is_some_and(|torch| torch.ended_in_handler)
    }

    /// Counts the calls that this latency slowed down, over all processes.
    pub fn slow_calls(&self, latency: &Latency) -> u64 {
        struck(
            self.processes
                .iter()
                .flat_map(|process| &process.slow_calls),
            latency,
        )
    }

    /// Returns the first latency that slowed down no call.
    pub fn latency_not_reached<'a>(&self, latencies: &'a [Latency]) -> Option<&'a Latency> {
        latencies
            .iter()
            .find(|latency| self.slow_calls(latency) == 0)
    }

    /// Returns whether a process requested memory of a GPU.
    pub fn requested_memory(&self) -> bool {
        let requested = |process: &Process| process.devices.iter().any(|device| device.mallocs > 0);
        self.processes.iter().any(requested)
    }

    pub(crate) fn used(&self) -> impl Iterator<Item = &Process> {
        self.processes.iter().filter(|process| process.used_gpu())
    }

    /// Returns the processes that used the GPU with torch and wrote no snapshot: they ended before
    /// torch could report, or the disk was full.
    pub fn without_snapshot(&self, snapshots: &[SnapshotFile]) -> impl Iterator<Item = u32> {
        let uses_torch = |process: &&Process| {
            process.torch.as_ref().is_some_and(|torch| {
                torch.statistics != Statistics::Reported
                    || torch.other_library.is_none() && !torch.memory_stats.is_empty()
            })
        };
        let processes = self.used().filter(uses_torch).map(|process| process.pid);
        processes.filter(|pid| snapshots.iter().all(|snapshot| snapshot.pid != *pid))
    }

    /// Returns the snapshots in the folder of a run: first those of processes that ended out of
    /// memory, or after an error, then by process ID.
    pub fn snapshots(&self, run: &Path) -> io::Result<Vec<SnapshotFile>> {
        let told = |pid: u32| {
            self.processes
                .iter()
                .find(|process| process.pid == pid)
                .and_then(|process| process.torch.as_ref())
        };
        let file = |is_of_error: bool| {
            move |(pid, path): (u32, PathBuf)| SnapshotFile {
                pid,
                rank: told(pid).and_then(|torch| torch.rank.clone()),
                path,
                ended_out_of_memory: told(pid).is_some_and(|torch| torch.ended_out_of_memory),
                is_of_error,
            }
        };
        let mut found: Vec<_> = numbered(run, "snapshot-", ".pickle")?
            .into_iter()
            .map(file(false))
            .collect();
        let mut of_errors = numbered(run, "error-", ".pickle")?;
        of_errors.retain(|(pid, _)| found.iter().all(|snapshot| snapshot.pid != *pid));
        found.extend(of_errors.into_iter().map(file(true)));
        found.sort_by_key(|snapshot| {
            (
                !snapshot.ended_out_of_memory,
                !snapshot.is_of_error,
                snapshot.pid,
            )
        });
        Ok(found)
    }
}

impl Process {
    /// Returns whether the process requested device memory or pinned host memory, called a function
    /// without a model, or a call of a library failed.
    pub fn used_gpu(&self) -> bool {
        self.devices.iter().any(|device| device.mallocs > 0)
            || !self.not_modelled.is_empty()
            || !self.failed_calls.is_empty()
            || self.used_host_memory()
    }

    /// Returns whether the process itself requested pinned host memory.
    pub(crate) fn used_host_memory(&self) -> bool {
        let torch = self.torch.as_ref();
        let host = torch.and_then(TorchRecord::host_memory);
        host.is_some_and(|host| host.is_of_program())
            || self
                .failed_calls
                .iter()
                .any(|calls| calls.call == Call::HostAlloc.name())
    }
}

/// The beginning of the names of files that the hook writes for each process: the first effect that
/// a second run would repeat.
const EFFECT: &str = "effect-";
/// The same of files with the programs that a process started without the variables of the run.
const WITHOUT_VARIABLES: &str = "without-variables-";
/// The same of files with exceptions of the hook itself.
const OWN_ERRORS: &str = "own-errors-";

impl DeviceRecord {
    fn new(index: usize, counters: &DeviceCounters) -> Self {
        let DeviceCounters {
            memory,
            peak,
            mallocs,
            frees,
            failed,
            injected,
            ..
        } = *counters;
        Self {
            index,
            memory: memory.0,
            peak_reserved: peak.0,
            mallocs,
            frees,
            failed,
            injected,
        }
    }
}

/// Counts the calls that this latency slowed down.
pub(crate) fn struck<'a>(calls: impl IntoIterator<Item = &'a SlowCalls>, latency: &Latency) -> u64 {
    let is_slow =
        |calls: &&SlowCalls| Call::from_name(calls.call).is_some_and(|call| latency.is_of(call));
    calls
        .into_iter()
        .filter(is_slow)
        .map(|calls| calls.calls)
        .sum()
}

#[cfg(test)]
mod tests;
