//! Identifies how a run failed: [`Failure`]. Equal failures can differ in sizes, names and lines.

use std::fmt;

use harness_record::{
    Accounts, CauseKind, FailedRequest, Invariant, Outcome, Rule, RunRecord, Verdict, Violation,
    causes,
};

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Failure {
    /// A request that should succeed failed. Pinned memory is fragmented and mostly in the
    /// allocator, not on the device.
    Oom {
        cause: Option<CauseKind>,
        is_pinned: bool,
    },
    /// An always-checked invariant was violated. Contains its expectation without figures.
    Invariant(Invariant, String),
    /// A formula was false. Its figures are included, because otherwise the smallest program would
    /// often be accepted.
    Formula { text: String, figures: String },
    /// A step did not meet its expectation. Contains the expectation without figures, and the cause
    /// of a failed request.
    Step {
        expected: String,
        cause: Option<CauseKind>,
    },
    /// The device or the allocator reported an error. Contains its words without figures.
    Device(String),
}

#[derive(Clone, Debug)]
pub(super) struct Wanted {
    pub(super) failure: Failure,
    /// True if other figures that violate the formula are also accepted.
    pub(super) any_figures: bool,
}

impl Wanted {
    /// Returns how the run failed, if it matches.
    pub(super) fn in_run(&self, record: &RunRecord) -> Option<Failure> {
        Failure::of(record)
            .ok()
            .filter(|seen| match (&self.failure, seen) {
                (
                    Failure::Formula { text, .. },
                    Failure::Formula {
                        text: other,
                        figures,
                    },
                ) if self.any_figures => text == other && is_computed(figures),
                (wanted, seen) => wanted == seen,
            })
    }
}

/// Returns true if a formula was evaluated. A formula that cannot be evaluated, for example after
/// division by zero, fails differently.
fn is_computed(figures: &str) -> bool {
    figures
        .split_once(" = ")
        .is_some_and(|(side, _)| !side.contains(": "))
}

/// Why a run has no failure that can be preserved.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum NoFailure {
    Passed,
    /// It did not run to its end. Contains the reason.
    NotRun(String),
    /// A step exceeded its time limit on this machine.
    TimeLimit,
}

impl Failure {
    pub(super) fn of(record: &RunRecord) -> Result<Self, NoFailure> {
        match &record.verdict {
            Verdict::Passed => Err(NoFailure::Passed),
            Verdict::Failed { first, .. } | Verdict::FailedAsExpected { first, .. } => {
                Self::of_violation(first, record)
            }
            Verdict::Skipped { reason, .. } | Verdict::Contended { reason } => {
                Err(NoFailure::NotRun(reason.clone()))
            }
            Verdict::Interrupted => Err(NoFailure::NotRun("it was interrupted".to_owned())),
        }
    }

    fn of_violation(first: &Violation, record: &RunRecord) -> Result<Self, NoFailure> {
        let step = record.steps.iter().find(|step| step.number == first.step);
        Ok(match first.rule {
            Rule::Invariant(invariant) => {
                Self::Invariant(invariant, without_figures(&first.expected))
            }
            Rule::BetweenArms => Self::formula(first),
            Rule::Expectation if is_formula(&first.expected) => Self::formula(first),
            Rule::Expectation => {
                let step = step.filter(|step| step.outcome == Outcome::OutOfMemory);
                let failed_request = step.and_then(|step| step.failed_request.as_ref());
                let cause = failed_request.and_then(|failed_request| {
                    causes(failed_request).first().map(|cause| cause.kind())
                });
                // A request that failed as expected, but for another cause, keeps that failure.
                match step {
                    Some(_) if !first.expected.starts_with(OTHER_CAUSE) => {
                        let most_is_cached =
                            |FailedRequest {
                                 accounts:
                                     Accounts {
                                         reserved,
                                         active,
                                         device,
                                         ..
                                     },
                                 ..
                             }: &FailedRequest| {
                                reserved.saturating_sub(*active) > device.free
                            };
                        let is_pinned = cause == Some(CauseKind::Fragmented)
                            && failed_request.is_some_and(most_is_cached);
                        Self::Oom { cause, is_pinned }
                    }
                    _ => Self::Step {
                        expected: without_figures(&first.expected),
                        cause,
                    },
                }
            }
            Rule::DeviceFailure | Rule::Fault => Self::Device(without_figures(&first.seen)),
            Rule::TimeLimit => return Err(NoFailure::TimeLimit),
            Rule::ExpectedFailure | Rule::ExpectedViolation => return Err(NoFailure::Passed),
        })
    }

    /// If a side needs evaluation, its result precedes the values of its terms. The result is
    /// sufficient.
    fn formula(violation: &Violation) -> Self {
        let figures = violation
            .seen
            .split("; ")
            .next()
            .unwrap_or_default()
            .to_owned();
        Self::Formula {
            text: violation.expected.clone(),
            figures,
        }
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Oom {
                cause: Some(cause), ..
            } => write!(f, "a request runs out of memory: {}", cause.about()),
            Self::Oom { cause: None, .. } => f.write_str("a request runs out of memory"),
            Self::Invariant(invariant, _) => write!(
                f,
                "the invariant {invariant} does not hold: {}",
                invariant.promise()
            ),
            Self::Formula { text, figures } => write!(f, "expected {text}, seen {figures}"),
            Self::Step {
                expected,
                cause: None,
            } => write!(f, "expected {expected}, which did not happen"),
            Self::Step {
                expected,
                cause: Some(cause),
            } => {
                write!(
                    f,
                    "expected {expected}, but a request runs out of memory: {}",
                    cause.about()
                )
            }
            Self::Device(words) => write!(f, "the device or the allocator fails: {words}"),
        }
    }
}

/// The start of a message about a request that failed for an unexpected cause.
const OTHER_CAUSE: &str = "the cause `";

/// Returns true if the expectation is a formula of the scenario rather than a sentence about a
/// step.
fn is_formula(expected: &str) -> bool {
    expected
        .split_whitespace()
        .any(|word| ["==", "!=", "<", "<=", ">", ">="].contains(&word))
        || ["==", "!=", "<=", ">="]
            .iter()
            .any(|comparison| expected.contains(comparison))
}

/// Removes amounts, addresses and buffer numbers, which differ between a program and a smaller one.
fn without_figures(text: &str) -> String {
    const UNITS: [&str; 11] = [
        "B", "KiB", "MiB", "GiB", "TiB", "PiB", "ns", "µs", "ms", "s", "min",
    ];
    let bare = |word: &str| word.trim_matches(|c: char| !c.is_alphanumeric()).to_owned();
    let is_word = |word: &&str| {
        !bare(word).starts_with(|c: char| c.is_ascii_digit())
            && !UNITS.contains(&bare(word).as_str())
    };
    let words: Vec<String> = text
        .split_whitespace()
        .filter(is_word)
        .map(|word| word.replace(|c: char| c.is_ascii_digit(), ""))
        .collect();
    words.join(" ")
}

#[cfg(test)]
mod tests;
