//! The rig: one device, the programs that allocate on it, and their accounts. Every operation of a
//! run goes through the rig. Nothing else in the harness touches the device while a scenario runs.
//!
//! A run is either checked or timed ([`Checks`]). Checks query the driver and NVML and read memory
//! while queued work continues on the device. Subtracting their time would lose that work; keeping
//! it would count the checks. So a timed run makes only the scenario's own device calls, from its
//! first step to its last.
//!
//! * `program`: the programs that allocate; most runs have only one. It also lends the device to
//!   other allocators;
//! * `memory`: requests, frees, contents; `private_pools`: private memory pools;
//! * `host`: host memory and copies;
//! * `streams`: streams, events and queued work;
//! * `audit`: checks after each operation; `checking`: selects the operations to check if calls
//!   fail;
//! * `names`: the owners of memory, and the bytes per allocation site;
//! * `accounts`, `curve` and `failed_request`: figures for records; `times`: measurements of a
//!   timed run;
//! * `recording`: records the main program's allocator as a PyTorch memory snapshot;
//! * `closing`: the end of a run.

mod accounts;
mod audit;
mod buffer;
mod checking;
mod closing;
mod curve;
mod failed_request;
mod host;
mod memory;
mod names;
mod private_pools;
mod program;
mod recording;
mod streams;
mod times;

use std::hash::{Hash as _, Hasher as _};
use std::{collections::BTreeSet, sync::Arc};

use harness_allocator::device::{
    CallSite, DeviceCalls, DeviceError, DeviceMemory, HostId, TestDevice, faulty::Injector,
};
use harness_allocator::{allocator::Allocator, hash::Mixer, units::Nanos};
use harness_cuda::nvtx::NvtxRanges;

pub(crate) use self::accounts::{Peaks, Totals};
pub(crate) use self::audit::check_structure;
pub use self::audit::{Audit, Finding, Held};
pub(crate) use self::names::{held_back, release_unit};
pub use self::{
    accounts::MemoryState, buffer::Buffer, checking::CheckedFrom, host::HostBuffer,
    names::BufferSite, private_pools::PoolRefused, program::ProgramId,
};
use self::{
    audit::AuditResult, checking::Checking, curve::Curve, names::Names, program::Program,
    streams::Queued, times::Times,
};
use crate::control::{BlockingCall, Control};
use crate::timeline::Tracer;
use harness_record::{Accounts, Invariant, Rule};
use harness_scenario::ProcessName;
use harness_trace::snapshot::{Recorder, StackId};

#[derive(Clone, Debug, PartialEq)]
pub enum Stop {
    /// Invariants do not hold.
    Violated(Vec<Finding>),
    /// The device or the allocator failed for a reason other than OOM.
    Device(DeviceError),
    /// Another process of the scenario failed. `fault` is the injected fault that caused it: the
    /// process, and the fault's index in it.
    Process {
        rule: Rule,
        expected: String,
        seen: String,
        fault: Option<(ProcessName, usize)>,
    },
    /// The user interrupted the run, or a step exceeded its time limit.
    Interrupted,
}

impl From<DeviceError> for Stop {
    /// Wrong contents and races are violations: the allocator handed out memory that was still in
    /// use.
    fn from(error: DeviceError) -> Self {
        match error {
            DeviceError::Corrupted { .. }
            | DeviceError::Race { .. }
            | DeviceError::InUse { .. } => {
                let expected = "the contents that were written last, ordered after earlier writes";
                Self::Violated(vec![Finding::new(
                    Invariant::ContentsAreIntact,
                    expected,
                    error.to_string(),
                )])
            }
            error => Self::Device(error),
        }
    }
}

/// The work of a run besides the scenario's own calls.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Checks {
    /// Keeps accounts, verifies buffers when they are freed, and audits every operation. Measures
    /// no times.
    #[default]
    Audit,
    /// The same without the audit, for programs whose audit takes too long.
    Accounts,
    /// Like [`Checks::Accounts`], with an audit of the counters, and a full audit on request
    /// ([`Rig::check_health`]).
    Health,
    /// No checks. Measures operations and steps.
    Timing,
}

#[derive(Clone, Debug, Default)]
pub struct RigOptions {
    pub checks: Checks,
    pub seed: u64,
    /// Stops the run, and receives each call that begins.
    pub control: Arc<Control>,
    pub recorder: Option<Recorder>,
    pub faults: Option<Injector>,
    /// The start of the checks if the device has injected faults. Another run has checked the
    /// earlier operations.
    pub checked_from: CheckedFrom,
    /// Receives the steps of a traced run and the main program's memory.
    pub tracer: Option<Tracer>,
}

#[derive(Clone, Copy, Debug, Default)]
pub struct StepEnd {
    pub duration: Option<Nanos>,
    pub accounts: Option<Accounts>,
}

#[derive(Clone, Debug)]
#[must_use = "continue the step with `Rig::resume_step`"]
pub struct PausedStep {
    number: u32,
    program: ProgramId,
    began: Nanos,
    owner: Option<Arc<names::Owner>>,
    /// Its call stack in the recording.
    place: Option<StackId>,
}

/// Like [`Rig::without_faults`], for callers without a rig.
pub(crate) fn without_faults<T>(faults: Option<&Injector>, act: impl FnOnce() -> T) -> T {
    faults.iter().for_each(|faults| faults.pause());
    let answer = act();
    faults.iter().for_each(|faults| faults.resume());
    answer
}

pub struct Rig {
    device: Box<dyn TestDevice>,
    programs: Vec<Program>,
    entered: ProgramId,
    checks: Checks,
    control: Arc<Control>,
    recorder: Option<Recorder>,
    faults: Option<Injector>,
    /// True if the injector wants a state hash before each call.
    logs_calls: bool,
    checking: Checking,
    tracer: Option<Tracer>,
    ranges: Option<NvtxRanges>,
    step: u32,
    /// The number of tags so far; each fill writes a new one.
    tags: u64,
    queued: Queued,
    host: BTreeSet<HostId>,
    findings: Vec<Finding>,
    names: Names,
    curve: Curve,
    /// What other processes of the run hold.
    elsewhere: Totals,
    /// The peaks of all programs and processes together.
    together: Peaks,
    /// The device's memory when the scenario began. Memory of its streams counts as context
    /// overhead.
    start: DeviceMemory,
    last_memory: DeviceMemory,
    /// The call counts at the last query of the device's memory.
    last_calls: DeviceCalls,
    calls_at_start: DeviceCalls,
    times: Times,
    /// The number of running external programs. Audits pause until all of them have ended: the
    /// scenario's allocators are idle, and the programs change the device's figures.
    pub running_programs: u32,
}

impl Rig {
    /// Takes a device before its first allocation, with one program.
    pub fn new(
        mut device: Box<dyn TestDevice>,
        allocator: Box<dyn Allocator>,
        options: &RigOptions,
    ) -> Result<Self, DeviceError> {
        let memory = without_faults(options.faults.as_ref(), || device.memory())?;
        let calls = device.calls();
        let allocator = match &options.recorder {
            Some(recorder) => Box::new(recorder.around(allocator)),
            None => allocator,
        };
        let later = Some(options.checked_from.clone())
            .filter(|from| !matches!(from, CheckedFrom::Start) && options.faults.is_some());
        let first = Program::new(
            allocator,
            &*device,
            memory,
            (options.checks, later.is_some()),
        );
        Ok(Self {
            device,
            programs: vec![first],
            entered: ProgramId::FIRST,
            checks: options.checks,
            control: Arc::clone(&options.control),
            recorder: options.recorder.clone(),
            faults: options.faults.clone(),
            logs_calls: options.faults.as_ref().is_some_and(Injector::is_logging),
            checking: later.map_or(Checking::Operations { until: None }, Checking::From),
            tracer: options.tracer.clone(),
            ranges: NvtxRanges::of_profiler(),
            step: 0,
            tags: 0,
            queued: Queued::default(),
            host: BTreeSet::new(),
            findings: Vec::new(),
            names: Names::default(),
            curve: Curve::default(),
            elsewhere: Totals::default(),
            together: Peaks::default(),
            start: memory,
            last_memory: memory,
            last_calls: calls,
            calls_at_start: calls,
            times: Times::new(options.seed, calls),
            running_programs: 0,
        })
    }

    /// Runs the harness's own device calls: injected faults neither count nor fail them.
    pub(crate) fn without_faults<T>(&mut self, act: impl FnOnce(&mut Self) -> T) -> T {
        let faults = self.faults.clone();
        without_faults(faults.as_ref(), || act(self))
    }

    pub const fn faults(&self) -> Option<&Injector> {
        self.faults.as_ref()
    }

    pub fn is_timed(&self) -> bool {
        self.checks == Checks::Timing
    }

    /// Starts the scenario after its streams were created.
    pub fn begin_scenario(&mut self) -> Result<(), Stop> {
        self.control.calls(BlockingCall::Memory);
        let memory = self.device.memory()?;
        self.start = DeviceMemory {
            context_overhead: memory.used.saturating_sub(memory.processes),
            ..memory
        };
        self.last_memory = self.start;
        for audit in self
            .programs
            .iter_mut()
            .filter_map(|program| program.audit.as_mut())
        {
            audit.begin(self.start);
        }
        Ok(())
    }

    /// Begins a step. A strict device names its number in errors.
    pub fn begin_step(&mut self, number: u32) {
        self.step = number;
        self.device.set_call_site(CallSite(number));
        if self.is_timed() {
            self.times.step_began = self.device.now();
        }
    }

    /// Reports the current step to the profiler and the tracer, until [`Rig::end_step`].
    pub fn describe_step(&mut self, text: impl Fn() -> String) {
        if let Some(ranges) = &self.ranges {
            ranges.begin(&text());
        }
        if let Some(tracer) = &self.tracer {
            tracer.begin_step(text(), self.device.now());
        }
    }

    /// Pauses a step to run others between its operations.
    pub fn pause_step(&mut self) -> PausedStep {
        self.times.paused += 1;
        let (owner, place) = (self.names.owner.clone(), self.place());
        PausedStep {
            number: self.step,
            program: self.entered,
            began: self.times.step_began,
            owner,
            place,
        }
    }

    pub fn resume_step(
        &mut self,
        PausedStep {
            number,
            program,
            began,
            owner,
            place,
        }: PausedStep,
    ) {
        self.times.paused -= 1;
        self.times.step_began = began;
        self.go_back_to(place);
        if let Some(recorder) = &self.recorder {
            recorder.set_label(owner.as_ref().map(|owner| owner.name.as_str()));
        }
        self.names.owner = owner;
        self.step = number;
        self.enter(program);
        self.device.set_call_site(CallSite(number));
    }

    /// Ends a step. A checked run checks everything and takes the accounts; a timed run takes the
    /// time. A step that was cut short is not checked, because it left partial state.
    pub fn end_step(&mut self, cut_short: bool) -> Result<StepEnd, Stop> {
        if let Some(ranges) = &self.ranges {
            ranges.end();
        }
        if let Some(tracer) = &self.tracer {
            tracer.end_step(self.device.now());
        }
        if self.is_timed() {
            let duration = self.device.now().saturating_sub(self.times.step_began);
            // Steps that run between the operations of another step are part of its time.
            if self.times.paused == 0 {
                self.times.scenario += duration;
            }
            return Ok(StepEnd {
                duration: Some(duration),
                accounts: None,
            });
        }
        if !cut_short {
            self.check_step()?;
        }
        let accounts = self.accounts_of(self.entered)?;
        self.last_memory = accounts.device;
        self.plot();
        Ok(StepEnd {
            duration: None,
            accounts: Some(accounts),
        })
    }

    pub(crate) fn control(&self) -> Arc<Control> {
        Arc::clone(&self.control)
    }

    pub fn is_interrupted(&self) -> bool {
        self.control.should_stop()
    }

    /// Runs a full check of each program. Linear in blocks. Does nothing without an audit.
    pub fn check_health(&mut self) -> Result<(), Stop> {
        self.in_each_program(|rig| rig.check(Audit::everything))
    }

    /// Notes a violation that does not stop the step; [`Rig::take_findings`] returns it.
    pub fn note(&mut self, finding: Finding) {
        if !self.findings.contains(&finding) {
            self.findings.push(finding);
        }
    }

    /// The violations noted since the last call, each once.
    pub fn take_findings(&mut self) -> Vec<Finding> {
        std::mem::take(&mut self.findings)
    }

    /// Describes what other processes did on the device, if that invalidates the accounts of this
    /// run.
    pub fn contention(&self) -> Option<&str> {
        self.programs
            .iter()
            .find_map(|program| program.audit.as_ref()?.contention())
    }

    /// The device's ordinal for other processes; `None` if only this process has the device.
    pub fn ordinal(&self) -> Option<u32> {
        self.device.ordinal()
    }

    /// Runs an audit check of the current program and adds a point to the curve. A timed run does
    /// neither.
    fn check(
        &mut self,
        check: impl FnOnce(&mut Audit, &dyn Allocator, &mut dyn TestDevice) -> AuditResult,
    ) -> Result<(), Stop> {
        if self.is_timed() || self.running_programs > 0 {
            return Ok(());
        }
        if let Some(faults) = self.faults.as_ref().filter(|_| self.logs_calls) {
            let mut hasher = Mixer::default();
            self.programs
                .iter()
                .for_each(|program| program.allocator.snapshot().hash(&mut hasher));
            (self.entered, &self.host).hash(&mut hasher);
            faults.set_state_hash(hasher.finish());
        }
        let (
            Program {
                allocator, audit, ..
            },
            device,
        ) = self.program_on_device();
        if let Some(audit) = audit {
            check(audit, &**allocator, device)
                .map_err(|findings| Stop::Violated(self.name_program(findings)))?;
        }
        if self.is_asleep() {
            return Ok(());
        }
        if self.device.calls().memory_calls() != self.last_calls.memory_calls() {
            self.refresh_memory()?;
        }
        self.plot();
        Ok(())
    }
}
