//! Fails every device call of a scenario, one per run. [`every_fault`] first runs the scenario to count the calls that
//! can fail, then once per call with that call failing. SQLite tests itself in the same setup
//! (<https://www.sqlite.org/testing.html#out_of_memory_testing>).
//!
//! A failing call may break the scenario's expectations. It must not break invariants, corrupt contents or leak
//! device memory. The run must recover, end with OOM, or end with an error that names the call and, in another process,
//! that process.
//!
//! Three optimizations make this fast:
//!
//! * A run equals the run without failures up to the operation that makes the call, so checks start there. If
//!   another process makes the call, the whole run is checked.
//! * On the simulated device, the steps before that operation run only once for many calls, unless the scenario has
//!   processes (`copies`).
//! * A call that *repeats* another one is skipped, unless [`Chosen::Each`] asks for it. A repeat is the same call in
//!   the same step. The allocators' memory, the earlier calls of the operation and the busy streams must also be the
//!   same, and the other call's failure must have ended the run immediately. The result then depends on nothing else,
//!   because no further request or free follows.

mod copies;

use std::collections::BTreeMap;
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::str::FromStr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use harness_allocator::device::DeviceError;
use harness_allocator::device::faulty::{CallRecord, Calls, DeviceCall, Fault, Injector, LoggedCall, Numbered};
use harness_allocator::units::Bytes;
use harness_devices::DeviceSource;
use harness_exec::trials::each;
use harness_exec::trials::which::Which;
use harness_record::{FaultedArm, FaultedCase, FaultedEnd, FaultedRuns, Invariant, NotTried, Rule, Verdict, Violation};
use harness_scenario::{ProcessName, Scenario};
use serde::{Deserialize, Serialize};

use self::copies::{Order, Servers};
use super::{ArmRun, Plan, open};
use crate::branches::Point;
use crate::context::kind_of;
use crate::faults::Faults;
use crate::processes::{ProcessGroup, StartedBy};
use crate::rig::CheckedFrom;
use crate::run::{FaultedRun, Run, RunRequest};

/// A run with a failure may make this many times the calls of the run without failures, plus [`MORE_CALLS`]. With more
/// calls it counts as endless.
const TIMES_THE_CALLS: u64 = 10;
const MORE_CALLS: u64 = 1000;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Chosen {
    /// A selection of the calls that repeat no other call.
    Different(Which),
    /// Every call, including repeats.
    Each,
}

#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("`{0}` does not select calls: write `all`, `each`, `sample:N` or `largest:N`, with N from 1, as in `sample:20`")]
pub struct ChosenError(String);

impl FromStr for Chosen {
    type Err = ChosenError;

    fn from_str(text: &str) -> Result<Self, ChosenError> {
        match text {
            "each" => Ok(Self::Each),
            text => text.parse().map(Self::Different).map_err(|_| ChosenError(text.to_owned())),
        }
    }
}

impl fmt::Display for Chosen {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Each => f.write_str("each"),
            Self::Different(which) => which.fmt(f),
        }
    }
}

/// The parameters of [`every_fault`].
pub struct Engine<'a> {
    pub plan: &'a Plan,
    pub source: &'a DeviceSource,
    pub chosen: Chosen,
    /// The number of parallel runs.
    pub jobs: usize,
    /// Set from outside to stop.
    pub stop: &'a AtomicBool,
    /// Called with the number of runs that follow.
    pub begun: &'a (dyn Fn(usize) + Sync),
    /// Called after each run.
    pub progress: &'a (dyn Fn() + Sync),
}

/// A scenario and allocator, and their run without failures.
struct Baseline<'a> {
    arm: ArmRun<'a>,
    seed: u64,
    ran: Result<Ran, NotTried>,
}

struct Ran {
    ooms: u64,
    /// The calls of each process, the main process first.
    calls: Vec<Call>,
    /// For each call, the index of the first call in the same state, which may be the call itself.
    firsts: Vec<usize>,
    total: u64,
}

#[derive(Clone)]
struct Call {
    /// The process that made the call; `None` for the main one.
    process: Option<ProcessName>,
    noted: LoggedCall,
}

impl Ran {
    fn new(ooms: u64, faults: &Faults, chosen: Chosen) -> Self {
        let of_process = |(process, injector): (Option<&ProcessName>, &Injector)| {
            let process = process.cloned();
            injector.calls_made().into_iter().map(move |noted| Call { process: process.clone(), noted })
        };
        let calls: Vec<Call> = faults.all().flat_map(of_process).filter(|call| !call.noted.made.call.is_of_checks()).collect();
        let mut seen = BTreeMap::new();
        let first = |(place, Call { process, noted }): (usize, &Call)| match chosen {
            Chosen::Each => place,
            Chosen::Different(_) => *seen.entry((process.clone(), noted.state)).or_insert(place),
        };
        let firsts = calls.iter().enumerate().map(first).collect();
        let total = faults.all().map(|(_, injector)| injector.total_calls()).sum();
        Self { ooms, calls, firsts, total }
    }

    /// The maximum number of calls in a run with a failure.
    const fn budget(&self) -> u64 {
        self.total * TIMES_THE_CALLS + MORE_CALLS
    }

    /// The indexes of the calls that repeat no other call.
    fn different(&self) -> Vec<usize> {
        (0..self.calls.len()).filter(|place| self.firsts[*place] == *place).collect()
    }

    /// The indexes of the calls to fail first.
    fn chosen(&self, chosen: Chosen) -> Vec<usize> {
        let different = self.different();
        let Chosen::Different(which) = chosen else { return different };
        let sizes: Vec<Bytes> = different.iter().map(|place| self.calls[*place].noted.made.size.unwrap_or_default()).collect();
        which.choose(&sizes).into_iter().filter_map(|number| different.get(number as usize - 1).copied()).collect()
    }
}

/// A call to fail.
struct Case<'a> {
    baseline: &'a Baseline<'a>,
    ran: &'a Ran,
    /// The index of the call.
    place: usize,
    call: Call,
}

impl Case<'_> {
    /// The first run, in which only this call fails.
    fn attempt(&self) -> Attempt<'_> {
        let Case { baseline, ran, call: Call { process, noted: LoggedCall { made, operation, .. } }, .. } = self;
        Attempt {
            arm: &baseline.arm,
            seed: baseline.seed,
            process: process.as_ref(),
            made: *made,
            count: 1,
            operation: *operation,
            ooms_without: ran.ooms,
            budget: ran.budget(),
        }
    }
}

/// The variable parts of a run.
struct RunSetup {
    faults: Faults,
    checked_from: CheckedFrom,
    started_by: StartedBy,
}

/// One run with failing calls.
#[derive(Clone, Copy)]
struct Attempt<'a> {
    arm: &'a ArmRun<'a>,
    seed: u64,
    /// The process that makes the calls; `None` for the main one.
    process: Option<&'a ProcessName>,
    /// The first failing call; `count` is the number of failing calls.
    made: CallRecord,
    count: u64,
    /// The operation that makes the first failing call.
    operation: u64,
    /// OOMs of the run without failures.
    ooms_without: u64,
    /// The maximum number of calls.
    budget: u64,
}

impl Attempt<'_> {
    /// Where checks start. Another process's calls have no place in this one's sequence of operations, so then the
    /// whole run is checked.
    const fn checked_from(&self) -> CheckedFrom {
        if self.process.is_none() { CheckedFrom::Operation(self.operation) } else { CheckedFrom::Start }
    }
}

/// The results for one call.
struct CallResult {
    cases: Vec<FaultedCase>,
    ended_at_once: bool,
}

/// The result of one run.
#[derive(Serialize, Deserialize)]
struct Outcome {
    case: FaultedCase,
    /// True if the failure ended the run immediately.
    ended_at_once: bool,
    /// True if the allocator still got memory, so that another run should fail the next call too.
    wants_one_more: bool,
}

/// How a run with a failure ended.
enum RunEnd {
    /// It completed or recorded a violation.
    Run(Box<FaultedRun>),
    NotBegun(DeviceError),
    /// It panicked with this message.
    Panicked(String),
}

/// Fails each chosen call of each allocator of a plan, one per run.
/// Fails with [`DeviceError`] if no device can be opened.
pub fn every_fault(engine: &Engine<'_>) -> Result<FaultedRuns, DeviceError> {
    let arms: Vec<ArmRun<'_>> = engine.plan.arms().filter(|arm| arm.repetition == 0).collect();
    try_all(engine, &arms, &Servers::start(engine, &arms))
}

fn try_all(engine: &Engine<'_>, arms: &[ArmRun<'_>], servers: &Servers) -> Result<FaultedRuns, DeviceError> {
    (engine.begun)(arms.len());
    let baselines = each(engine.jobs, arms, engine.progress, |arm| engine.baseline(*arm))?;
    let mut tried: Vec<Results> = baselines.iter().map(|_| Results::new()).collect();
    engine.try_places(servers, &baselines, &mut tried, |ran, _| ran.chosen(engine.chosen))?;
    if engine.chosen == Chosen::Different(Which::All) {
        // If the run continued after the first of several equal calls failed, the others may end differently, so they
        // run too.
        engine.try_places(servers, &baselines, &mut tried, |ran, ends| {
            let is_open = |place: &usize| {
                let first = ran.firsts[*place];
                first != *place && ends.get(&first).is_none_or(|tried| tried.as_ref().is_none_or(|tried| !tried.ended_at_once))
            };
            (0..ran.calls.len()).filter(is_open).collect()
        })?;
    }
    let mut runs = FaultedRuns::default();
    for (baseline, ends) in baselines.iter().zip(tried) {
        runs.left_out += ends.values().filter(|end| end.is_none()).count();
        runs.arms.push(engine.summary(baseline, ends));
    }
    Ok(runs)
}

/// The results of one allocator's calls, by the index of the call; `None` for calls skipped by an interrupt.
type Results = BTreeMap<usize, Option<CallResult>>;

impl<'a> Engine<'a> {
    fn baseline(&self, arm: ArmRun<'a>) -> Result<Baseline<'a>, DeviceError> {
        let seed = self.plan.seed_of(&arm);
        let ran = match not_for_this(arm.scenario) {
            Some(why) => Err(NotTried { why: why.to_owned(), failed: false }),
            None => self.run_without(&arm, seed)?,
        };
        Ok(Baseline { arm, seed, ran })
    }

    fn run_without(&self, arm: &ArmRun<'_>, seed: u64) -> Result<Result<Ran, NotTried>, DeviceError> {
        let faults = Faults::each_by(arm.scenario, |_| Injector::new(&[], seed).logging());
        let setup = RunSetup { faults: faults.clone(), checked_from: CheckedFrom::Start, started_by: StartedBy::Exec };
        let run = match self.run_with(arm, seed, setup)? {
            Ok(run) => run?,
            Err(why) => return Ok(Err(NotTried { why, failed: false })),
        };
        let record = &run.record;
        let not_tried = |why: String, failed| Ok(Err(NotTried { why, failed }));
        match &record.verdict {
            Verdict::Passed => {}
            Verdict::Failed { first, .. } => {
                let kind = kind_of(&record.device);
                let is_expected = arm.scenario.expected_to_fail.of(&record.allocator, kind).is_some();
                return not_tried(format!("it fails without a failure of the device: {first}"), !is_expected);
            }
            Verdict::FailedAsExpected { reason, .. } => return not_tried(format!("it fails by itself: {reason}"), false),
            Verdict::Skipped { reason, .. } | Verdict::Contended { reason } => return not_tried(reason.clone(), false),
            Verdict::Interrupted => return not_tried("interrupted".to_owned(), false),
        }
        Ok(Ok(Ran::new(run.ooms, &faults, self.chosen)))
    }

    /// Runs an arm on a fresh device. The inner errors are the reason to skip it and the reason that it did not begin.
    fn run_with(
        &self,
        arm: &ArmRun<'_>,
        seed: u64,
        setup: RunSetup,
    ) -> Result<Result<Result<FaultedRun, DeviceError>, String>, DeviceError> {
        let RunSetup { faults, checked_from, started_by } = setup;
        let scenario = self.plan.sized(arm.scenario);
        let group = ProcessGroup::of(&scenario, arm.allocator, (seed, self.plan.audit), self.source, started_by)?;
        let device = match open(self.source, &scenario, arm.allocator, group.as_ref())? {
            Ok(device) => device,
            Err((.., why)) => return Ok(Err(why)),
        };
        let request = RunRequest {
            scenario: &scenario,
            allocator: arm.allocator,
            seed,
            repetition: 0,
            reproduce: String::new(),
            audit: self.plan.audit,
            interrupt: Arc::default(),
        };
        Ok(Ok(Run::new(&request, device).with_processes(group).faulted(faults, checked_from)))
    }

    /// Fails the calls at some indexes of each arm: in forked copies if possible, otherwise in separate runs.
    fn try_places(
        &self,
        servers: &Servers,
        baselines: &[Baseline<'_>],
        tried: &mut [Results],
        places: impl Fn(&Ran, &Results) -> Vec<usize>,
    ) -> Result<(), DeviceError> {
        let mut cases = Vec::new();
        for (arm, (baseline, ends)) in baselines.iter().zip(&*tried).enumerate() {
            let Ok(ran) = &baseline.ran else { continue };
            cases.extend(places(ran, ends).into_iter().map(|place| (arm, Case { baseline, ran, place, call: ran.calls[place].clone() })));
        }
        (self.begun)(cases.len());
        let orders: Vec<Order> = cases.chunk_by(|one, other| one.0 == other.0).flat_map(|of_arm| self.orders(of_arm)).collect();
        let told = each::<_, _, DeviceError>(self.jobs, &orders, &|| (), |order| Ok(servers.ask(order, self.stop, self.progress)))?;
        for (order, told) in orders.iter().zip(told) {
            tried[order.arm].extend(told.into_iter().map(|(place, end)| (place, Some(end))));
        }
        let untold: Vec<_> = cases.iter().filter(|(arm, case)| !tried[*arm].contains_key(&case.place)).collect();
        let ends = each(self.jobs, &untold, self.progress, |(_, case)| self.try_case(case))?;
        for ((arm, case), end) in untold.iter().zip(ends) {
            tried[*arm].insert(case.place, end);
        }
        Ok(())
    }

    /// The cases of an arm as orders for servers; empty if the arm cannot run in forked copies.
    fn orders(&self, cases: &[(usize, Case<'_>)]) -> Vec<Order> {
        let is_copied = |(_, case): &&(usize, Case<'_>)| copies::can_run(self.source, &case.baseline.arm);
        let cases: Vec<_> = cases.iter().filter(is_copied).collect();
        let order = |cases: &[&(usize, Case<'_>)]| {
            let (arm, Case { ran, .. }) = cases.first()?;
            let point = |(_, case): &&(usize, Case<'_>)| {
                let Call { process, noted: LoggedCall { made, operation, .. } } = &case.call;
                let names = || case.baseline.arm.scenario.processes.iter().map(|process| &process.name);
                let process = process.as_ref().and_then(|process| names().position(|name| name == process));
                Point { place: case.place, process, made: *made, operation: *operation }
            };
            Some(Order { arm: *arm, ooms_without: ran.ooms, budget: ran.budget(), points: cases.iter().map(point).collect() })
        };
        cases.chunks(copies::MOST_POINTS).filter_map(order).collect()
    }

    /// Summarizes the results of an arm.
    fn summary(&self, baseline: &Baseline<'_>, ends: Results) -> FaultedArm {
        let (calls, repeats, different) = match &baseline.ran {
            Err(_) => (0, 0, 0),
            Ok(ran) => {
                let ended_at_once =
                    |place: &usize| ends.get(place).is_some_and(|end| end.as_ref().is_some_and(|tried| tried.ended_at_once));
                let repeats = (0..ran.calls.len()).filter(|place| !ends.contains_key(place) && ended_at_once(&ran.firsts[*place]));
                (ran.calls.len(), repeats.count(), ran.different().len())
            }
        };
        FaultedArm {
            scenario: baseline.arm.scenario.name.clone(),
            allocator: baseline.arm.allocator.to_string(),
            calls,
            repeats,
            chosen: match self.chosen {
                Chosen::Each | Chosen::Different(Which::All) => Which::All.described(calls),
                Chosen::Different(which) => which.described(different),
            },
            cases: ends.into_values().flatten().flat_map(|tried| tried.cases).collect(),
            not_tried: baseline.ran.as_ref().err().cloned(),
        }
    }

    /// Fails one call, and if the allocator still got memory, also the next call of its kind. `None` after an
    /// interrupt.
    fn try_case(&self, case: &Case<'_>) -> Result<Option<CallResult>, DeviceError> {
        if self.stop.load(Ordering::Relaxed) {
            return Ok(None);
        }
        let attempt = case.attempt();
        let Outcome { case, ended_at_once, wants_one_more } = self.attempt(attempt, attempt.checked_from(), StartedBy::Exec)?;
        let mut cases = vec![case];
        if wants_one_more {
            let both = Attempt { count: 2, ..attempt };
            cases.push(self.attempt(both, both.checked_from(), StartedBy::Exec)?.case);
        }
        Ok(Some(CallResult { cases, ended_at_once }))
    }

    /// Fails calls in a separate run with checks from `checked_from`.
    fn attempt(&self, attempt: Attempt<'_>, checked_from: CheckedFrom, started_by: StartedBy) -> Result<Outcome, DeviceError> {
        let Attempt { arm, seed, process, made, count, budget, .. } = attempt;
        let fault = Fault::failing(Calls::Of(made.call), Numbered { first: made.number, count, min_size: Bytes::ZERO });
        let faults = Faults::each_by(arm.scenario, |other| {
            let own = if other == process { &[fault][..] } else { &[] };
            Injector::new(own, seed).with_budget(budget)
        });
        let seen = self.run_catching(arm, seed, RunSetup { faults: faults.clone(), checked_from, started_by })?;
        Ok(self.outcome(attempt, &faults, &seen))
    }

    /// Runs an arm and catches panics.
    fn run_catching(&self, arm: &ArmRun<'_>, seed: u64, setup: RunSetup) -> Result<RunEnd, DeviceError> {
        match catch_unwind(AssertUnwindSafe(|| self.run_with(arm, seed, setup))) {
            Err(panic) => Ok(RunEnd::Panicked(message(&*panic))),
            Ok(run) => Ok(match run? {
                Ok(Ok(run)) => RunEnd::Run(Box::new(run)),
                Ok(Err(error)) => RunEnd::NotBegun(error),
                Err(why) => RunEnd::NotBegun(DeviceError::Unavailable { what: "the device".to_owned(), why }),
            }),
        }
    }

    /// Judges a run with failing calls.
    fn outcome(&self, attempt: Attempt<'_>, faults: &Faults, seen: &RunEnd) -> Outcome {
        let Attempt { arm, seed, process, made, count, operation, ooms_without, .. } = attempt;
        let (struck, operations) = faults.of(process).map_or((0, 0), |faults| (faults.injected_by(0).0, faults.operations()));
        let end = match struck {
            0 if !matches!(seen, RunEnd::Panicked(_)) => defect("the call was not made again: two runs of the scenario differ"),
            _ => judge((process, made.call), arm.scenario, ooms_without, seen),
        };
        let times = if count == 1 { String::new() } else { format!(":{count}") };
        let reproduce = self.plan.reproduce(arm, self.source, seed);
        let whose = process.map_or_else(String::new, |process| format!("{process}/"));
        Outcome {
            ended_at_once: matches!(end, FaultedEnd::NamedError { .. }) && operations == operation,
            wants_one_more: end == FaultedEnd::Healed && made.call.gets_memory() && count == 1,
            case: FaultedCase {
                process: process.map(ToString::to_string),
                call: made.call.name().to_owned(),
                number: made.number,
                count,
                size: made.size,
                step: made.place.0,
                end,
                reproduce: format!("{reproduce} --fail {whose}{}:{}{times}", made.call, made.number),
            },
        }
    }
}

/// Why a scenario does not qualify.
fn not_for_this(scenario: &Scenario) -> Option<&'static str> {
    if !scenario.execs().is_empty() {
        return Some("its programs have their own GPUs: use `harness exec --every-fault` for them");
    }
    if scenario.has_threads() {
        return Some("its storm has threads, so the sequence of device calls differs from run to run");
    }
    (!scenario.faults.is_empty()).then_some("it declares faults of its own")
}

fn defect(why: impl Into<String>) -> FaultedEnd {
    FaultedEnd::Defect { why: why.into() }
}

fn message(panic: &(dyn std::any::Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().map(|text| (*text).to_owned()).or_else(|| panic.downcast_ref::<String>().cloned());
    text.unwrap_or_else(|| "a panic without a message".to_owned())
}

/// A call and its process; `None` is the main one.
type Failing<'a> = (Option<&'a ProcessName>, DeviceCall);

/// Judges a call's failure from the result of the run and the OOMs of the run without failures.
fn judge(call: Failing<'_>, scenario: &Scenario, ooms_without: u64, seen: &RunEnd) -> FaultedEnd {
    let run = match seen {
        RunEnd::Panicked(message) => return defect(format!("a panic: {message}")),
        RunEnd::NotBegun(error) => return reported(call, "", &error.to_string()),
        RunEnd::Run(run) => run,
    };
    let is_out_of_memory = run.ooms > ooms_without;
    match &run.record.verdict {
        Verdict::Passed if is_out_of_memory => FaultedEnd::Recovered,
        Verdict::Passed => FaultedEnd::Healed,
        Verdict::Failed { first, rest } | Verdict::FailedAsExpected { first, rest, .. } => {
            let all = || std::iter::once(first).chain(rest);
            if let Some(violation) = all().find(|violation| is_defect(violation, scenario)) {
                return defect(violation.to_string());
            }
            match all().find(|violation| violation.rule == Rule::DeviceFailure) {
                Some(violation) => reported(call, &violation.expected, &violation.seen),
                None if is_out_of_memory => FaultedEnd::OutOfMemory,
                None => FaultedEnd::Healed,
            }
        }
        Verdict::Skipped { reason, .. } | Verdict::Contended { reason } => defect(format!("it did not run to its end: {reason}")),
        Verdict::Interrupted => defect("it was interrupted"),
    }
}

/// Checks that an error names the call, and in another process that the violation names the process.
fn reported((process, call): Failing<'_>, expected: &str, error: &str) -> FaultedEnd {
    match process {
        _ if !error.contains(call.name()) => defect(format!("an error that does not name the call: {error}")),
        Some(process) if !expected.contains(&format!("the process `{process}`")) => {
            defect(format!("an error that does not name the process `{process}`: {error}"))
        }
        Some(process) => FaultedEnd::NamedError { error: format!("in the process `{process}`: {error}") },
        None => FaultedEnd::NamedError { error: error.to_owned() },
    }
}

/// Returns whether a violation is a defect under injected failures. A retry of a policy without progress is none, because the
/// device failed without a reason. Ranks with different collectives are none either: a rank whose device failed stops
/// joining, and the run reports that the others would hang.
fn is_defect(violation: &Violation, scenario: &Scenario) -> bool {
    match &violation.rule {
        Rule::Invariant(Invariant::RetryMakesProgress | Invariant::CollectivesMatch) => false,
        Rule::Invariant(invariant) => scenario.expect_violation.as_ref().is_none_or(|violates| violates.value != *invariant),
        Rule::TimeLimit => true,
        Rule::Expectation | Rule::BetweenArms | Rule::ExpectedFailure | Rule::ExpectedViolation | Rule::DeviceFailure | Rule::Fault => {
            false
        }
    }
}

#[cfg(test)]
mod tests;
