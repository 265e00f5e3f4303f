//! One run of a scenario with an allocator on a device. It returns a record and emits events. Failures of the run are
//! data in the record.
//! || * `runner`: runs steps in order; `cursor`: the position in a list of steps; `execute`: runs one step;
//! * `health`: periodic full checks; `loops`: leak checks of loops;
//! * `judge`: failures and the verdict; `claim`: the figures of a claim; `kept`: limits the record of a long run;
//! * `frames`: names steps in a recording.

mod claim;
mod cursor;
mod execute;
mod frames;
mod health;
mod judge;
mod kept;
mod loops;
mod runner;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use harness_allocator::allocator::{Allocator, AllocatorSpec};
use harness_allocator::device::faulty::Faulty;
use harness_allocator::device::{DeviceCalls, DeviceError, TestDevice};
use harness_allocator::stats::MemoryStats;
use harness_allocator::units::{Bytes, Nanos};

use self::kept::Steps;
use self::runner::Runner;
use crate::control::{Control, DEFAULT_TIME_LIMIT, Phase};
use crate::faults::Faults;
use crate::processes::{ProcessGroup, Processes};
use crate::rig::{CheckedFrom, Checks, ProgramId, Rig, RigOptions, Stop};
use crate::timeline::{TracedDevice, Tracer};
use crate::context::{Figures, RunContext};

pub(crate) use execute::{execute_step, describe_unmet};
use harness_record::timeline::Timeline;
use harness_record::{ClaimFigure, CurvePoint, Event, Recovery, RunRecord, StepRecord, Timings, Verdict, Violation};
use harness_scenario::{ReportKey, Scenario};
use harness_trace::snapshot::{Recorder, Settings, Snapshot, Value};
pub(crate) use judge::of_device;

/// The parameters of a run, without the device.
#[derive(Clone, Debug)]
pub struct RunRequest<'a> {
    pub scenario: &'a Scenario,
    pub allocator: &'a AllocatorSpec,
    /// The seed of every random choice.
    pub seed: u64,
    /// Counted from 0.
    pub repetition: u32,
    /// A command that repeats this run.
    pub reproduce: String,
    /// True if a checked run audits every operation.
    pub audit: bool,
    /// Set from outside to stop the run.
    pub interrupt: Arc<AtomicBool>,
}

/// Receives the events of a run and controls it.
pub struct Observer<'a> {
    /// Stops the run and reports its phase.
    pub control: Arc<Control>,
    /// True if failed expectations become notes instead of failures. Invariants that always hold are still checked.
    pub only_observed: bool,
    /// Receives [`Event::RunStarted`], and [`Event::StepEnded`] for the first recorded steps.
    pub emit: &'a mut dyn FnMut(Event),
    /// Receives a PyTorch memory snapshot after the last step, before the remaining blocks are freed. `None` costs
    /// nothing.
    pub record: Option<&'a mut dyn FnMut(Snapshot)>,
}

fn faults_of(request: &RunRequest<'_>) -> Option<Faults> {
    Faults::planned(request.scenario, request.seed)
}

/// The result of a run with injected faults.
#[derive(Clone, Debug, PartialEq)]
pub struct FaultedRun {
    /// The record of the main process.
    pub record: RunRecord,
    /// OOMs of all processes.
    pub ooms: u64,
}

/// Runs a scenario on a device with these faults instead of the scenario's own, with all checks from there on. How
/// the device was given back counts too, however the run ended. The record has no steps: they are counted. A scenario that has processes shares the device by a [`ProcessGroup`].
///
/// # Errors
/// [`DeviceError`] where the scenario could not begin.
pub fn run_faulted(
    request: &RunRequest<'_>,
    device: Box<dyn TestDevice>,
    allocator: Box<dyn Allocator>,
    faults: Faults,
    checked_from: CheckedFrom,
    group: Option<ProcessGroup>,
) -> Result<FaultedRun, DeviceError> {
    let mut ignore = |_| {};
    let setup = Setup { faults: Some(faults), checked_from, group, tracer: None, counts_steps: true };
    let (record, _, ooms) = observe_with(request, device, allocator, unobserved(request, &mut ignore), setup)?;
    Ok(FaultedRun { ooms: record.stats.num_ooms + ooms, record })
}

/// Runs a scenario on a device that is as large as the scenario wants it, with all checks. The record has no times: those are taken by [`time`].
///
/// # Errors
/// [`DeviceError`] where the device cannot even tell its memory; whatever happens later is in the record.
pub fn run(request: &RunRequest<'_>, device: Box<dyn TestDevice>) -> Result<RunRecord, DeviceError> {
    run_with(request, device, request.allocator.build())
}

/// Runs a scenario with an allocator that somebody else made, in the place of the one that the request names.
pub fn run_with(request: &RunRequest<'_>, device: Box<dyn TestDevice>, allocator: Box<dyn Allocator>) -> Result<RunRecord, DeviceError> {
    observe(request, device, allocator, unobserved(request, &mut |_| {})).map(|(record, _)| record)
}

/// Runs a scenario, watched by somebody. Besides the record there are the figures for its expectations between arms.
pub fn observe(
    request: &RunRequest<'_>,
    device: Box<dyn TestDevice>,
    allocator: Box<dyn Allocator>,
    observer: Observer<'_>,
) -> Result<(RunRecord, Figures), DeviceError> {
    observe_group(request, device, allocator, observer, None)
}

/// What a run has besides its scenario, device and allocator.
#[derive(Default)]
struct Setup {
    /// Makes calls to the device fail.
    faults: Option<Faults>,
    /// From where on it is checked.
    checked_from: CheckedFrom,
    /// The processes beside the main one.
    group: Option<ProcessGroup>,
    /// Is told what happens and when.
    tracer: Option<Tracer>,
    /// Nobody looks at the steps in the record: they are counted.
    counts_steps: bool,
}

/// As [`observe`], of a scenario that has processes beside the main one: the device is shared by this [`ProcessGroup`].
pub fn observe_group(
    request: &RunRequest<'_>,
    device: Box<dyn TestDevice>,
    allocator: Box<dyn Allocator>,
    observer: Observer<'_>,
    group: Option<ProcessGroup>,
) -> Result<(RunRecord, Figures), DeviceError> {
    let setup = Setup { faults: faults_of(request), group, ..Setup::default() };
    observe_with(request, device, allocator, observer, setup).map(|(record, figures, _)| (record, figures))
}

/// The record, the figures, and how many requests ran out of memory in processes beside the main one.
fn observe_with(
    request: &RunRequest<'_>,
    device: Box<dyn TestDevice>,
    allocator: Box<dyn Allocator>,
    observer: Observer<'_>,
    setup: Setup,
) -> Result<(RunRecord, Figures, u64), DeviceError> {
    let mut record = RunRecord {
        scenario: request.scenario.info(),
        device: device.info().clone(),
        allocator: request.allocator.to_string(),
        settings: request.allocator.settings(),
        only_observed: observer.only_observed,
        seed: request.seed,
        repetition: request.repetition,
        reproduce: request.reproduce.clone(),
        audited: Some(request.audit),
        timed: false,
        verdict: Verdict::Interrupted,
        steps: Vec::new(),
        unrecorded_steps: 0,
        figures: Vec::new(),
        curve: Vec::new(),
        timings: Timings::default(),
        calls: DeviceCalls::default(),
        stats: MemoryStats::default(),
        cost_figures: device.cost_figures(),
    };
    (observer.emit)(Event::RunStarted(Box::new(record.clone())));
    let checks = match (request.audit, request.scenario.health_check) {
        (true, _) => Checks::Audit,
        (false, Some(_)) => Checks::Health,
        (false, None) => Checks::Accounts,
    };
    let done = execute_all(request, device, allocator, checks, observer, setup)?;
    record.verdict = done.verdict;
    (record.steps, record.unrecorded_steps) = (done.steps, done.unrecorded_steps);
    record.figures = done.claim_figures;
    (record.curve, record.timings) = (done.curve, done.timings);
    (record.calls, record.stats) = (done.calls, done.stats);
    Ok((record, done.figures, done.ooms_of_processes))
}

fn unobserved<'a>(request: &RunRequest<'_>, emit: &'a mut dyn FnMut(Event)) -> Observer<'a> {
    Observer { control: Arc::new(Control::new(Arc::clone(&request.interrupt))), only_observed: false, emit, record: None }
}

#[derive(Clone, Debug, PartialEq)]
pub struct TimedRun {
    /// The verdict. Expectations about the device's memory are not judged.
    pub verdict: Verdict,
    pub timings: Timings,
    /// The duration of each step and the times it reports, by step number. As many steps as a record keeps.
    pub steps: BTreeMap<u32, StepTimes>,
    /// The allocator's counters after the last step.
    pub stats: MemoryStats,
    /// Reserved but unallocated bytes at the first peak of reserved memory.
    pub unused_at_peak: Bytes,
    /// Times for comparisons between allocators.
    pub figures: Figures,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StepTimes {
    pub duration: Nanos,
    /// Reported figures by metric name; times are in nanoseconds.
    pub reports: BTreeMap<String, u64>,
    /// The recovery record of a step with policies, with times.
    pub recovery: Option<Recovery>,
}

impl TimedRun {
    /// Adds the times to the record of a checked run. Failed expectations of the timed run fail the record.
    pub fn add_to(self, record: &mut RunRecord) {
        record.timings = self.timings;
        record.timed = true;
        for step in &mut record.steps {
            if let Some(times) = self.steps.get(&step.number) {
                step.duration = Some(times.duration);
                let is_time = |name: &str| ReportKey::from_name(name).is_some_and(ReportKey::is_timed);
                step.reports.extend(times.reports.clone().into_iter().filter(|(name, _)| is_time(name)));
                if let (Some(recovery), Some(timed)) = (&mut step.recovery, &times.recovery) {
                    recovery.add_times(timed);
                }
            }
        }
        let in_timed_run = |violation: Violation| Violation { seen: format!("{}, in the timed run", violation.seen), ..violation };
        match self.verdict {
            Verdict::Passed | Verdict::Skipped { .. } => {}
            Verdict::Failed { first, rest } => {
                record.verdict = Verdict::Failed { first: in_timed_run(first), rest: rest.into_iter().map(in_timed_run).collect() };
            }
            verdict @ (Verdict::FailedAsExpected { .. } | Verdict::Contended { .. } | Verdict::Interrupted) => record.verdict = verdict,
        }
    }
}

/// Runs a scenario for its times, without any check: from the first step to the end of the last one, the device sees the scenario's own calls
/// only.
pub fn time(request: &RunRequest<'_>, device: Box<dyn TestDevice>) -> Result<TimedRun, DeviceError> {
    time_with(request, device, request.allocator.build())
}

/// As [`time`], with an allocator that somebody else made.
pub fn time_with(request: &RunRequest<'_>, device: Box<dyn TestDevice>, allocator: Box<dyn Allocator>) -> Result<TimedRun, DeviceError> {
    time_observed(request, device, allocator, unobserved(request, &mut |_| {}))
}

/// As [`time_with`], watched by somebody. No event is told: between the steps of a timed run nothing else is done.
pub fn time_observed(
    request: &RunRequest<'_>,
    device: Box<dyn TestDevice>,
    allocator: Box<dyn Allocator>,
    observer: Observer<'_>,
) -> Result<TimedRun, DeviceError> {
    let setup = Setup { faults: faults_of(request), ..Setup::default() };
    let done = execute_all(request, device, allocator, Checks::Timing, observer, setup)?;
    Ok(TimedRun {
        verdict: done.verdict,
        timings: done.timings,
        steps: done.times.into_iter().collect(),
        stats: done.stats,
        unused_at_peak: done.unused_at_peak,
        figures: done.figures,
    })
}

/// Runs a scenario for its timeline, whatever its verdict is. Recording takes time, so its times are not those of [`time`].
pub fn trace_observed(
    request: &RunRequest<'_>,
    device: Box<dyn TestDevice>,
    allocator: Box<dyn Allocator>,
    observer: Observer<'_>,
) -> Result<Timeline, DeviceError> {
    let info = device.info();
    let tracer = Tracer::new(Timeline {
        scenario: request.scenario.name.clone(),
        allocator: request.allocator.to_string(),
        repetition: request.repetition,
        device: info.name.clone(),
        clock: info.clock,
        streams: Vec::new(),
        entries: Vec::new(),
        left_out: 0,
    });
    let device = Box::new(TracedDevice::new(device, tracer.clone())?);
    let setup = Setup { faults: faults_of(request), tracer: Some(tracer.clone()), ..Setup::default() };
    execute_all(request, device, allocator, Checks::Timing, observer, setup)?;
    Ok(tracer.timeline())
}

/// The result of any run.
struct Executed {
    verdict: Verdict,
    steps: Vec<StepRecord>,
    unrecorded_steps: u64,
    times: Vec<(u32, StepTimes)>,
    curve: Vec<CurvePoint>,
    timings: Timings,
    calls: DeviceCalls,
    stats: MemoryStats,
    ooms_of_processes: u64,
    unused_at_peak: Bytes,
    figures: Figures,
    claim_figures: Vec<ClaimFigure>,
}

/// Runs all steps, releases everything, and judges the run.
fn execute_all(
    request: &RunRequest<'_>,
    device: Box<dyn TestDevice>,
    allocator: Box<dyn Allocator>,
    checks: Checks,
    observer: Observer<'_>,
    Setup { faults, checked_from, group, tracer, counts_steps }: Setup,
) -> Result<Executed, DeviceError> {
    let device = match &faults {
        None => device,
        Some(faults) => {
            let control = Arc::clone(&observer.control);
            faults.main().abandon_waits_when(move || control.should_stop() || control.overrun().is_some());
            Box::new(Faulty::new(device, faults.main().clone()))
        }
    };
    let recorder =
        observer.record.is_some().then(|| Recorder::new(request.allocator.effective().map(|config| settings(config.to_string()))));
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
    let mut runner = Runner::new(request, checks, observer, faults.clone(), if counts_steps { Steps::counted() } else { Steps::new() });
    let mut ctx = match RunContext::new(rig, request.scenario, request.allocator, request.seed) {
        Ok(ctx) => ctx,
        Err(failed) => {
            let (rig, streams, stop) = *failed;
            // The run has already failed; errors of closing would hide the reason.
            let _ = rig.close(streams.into_iter().skip(1).collect(), Vec::new());
            return Err(device_error(stop));
        }
    };
    ctx.processes = group.map(|group| Processes::new(group, faults));
    let completed = runner.run_all(&mut ctx, &request.scenario.steps).is_continue();
    let claim_figures = if completed { claim::figures(&mut ctx, &request.scenario.figures) } else { Vec::new() };
    let figures = ctx.take_figures();
    let (stats, calls, unused_at_peak) = (ctx.rig.stats_of(ProgramId::FIRST), ctx.rig.calls(), ctx.rig.unused_at_peak());
    let (timings, curve) = (ctx.rig.take_timings(), ctx.rig.take_curve());
    let ooms_of_processes = ctx.processes.as_ref().map_or(0, Processes::ooms);
    runner.observer.control.enter(Phase::Closing, DEFAULT_TIME_LIMIT);
    if let Some(record) = &mut runner.observer.record
        && let Some(snapshot) = ctx.rig.recorded(&request.scenario.name, &ctx.arm, request.allocator.is_pytorch())
    {
        record(snapshot);
    }
    runner.finish(ctx, completed);
    let verdict = runner.verdict();
    let ((steps, unrecorded_steps), (times, _)) = (runner.steps.into_parts(), runner.times.into_parts());
    Ok(Executed {
        verdict,
        steps,
        unrecorded_steps,
        times,
        curve,
        timings,
        calls,
        stats,
        ooms_of_processes,
        unused_at_peak,
        figures,
        claim_figures,
    })
}

/// The allocator settings as a PyTorch snapshot stores them.
fn settings(conf: String) -> Settings {
    Settings::new(vec![("PYTORCH_CUDA_ALLOC_CONF".to_owned(), Value::Text(conf))])
}

fn device_error(stop: Stop) -> DeviceError {
    match stop {
        Stop::Device(error) => error,
        Stop::Violated(findings) => {
            let why = findings.into_iter().map(|finding| finding.seen).collect::<Vec<_>>().join("; ");
            DeviceError::Unavailable { what: "the device".to_owned(), why }
        }
        Stop::Process { seen, .. } => DeviceError::Unavailable { what: "the device".to_owned(), why: seen },
        Stop::Interrupted => DeviceError::Unavailable { what: "the device".to_owned(), why: "interrupted".to_owned() },
    }
}
