//! One run of a scenario with an allocator on a device. It returns a record and emits events.
//! Failures of the run are data in the record.
//!
//! * `runner`: runs steps in order; `cursor`: the position in a list of steps; `execute`: runs one
//!   step;
//! * `judge`: periodic full checks, failures and the verdict; `claim`: the figures of a claim;
//!   `kept`: limits the record of a long run;
//! * `frames`: names steps in a recording.

mod claim;
mod cursor;
mod execute;
mod frames;
mod judge;
mod kept;
mod runner;

use std::collections::BTreeMap;
use std::sync::{Arc, atomic::AtomicBool};

use harness_allocator::allocator::{Allocator, AllocatorSpec};
use harness_allocator::device::{DeviceCalls, DeviceError, DeviceInfo, TestDevice, faulty::Faulty};
use harness_allocator::stats::MemoryStats;
use harness_allocator::units::{Bytes, Nanos};

use self::{kept::Steps, runner::Runner};
use crate::context::{Figures, RunContext};
use crate::control::{Control, DEFAULT_TIME_LIMIT, Phase};
use crate::faults::Faults;
use crate::processes::{ProcessGroup, Processes};
use crate::rig::{CheckedFrom, Checks, ProgramId, Rig, RigOptions, Stop};
use crate::timeline::{TracedDevice, Tracer};

pub(crate) use execute::{describe_unmet, execute};
use harness_record::{Event, Recovery, RunRecord, Timings, Verdict, Violation, timeline::Timeline};
use harness_scenario::{ReportKey, Scenario};
use harness_trace::snapshot::{RecordedSettings, Recorder, Snapshot};
pub(crate) use judge::of_device;

#[derive(Clone, Debug)]
pub struct RunRequest<'a> {
    pub scenario: &'a Scenario,
    pub allocator: &'a AllocatorSpec,
    pub seed: u64,
    /// Counted from 0.
    pub repetition: u32,
    pub reproduce: String,
    /// True if a checked run audits every operation.
    pub audit: bool,
    pub interrupt: Arc<AtomicBool>,
}

/// Receives the events of a run and controls it.
pub struct RunObserver<'a> {
    pub control: Arc<Control>,
    /// True if failed expectations become notes instead of failures. Invariants that always hold
    /// are still checked.
    pub only_observed: bool,
    /// Receives [`Event::RunStarted`], and [`Event::StepEnded`] for the first recorded steps.
    pub emit: Option<&'a mut dyn FnMut(Event)>,
    /// Receives a PyTorch memory snapshot after the last step, before the remaining blocks are
    /// freed.
    pub record: Option<&'a mut dyn FnMut(Snapshot)>,
}

#[derive(Clone, Debug, PartialEq)]
pub struct RunResult {
    /// The record of the main process. The record of a timed run lists no steps, and its verdict
    /// judges no expectation about the device's memory.
    pub record: RunRecord,
    /// The duration of each step and the times it reports, by step number, in a timed run. As many
    /// steps as a record keeps.
    pub times: BTreeMap<u32, StepTimes>,
    /// OOMs of all processes.
    pub ooms: u64,
    /// Reserved but unallocated bytes at the first peak of reserved memory, in a timed run.
    pub unused_at_peak: Bytes,
    pub figures: Figures,
}

/// A run to execute: [`Run::checked`], [`Run::timed`], [`Run::traced`] or [`Run::faulted`].
///
/// These fail with a [`DeviceError`] only if the run cannot begin. Later failures are data in the
/// result.
pub struct Run<'a, 'o> {
    request: &'a RunRequest<'a>,
    device: Box<dyn TestDevice>,
    allocator: Option<Box<dyn Allocator>>,
    observer: RunObserver<'o>,
    group: Option<ProcessGroup>,
}

impl<'a, 'o> Run<'a, 'o> {
    /// A run on a device with the memory that the scenario needs.
    pub fn new(request: &'a RunRequest<'a>, device: Box<dyn TestDevice>) -> Self {
        let control = Arc::new(Control::new(Arc::clone(&request.interrupt)));
        let observer = RunObserver {
            control,
            only_observed: false,
            emit: None,
            record: None,
        };
        Self {
            request,
            device,
            allocator: None,
            observer,
            group: None,
        }
    }

    /// Replaces the allocator that the request names.
    pub fn with_allocator(self, allocator: Box<dyn Allocator>) -> Self {
        Self {
            allocator: Some(allocator),
            ..self
        }
    }

    /// Timed and traced runs emit no events.
    pub fn observed(self, observer: RunObserver<'o>) -> Self {
        Self { observer, ..self }
    }

    pub fn with_processes(self, group: Option<ProcessGroup>) -> Self {
        Self { group, ..self }
    }

    /// Runs with all checks. The record has no times.
    pub fn checked(self) -> Result<RunRecord, DeviceError> {
        self.checked_with_figures().map(|done| done.record)
    }

    /// Like [`Run::checked`], with the figures for comparisons between allocators.
    pub fn checked_with_figures(self) -> Result<RunResult, DeviceError> {
        let checks = self.request.checks();
        self.execute(checks, Setup::default())
    }

    /// Runs with these faults instead of the scenario's own, and with all checks from
    /// `checked_from` on. The run must release everything, however it ends. The record counts its
    /// steps without keeping them.
    pub fn faulted(
        self,
        faults: Faults,
        checked_from: CheckedFrom,
    ) -> Result<RunResult, DeviceError> {
        let checks = self.request.checks();
        self.execute(
            checks,
            Setup {
                faults: Some(faults),
                checked_from,
                tracer: None,
                counts_steps: true,
            },
        )
    }

    /// Measures times without any checks. From the first step to the last, the device receives only
    /// the scenario's own calls.
    pub fn timed(self) -> Result<RunResult, DeviceError> {
        self.execute(Checks::Timing, Setup::default())
    }

    /// Records a timeline, whatever the verdict. Recording takes time, so the times differ from
    /// [`Run::timed`].
    pub fn traced(mut self) -> Result<Timeline, DeviceError> {
        let info = self.device.info();
        let tracer = Tracer::new(Timeline {
            scenario: self.request.scenario.name.clone(),
            allocator: self.request.allocator.to_string(),
            repetition: self.request.repetition,
            device: info.name.clone(),
            clock: info.clock,
            streams: Vec::new(),
            entries: Vec::new(),
            left_out: 0,
        });
        self.device = Box::new(TracedDevice::new(self.device, tracer.clone())?);
        self.execute(
            Checks::Timing,
            Setup {
                tracer: Some(tracer.clone()),
                ..Setup::default()
            },
        )?;
        Ok(tracer.timeline())
    }

    /// Runs all steps, releases everything, and judges the run.
    fn execute(self, checks: Checks, setup: Setup) -> Result<RunResult, DeviceError> {
        let Self {
            request,
            device,
            allocator,
            mut observer,
            group,
        } = self;
        let Setup {
            faults,
            checked_from,
            tracer,
            counts_steps,
        } = setup;
        let faults = faults.or_else(|| Faults::planned(request.scenario, request.seed));
        let allocator = allocator.unwrap_or_else(|| request.allocator.build());
        let mut record = request.record(
            device.info().clone(),
            observer.only_observed,
            Verdict::Interrupted,
        );
        (record.audited, record.cost_figures) = (Some(request.audit), device.cost_figures());
        if checks != Checks::Timing
            && let Some(emit) = &mut observer.emit
        {
            emit(Event::RunStarted(Box::new(record.clone())));
        }
        let device = match &faults {
            None => device,
            Some(faults) => with_faults(device, faults, &observer.control),
        };
        let recorder = observer.record.is_some().then(|| {
            Recorder::new(
                request
                    .allocator
                    .effective()
                    .as_ref()
                    .map(RecordedSettings::of),
            )
        });
        let control = Arc::clone(&observer.control);
        let options = RigOptions {
            checks,
            seed: request.seed,
            control,
            recorder,
            faults: faults.as_ref().map(Faults::main).cloned(),
            checked_from,
            tracer,
        };
        let rig = Rig::new(device, allocator, &options)?;
        let steps = if counts_steps {
            Steps::counted()
        } else {
            Steps::new()
        };
        let runner = Runner::new(request, checks, observer, steps, faults.clone());
        let mut ctx = RunContext::new(rig, request.scenario, request.allocator, request.seed)
            .map_err(device_error)?;
        ctx.processes = Processes::new(group, faults);
        Ok(run_steps(runner, ctx, record))
    }
}

/// Injects failures into calls of the device.
fn with_faults(
    device: Box<dyn TestDevice>,
    faults: &Faults,
    control: &Arc<Control>,
) -> Box<dyn TestDevice> {
    let control = Arc::clone(control);
    faults
        .main()
        .abandon_waits_when(move || control.should_stop() || control.overrun().is_some());
    Box::new(Faulty::new(device, faults.main().clone()))
}

/// Runs all steps, releases everything, and completes the record.
fn run_steps(mut runner: Runner<'_, '_>, mut ctx: RunContext, mut record: RunRecord) -> RunResult {
    let request = runner.request;
    let completed = runner
        .run_all(&mut ctx, &request.scenario.steps)
        .is_continue();
    if completed {
        record.figures = claim::figures(&mut ctx, &request.scenario.figures);
    }
    let (figures, unused_at_peak) = (
        std::mem::take(&mut ctx.values.figures),
        ctx.rig.unused_at_peak(),
    );
    (record.stats, record.calls) = (ctx.rig.stats_of(ProgramId::FIRST), ctx.rig.calls());
    (record.timings, record.curve) = (ctx.rig.take_timings(), ctx.rig.take_curve());
    record.processes = ctx.figures_of_processes(request.scenario);
    let ooms = record.stats.num_ooms + ctx.processes.ooms;
    runner
        .observer
        .control
        .enter(Phase::Closing, DEFAULT_TIME_LIMIT);
    if let Some(receive) = &mut runner.observer.record
        && let Some(snapshot) = ctx.rig.recorded(
            &request.scenario.name,
            &ctx.setup.arm,
            request.allocator.is_pytorch(),
        )
    {
        receive(snapshot);
    }
    runner.finish(ctx, completed);
    record.verdict = runner.verdict();
    let times = runner.times.into_parts().0.into_iter().collect();
    (record.steps, record.unrecorded_steps) = runner.steps.into_parts();
    RunResult {
        record,
        times,
        ooms,
        unused_at_peak,
        figures,
    }
}

impl RunRequest<'_> {
    pub(crate) fn record(
        &self,
        device: DeviceInfo,
        only_observed: bool,
        verdict: Verdict,
    ) -> RunRecord {
        RunRecord {
            scenario: self.scenario.info(),
            device,
            allocator: self.allocator.to_string(),
            settings: self.allocator.settings(),
            only_observed,
            seed: self.seed,
            repetition: self.repetition,
            reproduce: self.reproduce.clone(),
            audited: None,
            timed: false,
            verdict,
            steps: Vec::new(),
            unrecorded_steps: 0,
            figures: Vec::new(),
            curve: Vec::new(),
            timings: Timings::default(),
            calls: DeviceCalls::default(),
            stats: MemoryStats::default(),
            processes: None,
            cost_figures: Vec::new(),
        }
    }

    /// The checks of a run that is not timed.
    const fn checks(&self) -> Checks {
        match (self.audit, self.scenario.health_check) {
            (true, _) => Checks::Audit,
            (false, Some(_)) => Checks::Health,
            (false, None) => Checks::Accounts,
        }
    }
}

/// The parts of a run that depend on its kind.
#[derive(Default)]
struct Setup {
    /// Replaces the scenario's faults.
    faults: Option<Faults>,
    checked_from: CheckedFrom,
    tracer: Option<Tracer>,
    /// Steps are counted, not recorded.
    counts_steps: bool,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StepTimes {
    pub duration: Nanos,
    /// Reported figures by metric name; times are in nanoseconds.
    pub reports: BTreeMap<String, u64>,
    /// The recovery record of a step with policies, with times.
    pub recovery: Option<Recovery>,
}

impl RunResult {
    /// Adds the times of a timed run to the record of a checked run. Failed expectations of the
    /// timed run fail the record.
    pub fn add_times_to(self, record: &mut RunRecord) {
        record.timings = self.record.timings;
        record.timed = true;
        for step in &mut record.steps {
            if let Some(times) = self.times.get(&step.number) {
                step.duration = Some(times.duration);
                let is_time =
                    |name: &str| ReportKey::from_name(name).is_some_and(ReportKey::is_timed);
                step.reports.extend(
                    times
                        .reports
                        .clone()
                        .into_iter()
                        .filter(|(name, _)| is_time(name)),
                );
                if let (Some(recovery), Some(timed)) = (&mut step.recovery, &times.recovery) {
                    recovery.add_times(timed);
                }
            }
        }
        let in_timed_run = |violation: Violation| Violation {
            seen: format!("{}, in the timed run", violation.seen),
            ..violation
        };
        match self.record.verdict {
            Verdict::Passed | Verdict::Skipped { .. } => {}
            Verdict::Failed { first, rest } => {
                record.verdict = Verdict::Failed {
                    first: in_timed_run(first),
                    rest: rest.into_iter().map(in_timed_run).collect(),
                };
            }
            verdict @ (Verdict::FailedAsExpected { .. }
            | Verdict::Contended { .. }
            | Verdict::Interrupted) => record.verdict = verdict,
        }
    }
}

fn device_error(stop: Stop) -> DeviceError {
    match stop {
        Stop::Device(error) => error,
        Stop::Violated(findings) => {
            let why = findings
                .into_iter()
                .map(|finding| finding.seen)
                .collect::<Vec<_>>()
                .join("; ");
            DeviceError::Unavailable {
                what: "the device".to_owned(),
                why,
            }
        }
        Stop::Process { seen, .. } => DeviceError::Unavailable {
            what: "the device".to_owned(),
            why: seen,
        },
        Stop::Interrupted => DeviceError::Unavailable {
            what: "the device".to_owned(),
            why: "interrupted".to_owned(),
        },
    }
}
