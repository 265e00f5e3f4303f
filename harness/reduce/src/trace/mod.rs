//! Reducing a trace that runs out of memory to a small one that fails the same way: [`shrink`]; or one that violates an invariant:
//! [`shrink_violation`].
//!
//! A part that is left out is an allocation together with its free and its uses on other streams, so each smaller trace is a program that
//! could have been written. The device's memory shrinks along with the trace: of a hundred segments that are pinned alike, one tells as much.
//! Then streams, sizes and settings become simpler in the same manner.
//!
//! Each accepted step was replayed before. Nothing is random and no clock is read, so the same trace always comes down to the same one.

mod audited;
mod candidate;
mod scenario;
mod simpler;
mod trial;
mod units;

use std::collections::BTreeSet;
use std::ops::ControlFlow;
use std::path::Path;

use harness_allocator::allocator::caching::Config;
use harness_allocator::units::Bytes;
use harness_trace::trace::TraceEvent;

use self::candidate::Candidate;
pub use self::scenario::{NotAScenario, scenario};
pub use self::trial::Failure;
use self::trial::Trial;
use crate::Progress;
use crate::scenario::{self as scenarios, Engine, Given, ReduceError, Reduced};

/// A trace, the settings it runs under and the memory of its device.
#[derive(Clone, Debug, PartialEq)]
#[allow(missing_docs, reason = "the names say what they are")]
pub struct Case {
    pub events: Vec<TraceEvent>,
    pub config: Config,
    pub memory: Bytes,
}

/// What has to stay as it is.
#[derive(Clone, Debug, PartialEq)]
pub enum Goal {
    /// The last request that is refused stays refused, for the same [`Failure`]. Requests before it are served, but for those that were
    /// refused from the beginning.
    Oom,
    /// A request is refused under the case's settings or under these, and none under the others. Which of the two fails stays the same.
    ConfDiffers(Config),
}

/// A trace that came down to a small one.
#[derive(Clone, Debug, PartialEq)]
pub struct Shrunk {
    /// It ends with the refused request, where one is.
    pub case: Case,
    /// The settings that the trace was compared with, where it was.
    pub other: Option<Config>,
    /// How the request at the end fails.
    pub failure: Failure,
    /// Where `false`, the case's own settings serve everything and the others refuse the request.
    pub fails_under_its_own: bool,
    /// Requests in front of the last one that may be refused: they were from the beginning.
    pub may_fail: BTreeSet<u64>,
    /// Of each event, which one it was of the trace given, counted from 0.
    pub origins: Vec<usize>,
    /// Traces that were replayed.
    pub replays: u64,
    /// Whether it was stopped before nothing more could be left out.
    pub is_stopped: bool,
}

/// A trace that cannot be reduced.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[allow(missing_docs, reason = "the names say what they are")]
pub enum ShrinkError {
    /// Every request is served. Give less memory, or other settings.
    #[error("the trace does not run out of memory: every request is served in {memory}")]
    Fits { memory: Bytes },
    /// Give settings of which one makes the trace run out of memory.
    #[error("both settings end alike: {}", if *.both_fail { "the trace runs out of memory under either" } else { "every request is served under either" })]
    EndsAlike { both_fail: bool },
    /// Every invariant holds: there is nothing to look for.
    #[error("no invariant is violated while the trace is replayed in {memory}")]
    Holds { memory: Bytes },
    /// Correct the trace.
    #[error("the trace cannot be replayed: {0}")]
    Trace(String),
}

/// Reduces a trace that runs out of memory as far as it goes, or until `watch`, which is told of each replay, breaks it off.
///
/// Replays of a trace of *n* operations of which *k* are needed: some *k* · log *n*, of shorter and shorter traces.
///
/// # Errors
/// [`ShrinkError`].
pub fn shrink(case: Case, goal: &Goal, watch: &mut Watch<'_>) -> Result<Shrunk, ShrinkError> {
    let (case, origins) = units::settled(&case);
    let (start, trial) = Trial::new(case, origins, goal)?;
    let compares = matches!(goal, Goal::ConfDiffers(_));
    Ok(reduced(start, trial, compares, watch))
}

/// Reduces a trace that violates an always-checked invariant when a scenario replays it, to one that violates the same.
///
/// # Errors
/// [`ShrinkError`].
pub fn shrink_violation(case: Case, engine: &dyn Engine, watch: &mut Watch<'_>) -> Result<Shrunk, ShrinkError> {
    let (case, origins) = units::settled(&case);
    let (start, trial) = Trial::of_violation(case, origins, engine)?;
    Ok(reduced(start, trial, false, watch))
}

/// The scenario with a step for each operation of a reduced trace that violates an invariant, itself reduced: of what a replay does beside the
/// operations, what is not needed goes. `origin` says what it was reduced from.
///
/// # Errors
/// [`ReduceError::Passes`] where a replay violates the invariant, and the steps alone do not; else as [`scenarios::reduce`].
pub fn scenario_of_violation(
    shrunk: &Shrunk,
    origin: &str,
    comment: impl Fn(usize) -> Option<String>,
    engine: &dyn Engine,
    watch: &mut Watch<'_>,
) -> Result<Reduced, ReduceError> {
    let path = Path::new("scenario.yaml");
    let passes = || ReduceError::Passes { path: path.to_owned(), arms: vec!["caching".to_owned()], goal: scenarios::Goal::Invariant };
    let source = scenario(shrunk, origin, "fits", comment).map_err(|_| passes())?;
    let given = Given { source: &source, path, arm: None, goal: scenarios::Goal::Invariant, any_figures: false, origin: Some(origin) };
    scenarios::reduce(&given, engine, watch)
}

/// Is told how far it is, and may break it off.
pub type Watch<'a> = dyn FnMut(&Progress) -> ControlFlow<()> + 'a;

fn reduced(mut best: Candidate, mut trial: Trial<'_>, compares: bool, watch: &mut Watch<'_>) -> Shrunk {
    let done = reduce(&mut best, &mut trial, watch);
    let Trial { failure, own_fails: fails_under_its_own, replays, refused_before: may_fail, .. } = trial;
    let other = compares.then(|| best.other.clone());
    let Candidate { case, origins, .. } = best;
    Shrunk { case, other, failure, fails_under_its_own, may_fail, origins, replays, is_stopped: done.is_break() }
}

/// All passes, again and again until nothing more can be left out.
fn reduce(best: &mut Candidate, trial: &mut Trial<'_>, watch: &mut Watch<'_>) -> ControlFlow<()> {
    // First of all: what is left out afterwards might make a setting matter that did not.
    simpler::settings(best, trial, watch)?;
    loop {
        let before = best.case.events.len();
        units::leave_out(best, trial, watch)?;
        simpler::memory(best, trial, watch)?;
        simpler::streams(best, trial, watch)?;
        simpler::sizes(best, trial, watch)?;
        simpler::settings(best, trial, watch)?;
        if best.case.events.len() == before {
            return ControlFlow::Continue(());
        }
    }
}

#[cfg(test)]
mod tests;
