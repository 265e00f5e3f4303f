//! [`StepResult`]: the outcome of a step and everything it reports.

use std::collections::BTreeMap;

use harness_allocator::allocator::AllocatorError;
use harness_allocator::units::{Bytes, Nanos};
use harness_record::{
    Cause, CauseKind, FailedRequest, MemoryFigures, Outcome, ProcessFigures, Recovery, Table,
    causes,
};
use harness_scenario::{Expected, Position, ReportKey, Step};
use serde::{Deserialize, Serialize};

#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(crate) struct StepResult {
    pub(crate) outcome: Outcome,
    pub(crate) reports: BTreeMap<ReportKey, u64>,
    pub(crate) notes: Vec<String>,
    pub(crate) tables: Vec<Table>,
    pub(crate) unmet: Vec<Unmet>,
    pub(crate) failed_request: Option<FailedRequest>,
    pub(crate) size: Option<Bytes>,
    pub(crate) program: Option<MemoryFigures>,
    /// Those of its processes. A name goes before that of the step.
    pub(crate) programs: Vec<ProcessFigures>,
    /// The recovery record of a step with policies.
    pub(crate) recovery: Option<Recovery>,
}

impl From<Unmet> for StepResult {
    fn from(unmet: Unmet) -> Self {
        Self {
            unmet: vec![unmet],
            ..Self::default()
        }
    }
}

impl StepResult {
    pub(crate) fn with_note(note: String) -> Self {
        Self {
            notes: vec![note],
            ..Self::default()
        }
    }

    pub(crate) fn append(&mut self, other: Self) {
        self.notes.extend(other.notes);
        self.tables.extend(other.tables);
        self.unmet.extend(other.unmet);
    }

    /// The figures that the step reports. Only timed runs report times: in a checked run they
    /// include the checks.
    pub(crate) fn reports_with(&self, duration: Option<Nanos>) -> BTreeMap<ReportKey, u64> {
        let mut reports = self.reports.clone();
        match duration {
            Some(duration) => drop(reports.insert(ReportKey::Time, duration.0)),
            None => reports.retain(|key, _| !key.is_timed()),
        }
        reports
    }

    /// Judges a request or workload that was served. `request` names it.
    pub(crate) fn fits(
        &mut self,
        step: &Step,
        expected: Expected,
        request: impl Into<String>,
        seen: impl Into<String>,
    ) {
        if let Expected::Oom(_) = expected {
            self.unmet.push(Unmet::at(step, request, seen));
        }
    }

    /// Judges a request or workload that ran out of memory. `wanted` is the expectation of success,
    /// and what was seen instead.
    pub(crate) fn runs_out(
        &mut self,
        step: &Step,
        expected: Expected,
        note: String,
        wanted: (impl Into<String>, String),
        failed_request: Option<FailedRequest>,
    ) {
        self.outcome = Outcome::OutOfMemory;
        self.notes.push(note);
        match expected {
            Expected::Fits => self.unmet.push(Unmet::at(step, wanted.0, wanted.1)),
            Expected::Oom(Some(cause)) => {
                self.unmet
                    .extend(Unmet::other_cause(step, cause, failed_request.as_ref()))
            }
            Expected::Oom(None) | Expected::Any => {}
        }
        self.failed_request = failed_request;
    }

    /// Judges the end of a training or of an inference: `did` describes how far it came, `wanted`
    /// an OOM and a success.
    pub(crate) fn ends(
        &mut self,
        step: &Step,
        expected: Expected,
        wanted: [&str; 2],
        did: String,
        failed: Option<(AllocatorError, Option<FailedRequest>)>,
    ) {
        let Some((error, failed_request)) = failed else {
            return self.fits(step, expected, wanted[0], did);
        };
        let seen = format!("{did}, then {error}");
        self.runs_out(
            step,
            expected,
            seen.clone(),
            (wanted[1], seen),
            failed_request,
        );
    }
}

#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Unmet {
    pub(crate) at: Position,
    pub(crate) expected: String,
    pub(crate) seen: String,
}

impl Unmet {
    pub(crate) fn at(step: &Step, expected: impl Into<String>, seen: impl Into<String>) -> Self {
        Self {
            at: step.position,
            expected: expected.into(),
            seen: seen.into(),
        }
    }

    /// Checks that a failed request has the expected cause. Timed runs do not look for causes.
    fn other_cause(
        step: &Step,
        expected: CauseKind,
        failed_request: Option<&FailedRequest>,
    ) -> Option<Self> {
        let causes: Vec<CauseKind> = causes(failed_request?).iter().map(Cause::kind).collect();
        if causes.contains(&expected) {
            return None;
        }
        let names: Vec<String> = causes
            .iter()
            .map(|cause| format!("`{cause}` ({})", cause.about()))
            .collect();
        let seen = if names.is_empty() {
            "no cause that the figures confirm".to_owned()
        } else {
            names.join(", ")
        };
        Some(Self::at(
            step,
            format!("the cause `{expected}`: {}", expected.about()),
            seen,
        ))
    }
}
