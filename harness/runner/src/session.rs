//! A session: scenarios × allocators × repetitions on one device, arms interleaved, each on a device of its own.

use std::ffi::OsString;
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use harness_allocator::allocator::AllocatorSpec;
use harness_allocator::device::cuda::CudaDevice;
use harness_allocator::device::limited::{Limited, admit};
use harness_allocator::device::open::{DeviceChoice, Probe, Resolved};
use harness_allocator::device::sim::{SimConfig, SimDevice};
use harness_allocator::device::{Device, DeviceCalls, DeviceError, DeviceInfo};
use harness_allocator::stats::MemoryStats;
use harness_allocator::units::Bytes;

use crate::profile::{Profile, ProfileError};
use crate::record::{RECORD_VERSION, Records, Rule, RunRecord, Timings, Verdict, Violation};
use crate::run::{RunRequest, run};
use crate::scenario::Scenario;

/// Where devices come from: each run opens one for itself, so that nothing of one run is left for the next.
#[derive(Clone, Debug)]
pub struct DeviceSource {
    resolved: Resolved,
    /// What the simulated device runs on, and the file that the user named for it.
    profile: Option<(Profile, PathBuf)>,
    /// Whether a run may take the last of a GPU that others use.
    whole_device: bool,
}

impl DeviceSource {
    /// The device that the user's choice comes down to.
    ///
    /// # Errors
    /// [`DeviceError::Unavailable`] where a CUDA device was asked for by name and is not there.
    pub fn new(choice: DeviceChoice, probe: &Probe, whole_device: bool) -> Result<Self, DeviceError> {
        Ok(Self { resolved: choice.resolve(probe)?, profile: None, whole_device })
    }

    /// The simulated device.
    #[must_use]
    pub fn simulated() -> Self {
        let resolved = Resolved::Simulated { reason: "the simulated device was asked for".to_owned() };
        Self { resolved, profile: None, whole_device: false }
    }

    /// The same, but a simulated device runs on the profile in this file.
    ///
    /// # Errors
    /// [`ProfileError`] where there is none.
    pub fn with_profile(self, path: &Path) -> Result<Self, ProfileError> {
        Ok(Self { profile: Some((Profile::load(path)?, path.to_owned())), ..self })
    }

    /// Why it is the simulated device, if it is.
    #[must_use]
    pub fn simulated_because(&self) -> Option<&str> {
        match &self.resolved {
            Resolved::Simulated { reason } => Some(reason),
            Resolved::Cuda(_) => None,
        }
    }

    /// The arguments of this program that choose it.
    #[must_use]
    pub fn arguments(&self) -> Vec<OsString> {
        match (&self.resolved, &self.profile) {
            (Resolved::Simulated { .. }, None) => vec!["--device".into(), "sim".into()],
            (Resolved::Simulated { .. }, Some((_, path))) => vec!["--device".into(), "sim".into(), "--device-profile".into(), path.into()],
            (Resolved::Cuda(ordinal), _) => vec!["--device".into(), format!("cuda:{ordinal}").into()],
        }
    }

    /// The number of the CUDA device, if it is one.
    #[must_use]
    pub const fn cuda_ordinal(&self) -> Option<u32> {
        match self.resolved {
            Resolved::Simulated { .. } => None,
            Resolved::Cuda(ordinal) => Some(ordinal),
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
            Resolved::Simulated { .. } => {
                let config = self.profile.as_ref().map_or_else(SimConfig::default, |(profile, _)| profile.sim_config());
                Box::new(SimDevice::new(config))
            }
            Resolved::Cuda(ordinal) => Box::new(CudaDevice::open(ordinal)?),
        })
    }

    /// Whether that much may be taken of a device.
    ///
    /// # Errors
    /// [`DeviceError::Unavailable`] with what is free, who has the rest, and what would be let in.
    pub fn admit(&self, device: &mut dyn Device, need: Bytes) -> Result<(), DeviceError> {
        let memory = device.memory()?;
        admit(&memory, device.info().fingerprint.other_processes, need, self.whole_device)
    }

    /// Limits a device to what a scenario needs, if that may be taken.
    fn limit(&self, mut device: Box<dyn Device>, need: Bytes) -> Result<Box<dyn Device>, DeviceError> {
        self.admit(&mut *device, need)?;
        Ok(Box::new(Limited::new(device, need)?))
    }
}

impl fmt::Display for DeviceSource {
    /// As `--device` takes it in a shell, with the option for the profile behind it.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (&self.resolved, &self.profile) {
            (Resolved::Simulated { .. }, None) => f.write_str("sim"),
            (Resolved::Simulated { .. }, Some((_, path))) => write!(f, "sim --device-profile {}", quoted(&path.to_string_lossy())),
            (Resolved::Cuda(ordinal), _) => write!(f, "cuda:{ordinal}"),
        }
    }
}

/// What is to be run.
#[derive(Clone, Debug)]
pub struct Plan {
    /// In this order.
    pub scenarios: Vec<Scenario>,
    /// With which allocators.
    pub selection: Selection,
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

/// Which of the arms that scenarios list are run, and which beside them.
#[derive(Clone, Debug, Default)]
pub struct Selection {
    /// Of those that a scenario lists, the ones of these names; `None`: all.
    pub only: Option<Vec<String>>,
    /// Arms of PyTorch's allocator, for every scenario that lists it under whatever settings.
    pub added: Vec<AllocatorSpec>,
}

impl Selection {
    /// Those of these names only.
    #[must_use]
    pub fn only(names: impl IntoIterator<Item = impl ToString>) -> Self {
        Self { only: Some(names.into_iter().map(|name| name.to_string()).collect()), added: Vec::new() }
    }

    /// The arms of a scenario, in its order; what is added comes behind. An added arm that the scenario lists itself is run as listed, and once.
    #[must_use]
    pub fn of<'a>(&'a self, scenario: &'a Scenario) -> Vec<&'a AllocatorSpec> {
        let wanted = |arm: &&AllocatorSpec| self.only.as_ref().is_none_or(|only| only.contains(&arm.to_string()));
        let mut arms: Vec<&AllocatorSpec> = scenario.allocators.iter().filter(wanted).collect();
        if !has_pytorchs(scenario) {
            return arms;
        }
        for added in &self.added {
            let arm = listed_as(scenario, added).unwrap_or(added);
            if !arms.iter().any(|there| there.does_the_same(arm)) {
                arms.push(arm);
            }
        }
        arms
    }
}

/// The arm that the scenario lists itself which does the same as this one, and is run in its place.
#[must_use]
pub fn listed_as<'a>(scenario: &'a Scenario, added: &AllocatorSpec) -> Option<&'a AllocatorSpec> {
    scenario.allocators.iter().find(|listed| listed.does_the_same(added))
}

/// Whether PyTorch's allocator is among those that the scenario lists.
#[must_use]
pub fn has_pytorchs(scenario: &Scenario) -> bool {
    scenario.allocators.iter().any(|arm| arm.kind().is_pytorchs())
}

/// One run of a plan, before it starts.
#[derive(Clone, Copy, Debug)]
pub struct Arm<'a> {
    /// The scenario.
    pub scenario: &'a Scenario,
    /// The allocator and its settings.
    pub allocator: &'a AllocatorSpec,
    /// Counted from 0.
    pub repetition: u32,
}

impl Plan {
    /// All runs in order: repetitions outermost, so that what drifts on the machine hits all arms alike.
    pub fn arms(&self) -> impl Iterator<Item = Arm<'_>> {
        let arms = move |repetition| {
            self.scenarios.iter().flat_map(move |scenario| {
                self.selection.of(scenario).into_iter().map(move |allocator| Arm { scenario, allocator, repetition })
            })
        };
        (0..self.repetitions).flat_map(arms)
    }

    /// Runs everything; stops early when the user interrupts. Where the device cannot be opened any more after runs on it, that arm has
    /// failed and those behind it are skipped: what broke the device is most likely in the records that there are.
    ///
    /// # Errors
    /// [`DeviceError`] where no device can be opened at all; a scenario that does not fit on the device is skipped, with the reason.
    pub fn run(
        &self,
        source: &DeviceSource,
        interrupt: &Arc<AtomicBool>,
        mut watch: impl FnMut(&Arm<'_>, Option<&RunRecord>),
    ) -> Result<Records, DeviceError> {
        let mut runs: Vec<RunRecord> = Vec::new();
        let mut lost = None;
        for arm in self.arms() {
            if interrupt.load(Ordering::Relaxed) {
                break;
            }
            watch(&arm, None);
            let record = match &lost {
                Some(device) => self.not_run(&arm, source, DeviceInfo::clone(device), device_was_lost()),
                None => match (self.run_arm(&arm, source, interrupt), runs.last()) {
                    (Ok(record), _) => record,
                    (Err(error), None) => return Err(error),
                    (Err(error), Some(RunRecord { device, .. })) => {
                        lost = Some(device.clone());
                        self.not_run(&arm, source, device.clone(), device_failed(&error))
                    }
                },
            };
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
        let device = match source.limit(device, scenario.memory) {
            Ok(device) => device,
            Err(error @ DeviceError::Unavailable { .. }) => {
                return Ok(self.not_run(arm, source, info, Verdict::Skipped { reason: error.to_string() }));
            }
            Err(error) => return Err(error),
        };
        let seed = self.seed_of(arm);
        let reproduce = self.reproduce(arm, source, seed);
        let (allocator, repetition) = (arm.allocator, arm.repetition);
        let (audit, interrupt) = (self.audit, Arc::clone(interrupt));
        run(&RunRequest { scenario, allocator, seed, repetition, reproduce, audit, interrupt }, device)
    }

    fn seed_of(&self, arm: &Arm<'_>) -> u64 {
        self.seed.unwrap_or(arm.scenario.seed)
    }

    /// The record of an arm that never began.
    fn not_run(&self, arm: &Arm<'_>, source: &DeviceSource, device: DeviceInfo, verdict: Verdict) -> RunRecord {
        let mut scenario = arm.scenario.info();
        scenario.memory = self.memory.unwrap_or(scenario.memory);
        let seed = self.seed_of(arm);
        RunRecord {
            scenario,
            device,
            allocator: arm.allocator.to_string(),
            settings: arm.allocator.settings(),
            seed,
            repetition: arm.repetition,
            reproduce: self.reproduce(arm, source, seed),
            verdict,
            steps: Vec::new(),
            unrecorded_steps: 0,
            curve: Vec::new(),
            timings: Timings::default(),
            calls: DeviceCalls::default(),
            stats: MemoryStats::default(),
            cost_figures: Vec::new(),
        }
    }

    fn reproduce(&self, arm: &Arm<'_>, source: &DeviceSource, seed: u64) -> String {
        let memory = self.memory.map(|memory| format!(" --memory {}B", memory.0)).unwrap_or_default();
        let (program, path) = (&self.program, quoted(&arm.scenario.path.to_string_lossy()));
        let allocator = quoted(&arm.allocator.to_string());
        let audit = if self.audit { "" } else { " --no-audit" };
        format!("{program} run {path} --device {source} --allocator {allocator} --seed {seed}{memory}{audit}")
    }
}

/// A word as a POSIX shell has to be given it: paths have spaces, and names of arms brackets where they tell settings.
#[must_use]
pub fn quoted(word: &str) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "_-./:,+@%".contains(c);
    if !word.is_empty() && word.chars().all(plain) { word.to_owned() } else { format!("'{}'", word.replace('\'', r"'\''")) }
}

/// The verdict of the arm at which a device that others ran on was lost.
fn device_failed(error: &DeviceError) -> Verdict {
    let first = Violation {
        step: 0,
        at: None,
        rule: Rule::DeviceFailure,
        expected: "the device to open again, as for the run before".to_owned(),
        seen: error.to_string(),
    };
    Verdict::Failed { first, rest: Vec::new() }
}

/// The verdict of the arms behind it.
fn device_was_lost() -> Verdict {
    Verdict::Skipped { reason: "the device could not be opened for a run before this one, and was not tried again".to_owned() }
}

#[cfg(test)]
mod tests {
    use super::quoted;

    #[test]
    fn a_word_is_quoted_where_a_shell_would_not_take_it_as_it_is() {
        let words = ["scenarios/oom_retry.yaml", "d one/job.yaml", "it's.yaml", "caching(x:1)", "$HOME", "~", ""];
        let expected = ["scenarios/oom_retry.yaml", "'d one/job.yaml'", r"'it'\''s.yaml'", "'caching(x:1)'", "'$HOME'", "'~'", "''"];
        assert_eq!(words.map(quoted), expected);
    }
}
