//! Reduces a trace that runs out of memory ([`shrink`]) or violates an invariant
//! ([`shrink_violation`]) to a small one that fails the same way.
//!
//! A unit of removal is an allocation with its free and its uses on other streams, so every
//! candidate is a possible program. The device memory shrinks with the trace: one pinned segment
//! explains as much as a hundred. Then streams, sizes and settings are simplified the same way.
//!
//! Every accepted step is verified by a replay. Reduction uses no randomness and no clock, so the
//! same trace always gives the same result.

mod audited;
mod failure;
mod scenario;
mod search;

use std::{collections::BTreeSet, path::Path};

use harness_allocator::{allocator::caching::Config, units::Bytes};
use harness_trace::trace::TraceEvent;

pub use self::failure::TraceFailure;
pub use self::scenario::{NotAScenario, scenario};
use self::search::Search;
use crate::Watch;
use crate::scenario::{self as scenarios, Engine, Given, ReduceError, Reduced};

#[derive(Clone, Debug, PartialEq)]
pub struct TraceCase {
    pub events: Vec<TraceEvent>,
    pub config: Config,
    pub memory: Bytes,
}

#[derive(Clone, Debug, PartialEq)]
pub enum TraceGoal {
    /// The last failed request keeps failing with the same [`TraceFailure`]. Earlier ones succeed,
    /// unless they failed in the original.
    Oom,
    /// A request fails with the case's settings or with these, but not with both. The failing side
    /// stays the same.
    ConfDiffers(Box<Config>),
}

#[derive(Clone, Debug, PartialEq)]
pub struct Shrunk {
    /// It ends with the failed request, if there is one.
    pub case: TraceCase,
    /// The settings to compare with, if any.
    pub other: Option<Config>,
    pub failure: TraceFailure,
    /// If `false`, the trace succeeds with the case's settings and fails with the others.
    pub fails_under_its_own: bool,
    /// Earlier requests that may fail, because they failed in the original.
    pub may_fail: BTreeSet<u64>,
    /// The index of each event in the original trace, counted from 0.
    pub origins: Vec<usize>,
    pub replays: u64,
    /// True if the caller stopped it before it was finished.
    pub is_stopped: bool,
}

impl Shrunk {
    fn new(case: TraceCase, failure: TraceFailure, origins: Vec<usize>) -> Self {
        Self {
            case,
            other: None,
            failure,
            fails_under_its_own: true,
            may_fail: BTreeSet::new(),
            origins,
            replays: 0,
            is_stopped: false,
        }
    }
}

#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum ShrinkError {
    /// Every request succeeds. Use less memory or other settings.
    #[error("the trace does not run out of memory: every request succeeds with {memory}")]
    Fits { memory: Bytes },
    #[error("both settings have the same outcome: {}", if *.both_fail { "the trace runs out of \
         memory with either" } else { "every request succeeds with either" })]
    EndsAlike { both_fail: bool },
    #[error("no invariant is violated while the trace is replayed in {memory}")]
    Holds { memory: Bytes },
    #[error("the trace cannot be replayed: {0}")]
    Trace(String),
}

/// Reduces a trace that runs out of memory completely, or until `watch` stops it. Calls `watch`
/// after each replay.
///
/// If *k* of *n* operations are needed, this takes about *k* · log *n* replays of ever shorter
/// traces.
pub fn shrink(
    case: TraceCase,
    goal: &TraceGoal,
    watch: &mut Watch<'_>,
) -> Result<Shrunk, ShrinkError> {
    Ok(Search::of_oom(case, goal, watch)?.finish())
}

/// Reduces a trace that violates an always-checked invariant when a scenario replays it.
pub fn shrink_violation(
    case: TraceCase,
    engine: &dyn Engine,
    watch: &mut Watch<'_>,
) -> Result<Shrunk, ShrinkError> {
    Ok(Search::of_violation(case, engine, watch)?.finish())
}

/// Converts a reduced trace that violates an invariant to a scenario with one step per operation,
/// and reduces that scenario too. `origin` describes the original. Fails with
/// [`ReduceError::Passes`] if the steps do not violate the invariant although a replay does; else
/// as [`scenarios::reduce`].
pub fn scenario_of_violation(
    shrunk: &Shrunk,
    origin: &str,
    comment: impl Fn(usize) -> Option<String>,
    engine: &dyn Engine,
    watch: &mut Watch<'_>,
) -> Result<Reduced, ReduceError> {
    let path = Path::new("scenario.yaml");
    let passes = || ReduceError::Passes {
        path: path.to_owned(),
        arms: vec!["caching".to_owned()],
        goal: scenarios::Goal::Invariant,
    };
    let source = scenario(shrunk, origin, "fits", comment).map_err(|_| passes())?;
    let given = Given {
        source: &source,
        path,
        arm: None,
        goal: scenarios::Goal::Invariant,
        any_figures: false,
        origin: Some(origin),
    };
    scenarios::reduce(&given, engine, watch)
}

#[cfg(test)]
mod tests;
