//! A session: scenarios × allocators × repetitions on one device, arms interleaved, each on a device of its own.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use harness_allocator::allocator::AllocatorKind;
use harness_allocator::device::cuda::CudaDevice;
use harness_allocator::device::limited::{Limited, admit};
use harness_allocator::device::open::{DeviceChoice, Probe, Resolved};
use harness_allocator::device::sim::{SimConfig, SimDevice};
use harness_allocator::device::{Device, DeviceCalls, DeviceError, DeviceInfo};
use harness_allocator::stats::MemoryStats;
use harness_allocator::units::Bytes;

use crate::record::{RECORD_VERSION, Records, RunRecord, Timings, Verdict};
use crate::run::{RunRequest, run};
use crate::scenario::Scenario;

/// Where devices come from: each run opens one for itself, so that nothing of one run is left for the next.
#[derive(Clone, Debug)]
pub struct DeviceSource {
    resolved: Resolved,
    /// Whether a run may take the last of a GPU that others use.
    whole_device: bool,
}

impl DeviceSource {
    /// The device that the user's choice comes down to.
    ///
    /// # Errors
    /// [`DeviceError::Unavailable`] where a CUDA device was asked for by name and is not there.
    pub fn new(choice: DeviceChoice, probe: &Probe, whole_device: bool) -> Result<Self, DeviceError> {
        Ok(Self { resolved: choice.resolve(probe)?, whole_device })
    }

    /// The simulated device.
    #[must_use]
    pub fn simulated() -> Self {
        let resolved = Resolved::Simulated { reason: "the simulated device was asked for".to_owned() };
        Self { resolved, whole_device: false }
    }

    /// Why it is the simulated device, if it is.
    #[must_use]
    pub fn simulated_because(&self) -> Option<&str> {
        match &self.resolved {
            Resolved::Simulated { reason } => Some(reason),
            Resolved::Cuda(_) => None,
        }
    }

    /// How often each arm runs where the user does not say: a simulated device gives the same figures every time.
    #[must_use]
    pub const fn default_repetitions(&self) -> u32 {
        match self.resolved {
            Resolved::Simulated { .. } => 1,
            Resolved::Cuda(_) => 5,
        }
    }

    /// Opens the device whole.
    ///
    /// # Errors
    /// [`DeviceError`] where it cannot be opened.
    pub fn open(&self) -> Result<Box<dyn Device>, DeviceError> {
        Ok(match self.resolved {
            Resolved::Simulated { .. } => Box::new(SimDevice::new(SimConfig::default())),
            Resolved::Cuda(ordinal) => Box::new(CudaDevice::open(ordinal)?),
        })
    }

    /// Limits a device to what a scenario needs, if that may be taken.
    fn limit(&self, mut device: Box<dyn Device>, need: Bytes) -> Result<Box<dyn Device>, DeviceError> {
        let memory = device.memory()?;
        admit(&memory, device.info().fingerprint.other_processes, need, self.whole_device)?;
        Ok(Box::new(Limited::new(device, need)?))
    }
}

impl fmt::Display for DeviceSource {
    /// As `--device` takes it.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.resolved {
            Resolved::Simulated { .. } => f.write_str("sim"),
            Resolved::Cuda(ordinal) => write!(f, "cuda:{ordinal}"),
        }
    }
}

/// What is to be run.
#[derive(Clone, Debug)]
pub struct Plan {
    /// In this order.
    pub scenarios: Vec<Scenario>,
    /// These allocators only, where the user says so; a scenario runs with those of them that it lists.
    pub allocators: Option<Vec<AllocatorKind>>,
    /// This seed instead of the scenarios' own.
    pub seed: Option<u64>,
    /// This memory instead of what the scenarios need.
    pub memory: Option<Bytes>,
    /// How often each arm runs.
    pub repetitions: u32,
    /// Whether every operation is audited. Off only where the allocators' own speed is measured.
    pub audit: bool,
    /// How the user started this program, for the command that reproduces a run: `harness`, or `cargo run --release --`.
    pub program: String,
}

/// One run of a plan, before it starts.
#[derive(Clone, Copy, Debug)]
pub struct Arm<'a> {
    /// The scenario.
    pub scenario: &'a Scenario,
    /// The allocator.
    pub allocator: AllocatorKind,
    /// Counted from 0.
    pub repetition: u32,
}

impl Plan {
    /// All runs in order: repetitions outermost, so that what drifts on the machine hits all arms alike.
    pub fn arms(&self) -> impl Iterator<Item = Arm<'_>> {
        let arms = move |repetition| {
            self.scenarios.iter().flat_map(move |scenario| {
                self.allocators_of(scenario).into_iter().map(move |allocator| Arm { scenario, allocator, repetition })
            })
        };
        (0..self.repetitions).flat_map(arms)
    }

    fn allocators_of(&self, scenario: &Scenario) -> Vec<AllocatorKind> {
        let wanted = |kind: &AllocatorKind| self.allocators.as_ref().is_none_or(|only| only.contains(kind));
        scenario.allocators.iter().copied().filter(wanted).collect()
    }

    /// Runs everything; stops early when the user interrupts.
    ///
    /// # Errors
    /// [`DeviceError`] where no device can be opened at all; a scenario that does not fit on the device is skipped, with the reason.
    pub fn run(
        &self,
        source: &DeviceSource,
        interrupt: &Arc<AtomicBool>,
        mut watch: impl FnMut(&Arm<'_>, Option<&RunRecord>),
    ) -> Result<Records, DeviceError> {
        let mut runs = Vec::new();
        for arm in self.arms() {
            if interrupt.load(Ordering::Relaxed) {
                break;
            }
            watch(&arm, None);
            let record = self.run_arm(&arm, source, interrupt)?;
            watch(&arm, Some(&record));
            runs.push(record);
        }
        Ok(Records { version: RECORD_VERSION, harness: env!("CARGO_PKG_VERSION").to_owned(), runs })
    }

    /// Runs one arm on a device of its own.
    ///
    /// # Errors
    /// [`DeviceError`] where the device cannot be opened.
    pub fn run_arm(&self, arm: &Arm<'_>, source: &DeviceSource, interrupt: &Arc<AtomicBool>) -> Result<RunRecord, DeviceError> {
        let device = source.open()?;
        let info = device.info().clone();
        let scenario = match self.memory {
            Some(memory) => &Scenario { memory, ..arm.scenario.clone() },
            None => arm.scenario,
        };
        let seed = self.seed.unwrap_or(scenario.seed);
        let reproduce = self.reproduce(arm, source, seed);
        let device = match source.limit(device, scenario.memory) {
            Ok(device) => device,
            Err(error @ DeviceError::Unavailable { .. }) => return Ok(skipped(arm, scenario, info, seed, reproduce, &error)),
            Err(error) => return Err(error),
        };
        let (allocator, repetition) = (arm.allocator, arm.repetition);
        let (audit, interrupt) = (self.audit, Arc::clone(interrupt));
        run(&RunRequest { scenario, allocator, seed, repetition, reproduce, audit, interrupt }, device)
    }

    fn reproduce(&self, arm: &Arm<'_>, source: &DeviceSource, seed: u64) -> String {
        let memory = self.memory.map(|memory| format!(" --memory {}B", memory.0)).unwrap_or_default();
        let (program, path, allocator) = (&self.program, arm.scenario.path.display(), arm.allocator.name());
        let audit = if self.audit { "" } else { " --no-audit" };
        format!("{program} run {path} --device {source} --allocator {allocator} --seed {seed}{memory}{audit}")
    }
}

fn skipped(arm: &Arm<'_>, scenario: &Scenario, device: DeviceInfo, seed: u64, reproduce: String, reason: &DeviceError) -> RunRecord {
    RunRecord {
        scenario: scenario.info(),
        device,
        allocator: arm.allocator.name().to_owned(),
        seed,
        repetition: arm.repetition,
        reproduce,
        verdict: Verdict::Skipped { reason: reason.to_string() },
        steps: Vec::new(),
        unrecorded_steps: 0,
        curve: Vec::new(),
        timings: Timings::default(),
        calls: DeviceCalls::default(),
        stats: MemoryStats::default(),
        cost_figures: Vec::new(),
    }
}
