//! Fails every device call of a scenario, one per run. [`every_fault`] first runs the scenario to
//! count the calls that can fail, then once per call with that call failing. SQLite tests itself in
//! the same setup (<https://www.sqlite.org/testing.html#out_of_memory_testing>).
//!
//! A failing call may break the scenario's expectations. It must not break invariants, corrupt
//! contents or leak device memory. The run must recover, end with OOM, or end with an error that
//! names the call and, in another process, that process.
//!
//! Three optimizations make this fast:
//!
//! * A run equals the run without failures up to the operation that makes the call, so checks start
//!   there. If another process makes the call, the whole run is checked.
//! * On the simulated device, the steps before that operation run only once for many calls, unless
//!   the scenario has processes (`copies`).
//! * A call that *repeats* another one is skipped, unless [`Chosen::Each`] asks for it. A repeat is
//!   the same call in the same step. The allocators' memory, the earlier calls of the operation and
//!   the busy streams must also be the same, and the other call's failure must have ended the run
//!   immediately. The result then depends on nothing else, because no further request or free
//!   follows.

mod copies;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::{collections::BTreeMap, str::FromStr};

use harness_allocator::device::DeviceError;
use harness_allocator::device::faulty::{Calls, DeviceCall, Fault, Injector, LoggedCall, Numbered};
use harness_allocator::units::Bytes;
use harness_devices::DeviceSource;
use harness_exec::trials::{each, which::Which};
use harness_record::{
    FaultOutcome, FaultedArm, FaultedCase, FaultedRuns, Invariant, NotTried, Rule, Verdict,
    Violation,
};
use harness_scenario::{ProcessName, Scenario};
use serde::{Deserialize, Serialize};

use self::copies::{Order, Servers};
use super::{ArmRun, Plan, open};
use crate::branches::{BranchPoint, Failing};
use crate::processes::{ProcessGroup, StartedBy};
use crate::run::{Run, RunRequest, RunResult};
use crate::{context::kind_of, faults::Faults, rig::CheckedFrom};

/// A run with a failure may make this many times the calls of the run without failures, plus
/// [`MORE_CALLS`].
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
#[error(
    "`{0}` does not select calls: write `all`, `each`, `sample:N` or `largest:N`, with N from 1, \
     as in `sample:20`"
)]
pub struct ChosenError(String);

impl FromStr for Chosen {
    type Err = ChosenError;

    fn from_str(text: &str) -> Result<Self, ChosenError> {
        match text {
            "each" => Ok(Self::Each),
            text => text
                .parse()
                .map(Self::Different)
                .map_err(|_| ChosenError(text.to_owned())),
        }
    }
}

pub struct EveryFault<'a> {
    pub plan: &'a Plan,
    pub source: &'a DeviceSource,
    pub chosen: Chosen,
    pub jobs: usize,
    pub stop: &'a AtomicBool,
    /// Called with the number of runs that follow.
    pub begun: &'a (dyn Fn(usize) + Sync),
    /// Called after each run.
    pub progress: &'a (dyn Fn() + Sync),
}

struct Baseline<'a> {
    arm: ArmRun<'a>,
    seed: u64,
    ran: Result<Ran, NotTried>,
}

struct Ran {
    ooms: u64,
    /// The calls of each process, the main process first.
    calls: Vec<BranchPoint>,
    /// For each call, the index of the first call in the same state, which may be the call itself.
    firsts: Vec<usize>,
    total: u64,
}

impl Ran {
    fn new(ooms: u64, faults: &Faults, chosen: Chosen) -> Self {
        let (mut calls, mut firsts, mut by_state) = (Vec::new(), Vec::new(), BTreeMap::new());
        for (process, injector) in faults.all() {
            let process = process.map(ProcessName::index);
            let logged = injector
                .calls_made()
                .into_iter()
                .filter(|logged| !logged.made.call.is_of_checks());
            for (
                place,
                LoggedCall {
                    made,
                    operation,
                    state,
                },
            ) in (calls.len()..).zip(logged)
            {
                calls.push(BranchPoint {
                    place,
                    process,
                    made,
                    operation,
                });
                firsts.push(match chosen {
                    Chosen::Each => place,
                    Chosen::Different(_) => *by_state.entry((process, state)).or_insert(place),
                });
            }
        }
        let total = faults
            .all()
            .map(|(_, injector)| injector.total_calls())
            .sum();
        Self {
            ooms,
            calls,
            firsts,
            total,
        }
    }

    /// The indexes of the calls that repeat no other call.
    fn different(&self) -> Vec<usize> {
        (0..self.calls.len())
            .filter(|place| self.firsts[*place] == *place)
            .collect()
    }

    /// The indexes of the calls to fail first.
    fn chosen(&self, chosen: Chosen) -> Vec<usize> {
        let different = self.different();
        let Chosen::Different(which) = chosen else {
            return different;
        };
        let sizes: Vec<Bytes> = different
            .iter()
            .map(|place| self.calls[*place].made.size.unwrap_or_default())
            .collect();
        which
            .choose(&sizes)
            .into_iter()
            .filter_map(|number| different.get(number as usize - 1).copied())
            .collect()
    }
}

impl Baseline<'_> {
    /// The first run for a call, in which only this call fails.
    const fn attempt(&self, ran: &Ran, point: BranchPoint) -> Attempt<'_> {
        let budget = ran.total * TIMES_THE_CALLS + MORE_CALLS;
        Attempt {
            arm: &self.arm,
            seed: self.seed,
            failing: Failing { point, count: 1 },
            ooms_without: ran.ooms,
            budget,
        }
    }
}

struct RunSetup {
    faults: Faults,
    checked_from: CheckedFrom,
    started_by: StartedBy,
}

#[derive(Clone, Copy)]
struct Attempt<'a> {
    arm: &'a ArmRun<'a>,
    seed: u64,
    failing: Failing,
    ooms_without: u64,
    /// The maximum number of calls.
    budget: u64,
}

impl<'a> Attempt<'a> {
    /// Where checks start. Another process's calls have no place in this one's sequence of
    /// operations, so then the whole run is checked.
    const fn checked_from(&self) -> CheckedFrom {
        let BranchPoint {
            process, operation, ..
        } = self.failing.point;
        if process.is_none() {
            CheckedFrom::Operation(operation)
        } else {
            CheckedFrom::Start
        }
    }

    /// The process that makes the calls; `None` for the main one.
    fn process(&self) -> Option<&'a ProcessName> {
        self.failing
            .point
            .process
            .map(|process| &self.arm.scenario.processes[process].name)
    }
}

#[derive(Serialize, Deserialize)]
struct Outcome {
    case: FaultedCase,
    /// True if the failure ended the run immediately.
    ended_at_once: bool,
    /// True if the allocator still got memory, so that another run should fail the next call too.
    wants_one_more: bool,
}

enum RunEnd {
    Run(Box<RunResult>),
    NotBegun(DeviceError),
    /// The device does not suit the scenario, for this reason.
    Skipped(String),
    Panicked(String),
}

/// Fails each chosen call of each allocator of a plan, one per run.
pub fn every_fault(engine: &EveryFault<'_>) -> Result<FaultedRuns, DeviceError> {
    let arms: Vec<ArmRun<'_>> = engine
        .plan
        .arms()
        .filter(|arm| arm.repetition == 0)
        .collect();
    try_all(engine, &arms, &Servers::start(engine, &arms))
}

fn try_all(
    engine: &EveryFault<'_>,
    arms: &[ArmRun<'_>],
    servers: &Servers,
) -> Result<FaultedRuns, DeviceError> {
    (engine.begun)(arms.len());
    let baselines = each(engine.jobs, arms, engine.progress, |arm| {
        engine.baseline(*arm)
    })?;
    let mut tried: Vec<Results> = baselines.iter().map(|_| Results::new()).collect();
    engine.try_places(servers, &baselines, &mut tried, |ran, _| {
        ran.chosen(engine.chosen)
    })?;
    if engine.chosen == Chosen::Different(Which::All) {
        // If the run continued after the first of several equal calls failed, the others may end
        // differently, so they run too.
        engine.try_places(servers, &baselines, &mut tried, |ran, ends| {
            let is_open = |place: &usize| {
                ran.firsts[*place] != *place && !ended_at_once(ends, ran.firsts[*place])
            };
            (0..ran.calls.len()).filter(is_open).collect()
        })?;
    }
    let mut runs = FaultedRuns::default();
    for (baseline, ends) in baselines.iter().zip(tried) {
        runs.left_out += ends.values().filter(|runs| runs.is_empty()).count();
        runs.arms.push(engine.summary(baseline, ends));
    }
    Ok(runs)
}

/// The results of one allocator's calls, by the index of the call: one run, or a second one in
/// which the next call of its kind fails too. Calls skipped by an interrupt have no run.
type Results = BTreeMap<usize, Vec<Outcome>>;

fn ended_at_once(results: &Results, place: usize) -> bool {
    results
        .get(&place)
        .and_then(|runs| runs.first())
        .is_some_and(|first| first.ended_at_once)
}

impl<'a> EveryFault<'a> {
    fn baseline(&self, arm: ArmRun<'a>) -> Result<Baseline<'a>, DeviceError> {
        let seed = self.plan.seed_of(&arm);
        let ran = match not_for_this(arm.scenario) {
            Some(why) => Err(NotTried {
                why: why.to_owned(),
                failed: false,
            }),
            None => self.run_without(&arm, seed)?,
        };
        Ok(Baseline { arm, seed, ran })
    }

    fn run_without(
        &self,
        arm: &ArmRun<'_>,
        seed: u64,
    ) -> Result<Result<Ran, NotTried>, DeviceError> {
        let faults = Faults::each_by(arm.scenario, |_| Injector::new(&[], seed).logging());
        let setup = RunSetup {
            faults: faults.clone(),
            checked_from: CheckedFrom::Start,
            started_by: StartedBy::Exec,
        };
        let not_tried = |why: String, failed| Ok(Err(NotTried { why, failed }));
        let run = match self.run_with(arm, seed, setup)? {
            RunEnd::Run(run) => run,
            RunEnd::NotBegun(error) => return Err(error),
            RunEnd::Skipped(why) | RunEnd::Panicked(why) => return not_tried(why, false),
        };
        let record = &run.record;
        match &record.verdict {
            Verdict::Passed => {}
            Verdict::Failed { first, .. } => {
                let kind = kind_of(&record.device);
                let is_expected = arm
                    .scenario
                    .expected_to_fail
                    .of(&record.allocator, kind)
                    .is_some();
                return not_tried(
                    format!("it fails without a failure of the device: {first}"),
                    !is_expected,
                );
            }
            Verdict::FailedAsExpected { reason, .. } => {
                return not_tried(format!("it fails by itself: {reason}"), false);
            }
            Verdict::Skipped { reason, .. } | Verdict::Contended { reason } => {
                return not_tried(reason.clone(), false);
            }
            Verdict::Interrupted => return not_tried("interrupted".to_owned(), false),
        }
        Ok(Ok(Ran::new(run.ooms, &faults, self.chosen)))
    }

    fn run_with(
        &self,
        arm: &ArmRun<'_>,
        seed: u64,
        setup: RunSetup,
    ) -> Result<RunEnd, DeviceError> {
        let RunSetup {
            faults,
            checked_from,
            started_by,
        } = setup;
        let scenario = self.plan.sized(arm.scenario);
        let group = ProcessGroup::of(
            &scenario,
            arm.allocator,
            (seed, self.plan.audit),
            self.source,
            started_by,
        )?;
        let device = match open(self.source, &scenario, arm.allocator, group.as_ref())? {
            Ok(device) => device,
            Err((.., why)) => return Ok(RunEnd::Skipped(why)),
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
        let run = Run::new(&request, device)
            .with_processes(group)
            .faulted(faults, checked_from);
        Ok(run.map_or_else(RunEnd::NotBegun, |run| RunEnd::Run(Box::new(run))))
    }

    /// Fails the calls at some indexes of each arm: in forked copies if possible, otherwise in
    /// separate runs.
    fn try_places(
        &self,
        servers: &Servers,
        baselines: &[Baseline<'_>],
        tried: &mut [Results],
        places: impl Fn(&Ran, &Results) -> Vec<usize>,
    ) -> Result<(), DeviceError> {
        let mut attempts: Vec<(usize, Attempt<'_>)> = Vec::new();
        for (arm, (baseline, ends)) in baselines.iter().zip(&*tried).enumerate() {
            let Ok(ran) = &baseline.ran else { continue };
            attempts.extend(
                places(ran, ends)
                    .into_iter()
                    .map(|place| (arm, baseline.attempt(ran, ran.calls[place]))),
            );
        }
        (self.begun)(attempts.len());
        let orders: Vec<Order> = attempts
            .chunk_by(|one, other| one.0 == other.0)
            .flat_map(|of_arm| self.orders(of_arm))
            .collect();
        let results = each::<_, _, DeviceError>(self.jobs, &orders, &|| (), |order| {
            Ok(servers.ask(order, self.stop, self.progress))
        })?;
        for (order, results) in orders.iter().zip(results) {
            tried[order.arm].extend(results);
        }
        attempts.retain(|(arm, attempt)| !tried[*arm].contains_key(&attempt.failing.point.place));
        let results = each(self.jobs, &attempts, self.progress, |(_, attempt)| {
            self.try_call(*attempt)
        })?;
        for ((arm, attempt), result) in attempts.iter().zip(results) {
            tried[*arm].insert(attempt.failing.point.place, result);
        }
        Ok(())
    }

    /// The attempts of an arm as orders for servers; empty if the arm cannot run in forked copies.
    fn orders(&self, attempts: &[(usize, Attempt<'_>)]) -> Vec<Order> {
        let can_run = attempts
            .first()
            .is_some_and(|(_, attempt)| copies::can_run(self.source, attempt.arm));
        let order = |attempts: &[(usize, Attempt<'_>)]| {
            let (
                arm,
                Attempt {
                    ooms_without,
                    budget,
                    ..
                },
            ) = attempts[0];
            Order {
                arm,
                ooms_without,
                budget,
                points: attempts
                    .iter()
                    .map(|(_, attempt)| attempt.failing.point)
                    .collect(),
            }
        };
        attempts
            .chunks(copies::MOST_POINTS)
            .filter(|_| can_run)
            .map(order)
            .collect()
    }

    fn summary(&self, baseline: &Baseline<'_>, ends: Results) -> FaultedArm {
        let (calls, repeats, different) = match &baseline.ran {
            Err(_) => (0, 0, 0),
            Ok(ran) => {
                let is_repeat = |place: &usize| {
                    !ends.contains_key(place) && ended_at_once(&ends, ran.firsts[*place])
                };
                let repeats = (0..ran.calls.len()).filter(is_repeat);
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
            cases: ends.into_values().flatten().map(|run| run.case).collect(),
            not_tried: baseline.ran.as_ref().err().cloned(),
        }
    }

    /// Fails one call, and if the allocator still got memory, also the next call of its kind.
    fn try_call(&self, attempt: Attempt<'_>) -> Result<Vec<Outcome>, DeviceError> {
        let mut runs: Vec<Outcome> = Vec::new();
        while runs.last().map_or_else(
            || !self.stop.load(Ordering::Relaxed),
            |last| last.wants_one_more,
        ) {
            let count = runs.len() as u64 + 1;
            let attempt = Attempt {
                failing: Failing {
                    count,
                    ..attempt.failing
                },
                ..attempt
            };
            runs.push(self.attempt(attempt, attempt.checked_from(), StartedBy::Exec)?);
        }
        Ok(runs)
    }

    /// Fails calls in a separate run with checks from `checked_from`.
    fn attempt(
        &self,
        attempt: Attempt<'_>,
        checked_from: CheckedFrom,
        started_by: StartedBy,
    ) -> Result<Outcome, DeviceError> {
        let Attempt {
            arm,
            seed,
            failing:
                Failing {
                    point: BranchPoint { made, .. },
                    count,
                },
            budget,
            ..
        } = attempt;
        let fault = Fault::failing(
            Calls::Of(made.call),
            Numbered {
                first: made.number,
                count,
                min_size: Bytes::ZERO,
            },
        );
        let faults = Faults::each_by(arm.scenario, |process| {
            let own = if process == attempt.process() {
                &[fault][..]
            } else {
                &[]
            };
            Injector::new(own, seed).with_budget(budget)
        });
        let end = self.run_catching(
            arm,
            seed,
            RunSetup {
                faults: faults.clone(),
                checked_from,
                started_by,
            },
        )?;
        Ok(self.outcome(attempt, &faults, &end))
    }

    fn run_catching(
        &self,
        arm: &ArmRun<'_>,
        seed: u64,
        setup: RunSetup,
    ) -> Result<RunEnd, DeviceError> {
        let run = catch_unwind(AssertUnwindSafe(|| self.run_with(arm, seed, setup)));
        run.unwrap_or_else(|panic| Ok(RunEnd::Panicked(message(&*panic))))
    }

    fn outcome(&self, attempt: Attempt<'_>, faults: &Faults, run_end: &RunEnd) -> Outcome {
        let Attempt {
            arm,
            seed,
            failing:
                Failing {
                    point:
                        BranchPoint {
                            made, operation, ..
                        },
                    count,
                },
            ooms_without,
            ..
        } = attempt;
        let process = attempt.process();
        let (injected, operations) = faults.of(process).map_or((0, 0), |faults| {
            (faults.injected_by(0).0, faults.operations())
        });
        let end = match injected {
            0 if !matches!(run_end, RunEnd::Panicked(_)) => {
                defect("the call was not made again: two runs of the scenario differ")
            }
            _ => judge((process, made.call), arm.scenario, ooms_without, run_end),
        };
        let times = if count == 1 {
            String::new()
        } else {
            format!(":{count}")
        };
        let reproduce = self.plan.reproduce(arm, self.source, seed);
        let whose = process.map_or_else(String::new, |process| format!("{process}/"));
        Outcome {
            ended_at_once: matches!(end, FaultOutcome::NamedError { .. })
                && operations == operation,
            wants_one_more: end == FaultOutcome::Healed && made.call.gets_memory() && count == 1,
            case: FaultedCase {
                process: process.map(ToString::to_string),
                call: made.call.name().to_owned(),
                number: made.number,
                count,
                size: made.size,
                step: made.place.0,
                end,
                reproduce: format!(
                    "{reproduce} --fail {whose}{}:{}{times}",
                    made.call, made.number
                ),
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
        return Some(
            "its storm has threads, so the sequence of device calls differs from run to run",
        );
    }
    (!scenario.faults.is_empty()).then_some("it declares faults of its own")
}

fn defect(why: impl Into<String>) -> FaultOutcome {
    FaultOutcome::Defect { why: why.into() }
}

fn message(panic: &(dyn std::any::Any + Send)) -> String {
    let text = panic
        .downcast_ref::<&str>()
        .map(|text| (*text).to_owned())
        .or_else(|| panic.downcast_ref::<String>().cloned());
    text.unwrap_or_else(|| "a panic without a message".to_owned())
}

/// Judges the failure of a call, which the given process made, from the result of the run and the
/// OOMs of the run without failures.
fn judge(
    call: (Option<&ProcessName>, DeviceCall),
    scenario: &Scenario,
    ooms_without: u64,
    run_end: &RunEnd,
) -> FaultOutcome {
    let run = match run_end {
        RunEnd::Panicked(message) => return defect(format!("a panic: {message}")),
        RunEnd::NotBegun(error) => return reported(call, "", &error.to_string()),
        RunEnd::Skipped(why) => return defect(format!("it did not run: {why}")),
        RunEnd::Run(run) => run,
    };
    let is_out_of_memory = run.ooms > ooms_without;
    match &run.record.verdict {
        Verdict::Passed if is_out_of_memory => FaultOutcome::Recovered,
        Verdict::Passed => FaultOutcome::Healed,
        Verdict::Failed { first, rest } | Verdict::FailedAsExpected { first, rest, .. } => {
            let all = || std::iter::once(first).chain(rest);
            if let Some(violation) = all().find(|violation| is_defect(violation, scenario)) {
                return defect(violation.to_string());
            }
            match all().find(|violation| violation.rule == Rule::DeviceFailure) {
                Some(violation) => reported(call, &violation.expected, &violation.seen),
                None if is_out_of_memory => FaultOutcome::OutOfMemory,
                None => FaultOutcome::Healed,
            }
        }
        Verdict::Skipped { reason, .. } | Verdict::Contended { reason } => {
            defect(format!("it did not run to its end: {reason}"))
        }
        Verdict::Interrupted => defect("it was interrupted"),
    }
}

/// Checks that an error names the call, and in another process that the violation names the
/// process.
fn reported(
    (process, call): (Option<&ProcessName>, DeviceCall),
    expected: &str,
    error: &str,
) -> FaultOutcome {
    match process {
        _ if !error.contains(call.name()) => {
            defect(format!("an error that does not name the call: {error}"))
        }
        Some(process) if !expected.contains(&format!("the process `{process}`")) => defect(
            format!("an error that does not name the process `{process}`: {error}"),
        ),
        Some(process) => FaultOutcome::NamedError {
            error: format!("in the process `{process}`: {error}"),
        },
        None => FaultOutcome::NamedError {
            error: error.to_owned(),
        },
    }
}

/// Returns whether a violation is a defect under injected failures. A retry of a policy without
/// progress is none, because the device failed without a reason. Ranks with different collectives
/// are none either: a rank whose device failed stops joining, and the run reports that the others
/// would hang.
fn is_defect(violation: &Violation, scenario: &Scenario) -> bool {
    match &violation.rule {
        Rule::Invariant(Invariant::RetryMakesProgress | Invariant::CollectivesMatch) => false,
        Rule::Invariant(invariant) => scenario
            .expect_violation
            .as_ref()
            .is_none_or(|violates| violates.value != *invariant),
        Rule::TimeLimit => true,
        Rule::Expectation
        | Rule::BetweenArms
        | Rule::ExpectedFailure
        | Rule::ExpectedViolation
        | Rule::DeviceFailure
        | Rule::Fault => false,
    }
}

#[cfg(test)]
mod tests;
