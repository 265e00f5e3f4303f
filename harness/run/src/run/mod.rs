//! The loop: a scenario, a device and an allocator in, a record out, and events on the way. Errors of the run are data in the record.

mod execute;

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use harness_allocator::allocator::{Allocator, AllocatorSpec};
use harness_allocator::device::{DeviceCalls, DeviceError, TestDevice};
use harness_allocator::stats::MemoryStats;
use harness_allocator::units::{Bytes, Nanos};

use crate::control::{Control, DEFAULT_TIME_LIMIT, Place};
use crate::rig::{Checks, Finding, Rig, RigOptions, StepEnd, Stop};
use crate::world::{StepResult, Unmet, World};
use harness_record::{
    Accounts, CurvePoint, Event, Invariant, NOT_JUDGED, Outcome, Rule, RunRecord, StepRecord, Timings, Verdict, Violation,
};
use harness_scenario::steps::{Action, Step};
use harness_scenario::{ReportKey, Scenario, Unit};

/// Steps of a run that are recorded, from its beginning and from its end. Those between are counted.
const FIRST_STEPS: usize = 5_000;
/// See [`FIRST_STEPS`].
const LAST_STEPS: usize = 5_000;

/// What is to be run, apart from the device.
#[derive(Clone, Debug)]
pub struct RunRequest<'a> {
    /// The scenario.
    pub scenario: &'a Scenario,
    /// The allocator.
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
    observe(request, device, allocator, unobserved(request, &mut |_| {}))
}

/// Runs a scenario, watched by somebody.
///
/// # Errors
/// As [`run`].
pub fn observe(
    request: &RunRequest<'_>,
    device: Box<dyn TestDevice>,
    allocator: Box<dyn Allocator>,
    observer: Observer<'_>,
) -> Result<RunRecord, DeviceError> {
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
    Ok(record)
}

fn unobserved<'a>(request: &RunRequest<'_>, emit: &'a mut dyn FnMut(Event)) -> Observer<'a> {
    Observer { control: Arc::new(Control::new(Arc::clone(&request.interrupt))), only_observed: false, emit }
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
            verdict @ (Verdict::Contended { .. } | Verdict::Interrupted) => record.verdict = verdict,
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
}

/// Runs all steps, gives everything back, and judges.
fn execute_all(
    request: &RunRequest<'_>,
    device: Box<dyn TestDevice>,
    allocator: Box<dyn Allocator>,
    checks: Checks,
    observer: Observer<'_>,
) -> Result<Executed, DeviceError> {
    let options = RigOptions { checks, seed: request.seed, control: Arc::clone(&observer.control) };
    let rig = Rig::new(device, allocator, &options)?;
    let mut runner = Runner::new(request, checks, observer);
    let mut world = match World::new(rig, request.scenario, request.allocator.to_string(), request.seed) {
        Ok(world) => world,
        Err(failed) => {
            let (rig, streams, stop) = *failed;
            // The run has failed already; what closing adds would only hide why.
            let _ = rig.close(streams.into_iter().skip(1).collect(), Vec::new());
            return Err(device_error(stop));
        }
    };
    let completed = matches!(runner.run_steps(&mut world, &request.scenario.steps), Next::Continue);
    let (stats, calls, unused_at_peak) = (world.rig.stats(), world.rig.calls(), world.rig.unused_at_peak());
    let (timings, curve) = (world.rig.take_timings(), world.rig.take_curve());
    runner.observer.control.enter(Place::Closing, DEFAULT_TIME_LIMIT);
    runner.finish(world, completed);
    let verdict = runner.verdict();
    let ((steps, unrecorded_steps), (times, _)) = (runner.steps.into_parts(), runner.times.into_parts());
    Ok(Executed { verdict, steps, unrecorded_steps, times, curve, timings, calls, stats, unused_at_peak })
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

/// What should have been, where a device says that something is wrong: whether to look at the allocator or at the machine.
const fn expected_of_device(error: &DeviceError) -> &'static str {
    match error {
        DeviceError::DoubleFree { .. } | DeviceError::InvalidFree { .. } | DeviceError::InvalidAccess { .. } => {
            "the allocator to hand out and free only memory that is allocated on the device"
        }
        DeviceError::UnknownHandle { .. } | DeviceError::NotReady(_) => "streams and events to be used only while they exist",
        DeviceError::Race { .. } | DeviceError::InUse { .. } | DeviceError::Corrupted { .. } => "memory to hold what was written",
        DeviceError::OutOfMemory { .. } => "memory for the harness's own needs",
        DeviceError::Driver { .. } | DeviceError::Unavailable { .. } => "the driver to do as it is told",
    }
}

/// What is kept of the first and the last steps of a run.
struct Steps<T> {
    first: Vec<T>,
    last: VecDeque<T>,
    unrecorded: u64,
}

impl<T> Steps<T> {
    const fn new() -> Self {
        Self { first: Vec::new(), last: VecDeque::new(), unrecorded: 0 }
    }

    fn push(&mut self, step: T) {
        if self.first.len() < FIRST_STEPS {
            self.first.push(step);
            return;
        }
        if self.last.len() == LAST_STEPS {
            self.last.pop_front();
            self.unrecorded += 1;
        }
        self.last.push_back(step);
    }

    /// Those that are kept, and how many are not.
    fn into_parts(self) -> (Vec<T>, u64) {
        (self.first.into_iter().chain(self.last).collect(), self.unrecorded)
    }
}

struct Runner<'a, 'o> {
    request: &'a RunRequest<'a>,
    checks: Checks,
    observer: Observer<'o>,
    /// Of a checked run.
    steps: Steps<StepRecord>,
    /// Of a timed run.
    times: Steps<(u32, StepTimes)>,
    number: u32,
    violations: Vec<Violation>,
    /// What other processes did on the device.
    contention: Option<String>,
    interrupted: bool,
}

/// Whether the run goes on.
enum Next {
    Continue,
    Stop,
}

fn place_of(number: u32, step: &Step) -> Place {
    Place::Step { number, line: step.position.line, text: format!("{} {}", step.action.kind(), step.action).trim_end().to_owned() }
}

impl<'a, 'o> Runner<'a, 'o> {
    fn new(request: &'a RunRequest<'a>, checks: Checks, observer: Observer<'o>) -> Self {
        let (steps, times) = (Steps::new(), Steps::new());
        Self { request, checks, observer, steps, times, number: 0, violations: Vec::new(), contention: None, interrupted: false }
    }

    fn run_steps(&mut self, world: &mut World, steps: &[Step]) -> Next {
        for step in steps {
            // Not every step allocates, and only an allocation looks by itself.
            if self.observer.control.is_interrupted() {
                self.interrupted = true;
                return Next::Stop;
            }
            let next = match &step.action {
                Action::Repeat(repeat) => self.repeat(world, repeat.times, &repeat.steps),
                _ => self.run_step(world, step),
            };
            if matches!(next, Next::Stop) {
                return Next::Stop;
            }
        }
        Next::Continue
    }

    fn repeat(&mut self, world: &mut World, times: u64, steps: &[Step]) -> Next {
        for _ in 0..times {
            if matches!(self.run_steps(world, steps), Next::Stop) {
                return Next::Stop;
            }
        }
        Next::Continue
    }

    fn run_step(&mut self, world: &mut World, step: &Step) -> Next {
        self.number += 1;
        let limit = step.time_limit.map_or(DEFAULT_TIME_LIMIT, |limit| Duration::from_nanos(limit.0));
        self.observer.control.enter(place_of(self.number, step), limit);
        world.rig.begin_step(self.number);
        let executed = execute::execute(world, step);
        let seen = self.violations.len();
        let mut result = match executed {
            Ok(mut result) => {
                for unmet in std::mem::take(&mut result.unmet) {
                    self.unmet(unmet, &mut result.notes);
                }
                Some(result)
            }
            Err(stop) => {
                self.stop(stop, Some(step));
                None
            }
        };
        let ended = match (world.rig.end_step(), &result) {
            (Ok(ended), _) => Some(ended),
            // A step that failed already has said why; what the audit adds would only hide it.
            (Err(_), None) => None,
            (Err(stop), Some(_)) => {
                self.stop(stop, Some(step));
                None
            }
        };
        for finding in world.rig.take_findings() {
            self.find(finding, Some(step));
        }
        // A step that was cut short leaves things half done, so that whatever is seen behind it says nothing.
        let cut_short = result.is_none() || ended.is_none();
        if let (Some(result), false) = (&mut result, cut_short) {
            self.check_invariants(world, step, &mut result.notes);
        }
        self.check_time(Some(step));
        let failed = self.violations.len() > seen;
        // A step that was interrupted is neither done nor failed.
        if !self.interrupted {
            self.record(world, step, result, ended, failed);
        }
        if self.interrupted || cut_short || (failed && !self.only_expected_violations()) { Next::Stop } else { Next::Continue }
    }

    /// Records a step that is over. Of one that was cut short there may be no accounts.
    fn record(&mut self, world: &mut World, step: &Step, result: Option<StepResult>, ended: Option<StepEnd>, failed: bool) {
        let StepEnd { duration, accounts } = ended.unwrap_or_default();
        let result = result.unwrap_or_else(|| StepResult { outcome: Outcome::Failed, ..StepResult::default() });
        let reports = result.reports_with(duration);
        // Without a name nobody asked for the figures.
        let named = step.id.iter().flat_map(|_| &reports).map(|(key, value)| (key.name().to_owned(), *value)).collect();
        if let Some(id) = &step.id {
            world.report(id.clone(), reports);
        }
        if let Some(duration) = duration {
            self.times.push((self.number, StepTimes { duration, reports: named }));
        } else if self.checks != Checks::Timing
            && let Some(accounts) = accounts.or_else(|| world.rig.accounts().ok())
        {
            self.record_checked(step, result, named, accounts, failed);
        }
    }

    fn record_checked(&mut self, step: &Step, result: StepResult, reports: BTreeMap<String, u64>, accounts: Accounts, failed: bool) {
        let outcome = if failed && result.outcome == Outcome::Done { Outcome::Failed } else { result.outcome };
        let step = StepRecord {
            number: self.number,
            line: step.position.line,
            kind: step.action.kind().name().to_owned(),
            text: step.action.to_string(),
            iteration: None,
            size: result.size,
            outcome,
            accounts,
            duration: None,
            reports,
            notes: result.notes,
            tables: result.tables,
            shortage: result.shortage,
        };
        if self.steps.first.len() < FIRST_STEPS {
            (self.observer.emit)(Event::StepEnded(Box::new(step.clone())));
        }
        self.steps.push(step);
    }

    /// What took longer than it may has failed, unless it failed for another reason. `None` is the end behind the last step.
    fn check_time(&mut self, step: Option<&Step>) {
        if self.violations.is_empty()
            && !self.interrupted
            && let Some(overrun) = self.observer.control.overrun()
        {
            self.violations.push(Violation {
                step: self.number,
                at: step.map(|step| self.request.scenario.place(step.position)),
                rule: Rule::TimeLimit,
                expected: overrun.expected(),
                seen: overrun.seen(),
            });
        }
    }

    /// Frees what is live, checks the end where all steps were done, and closes the device.
    fn finish(&mut self, mut world: World, completed: bool) {
        let mut clean = completed;
        if completed {
            world.rig.begin_step(self.number + 1);
            let ended = world.free_everything().and_then(|()| world.rig.finish());
            if let Err(stop) = ended {
                clean = false;
                self.stop(stop, None);
            }
        }
        self.contention = world.rig.contention().map(str::to_owned);
        if let Err(stop) = world.close()
            && clean
        {
            self.stop(stop, None);
        }
        self.check_time(None);
    }

    fn check_invariants(&mut self, world: &mut World, step: &Step, notes: &mut Vec<String>) {
        for invariant in &self.request.scenario.invariants {
            match execute::check(world, invariant) {
                Ok(unmet) => unmet.into_iter().for_each(|unmet| self.unmet(unmet, notes)),
                Err(stop) => return self.stop(stop, Some(step)),
            }
        }
    }

    fn stop(&mut self, stop: Stop, step: Option<&Step>) {
        match stop {
            // Where the user did not want it, the time of the step is over: `check_time` says so.
            Stop::Interrupted => self.interrupted = self.observer.control.is_interrupted(),
            Stop::Violated(findings) => findings.into_iter().for_each(|finding| self.find(finding, step)),
            Stop::Device(error) => self.violations.push(Violation {
                step: self.number,
                at: step.map(|step| self.request.scenario.place(step.position)),
                rule: Rule::DeviceFailure,
                expected: expected_of_device(&error).to_owned(),
                seen: error.to_string(),
            }),
        }
    }

    fn find(&mut self, finding: Finding, step: Option<&Step>) {
        let Finding { invariant, expected, seen } = finding;
        let at = step.map(|step| self.request.scenario.place(step.position));
        self.violations.push(Violation { step: self.number, at, rule: Rule::Invariant(invariant), expected, seen });
    }

    /// Something expected was not seen: a violation, or in a run that is only observed a note on the step.
    fn unmet(&mut self, unmet: Unmet, notes: &mut Vec<String>) {
        let Unmet { expected, seen, at } = unmet;
        if self.observer.only_observed {
            return notes.push(format!("{NOT_JUDGED}line {} expects {expected}; seen: {seen}", at.line));
        }
        let at = Some(self.request.scenario.place(at));
        self.violations.push(Violation { step: self.number, at, rule: Rule::Expectation, expected, seen });
    }

    /// Whether everything seen so far is what `violates:` asks for.
    fn only_expected_violations(&self) -> bool {
        let expected = self.request.scenario.violates.as_ref().map(|violates| Rule::Invariant(violates.value));
        self.violations.iter().all(|violation| Some(&violation.rule) == expected.as_ref())
    }

    /// Whether everything seen so far could be the doing of other processes on the device.
    fn only_disturbable_violations(&self) -> bool {
        self.violations.iter().all(|violation| match &violation.rule {
            Rule::Expectation => true,
            Rule::Invariant(invariant) => matches!(
                invariant,
                Invariant::AccountsAreOrdered | Invariant::DeviceUsedFollowsReserved | Invariant::WholeLimitFitsAtTheEnd
            ),
            Rule::ExpectedViolation | Rule::DeviceFailure | Rule::TimeLimit => false,
        })
    }

    fn verdict(&mut self) -> Verdict {
        if self.interrupted {
            return Verdict::Interrupted;
        }
        if let Some(contention) = self.contention.take().filter(|_| !self.violations.is_empty() && self.only_disturbable_violations()) {
            return Verdict::Contended { reason: contention };
        }
        if let Some(violates) = &self.request.scenario.violates {
            // A timed run does not look for violations.
            if self.violations.is_empty() && self.checks != Checks::Timing && !self.observer.only_observed {
                let expected = format!("the run to violate `{}`: {} must not hold", violates.value, violates.value.promise());
                self.violations.push(Violation {
                    step: self.number,
                    at: Some(self.request.scenario.place(violates.position())),
                    rule: Rule::ExpectedViolation,
                    expected,
                    seen: "it holds all the time".to_owned(),
                });
            } else if self.only_expected_violations() {
                return Verdict::Passed;
            }
        }
        let mut violations = std::mem::take(&mut self.violations).into_iter();
        match violations.next() {
            None => Verdict::Passed,
            Some(first) => Verdict::Failed { first, rest: violations.collect() },
        }
    }
}
