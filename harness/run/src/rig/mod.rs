//! The rig: one device, the programs that allocate on it, and the accounts kept of them. Every operation of a run goes through here; nothing
//! else in the harness touches the device while a scenario runs.
//!
//! A run is either checked or timed ([`Checks`]), never both. Checks ask the driver and NVML and read memory, and work that is queued on the
//! device goes on meanwhile: taking the time of the checks off leaves that work out, and leaving it in counts the checks. So a timed run makes
//! the scenario's own calls to the device, from its first step to its last, and no others.
//!
//! * `program`: who allocates: most runs have one program;
//! * `memory`: requests, frees, contents; `private_pools`: pools apart from the default one;
//! * `host`: memory of the host, and copies;
//! * `lent`: the device for an allocator that is not one of a program;
//! * `streams`: streams, events and queued work;
//! * `audit`: what is checked after each operation; `checking`: after which operations, where calls of the device fail;
//! * `sites`: what each place of the scenario holds;
//! * `accounts`, `curve` and `shortage`: what records tell; `times`: what a timed run measures;
//! * `recording`: what the main program's allocator does, as PyTorch's own history tells it;
//! * `closing`: the end of a run.

mod accounts;
mod audit;
mod buffer;
mod checking;
mod closing;
mod curve;
mod host;
mod lent;
mod memory;
mod names;
mod private_pools;
mod program;
mod recording;
mod samples;
mod shortage;
mod sites;
mod streams;
mod times;

use std::collections::BTreeSet;
use std::hash::{Hash as _, Hasher as _};
use std::sync::Arc;

use harness_allocator::allocator::Allocator;
use harness_allocator::device::faulty::Injector;
use harness_allocator::device::{DeviceCalls, DeviceError, DeviceMemory, HostId, Place, TestDevice};
use harness_allocator::hash::Mixer;
use harness_allocator::units::Nanos;
use harness_cuda::nvtx::Ranges;

pub use self::accounts::MemoryState;
pub(crate) use self::audit::check_structure;
pub use self::audit::{Audit, Finding, Held};
pub use self::buffer::Buffer;
pub use self::checking::CheckedFrom;
use self::checking::Checking;
use self::curve::Curve;
pub use self::host::HostBuffer;
use self::names::Names;
pub(crate) use self::names::{held_back, release_unit};
pub use self::private_pools::PoolRefused;
use self::program::Program;
pub use self::program::ProgramId;
pub use self::sites::Site;
use self::sites::Sites;
use self::streams::Queued;
use self::times::Times;
use crate::control::{Call, Control};
use crate::timeline::Tracer;
use harness_record::{Accounts, Invariant, Rule};
use harness_scenario::ProcessName;
use harness_trace::snapshot::{Recorder, StackId};

/// Why a run cannot go on.
#[derive(Clone, Debug, PartialEq)]
pub enum Stop {
    /// An invariant does not hold.
    Violated(Vec<Finding>),
    /// The device, or the allocator, failed otherwise than for lack of memory.
    Device(DeviceError),
    /// A process of the scenario did not do what it should.
    Process {
        /// What it comes under.
        rule: Rule,
        /// What it should have done.
        expected: String,
        /// What it did.
        seen: String,
        /// The fault that it comes from: the process, and the fault's place among those of the process.
        fault: Option<(ProcessName, usize)>,
    },
    /// It is to stop: the user wants it, or a step has run past its time limit.
    Interrupted,
}

impl From<DeviceError> for Stop {
    /// Wrong contents and races are violations: somebody was given memory that another still uses.
    fn from(error: DeviceError) -> Self {
        match error {
            DeviceError::Corrupted { .. } | DeviceError::Race { .. } | DeviceError::InUse { .. } => Self::Violated(vec![Finding {
                invariant: Invariant::ContentsAreIntact,
                expected: "what was written, ordered behind what was written before".to_owned(),
                seen: error.to_string(),
            }]),
            error => Self::Device(error),
        }
    }
}

/// What a run does besides the scenario's own calls.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Checks {
    /// Accounts are kept, buffers are verified when they are freed, and every operation is audited. Nothing is timed.
    #[default]
    Audit,
    /// The same without the audit, for programs whose audit takes too long.
    Accounts,
    /// As [`Checks::Accounts`], with an audit that looks at counters only, and at everything when it is asked to ([`Rig::check_health`]).
    Health,
    /// Nothing. Operations and steps are timed.
    Timing,
}

/// How a rig is run.
#[derive(Clone, Debug, Default)]
pub struct RigOptions {
    /// What it does besides the scenario's own calls.
    pub checks: Checks,
    /// For the choice of samples that are kept of many.
    pub seed: u64,
    /// Says when the run should stop; the rig reports to it each call that begins.
    pub control: Arc<Control>,
    /// Records what the main program's allocator does.
    pub recorder: Option<Recorder>,
    /// The other half of the faults of the device, where it has any.
    pub faults: Option<Injector>,
    /// From where on it checks, where the device has faults; what comes before was checked in another run.
    pub checked_from: CheckedFrom,
    /// Is told the steps of a traced run and the main program's memory.
    pub tracer: Option<Tracer>,
}

/// What is known at the end of a step. A checked run knows the accounts, a timed run the duration.
#[derive(Clone, Copy, Debug, Default)]
pub struct StepEnd {
    /// How long the step took.
    pub duration: Option<Nanos>,
    /// The accounts behind it.
    pub accounts: Option<Accounts>,
}

/// A step that was left for others.
#[derive(Clone, Debug)]
#[must_use = "the step goes on by `Rig::resume_step`"]
pub struct PausedStep {
    number: u32,
    program: ProgramId,
    began: Nanos,
    /// Whose its allocations are.
    owner: Option<Arc<names::Owner>>,
    site: Option<Site>,
    /// Where a recording has it.
    place: Option<StackId>,
}

/// As [`Rig::unstruck`], for whoever has more than the rig in hand.
pub(crate) fn unstruck<T>(faults: Option<&Injector>, act: impl FnOnce() -> T) -> T {
    faults.iter().for_each(|faults| faults.pause());
    let answer = act();
    faults.iter().for_each(|faults| faults.resume());
    answer
}

/// See the module.
pub struct Rig {
    device: Box<dyn TestDevice>,
    /// By number. There is at least one.
    programs: Vec<Program>,
    entered: ProgramId,
    checks: Checks,
    control: Arc<Control>,
    recorder: Option<Recorder>,
    faults: Option<Injector>,
    /// Whether somebody wants to know how things stand in front of each call.
    calls_are_noted: bool,
    checking: Checking,
    tracer: Option<Tracer>,
    ranges: Option<Ranges>,
    step: u32,
    /// Tags given so far: each fill writes one of its own.
    tags: u64,
    queued: Queued,
    /// Host memory that is held.
    host: BTreeSet<HostId>,
    findings: Vec<Finding>,
    names: Names,
    /// Kept where a step asks for it.
    sites: Option<Sites>,
    curve: Curve,
    /// The device's memory when the scenario began. Its streams are part of the context overhead.
    start: DeviceMemory,
    last_memory: DeviceMemory,
    /// Calls when the device was asked for its memory last.
    last_calls: DeviceCalls,
    calls_at_start: DeviceCalls,
    times: Times,
    /// Programs of the scenario's steps that run beside this process.
    running: u32,
}

impl Rig {
    /// Takes a device before the first allocation, with one program on it.
    ///
    /// # Errors
    /// [`DeviceError`] where the device does not tell its memory.
    pub fn new(mut device: Box<dyn TestDevice>, allocator: Box<dyn Allocator>, options: &RigOptions) -> Result<Self, DeviceError> {
        let memory = unstruck(options.faults.as_ref(), || device.memory())?;
        let calls = device.calls();
        let allocator = match &options.recorder {
            Some(recorder) => Box::new(recorder.around(allocator)),
            None => allocator,
        };
        let later = Some(options.checked_from.clone()).filter(|from| from.is_later() && options.faults.is_some());
        let first = Program::new(allocator, &*device, memory, (options.checks, later.is_some()));
        Ok(Self {
            device,
            programs: vec![first],
            entered: ProgramId::FIRST,
            checks: options.checks,
            control: Arc::clone(&options.control),
            recorder: options.recorder.clone(),
            faults: options.faults.clone(),
            calls_are_noted: options.faults.as_ref().is_some_and(Injector::is_logging),
            checking: later.map_or(Checking::Operations { until: None }, Checking::From),
            tracer: options.tracer.clone(),
            ranges: Ranges::of_profiler(),
            step: 0,
            tags: 0,
            queued: Queued::default(),
            host: BTreeSet::new(),
            findings: Vec::new(),
            names: Names::default(),
            sites: None,
            curve: Curve::default(),
            start: memory,
            last_memory: memory,
            last_calls: calls,
            calls_at_start: calls,
            times: Times::new(options.seed, calls),
            running: 0,
        })
    }

    /// Does something that is the harness's own: the faults of the device neither count its calls nor strike them.
    pub(crate) fn unstruck<T>(&mut self, act: impl FnOnce(&mut Self) -> T) -> T {
        let faults = self.faults.clone();
        unstruck(faults.as_ref(), || act(self))
    }

    /// The other half of the faults of the device, where it has any.
    #[must_use]
    pub const fn faults(&self) -> Option<&Injector> {
        self.faults.as_ref()
    }

    /// Whether this run is timed, and so makes no calls of its own to the device.
    #[must_use]
    pub fn is_timed(&self) -> bool {
        self.checks == Checks::Timing
    }

    /// The scenario begins: what its streams take of the device belongs to the context overhead, and not to an allocator.
    ///
    /// # Errors
    /// [`Stop::Device`] where the device does not tell its memory.
    pub fn begin_scenario(&mut self) -> Result<(), Stop> {
        self.control.calls(Call::Memory);
        let memory = self.device.memory()?;
        self.start = DeviceMemory { context_overhead: memory.used, ..memory };
        self.last_memory = self.start;
        for audit in self.programs.iter_mut().filter_map(|program| program.audit.as_mut()) {
            audit.begin(self.start);
        }
        Ok(())
    }

    /// Begins a step. A strict device names its number in errors.
    pub fn begin_step(&mut self, number: u32) {
        self.step = number;
        self.device.set_place(Place(number));
        if self.is_timed() {
            self.times.step_began = self.device.now();
        }
    }

    /// Tells a profiler and a traced run what the step is that has just begun. [`Rig::end_step`] ends it there too.
    pub fn describe_step(&mut self, text: impl Fn() -> String) {
        if let Some(ranges) = &self.ranges {
            ranges.begin(&text());
        }
        if let Some(tracer) = &self.tracer {
            tracer.begin_step(text(), self.device.now());
        }
    }

    /// Tells a traced run the main program's memory.
    fn trace_memory(&mut self) {
        if let Some(tracer) = &self.tracer {
            tracer.memory(&self.programs[ProgramId::FIRST.index()].allocator.stats(), self.device.now());
        }
    }

    /// Leaves a step for others that are done between its operations.
    pub fn pause_step(&mut self) -> PausedStep {
        self.times.paused += 1;
        let place = self.recorder.as_ref().map(Recorder::place);
        let site = self.sites.as_ref().and_then(Sites::current);
        PausedStep { number: self.step, program: self.entered, began: self.times.step_began, owner: self.names.owner(), site, place }
    }

    /// Goes back to a step that was left.
    pub fn resume_step(&mut self, PausedStep { number, program, began, owner, site, place }: PausedStep) {
        self.times.paused -= 1;
        self.times.step_began = began;
        self.go_back_in_recording(owner.as_deref(), place);
        self.names.go_back_to(owner);
        self.sites.iter_mut().for_each(|sites| sites.go_back_to(site.clone()));
        self.step = number;
        self.enter(program);
        self.device.set_place(Place(number));
    }

    /// Ends a step: a checked run checks everything and takes the accounts, a timed run takes the time. One that was cut short left things half done, and is not checked.
    ///
    /// # Errors
    /// [`Stop`].
    pub fn end_step(&mut self, cut_short: bool) -> Result<StepEnd, Stop> {
        if let Some(ranges) = &self.ranges {
            ranges.end();
        }
        if let Some(tracer) = &self.tracer {
            tracer.end_step(self.device.now());
        }
        if self.is_timed() {
            let duration = self.device.now().saturating_sub(self.times.step_began);
            // What is done between the operations of another step is part of its time.
            if self.times.paused == 0 {
                self.times.scenario += duration;
            }
            return Ok(StepEnd { duration: Some(duration), accounts: None });
        }
        if !cut_short {
            self.check_step()?;
        }
        let accounts = self.accounts()?;
        self.last_memory = accounts.device;
        self.plot();
        Ok(StepEnd { duration: None, accounts: Some(accounts) })
    }

    /// Whether the run should stop: the user wants it, or a step has run past its time limit.
    #[must_use]
    pub fn is_interrupted(&self) -> bool {
        self.control.should_stop()
    }

    /// Checks everything in each program, whatever it costs. Linear in blocks. A timed run, and one without any audit, checks nothing.
    ///
    /// # Errors
    /// [`Stop::Violated`].
    pub fn check_health(&mut self) -> Result<(), Stop> {
        self.in_each_program(|rig| rig.check(Audit::everything))
    }

    /// Notes a violation that does not keep the step from going on; [`Rig::take_findings`] returns it.
    pub fn note(&mut self, finding: Finding) {
        if !self.findings.contains(&finding) {
            self.findings.push(finding);
        }
    }

    /// The violations noted since the last call, each once.
    pub fn take_findings(&mut self) -> Vec<Finding> {
        std::mem::take(&mut self.findings)
    }

    /// What other processes did on the device, in words, where that makes the accounts of this run worthless.
    #[must_use]
    pub fn contention(&self) -> Option<&str> {
        self.programs.iter().find_map(|program| program.audit.as_ref()?.contention())
    }

    /// The number of the device for other processes; `None` where only this one has it.
    #[must_use]
    pub fn ordinal(&self) -> Option<u32> {
        self.device.ordinal()
    }

    /// A program was started that uses the device by itself. Until all of them have ended, nothing is audited: no allocator does anything meanwhile, and
    /// on a GPU what such programs hold moves the device's figures.
    pub const fn program_started(&mut self) {
        self.running += 1;
    }

    /// It has ended.
    pub const fn program_ended(&mut self) {
        self.running -= 1;
    }

    /// How many such programs run.
    #[must_use]
    pub const fn running_programs(&self) -> u32 {
        self.running
    }

    /// Tells whoever notes every call what all programs hold.
    fn tell_how_it_stands(&self) {
        let Some(faults) = &self.faults else { return };
        let mut hasher = Mixer::default();
        self.programs.iter().for_each(|program| program.allocator.snapshot().hash(&mut hasher));
        (self.entered, &self.host).hash(&mut hasher);
        faults.stands(hasher.finish());
    }

    /// Runs a check of the entered program's audit and adds a point to the picture. A timed run does neither.
    fn check(
        &mut self,
        check: impl FnOnce(&mut Audit, &dyn Allocator, &mut dyn TestDevice) -> Result<(), Vec<Finding>>,
    ) -> Result<(), Stop> {
        if self.is_timed() || self.running > 0 {
            return Ok(());
        }
        if self.calls_are_noted {
            self.tell_how_it_stands();
        }
        let (Program { allocator, audit, .. }, device) = self.program_on_device();
        if let Some(audit) = audit {
            check(audit, &**allocator, device).map_err(|findings| Stop::Violated(self.name_program(findings)))?;
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
