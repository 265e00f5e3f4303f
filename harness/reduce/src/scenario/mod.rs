//! A scenario that fails, reduced to a small one that fails the same way: [`reduce`].
//!
//! The file is taken for a tree (`document`), so that names and comments of what is left stay. Steps are left out, loops get fewer iterations,
//! fields, list entries and settings go, sizes and the device become smaller (`passes`). Whether a smaller file still is a scenario, the check of
//! the language says; whether it fails the same way ([`Failure`]), a run does. What comes out says in its own words how it ends (`ending`), so
//! that it passes as a test for as long as it fails.

mod comments;
mod document;
mod ending;
mod engine;
mod failure;
mod loops;
mod passes;
mod search;
mod values;
mod writer;

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use harness_allocator::device::DeviceError;
use harness_language::error::FileError;
use harness_record::RunRecord;
use harness_scenario::{Scenario, Settings};

use self::document::{Document, Node};
pub use self::engine::{Engine, Simulated};
pub use self::failure::Failure;
use self::failure::{NoFailure, Wanted};
use self::search::Search;
use crate::Progress;
use crate::delta::Flow;

/// What is to be reduced.
#[derive(Clone, Copy, Debug)]
pub struct Given<'a> {
    /// The scenario's text.
    pub source: &'a str,
    /// Where it lies: its file name names it, and traces that it replays lie beside it.
    pub path: &'a Path,
    /// Only with this arm; the first one that fails, if not given.
    pub arm: Option<&'a str>,
    /// Which failures count.
    pub goal: Goal,
    /// Whether an expectation that is not met may come to other figures. With the same ones nothing goes that they come from.
    pub any_figures: bool,
    /// What it was reduced from, if that is something else than this file.
    pub origin: Option<&'a str>,
}

/// Which failures count.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[allow(missing_docs, reason = "the names say what they are")]
pub enum Goal {
    #[default]
    Any,
    /// A request that is refused.
    Oom,
    /// An always-checked invariant that does not hold.
    Invariant,
}

/// A scenario that came down to a small one.
#[derive(Clone, Debug, PartialEq)]
pub struct Reduced {
    /// The scenario. It was run, and ends as it says.
    pub text: String,
    /// How it fails.
    pub failure: Failure,
    /// The arm that fails.
    pub arm: String,
    /// The values of the matrix's parameters at which it fails.
    pub point: Vec<(String, String)>,
    /// How many steps the file had.
    pub steps_before: usize,
    /// How many it has.
    pub steps: usize,
    /// How often something smaller was run.
    pub runs: u64,
    /// Whether it was stopped before nothing more could be left out.
    pub is_stopped: bool,
}

/// A scenario that cannot be reduced.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the names say what they are")]
pub enum ReduceError {
    /// Correct the file.
    #[error(transparent)]
    Invalid(#[from] FileError),
    /// Nothing fails that is looked for. Give a scenario that fails.
    #[error("{}: {} on the simulated device, so there is nothing to reduce", .path.display(), passes_with(.arms, *.goal))]
    Passes {
        path: PathBuf,
        /// The arms that were run.
        arms: Vec<String>,
        /// What was looked for.
        goal: Goal,
    },
    /// Name an arm that it has.
    #[error("{}: the scenario has no allocator `{arm}`", .path.display())]
    NoSuchArm {
        path: PathBuf,
        /// What was asked for.
        arm: String,
        arms: Vec<String>,
    },
    /// Reduce it where it runs, by hand.
    #[error("{}: it does not run on the simulated device: {reason}", .path.display())]
    NotRun { path: PathBuf, reason: String },
    /// Raise the time limit of the step: how long something takes on this machine is no failure of the scenario that can be looked for again.
    #[error("{}: a step exceeds its time limit, which depends on this machine", .path.display())]
    TimeLimit { path: PathBuf },
    /// No device can be had.
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// Report it: what was reduced does not end as it says.
    #[error("{}: the reduced scenario does not end as it says", .path.display())]
    NotConfirmed { path: PathBuf },
}

fn passes_with(arms: &[String], goal: Goal) -> String {
    let what = match goal {
        Goal::Any => "it passes",
        Goal::Oom => "no request that should be served is refused",
        Goal::Invariant => "no invariant is violated",
    };
    format!("{what} with {}", arms.join(", "))
}

impl Goal {
    const fn is(self, failure: &Failure) -> bool {
        match self {
            Self::Any => true,
            Self::Oom => matches!(failure, Failure::Oom { .. }),
            Self::Invariant => matches!(failure, Failure::Invariant(..)),
        }
    }
}

/// Reduces a scenario as far as it goes, or until `watch`, which is told of each run, breaks it off.
///
/// # Errors
/// [`ReduceError`].
pub fn reduce(given: &Given<'_>, engine: &dyn Engine, watch: &mut dyn FnMut(&Progress) -> Flow) -> Result<Reduced, ReduceError> {
    let points = Scenario::parse_points(given.source, given.path, &Settings::new())?;
    let found = find(given, &points, engine)?;
    let steps_before = found.document.steps().len();
    let (point, arm) = (found.scenario.parameters.clone(), found.record.allocator.clone());
    let wanted = Wanted { failure: found.failure, any_figures: given.any_figures };
    let mut search = Search::new(engine, given.path, wanted.clone(), found.document, search::steps_of(&found.record), watch);
    let is_stopped = search.start(&found.scenario, &arm).is_break() || search.reduce().is_break();
    let (best, runs) = (search.best, search.runs);
    let file = given.path.file_name().unwrap_or_default().to_string_lossy();
    let origin = given.origin.map_or_else(|| format!("{steps_before} steps of {file}"), str::to_owned);
    let (document, failure) = ending::stated(&best, &wanted, &arm, given.path, engine, &origin)
        .ok_or_else(|| ReduceError::NotConfirmed { path: given.path.to_owned() })?;
    let (text, steps) = (writer::Written::of(&document).text, document.steps().len());
    Ok(Reduced { text, failure, arm, point, steps_before, steps, runs, is_stopped })
}

/// The first failure of a scenario.
struct Found {
    scenario: Scenario,
    record: RunRecord,
    failure: Failure,
    /// At that point of the matrix, without what says how the scenario ends.
    document: Document,
}

fn find(given: &Given<'_>, points: &[Scenario], engine: &dyn Engine) -> Result<Found, ReduceError> {
    let path = given.path.to_owned();
    let arms: Vec<String> = points.first().map_or_else(Vec::new, |point| point.allocators.iter().map(ToString::to_string).collect());
    if let Some(arm) = given.arm.filter(|arm| !arms.iter().any(|there| there == arm)) {
        return Err(ReduceError::NoSuchArm { path, arm: arm.to_owned(), arms });
    }
    let (mut ran, mut why_not) = (BTreeSet::new(), None);
    for point in points {
        let document = unstated(Document::parse(given.source, given.path)?, point);
        // Judged without what it says of its own end: one that fails as expected fails.
        let scenario = Scenario::parse(&writer::Written::of(&document).text, given.path)?;
        for record in engine.run(&scenario, &mut |_| Flow::Continue(()))? {
            if given.arm.is_some_and(|arm| arm != record.allocator) {
                continue;
            }
            match Failure::of(&record) {
                Ok(failure) if given.goal.is(&failure) => {
                    return Ok(Found { scenario: scenario.clone(), record, failure, document });
                }
                Ok(_) | Err(NoFailure::Passed) => drop(ran.insert(record.allocator)),
                Err(why) => why_not = why_not.or(Some(why)),
            }
        }
    }
    Err(match why_not.filter(|_| ran.is_empty()) {
        Some(NoFailure::NotRun(reason)) => ReduceError::NotRun { path, reason },
        Some(NoFailure::TimeLimit) => ReduceError::TimeLimit { path },
        _ => {
            let arms = arms.into_iter().filter(|arm| ran.contains(arm)).collect();
            ReduceError::Passes { path, arms, goal: given.goal }
        }
    })
}

/// The file at one point of its matrix, without what it says of how it ends.
fn unstated(mut document: Document, point: &Scenario) -> Document {
    document.remove("expected_to_fail");
    document.remove("expect_violation");
    document.remove("violates");
    let only = |(name, value): &(String, String)| (name.clone(), Node::List(vec![Node::Scalar(value.clone())]));
    if !point.parameters.is_empty() {
        document.set("matrix", Node::Map(point.parameters.iter().map(only).collect()));
    }
    document
}

#[cfg(test)]
mod tests;
