//! Judges a run: expectations, invariants, time limits, device failures, and the final verdict.

use harness_allocator::device::{DeviceError, faulty::InjectedFault};
use harness_base::words::count;
use harness_record::{Invariant, NOT_JUDGED, Rule, Verdict, Violation};
use harness_scenario::steps::{Action, Step};
use harness_scenario::{Expectation, Located, PlannedFault, Position, ProcessName};

use super::{execute, runner::Runner};
use crate::faults::{Faults, planned_of};
use crate::rig::{Checks, Finding, Stop};
use crate::{context::RunContext, step_result::Unmet};

/// The rule that a device error violates, and the expectation that goes with it. It shows whether
/// to suspect the allocator or the machine.
pub(crate) const fn of_device(error: &DeviceError) -> (Rule, &'static str) {
    let rule = if matches!(error, DeviceError::NeverReturns { .. }) {
        Rule::TimeLimit
    } else {
        Rule::DeviceFailure
    };
    let expected = match error {
        DeviceError::DoubleFree { .. }
        | DeviceError::InvalidFree { .. }
        | DeviceError::InvalidAccess { .. } => {
            "the allocator to hand out and free only memory that is allocated on the device"
        }
        DeviceError::HostMemory { .. } => "enough host memory",
        DeviceError::HostRange { .. } => "copies to fit into their host memory",
        DeviceError::UnknownHandle { .. } | DeviceError::NotReady(_) => {
            "streams and events to be used only while they exist"
        }
        DeviceError::Race { .. } | DeviceError::InUse { .. } | DeviceError::Corrupted { .. } => {
            "memory to hold what was written"
        }
        DeviceError::OutOfMemory { .. } => "memory for the harness's own needs",
        DeviceError::NeverReturns { .. } => "every wait to end",
        DeviceError::Library { .. } => "the library call to succeed",
        DeviceError::Driver { .. } | DeviceError::Unavailable { .. } => {
            "the driver call to succeed"
        }
    };
    (rule, expected)
}

fn not_injected(planned: &PlannedFault, matching: u64) -> String {
    match (matching, planned.fault.skip) {
        (0, _) => "it was not reached: the run made no matching call".to_owned(),
        (made, skip) if made <= skip => {
            let who = planned.process.as_ref().map_or_else(
                || "the run".to_owned(),
                |process| format!("the process `{process}`"),
            );
            format!(
                "it was not reached: {who} made {}, and the fault skips the first {skip}",
                count(made, "matching call")
            )
        }
        (made, _) => format!(
            "the random draw selected none of {}",
            count(made, "matching call")
        ),
    }
}

impl Runner<'_, '_> {
    pub(super) fn has_health_checks(&self) -> bool {
        self.checks != Checks::Timing && self.request.scenario.health_check.is_some()
    }

    /// Counts a finished step or operation, and runs a full check every N of them.
    pub(super) fn check_health(&mut self, ctx: &mut RunContext) -> Result<(), Stop> {
        let Some(every) = self
            .request
            .scenario
            .health_check
            .filter(|_| self.has_health_checks())
        else {
            return Ok(());
        };
        self.operations += 1;
        if !self.operations.is_multiple_of(every) {
            return Ok(());
        }
        ctx.verify_live()?;
        ctx.verify_storms()?;
        ctx.rig.check_health()
    }

    /// Records an exceeded time limit, unless the run has failed for another reason. `None` is the
    /// cleanup after the last step.
    pub(super) fn check_time(&mut self, step: Option<&Step>) {
        if self.violations.is_empty()
            && !self.interrupted
            && let Some(overrun) = self.observer.control.overrun()
        {
            self.violate(
                step.map(|step| step.position),
                Rule::TimeLimit,
                overrun.expected(),
                overrun.seen(),
            );
        }
    }

    fn violate(&mut self, at: Option<Position>, rule: Rule, expected: String, seen: String) {
        let at = at.map(|at| self.request.scenario.place(at));
        self.violations.push(Violation {
            step: self.number,
            at,
            rule,
            expected,
            seen,
        });
    }

    /// Checks the pending `eventually` expectations and drops those that hold. An `eventually` step
    /// adds its own first.
    pub(super) fn check_awaited(&mut self, ctx: &mut RunContext, step: &Step) {
        if let Action::Eventually(eventually) = &step.action {
            let is_new = |expectation: &&Located<Expectation>| {
                !self.awaited.iter().any(|other| other.at == expectation.at)
            };
            let new: Vec<_> = eventually.0.iter().filter(is_new).cloned().collect();
            self.awaited.extend(new);
        }
        for expectation in std::mem::take(&mut self.awaited) {
            match execute::check(ctx, &expectation) {
                Ok(None) => {}
                Ok(Some(_)) => self.awaited.push(expectation),
                Err(stop) => self.stop(stop, Some(step)),
            }
        }
    }

    /// At the end of the run, reports the `eventually` expectations that never held.
    pub(super) fn judge_awaited(&mut self, ctx: &mut RunContext) {
        for expectation in std::mem::take(&mut self.awaited) {
            if let Ok(Some(unmet)) = execute::check(ctx, &expectation) {
                let (expected, seen) = (
                    format!("eventually {}", unmet.expected),
                    format!("at the end {}", unmet.seen),
                );
                self.unmet(
                    Unmet {
                        expected,
                        seen,
                        ..unmet
                    },
                    &mut Vec::new(),
                );
            }
        }
    }

    /// Judges the loops that a failed run left early, because their leaks may be the cause.
    pub(super) fn judge_open_loops(&mut self, ctx: &mut RunContext) {
        if self.interrupted {
            return;
        }
        for (_, watch) in std::mem::take(&mut self.watches) {
            let unmet = watch
                .judge(ctx)
                .map(|found| found.unmet)
                .unwrap_or_default();
            unmet
                .into_iter()
                .for_each(|unmet| self.unmet(unmet, &mut Vec::new()));
        }
    }

    pub(super) fn check_invariants(
        &mut self,
        ctx: &mut RunContext,
        step: &Step,
        notes: &mut Vec<String>,
    ) {
        for invariant in &self.request.scenario.invariants {
            match execute::check(ctx, invariant) {
                Ok(unmet) => unmet.into_iter().for_each(|unmet| self.unmet(unmet, notes)),
                Err(stop) => return self.stop(stop, Some(step)),
            }
        }
    }

    pub(super) fn stop(&mut self, stop: Stop, step: Option<&Step>) {
        match stop {
            // If the user did not interrupt, the step exceeded its time limit; `check_time` reports
            // that.
            Stop::Interrupted => self.interrupted = self.observer.control.is_interrupted(),
            Stop::Violated(findings) => findings
                .into_iter()
                .for_each(|finding| self.find(finding, step)),
            Stop::Process {
                rule,
                expected,
                seen,
                fault,
            } => {
                self.failed(
                    step,
                    rule,
                    expected,
                    seen,
                    fault
                        .as_ref()
                        .map(|(process, fault)| (Some(process), *fault)),
                );
            }
            Stop::Device(error) => {
                let fault = self
                    .faults
                    .as_ref()
                    .and_then(|faults| faults.main().cause_of(&error));
                let (rule, expected) = of_device(&error);
                self.failed(
                    step,
                    rule,
                    expected.to_owned(),
                    error.to_string(),
                    fault.map(|fault| (None, fault)),
                );
            }
        }
    }

    /// Records a failure.
    fn failed(
        &mut self,
        step: Option<&Step>,
        rule: Rule,
        expected: String,
        seen: String,
        fault: Option<(Option<&ProcessName>, usize)>,
    ) {
        let planned = fault
            .and_then(|(process, fault)| planned_of(self.request.scenario, process).nth(fault));
        self.ended_by = self.ended_by.or(planned.map(|(place, _)| place));
        self.violate(step.map(|step| step.position), rule, expected, seen);
    }

    pub(super) fn injected_calls(&self) -> Vec<String> {
        let words = |process: Option<&ProcessName>, injected: &InjectedFault| {
            let planned = planned_of(self.request.scenario, process).nth(injected.fault);
            let whose =
                planned.map_or_else(|| "injected".to_owned(), |(_, planned)| planned.to_string());
            let inside = process.map_or_else(String::new, |process| {
                format!("in the process `{process}` ")
            });
            format!("{whose}: {inside}{injected}")
        };
        let all = self.faults.iter().flat_map(Faults::all);
        all.flat_map(|(process, faults)| {
            faults
                .take_injected()
                .iter()
                .map(|injected| words(process, injected))
                .collect::<Vec<_>>()
        })
        .collect()
    }

    /// Reports faults that failed no call, and faults that should have ended the run but did not.
    fn judge_faults(&mut self) {
        let Some(faults) = self
            .faults
            .clone()
            .filter(|_| self.checks != Checks::Timing)
        else {
            return;
        };
        let scenario = self.request.scenario;
        for (process, faults) in faults.all() {
            for (fault, (place, planned)) in planned_of(scenario, process).enumerate() {
                let (injected, matching) = faults.injected_by(fault);
                let (expected, seen) = if injected == 0 {
                    (
                        format!("{planned} to strike a call of {}", planned.fault.calls),
                        not_injected(planned, matching),
                    )
                } else if planned.ends_run && self.ended_by != Some(place) {
                    (
                        format!("the run to end with the error of {planned}"),
                        "it continued to its end".to_owned(),
                    )
                } else {
                    continue;
                };
                self.violate(planned.position(), Rule::Fault, expected, seen);
            }
        }
    }

    pub(super) fn find(&mut self, finding: Finding, step: Option<&Step>) {
        let Finding {
            invariant,
            expected,
            seen,
        } = finding;
        self.violate(
            step.map(|step| step.position),
            Rule::Invariant(invariant),
            expected,
            seen,
        );
    }

    /// Records a failed expectation: a violation, or only a note on the step if the run is
    /// observed.
    pub(super) fn unmet(&mut self, unmet: Unmet, notes: &mut Vec<String>) {
        let Unmet { expected, seen, at } = unmet;
        if self.observer.only_observed {
            return notes.push(format!(
                "{NOT_JUDGED}line {} expects {expected}; seen: {seen}",
                at.line
            ));
        }
        self.violate(Some(at), Rule::Expectation, expected, seen);
    }

    /// Returns whether all violations so far are expected by `expect_violation:`.
    pub(super) fn only_expected_violations(&self) -> bool {
        let expected = self
            .request
            .scenario
            .expect_violation
            .as_ref()
            .map(|violates| Rule::Invariant(violates.value));
        self.violations
            .iter()
            .all(|violation| Some(&violation.rule) == expected.as_ref())
    }

    /// Returns whether other processes on the device could have caused all violations so far.
    pub(super) fn only_disturbable_violations(&self) -> bool {
        self.violations
            .iter()
            .all(|violation| match &violation.rule {
                Rule::Expectation => true,
                Rule::Invariant(invariant) => matches!(
                    invariant,
                    Invariant::AccountsAreOrdered
                        | Invariant::DeviceUsedFollowsReserved
                        | Invariant::WholeLimitFitsAtTheEnd
                ),
                Rule::BetweenArms
                | Rule::ExpectedFailure
                | Rule::ExpectedViolation
                | Rule::DeviceFailure
                | Rule::TimeLimit
                | Rule::Fault => false,
            })
    }

    pub(super) fn verdict(&mut self) -> Verdict {
        if self.interrupted {
            return Verdict::Interrupted;
        }
        if let Some(contention) = self
            .contention
            .take()
            .filter(|_| !self.violations.is_empty() && self.only_disturbable_violations())
        {
            return Verdict::Contended { reason: contention };
        }
        // The run ended with the error of a fault that should end it, and with no other violation.
        let planned = self
            .ended_by
            .and_then(|fault| self.request.scenario.faults.get(fault));
        if planned.is_some_and(|planned| planned.ends_run) && self.violations.len() == 1 {
            self.violations.clear();
        }
        if self.violations.is_empty() {
            self.judge_faults();
        }
        if let Some(violates) = &self.request.scenario.expect_violation {
            // A timed run does not look for violations.
            if self.violations.is_empty()
                && self.checks != Checks::Timing
                && !self.observer.only_observed
            {
                let expected = format!(
                    "the run to violate `{}`: {} must not hold",
                    violates.value,
                    violates.value.promise()
                );
                self.violate(
                    Some(violates.at),
                    Rule::ExpectedViolation,
                    expected,
                    "it was never violated".to_owned(),
                );
            } else if self.only_expected_violations() {
                return Verdict::Passed;
            }
        }
        let mut violations = std::mem::take(&mut self.violations).into_iter();
        match violations.next() {
            None => Verdict::Passed,
            Some(first) => Verdict::Failed {
                first,
                rest: violations.collect(),
            },
        }
    }
}
