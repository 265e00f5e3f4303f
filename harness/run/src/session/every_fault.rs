//! Every call of a scenario fails in its turn: [`every_fault`] runs it once to count the calls of the device that can fail, then once for each with
//! this call failing, as SQLite tests itself out of memory (<https://www.sqlite.org/testing.html#out_of_memory_testing>).
//!
//! What a scenario expects may well not hold where a call fails. What must hold however calls fail is that the invariants do, that contents are intact,
//! that nothing is left on the device, and that the run recovers, is out of memory, or ends with an error that names the call.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use harness_allocator::device::DeviceError;
use harness_allocator::device::faulty::{Calls, DeviceCall, Fault, Injector, Made, Numbered};
use harness_allocator::units::Bytes;
use harness_devices::DeviceSource;
use harness_exec::trials::each;
use harness_exec::trials::which::Which;
use harness_record::{FaultedArm, FaultedCase, FaultedEnd, FaultedRuns, Invariant, NotTried, Rule, RunRecord, Verdict, Violation};
use harness_scenario::Scenario;

use super::{ArmRun, Plan, kind_of, open};
use crate::run::{RunRequest, run_faulted};

/// A run in which a call failed may make so many times the calls of the run without, and [`MORE_CALLS`]. One that makes more does not end.
const TIMES_THE_CALLS: u64 = 10;
const MORE_CALLS: u64 = 1000;

/// How the runs are made.
#[allow(missing_docs, reason = "the names say what they are")]
pub struct Engine<'a> {
    pub plan: &'a Plan,
    /// On which devices.
    pub source: &'a DeviceSource,
    /// Which calls fail.
    pub which: Which,
    /// Runs at one time.
    pub jobs: usize,
    /// Set by somebody else when it should stop.
    pub stop: &'a AtomicBool,
    /// Told of how many runs are to come.
    pub begun: &'a (dyn Fn(usize) + Sync),
    /// Told after each run.
    pub progress: &'a (dyn Fn() + Sync),
}

/// The run of an arm without failures.
struct Baseline<'a> {
    arm: ArmRun<'a>,
    seed: u64,
    ran: Result<Ran, NotTried>,
}

struct Ran {
    record: RunRecord,
    calls: Vec<Made>,
    total: u64,
}

/// A run that is to be made.
struct Case<'a> {
    baseline: &'a Baseline<'a>,
    ran: &'a Ran,
    made: Made,
}

/// How a run with a failure ended, as it was seen.
enum Seen {
    /// To the end, or to a violation.
    Recorded(Box<RunRecord>),
    /// It could not begin.
    NotBegun(DeviceError),
    /// With a panic of this message.
    Panicked(String),
}

/// Lets every chosen call of every arm of a plan fail in its turn.
///
/// # Errors
/// [`DeviceError`] where no device can be opened.
pub fn every_fault(engine: &Engine<'_>) -> Result<FaultedRuns, DeviceError> {
    let arms: Vec<ArmRun<'_>> = engine.plan.arms().filter(|arm| arm.repetition == 0).collect();
    (engine.begun)(arms.len());
    let baselines = each(engine.jobs, &arms, engine.progress, |arm| engine.baseline(*arm))?;
    let cases: Vec<Case<'_>> = baselines.iter().flat_map(|baseline| engine.cases(baseline)).collect();
    (engine.begun)(cases.len());
    let ends = each(engine.jobs, &cases, engine.progress, |case| engine.try_case(case))?;
    let mut ends = ends.into_iter();
    let mut runs = FaultedRuns::default();
    for baseline in &baselines {
        let mine: Vec<Option<Vec<FaultedCase>>> = ends.by_ref().take(engine.cases(baseline).len()).collect();
        runs.left_out += mine.iter().filter(|end| end.is_none()).count();
        let calls = baseline.ran.as_ref().map_or(0, |ran| ran.calls.len());
        runs.arms.push(FaultedArm {
            scenario: baseline.arm.scenario.name.clone(),
            allocator: baseline.arm.allocator.to_string(),
            calls,
            chosen: engine.which.described(calls),
            cases: mine.into_iter().flatten().flatten().collect(),
            not_tried: baseline.ran.as_ref().err().cloned(),
        });
    }
    Ok(runs)
}

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
        let faults = Injector::new(&[], seed).logging();
        let record = match self.run_with(arm, seed, faults.clone())? {
            Ok(record) => record?,
            Err(why) => return Ok(Err(NotTried { why, failed: false })),
        };
        let not_tried = |why: String, failed| Ok(Err(NotTried { why, failed }));
        match &record.verdict {
            Verdict::Passed => {}
            Verdict::Failed { first, .. } => {
                let kind = kind_of(&record.device);
                let is_expected = arm.scenario.expected_to_fail.of(&record.allocator, kind).is_some();
                return not_tried(format!("it fails without a failure of the device: {first}"), !is_expected);
            }
            Verdict::FailedAsExpected { reason, .. } => return not_tried(format!("it fails by itself: {reason}"), false),
            Verdict::Skipped { reason } | Verdict::Contended { reason } => return not_tried(reason.clone(), false),
            Verdict::Interrupted => return not_tried("interrupted".to_owned(), false),
        }
        let calls = faults.calls_made().into_iter().filter(|made| !made.call.is_of_checks()).collect();
        Ok(Ok(Ran { record, calls, total: faults.total_calls() }))
    }

    /// Runs an arm on a fresh device with these faults; the inner errors: why it is skipped, and why it did not begin.
    fn run_with(
        &self,
        arm: &ArmRun<'_>,
        seed: u64,
        faults: Injector,
    ) -> Result<Result<Result<RunRecord, DeviceError>, String>, DeviceError> {
        let scenario = self.plan.sized(arm.scenario);
        let device = match open(self.source, &scenario, arm.allocator, None)? {
            Ok(device) => device,
            Err((_, why)) => return Ok(Err(why)),
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
        Ok(Ok(run_faulted(&request, device, arm.allocator.build(), faults)))
    }

    /// One case for each chosen call.
    fn cases<'b>(&self, baseline: &'b Baseline<'b>) -> Vec<Case<'b>> {
        let Ok(ran) = &baseline.ran else { return Vec::new() };
        let sizes: Vec<Bytes> = ran.calls.iter().map(|made| made.size.unwrap_or_default()).collect();
        let chosen = self.which.choose(&sizes).into_iter();
        chosen.filter_map(|number| Some(Case { baseline, ran, made: *ran.calls.get(number as usize - 1)? })).collect()
    }

    /// Lets one call fail, and where the allocator got memory all the same, the next of its kind too. `None` where the user interrupted.
    fn try_case(&self, case: &Case<'_>) -> Result<Option<Vec<FaultedCase>>, DeviceError> {
        if self.stop.load(Ordering::Relaxed) {
            return Ok(None);
        }
        let alone = self.try_count(case, 1)?;
        let is_healed = alone.end == FaultedEnd::Healed;
        let mut cases = vec![alone];
        if is_healed && case.made.call.gets_memory() {
            cases.push(self.try_count(case, 2)?);
        }
        Ok(Some(cases))
    }

    fn try_count(&self, case: &Case<'_>, count: u64) -> Result<FaultedCase, DeviceError> {
        let Case { baseline, ran, made } = case;
        let fault = Fault::failing(Calls::Of(made.call), Numbered { first: made.number, count, min_size: Bytes::ZERO });
        let faults = Injector::new(&[fault], baseline.seed).with_budget(ran.total * TIMES_THE_CALLS + MORE_CALLS);
        let run = catch_unwind(AssertUnwindSafe(|| self.run_with(&baseline.arm, baseline.seed, faults.clone())));
        let seen = match run {
            Err(panic) => Seen::Panicked(message(&*panic)),
            Ok(run) => match run? {
                Ok(Ok(record)) => Seen::Recorded(Box::new(record)),
                Ok(Err(error)) => Seen::NotBegun(error),
                Err(why) => Seen::NotBegun(DeviceError::Unavailable { what: "the device".to_owned(), why }),
            },
        };
        let end = match faults.struck_by(0) {
            (0, _) if !matches!(seen, Seen::Panicked(_)) => defect("the call was not made again, so that two runs of one scenario differ"),
            _ => judge(made.call, baseline.arm.scenario, &ran.record, &seen),
        };
        let times = if count == 1 { String::new() } else { format!(":{count}") };
        let reproduce = self.plan.reproduce(&baseline.arm, self.source, baseline.seed);
        Ok(FaultedCase {
            call: made.call.name().to_owned(),
            number: made.number,
            count,
            size: made.size,
            step: made.place.0,
            end,
            reproduce: format!("{reproduce} --fail {}:{}{times}", made.call, made.number),
        })
    }
}

/// Why a scenario is none for this.
fn not_for_this(scenario: &Scenario) -> Option<&'static str> {
    if !scenario.execs().is_empty() {
        return Some("its programs have GPUs of their own: `harness exec --every-fault` is for programs");
    }
    if !scenario.processes.is_empty() {
        return Some("its processes have devices of their own, whose calls are not counted");
    }
    if scenario.has_threads() {
        return Some("how the threads of its storm meet differs from run to run, and with it the calls of the device");
    }
    (!scenario.faults.is_empty()).then_some("it has faults of its own")
}

fn defect(why: impl Into<String>) -> FaultedEnd {
    FaultedEnd::Defect { why: why.into() }
}

fn message(panic: &(dyn std::any::Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().map(|text| (*text).to_owned()).or_else(|| panic.downcast_ref::<String>().cloned());
    text.unwrap_or_else(|| "a panic without a message".to_owned())
}

/// What came of a call that failed: a function of what was seen of the run, and of the run without.
fn judge(call: DeviceCall, scenario: &Scenario, without: &RunRecord, seen: &Seen) -> FaultedEnd {
    let record = match seen {
        Seen::Panicked(message) => return defect(format!("a panic: {message}")),
        Seen::NotBegun(error) => return told(call, &error.to_string()),
        Seen::Recorded(record) => record,
    };
    let is_out_of_memory = record.stats.num_ooms > without.stats.num_ooms;
    match &record.verdict {
        Verdict::Passed if is_out_of_memory => FaultedEnd::Recovered,
        Verdict::Passed => FaultedEnd::Healed,
        Verdict::Failed { first, rest } | Verdict::FailedAsExpected { first, rest, .. } => {
            let all = || std::iter::once(first).chain(rest);
            if let Some(violation) = all().find(|violation| is_defect(violation, scenario)) {
                return defect(violation.to_string());
            }
            match all().find(|violation| violation.rule == Rule::DeviceFailure) {
                Some(violation) => told(call, &violation.seen),
                None if is_out_of_memory => FaultedEnd::OutOfMemory,
                None => FaultedEnd::Healed,
            }
        }
        Verdict::Skipped { reason } | Verdict::Contended { reason } => defect(format!("it did not run to its end: {reason}")),
        Verdict::Interrupted => defect("it was interrupted"),
    }
}

/// An error has to say which call it is of.
fn told(call: DeviceCall, error: &str) -> FaultedEnd {
    if error.contains(call.name()) {
        FaultedEnd::Told { error: error.to_owned() }
    } else {
        defect(format!("an error that does not name the call: {error}"))
    }
}

/// Whether a violation is one however calls fail. That a retry of a policy makes progress is not: it asks a device that failed for no reason. Nor is that ranks
/// call the same collectives: one whose device failed joins no more, and that the others would hang is told.
fn is_defect(violation: &Violation, scenario: &Scenario) -> bool {
    match &violation.rule {
        Rule::Invariant(Invariant::RetryMakesProgress | Invariant::CollectivesMatch) => false,
        Rule::Invariant(invariant) => scenario.violates.as_ref().is_none_or(|violates| violates.value != *invariant),
        Rule::TimeLimit => true,
        Rule::Expectation | Rule::BetweenArms | Rule::ExpectedFailure | Rule::ExpectedViolation | Rule::DeviceFailure | Rule::Fault => {
            false
        }
    }
}

#[cfg(test)]
mod tests;
