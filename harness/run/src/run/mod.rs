//! One run: a scenario, a device and an allocator in, a record out, and events on the way. Errors of the run are data in the record.
//!
//! * `runner`: steps in their order; `cursor`: where a list of steps stands; `execute`: what each step does;
//! * `judge`: what fails a run; `kept`: what a record keeps of a long one; `frames`: what a recording calls the steps.

mod cursor;
mod execute;
mod frames;
mod judge;
mod kept;
mod runner;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use harness_allocator::allocator::{Allocator, AllocatorSpec};
use harness_allocator::device::{DeviceCalls, DeviceError, TestDevice};
use harness_allocator::stats::MemoryStats;
use harness_allocator::units::{Bytes, Nanos};

use self::runner::Runner;
use crate::control::{Control, DEFAULT_TIME_LIMIT, Place};
use crate::rig::{Checks, ProgramId, Rig, RigOptions, Stop};
use crate::world::{Figures, World};

pub(crate) use execute::seen;
use harness_record::{CurvePoint, Event, RunRecord, StepRecord, Timings, Verdict, Violation};
use harness_scenario::{ReportKey, Scenario, Unit};
use harness_trace::snapshot::{Recorder, Settings, Snapshot, Value};

/// What is to be run, apart from the device.
#[derive(Clone, Debug)]
#[allow(missing_docs, reason = "the names say what they are")]
pub struct RunRequest<'a> {
    pub scenario: &'a Scenario,
    pub allocator: &'a AllocatorSpec,
    /// Every random choice comes from this.
    pub seed: u64,
    /// Counted from 0.
    pub repetition: u32,
    /// A command that does the same again.
    pub reproduce: String,
    /// Whether a checked run audits every operation.
    pub audit: bool,
    /// Set by somebody else when the run should stop.
    pub interrupt: Arc<AtomicBool>,
}

/// Who watches a run while it goes on.
pub struct Observer<'a> {
    /// Says when the run should stop, and is told where it stands.
    pub control: Arc<Control>,
    /// Whether the run is observed and not judged: what the scenario expects is then noted where it is not met, and fails nothing. The
    /// always-checked invariants hold all the same.
    pub only_observed: bool,
    /// Is given [`Event::RunStarted`], and [`Event::StepEnded`] for the first steps that are recorded.
    pub emit: &'a mut dyn FnMut(Event),
    /// Is given what the allocator did, as a memory snapshot of PyTorch, when the last step has ended, however it did: nothing of what the steps left
    /// live was freed then. `None`: nothing is recorded, at no cost.
    pub record: Option<&'a mut dyn FnMut(Snapshot)>,
}

/// Runs a scenario on a device that is as large as the scenario wants it, with all checks. The record has no times: those are taken by [`time`].
///
/// # Errors
/// [`DeviceError`] where the device cannot even tell its memory; whatever happens later is in the record.
pub fn run(request: &RunRequest<'_>, device: Box<dyn TestDevice>) -> Result<RunRecord, DeviceError> {
    run_with(request, device, request.allocator.build())
}

/// Runs a scenario with an allocator that somebody else made, in the place of the one that the request names.
///
/// # Errors
/// As [`run`].
pub fn run_with(request: &RunRequest<'_>, device: Box<dyn TestDevice>, allocator: Box<dyn Allocator>) -> Result<RunRecord, DeviceError> {
    observe(request, device, allocator, unobserved(request, &mut |_| {})).map(|(record, _)| record)
}

/// Runs a scenario, watched by somebody. Besides the record there are the figures for its expectations between arms.
///
/// # Errors
/// As [`run`].
pub fn observe(
    request: &RunRequest<'_>,
    device: Box<dyn TestDevice>,
    allocator: Box<dyn Allocator>,
    observer: Observer<'_>,
) -> Result<(RunRecord, Figures), DeviceError> {
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
        curve: Vec::new(),
        timings: Timings::default(),
        calls: DeviceCalls::default(),
        stats: MemoryStats::default(),
        cost_figures: device.cost_figures(),
    };
    (observer.emit)(Event::RunStarted(Box::new(record.clone())));
    let checks = if request.audit { Checks::Audit } else { Checks::Accounts };
    let done = execute_all(request, device, allocator, checks, observer)?;
    record.verdict = done.verdict;
    (record.steps, record.unrecorded_steps) = (done.steps, done.unrecorded_steps);
    (record.curve, record.timings) = (done.curve, done.timings);
    (record.calls, record.stats) = (done.calls, done.stats);
    Ok((record, done.figures))
}

fn unobserved<'a>(request: &RunRequest<'_>, emit: &'a mut dyn FnMut(Event)) -> Observer<'a> {
    Observer { control: Arc::new(Control::new(Arc::clone(&request.interrupt))), only_observed: false, emit, record: None }
}

/// What a timed run leaves behind.
#[derive(Clone, Debug, PartialEq)]
pub struct TimedRun {
    /// How it ended. The device's memory was not looked at, so expectations on that are not judged.
    pub verdict: Verdict,
    /// How long operations took.
    pub timings: Timings,
    /// How long each step took, by its number, with the times that it reports. Of a long run as many as a record keeps.
    pub steps: BTreeMap<u32, StepTimes>,
    /// The allocator's counters when the last step was done.
    pub stats: MemoryStats,
    /// What was reserved and not allocated when reserved was at its first peak.
    pub unused_at_peak: Bytes,
    /// Times for expectations between arms.
    pub figures: Figures,
}

/// The times of one step.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StepTimes {
    /// How long it took.
    pub duration: Nanos,
    /// What it reports, by metric name: times in nanoseconds.
    pub reports: BTreeMap<String, u64>,
}

impl TimedRun {
    /// Puts the times into the record of a checked run of the same scenario. What was expected and not seen in the timed run fails the record.
    pub fn add_to(self, record: &mut RunRecord) {
        record.timings = self.timings;
        record.timed = true;
        for step in &mut record.steps {
            if let Some(times) = self.steps.get(&step.number) {
                step.duration = Some(times.duration);
                let is_time = |name: &str| ReportKey::from_name(name).is_some_and(|key| key.unit() == Unit::Time);
                step.reports.extend(times.reports.clone().into_iter().filter(|(name, _)| is_time(name)));
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
///
/// # Errors
/// As [`run`].
pub fn time(request: &RunRequest<'_>, device: Box<dyn TestDevice>) -> Result<TimedRun, DeviceError> {
    time_with(request, device, request.allocator.build())
}

/// As [`time`], with an allocator that somebody else made.
///
/// # Errors
/// As [`run`].
pub fn time_with(request: &RunRequest<'_>, device: Box<dyn TestDevice>, allocator: Box<dyn Allocator>) -> Result<TimedRun, DeviceError> {
    time_observed(request, device, allocator, unobserved(request, &mut |_| {}))
}

/// As [`time_with`], watched by somebody. No event is told: between the steps of a timed run nothing else is done.
///
/// # Errors
/// As [`run`].
pub fn time_observed(
    request: &RunRequest<'_>,
    device: Box<dyn TestDevice>,
    allocator: Box<dyn Allocator>,
    observer: Observer<'_>,
) -> Result<TimedRun, DeviceError> {
    let done = execute_all(request, device, allocator, Checks::Timing, observer)?;
    Ok(TimedRun {
        verdict: done.verdict,
        timings: done.timings,
        steps: done.times.into_iter().collect(),
        stats: done.stats,
        unused_at_peak: done.unused_at_peak,
        figures: done.figures,
    })
}

/// What any run leaves behind.
struct Executed {
    verdict: Verdict,
    steps: Vec<StepRecord>,
    unrecorded_steps: u64,
    times: Vec<(u32, StepTimes)>,
    curve: Vec<CurvePoint>,
    timings: Timings,
    calls: DeviceCalls,
    stats: MemoryStats,
    unused_at_peak: Bytes,
    figures: Figures,
}

/// Runs all steps, gives everything back, and judges.
fn execute_all(
    request: &RunRequest<'_>,
    device: Box<dyn TestDevice>,
    allocator: Box<dyn Allocator>,
    checks: Checks,
    observer: Observer<'_>,
) -> Result<Executed, DeviceError> {
    let recorder =
        observer.record.is_some().then(|| Recorder::new(request.allocator.effective().map(|config| settings(config.to_string()))));
    let options = RigOptions { checks, seed: request.seed, control: Arc::clone(&observer.control), recorder };
    let rig = Rig::new(device, allocator, &options)?;
    let mut runner = Runner::new(request, checks, observer);
    let mut world = match World::new(rig, request.scenario, request.allocator, request.seed) {
        Ok(world) => world,
        Err(failed) => {
            let (rig, streams, stop) = *failed;
            // The run has failed already; what closing adds would only hide why.
            let _ = rig.close(streams.into_iter().skip(1).collect(), Vec::new());
            return Err(device_error(stop));
        }
    };
    let completed = runner.run_all(&mut world, &request.scenario.steps).is_continue();
    let figures = world.take_figures();
    let (stats, calls, unused_at_peak) = (world.rig.stats_of(ProgramId::FIRST), world.rig.calls(), world.rig.unused_at_peak());
    let (timings, curve) = (world.rig.take_timings(), world.rig.take_curve());
    runner.observer.control.enter(Place::Closing, DEFAULT_TIME_LIMIT);
    if let Some(record) = &mut runner.observer.record
        && let Some(snapshot) = world.rig.recorded(&request.scenario.name, &world.arm, request.allocator.is_pytorch())
    {
        record(snapshot);
    }
    runner.finish(world, completed);
    let verdict = runner.verdict();
    let ((steps, unrecorded_steps), (times, _)) = (runner.steps.into_parts(), runner.times.into_parts());
    Ok(Executed { verdict, steps, unrecorded_steps, times, curve, timings, calls, stats, unused_at_peak, figures })
}

/// Settings of PyTorch's allocator as its snapshots have them.
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
        Stop::Interrupted => DeviceError::Unavailable { what: "the device".to_owned(), why: "interrupted".to_owned() },
    }
}
