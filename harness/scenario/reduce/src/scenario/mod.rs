//! Reduces a failing scenario to a small one that fails the same way: [`reduce`].
//!
//! The file is edited as a tree (`document`), which preserves names and comments. The passes
//! (`passes`) remove steps, iterations, fields, list entries and settings, and shrink sizes and the
//! device. The language's checker decides whether a smaller file is a valid scenario; a run decides
//! whether it fails the same way ([`Failure`]). The result declares its own failure (`ending`), so
//! it passes as a test while the failure persists.

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
use harness_scenario::{ParameterSettings, Scenario};

use self::document::{Document, Node};
pub use self::engine::{Engine, Simulated};
pub use self::failure::Failure;
use self::failure::{NoFailure, Wanted};
use self::search::Search;
use crate::{ReductionProgress, delta::Flow};

#[derive(Clone, Copy, Debug)]
pub struct Given<'a> {
    pub source: &'a str,
    /// The scenario's path. It gives the name, and traces are relative to it.
    pub path: &'a Path,
    /// Considers only this configuration. By default, the first one that fails.
    pub arm: Option<&'a str>,
    pub goal: Goal,
    /// True if a violated formula may have other figures. If not, the steps that produce the
    /// figures stay.
    pub any_figures: bool,
    /// The original source, if it is not this file.
    pub origin: Option<&'a str>,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Goal {
    #[default]
    Any,
    Oom,
    Invariant,
}

#[derive(Clone, Debug, PartialEq)]
pub struct Reduced {
    /// The scenario's text. It was run and ends as it declares.
    pub text: String,
    pub failure: Failure,
    pub arm: String,
    /// The failing values of the matrix parameters.
    pub point: Vec<(String, String)>,
    pub steps_before: usize,
    pub steps: usize,
    pub runs: u64,
    /// True if the caller stopped it before it was finished.
    pub is_stopped: bool,
}

#[derive(Debug, thiserror::Error)]
pub enum ReduceError {
    #[error(transparent)]
    Invalid(#[from] FileError),
    #[error(
        "{}: {} on the simulated device, so there is nothing to reduce",
        .path.display(),
        passes_with(.arms, *.goal),
    )]
    Passes {
        path: PathBuf,
        arms: Vec<String>,
        goal: Goal,
    },
    #[error("{}: the scenario has no allocator `{arm}`", .path.display())]
    NoSuchArm {
        path: PathBuf,
        arm: String,
        arms: Vec<String>,
    },
    #[error("{}: it does not run on the simulated device: {reason}", .path.display())]
    NotRun { path: PathBuf, reason: String },
    /// A time limit depends on this machine, so such a failure cannot be preserved. Raise the limit
    /// of the step.
    #[error("{}: a step exceeds its time limit, which depends on this machine", .path.display())]
    TimeLimit { path: PathBuf },
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// A bug in this program.
    #[error(
        "{}: the reduced scenario does not end as it declares; please report this",
        .path.display(),
    )]
    NotConfirmed { path: PathBuf },
}

fn passes_with(arms: &[String], goal: Goal) -> String {
    let what = match goal {
        Goal::Any => "it passes",
        Goal::Oom => "no request fails unexpectedly",
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

/// Reduces a scenario completely, or until `watch` stops it. Calls `watch` after each run.
pub fn reduce(
    given: &Given<'_>,
    engine: &dyn Engine,
    watch: &mut dyn FnMut(&ReductionProgress) -> Flow,
) -> Result<Reduced, ReduceError> {
    let points = Scenario::parse_points(given.source, given.path, &ParameterSettings::new())?;
    let found = find(given, &points, engine)?;
    let steps_before = found.document.steps().len();
    let (point, arm) = (
        found.scenario.parameters.clone(),
        found.record.allocator.clone(),
    );
    let wanted = Wanted {
        failure: found.failure,
        any_figures: given.any_figures,
    };
    let mut search = Search::new(
        engine,
        given.path,
        wanted.clone(),
        found.document,
        search::steps_of(&found.record),
        watch,
    );
    let is_stopped = search.start(&found.scenario, &arm).is_break() || search.reduce().is_break();
    let (best, runs) = (search.best, search.runs);
    let file = given.path.file_name().unwrap_or_default().to_string_lossy();
    let origin = given
        .origin
        .map_or_else(|| format!("{steps_before} steps of {file}"), str::to_owned);
    let (document, failure) = ending::stated(&best, &wanted, &arm, given.path, engine, &origin)
        .ok_or_else(|| ReduceError::NotConfirmed {
            path: given.path.to_owned(),
        })?;
    let (text, steps) = (writer::Written::of(&document).text, document.steps().len());
    Ok(Reduced {
        text,
        failure,
        arm,
        point,
        steps_before,
        steps,
        runs,
        is_stopped,
    })
}

struct Found {
    scenario: Scenario,
    record: RunRecord,
    failure: Failure,
    /// Uses one point of the matrix, without the declared failure.
    document: Document,
}

fn find(given: &Given<'_>, points: &[Scenario], engine: &dyn Engine) -> Result<Found, ReduceError> {
    let path = given.path.to_owned();
    let arms: Vec<String> = points.first().map_or_else(Vec::new, |point| {
        point.allocators.iter().map(ToString::to_string).collect()
    });
    if let Some(arm) = given
        .arm
        .filter(|arm| !arms.iter().any(|there| there == arm))
    {
        return Err(ReduceError::NoSuchArm {
            path,
            arm: arm.to_owned(),
            arms,
        });
    }
    let (mut ran, mut why_not) = (BTreeSet::new(), None);
    for point in points {
        let document = unstated(Document::parse(given.source, given.path)?, point);
        // The declared failure was removed, so a scenario that fails as declared counts as failing.
        let scenario = document.checked(given.path).1?;
        for record in engine.run(&scenario, &mut |_| Flow::Continue(()))? {
            if given.arm.is_some_and(|arm| arm != record.allocator) {
                continue;
            }
            match Failure::of(&record) {
                Ok(failure) if given.goal.is(&failure) => {
                    return Ok(Found {
                        scenario: scenario.clone(),
                        record,
                        failure,
                        document,
                    });
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
            ReduceError::Passes {
                path,
                arms,
                goal: given.goal,
            }
        }
    })
}

/// The file at one point of its matrix, without its declared failure.
fn unstated(mut document: Document, point: &Scenario) -> Document {
    document.remove("expected_to_fail");
    document.remove("expect_violation");
    document.remove("violates");
    let only = |(name, value): &(String, String)| {
        (name.clone(), Node::List(vec![Node::Scalar(value.clone())]))
    };
    if !point.parameters.is_empty() {
        document.set(
            "matrix",
            Node::Map(point.parameters.iter().map(only).collect()),
        );
    }
    document
}

#[cfg(test)]
mod tests;
