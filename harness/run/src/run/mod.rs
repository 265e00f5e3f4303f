//! The loop: a scenario, a device and an allocator in, a record out, and events on the way. Errors of the run are data in the record.

mod cursor;
mod execute;

use std::collections::{BTreeMap, VecDeque};
use std::ops::ControlFlow;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use harness_allocator::allocator::{Allocator, AllocatorSpec};
use harness_allocator::device::{DeviceCalls, DeviceError, TestDevice};
use harness_allocator::stats::MemoryStats;
use harness_allocator::units::{Bytes, Nanos};

use crate::control::{Control, DEFAULT_TIME_LIMIT, Place};
use crate::rig::{Checks, Finding, ProgramId, Rig, RigOptions, StepEnd, Stop};
use crate::world::{Figures, StepResult, Unmet, World};

use self::cursor::{Cursor, Next};
pub(crate) use execute::{other_cause, seen};
use harness_record::{
    Accounts, CurvePoint, Event, Invariant, NOT_JUDGED, Outcome, Rule, RunRecord, StepRecord, Timings, Verdict, Violation,
};
use harness_scenario::steps::{Action, Step};
use harness_scenario::{Expectation, Located, ReportKey, Scenario, Unit};

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
    let options = RigOptions { checks, seed: request.seed, control: Arc::clone(&observer.control) };
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
    runner.finish(world, completed);
    let verdict = runner.verdict();
    let ((steps, unrecorded_steps), (times, _)) = (runner.steps.into_parts(), runner.times.into_parts());
    Ok(Executed { verdict, steps, unrecorded_steps, times, curve, timings, calls, stats, unused_at_peak, figures })
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
    /// What should hold before the end of the run and has not held yet.
    awaited: Vec<Located<Expectation>>,
    violations: Vec<Violation>,
    /// What other processes did on the device.
    contention: Option<String>,
    interrupted: bool,
}

/// Steps that are done one after another: those of the scenario, or those that are done meanwhile.
struct Task<'s> {
    cursor: Cursor<'s>,
    /// What is done meanwhile, for each block around the next step that has such steps.
    meanwhile: Vec<(&'s Step, Task<'s>)>,
}

impl<'s> Task<'s> {
    fn new(steps: &'s [Step]) -> Self {
        Self { cursor: Cursor::new(steps), meanwhile: Vec::new() }
    }

    /// What is done while the step goes on that comes next.
    fn beside(&self, step: &'s Step) -> Self {
        Self { cursor: self.cursor.meanwhile(step), meanwhile: Vec::new() }
    }
}

/// A step that is over, with what it left behind.
struct StepOver<'s> {
    step: &'s Step,
    number: u32,
    /// The iterations of the loops around it, in words.
    iteration: Option<String>,
    result: StepResult,
    failed: bool,
}

/// Whether a run, or a task of it, goes on.
type Flow = ControlFlow<()>;

fn place_of(number: u32, step: &Step) -> Place {
    Place::Step { number, line: step.position.line, text: format!("{} {}", step.action.kind(), step.action).trim_end().to_owned() }
}

impl<'a, 'o> Runner<'a, 'o> {
    fn new(request: &'a RunRequest<'a>, checks: Checks, observer: Observer<'o>) -> Self {
        let (steps, times) = (Steps::new(), Steps::new());
        Self {
            request,
            checks,
            observer,
            steps,
            times,
            number: 0,
            awaited: Vec::new(),
            violations: Vec::new(),
            contention: None,
            interrupted: false,
        }
    }

    /// Does all steps. Breaks off where the run cannot go on.
    fn run_all(&mut self, world: &mut World, steps: &[Step]) -> Flow {
        let mut task = Task::new(steps);
        while self.advance(world, &mut task)? {}
        self.judge_awaited(world);
        if self.violations.is_empty() || self.only_expected_violations() { Flow::Continue(()) } else { Flow::Break(()) }
    }

    /// Does one step of a task, and after it one of each task that goes on meanwhile. Tells whether there was one left.
    fn advance<'s>(&mut self, world: &mut World, task: &mut Task<'s>) -> ControlFlow<(), bool> {
        // Not every step allocates, and only an allocation looks by itself.
        if self.observer.control.is_interrupted() {
            self.interrupted = true;
            return ControlFlow::Break(());
        }
        while let Some(next) = task.cursor.advance() {
            match next {
                Next::Do(step) => {
                    self.do_step(world, task, step)?;
                    self.advance_meanwhile(world, &mut task.meanwhile)?;
                    return ControlFlow::Continue(true);
                }
                Next::Enter(step) => self.enter_block(world, task, step)?,
                Next::Leave { step, iterations, ran_out } => self.leave_block(world, task, step, iterations, ran_out)?,
            }
        }
        ControlFlow::Continue(false)
    }

    /// Does one step of each of some tasks.
    fn advance_meanwhile(&mut self, world: &mut World, tasks: &mut [(&Step, Task<'_>)]) -> Flow {
        tasks.iter_mut().try_for_each(|(_, task)| self.advance(world, task).map_continue(drop))
    }

    /// Makes the loops' variables and the program around the next step those of the run.
    fn resume(world: &mut World, task: &Task<'_>) {
        world.set_variables(task.cursor.variables());
        world.enter(task.cursor.program());
    }

    fn enter_block<'s>(&mut self, world: &mut World, task: &mut Task<'s>, step: &'s Step) -> Flow {
        if !step.meanwhile.is_empty() {
            task.meanwhile.push((step, task.beside(step)));
        }
        if let Action::PrivatePool(_) = step.action {
            Self::resume(world, task);
            self.run_step(world, step, task.cursor.iteration(), None)?;
        }
        Flow::Continue(())
    }

    fn leave_block(&mut self, world: &mut World, task: &mut Task<'_>, step: &Step, iterations: u64, ran_out: bool) -> Flow {
        if let Some((_, mut rest)) = task.meanwhile.pop_if(|(block, _)| std::ptr::eq(*block, step)) {
            while self.advance(world, &mut rest)? {}
        }
        Self::resume(world, task);
        match &step.action {
            Action::PrivatePool(block) => {
                let pool = world.pool(&block.pool);
                if let Err(stop) = world.rig.end_private_pool(pool) {
                    self.stop(stop, Some(step));
                    return Flow::Break(());
                }
                Flow::Continue(())
            }
            Action::For(steps) | Action::Repeat(steps) if steps.until_oom || step.id.is_some() => {
                let mut result = StepResult { reports: BTreeMap::from([(ReportKey::Iterations, iterations)]), ..StepResult::default() };
                if steps.until_oom && !ran_out {
                    let seen = format!("all {iterations} iterations ended without that");
                    result.unmet.push(Unmet::at(step, "a request inside the loop to run out of memory", seen));
                }
                self.run_as_step(world, step, task.cursor.iteration(), |_, _| Ok(result)).map_continue(drop)
            }
            _ => Flow::Continue(()),
        }
    }

    /// Does one step that has no steps inside it. One that runs out of memory may end the loop around it.
    fn do_step<'s>(&mut self, world: &mut World, task: &mut Task<'s>, step: &'s Step) -> Flow {
        Self::resume(world, task);
        let iteration = task.cursor.iteration();
        let mut own = (!step.meanwhile.is_empty()).then(|| task.beside(step));
        let outcome = self.run_step(world, step, iteration, own.as_mut())?;
        if let Some(mut rest) = own {
            while self.advance(world, &mut rest)? {}
            Self::resume(world, task);
        }
        let ends_loop = match &step.action {
            Action::Alloc(alloc) => alloc.expect.ends_loop,
            Action::Train(train) => train.expect.ends_loop,
            _ => false,
        };
        if ends_loop && outcome == Outcome::OutOfMemory {
            task.cursor.leave_loop();
        }
        Flow::Continue(())
    }

    /// Does a step, with the scenario's invariants and a task that goes on meanwhile between its operations.
    fn run_step(
        &mut self,
        world: &mut World,
        step: &Step,
        iteration: Option<String>,
        meanwhile: Option<&mut Task<'_>>,
    ) -> ControlFlow<(), Outcome> {
        let is_workload = matches!(step.action, Action::Storm(_) | Action::Train(_));
        let has_invariants = self.checks != Checks::Timing && !self.request.scenario.invariants.is_empty();
        if !is_workload || (meanwhile.is_none() && !has_invariants) {
            return self.run_as_step(world, step, iteration, |_, world| execute::execute(world, step, None));
        }
        let mut meanwhile = meanwhile;
        self.run_as_step(world, step, iteration, |runner, world| {
            let mut between = |world: &mut World| {
                let seen = runner.violations.len();
                runner.check_invariants(world, step, &mut Vec::new());
                if let Some(task) = meanwhile.as_deref_mut() {
                    let paused = world.rig.pause_step();
                    let flow = runner.advance(world, task);
                    world.rig.resume_step(paused);
                    if flow.is_break() {
                        return Err(Stop::Violated(Vec::new()));
                    }
                }
                let has_failed = runner.violations.len() > seen && !runner.only_expected_violations();
                // What was found stands in the record already.
                if has_failed { Err(Stop::Violated(Vec::new())) } else { Ok(()) }
            };
            execute::execute(world, step, Some(&mut between))
        })
    }

    /// Numbers, watches, checks and records what is done as a step.
    fn run_as_step(
        &mut self,
        world: &mut World,
        step: &Step,
        iteration: Option<String>,
        act: impl FnOnce(&mut Self, &mut World) -> Result<StepResult, Stop>,
    ) -> ControlFlow<(), Outcome> {
        self.number += 1;
        let number = self.number;
        let limit = step.time_limit.map_or(DEFAULT_TIME_LIMIT, |limit| Duration::from_nanos(limit.0));
        self.observer.control.enter(place_of(number, step), limit);
        world.rig.begin_step(number);
        let seen = self.violations.len();
        let mut result = match act(self, world) {
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
            self.check_awaited(world, step);
        }
        self.check_time(Some(step));
        let failed = self.violations.len() > seen;
        let outcome = result.as_ref().map_or(Outcome::Failed, |result| result.outcome.clone());
        // A step that was interrupted is neither done nor failed.
        if !self.interrupted {
            let result = result.unwrap_or_else(|| StepResult { outcome: Outcome::Failed, ..StepResult::default() });
            self.record(world, StepOver { step, number, iteration, result, failed }, ended);
        }
        let stops = self.interrupted || cut_short || (failed && !self.only_expected_violations());
        if stops { ControlFlow::Break(()) } else { ControlFlow::Continue(outcome) }
    }

    /// Records a step that is over. Of one that was cut short there may be no accounts.
    fn record(&mut self, world: &mut World, over: StepOver<'_>, ended: Option<StepEnd>) {
        let StepEnd { duration, accounts } = ended.unwrap_or_default();
        let reports = over.result.reports_with(duration);
        // Without a name nobody asked for the figures.
        let named = over.step.id.iter().flat_map(|_| &reports).map(|(key, value)| (key.name().to_owned(), *value)).collect();
        if let Some(id) = &over.step.id {
            world.report(id.clone(), reports);
        }
        if let Some(duration) = duration {
            self.times.push((over.number, StepTimes { duration, reports: named }));
        } else if self.checks != Checks::Timing
            && let Some(accounts) = accounts.or_else(|| world.rig.accounts().ok())
        {
            self.record_checked(over, named, accounts);
        }
    }

    fn record_checked(&mut self, over: StepOver<'_>, reports: BTreeMap<String, u64>, accounts: Accounts) {
        let StepOver { step, number, iteration, result, failed } = over;
        let outcome = if failed && result.outcome == Outcome::Done { Outcome::Failed } else { result.outcome };
        let step = StepRecord {
            number,
            line: step.position.line,
            kind: step.action.kind().name().to_owned(),
            text: step.action.to_string(),
            iteration,
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

    /// Looks at what is awaited, and forgets what holds. A step that awaits something adds it first.
    fn check_awaited(&mut self, world: &mut World, step: &Step) {
        if let Action::Eventually(eventually) = &step.action {
            let is_new = |expectation: &&Located<Expectation>| !self.awaited.iter().any(|other| other.position() == expectation.position());
            let new: Vec<_> = eventually.0.iter().filter(is_new).cloned().collect();
            self.awaited.extend(new);
        }
        for expectation in std::mem::take(&mut self.awaited) {
            match execute::check(world, &expectation) {
                Ok(None) => {}
                Ok(Some(_)) => self.awaited.push(expectation),
                Err(stop) => self.stop(stop, Some(step)),
            }
        }
    }

    /// At the end of the run: what never held is not met.
    fn judge_awaited(&mut self, world: &mut World) {
        for expectation in std::mem::take(&mut self.awaited) {
            if let Ok(Some(unmet)) = execute::check(world, &expectation) {
                let (expected, seen) = (format!("eventually {}", unmet.expected), format!("at the end {}", unmet.seen));
                self.unmet(Unmet { expected, seen, ..unmet }, &mut Vec::new());
            }
        }
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
            Rule::BetweenArms | Rule::ExpectedFailure | Rule::ExpectedViolation | Rule::DeviceFailure | Rule::TimeLimit => false,
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
