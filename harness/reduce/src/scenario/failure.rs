//! How a run failed: [`Failure`]. Two runs that have the same one failed the same way, whatever their sizes, names and lines are.

use std::fmt;

use harness_record::{Accounts, CauseKind, Invariant, Outcome, Rule, RunRecord, Verdict, Violation, causes};

/// See the module.
#[derive(Clone, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "the names say what they are")]
pub enum Failure {
    /// A request that should be served was refused.
    Oom {
        /// The first cause that the figures show, if they show one.
        cause: Option<CauseKind>,
        /// Whether it is in pieces, and more of them in the allocator than on the device.
        is_pinned: bool,
    },
    /// An always-checked invariant did not hold. What it expected, without figures.
    Invariant(Invariant, String),
    /// A formula did not hold: its text, and what its sides came to. Without the figures, the smallest program at all would often do.
    Formula {
        /// As the scenario writes it.
        text: String,
        /// What was seen of it.
        figures: String,
    },
    /// A step did something else than it should: what it should, and why a request was refused, where one was. Without figures.
    Step {
        expected: String,
        /// Of the request.
        cause: Option<CauseKind>,
    },
    /// The device or the allocator refused to go on, in the device's words without figures.
    Device(String),
}

/// The failure that is looked for.
#[derive(Clone, Debug)]
pub(super) struct Wanted {
    pub(super) failure: Failure,
    /// Whether a formula may come to anything else that does not hold.
    pub(super) any_figures: bool,
}

impl Wanted {
    /// How the run failed, where that is what is looked for.
    pub(super) fn in_run(&self, record: &RunRecord) -> Option<Failure> {
        Failure::of(record).ok().filter(|seen| match (&self.failure, seen) {
            (Failure::Formula { text, .. }, Failure::Formula { text: other, figures }) if self.any_figures => {
                text == other && is_computed(figures)
            }
            (wanted, seen) => wanted == seen,
        })
    }
}

/// Whether a formula came to something. One that cannot be computed, as where it divides by zero, fails otherwise.
fn is_computed(figures: &str) -> bool {
    figures.split_once(" = ").is_some_and(|(side, _)| !side.contains(": "))
}

/// Why a run is no failure that can be looked for again.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum NoFailure {
    Passed,
    /// It did not run, or not to its end; why.
    NotRun(String),
    /// A step took longer than it may on this machine.
    TimeLimit,
}

impl Failure {
    /// How this run failed.
    pub(super) fn of(record: &RunRecord) -> Result<Self, NoFailure> {
        match &record.verdict {
            Verdict::Passed => Err(NoFailure::Passed),
            Verdict::Failed { first, .. } | Verdict::FailedAsExpected { first, .. } => Self::of_violation(first, record),
            Verdict::Skipped { reason } | Verdict::Contended { reason } => Err(NoFailure::NotRun(reason.clone())),
            Verdict::Interrupted => Err(NoFailure::NotRun("it was interrupted".to_owned())),
        }
    }

    fn of_violation(first: &Violation, record: &RunRecord) -> Result<Self, NoFailure> {
        let step = record.steps.iter().find(|step| step.number == first.step);
        Ok(match first.rule {
            Rule::Invariant(invariant) => Self::Invariant(invariant, without_figures(&first.expected)),
            Rule::BetweenArms => Self::formula(first),
            Rule::Expectation if is_formula(&first.expected) => Self::formula(first),
            Rule::Expectation => {
                let step = step.filter(|step| step.outcome == Outcome::OutOfMemory);
                let shortage = step.and_then(|step| step.shortage.as_ref());
                let cause = shortage.and_then(|shortage| causes(shortage).first().map(|cause| cause.kind()));
                // What was refused as it should be, and for another cause, stays that.
                match step {
                    Some(_) if !first.expected.starts_with(OTHER_CAUSE) => {
                        let is_pinned =
                            cause == Some(CauseKind::Fragmented) && shortage.is_some_and(|shortage| most_is_cached(&shortage.accounts));
                        Self::Oom { cause, is_pinned }
                    }
                    _ => Self::Step { expected: without_figures(&first.expected), cause },
                }
            }
            Rule::DeviceFailure | Rule::Fault => Self::Device(without_figures(&first.seen)),
            Rule::TimeLimit => return Err(NoFailure::TimeLimit),
            Rule::ExpectedFailure | Rule::ExpectedViolation => return Err(NoFailure::Passed),
        })
    }

    /// What the sides of a formula come to stands in front of what is in them, where a side has to be computed; and what they come to is enough.
    fn formula(violation: &Violation) -> Self {
        let figures = violation.seen.split("; ").next().unwrap_or_default().to_owned();
        Self::Formula { text: violation.expected.clone(), figures }
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Oom { cause: Some(cause), .. } => write!(f, "a request runs out of memory: {}", cause.about()),
            Self::Oom { cause: None, .. } => f.write_str("a request runs out of memory"),
            Self::Invariant(invariant, _) => write!(f, "the invariant {invariant} does not hold: {}", invariant.promise()),
            Self::Formula { text, figures } => write!(f, "expected {text}, seen {figures}"),
            Self::Step { expected, cause: None } => write!(f, "expected {expected}, and it was not seen"),
            Self::Step { expected, cause: Some(cause) } => {
                write!(f, "expected {expected}, and a request runs out of memory: {}", cause.about())
            }
            Self::Device(words) => write!(f, "the device or the allocator fails: {words}"),
        }
    }
}

/// How the words about a request begin that was refused for another cause than expected.
const OTHER_CAUSE: &str = "the cause `";

/// Whether more is free in the allocator than on the device.
fn most_is_cached(accounts: &Accounts) -> bool {
    accounts.reserved.saturating_sub(accounts.active) > accounts.device.free
}

/// Whether what was expected is a formula of the scenario, and not words about a step.
fn is_formula(expected: &str) -> bool {
    expected.split_whitespace().any(|word| ["==", "!=", "<", "<=", ">", ">="].contains(&word))
        || ["==", "!=", "<=", ">="].iter().any(|comparison| expected.contains(comparison))
}

/// A sentence without what differs between a program and a smaller one: amounts, addresses and numbers of buffers.
fn without_figures(text: &str) -> String {
    const UNITS: [&str; 11] = ["B", "KiB", "MiB", "GiB", "TiB", "PiB", "ns", "µs", "ms", "s", "min"];
    let bare = |word: &str| word.trim_matches(|c: char| !c.is_alphanumeric()).to_owned();
    let is_word = |word: &&str| !bare(word).starts_with(|c: char| c.is_ascii_digit()) && !UNITS.contains(&bare(word).as_str());
    let words: Vec<String> = text.split_whitespace().filter(is_word).map(|word| word.replace(|c: char| c.is_ascii_digit(), "")).collect();
    words.join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn amounts_addresses_and_numbers_of_buffers_are_no_part_of_a_failure() {
        assert_eq!(without_figures("700 MiB to fit"), "to fit");
        assert_eq!(without_figures("kv[12] to be live"), "kv[] to be live");
        assert_eq!(without_figures("double free at 0x7f00, in 3 ms"), "double free at in");
    }

    #[test]
    fn a_formula_that_cannot_be_computed_came_to_nothing() {
        assert!(is_computed("churn.ooms = 3") && is_computed("reserved - allocated = 5 B"));
        assert!(!is_computed("`reserved / allocated` divides by zero: reserved = 0 B") && !is_computed("a.time was not reported"));
    }

    #[test]
    fn a_formula_is_told_from_words_about_a_step() {
        assert!(is_formula("eventually active == 0") && is_formula("a<=1GiB") && is_formula("reserved < 5 * allocated"));
        assert!(!is_formula("700 MiB to fit") && !is_formula("the cause `fragmented`: free memory is in pieces"));
    }
}
