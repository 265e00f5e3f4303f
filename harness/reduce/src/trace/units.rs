//! Removes parts of a trace: [`leave_out`].

use std::collections::{BTreeMap, BTreeSet};

use harness_trace::trace::TraceEvent;

use super::candidate::Candidate;
use super::trial::Trial;
use super::{Case, Watch};
use crate::delta::{self, Flow};

/// Removes as many units as possible.
pub(super) fn leave_out(best: &mut Candidate, trial: &mut Trial<'_>, watch: &mut Watch<'_>) -> Flow {
    let keeps_last = trial.ends_with_failure();
    let (mut unit_of, count) = units(&best.case.events, keeps_last);
    delta::leave_out(count, &mut |range| {
        let candidate = best.without(|unit| range.contains(&unit), &unit_of);
        if !trial.accept(best, candidate, watch)? {
            return Flow::Continue(None);
        }
        let count;
        (unit_of, count) = units(&best.case.events, keeps_last);
        Flow::Continue(Some(count))
    })
}

/// Assigns each event to a unit and returns the number of units. A failing last event belongs to none.
///
/// A unit is an allocation with its free and its uses on other streams, both ends of a private pool's context, or any other
/// single operation.
fn units(events: &[TraceEvent], keeps_last: bool) -> (Vec<Option<usize>>, usize) {
    let (mut of_ids, mut of_pools) = (BTreeMap::new(), BTreeMap::new());
    let mut count = 0;
    let mut fresh = || {
        count += 1;
        count - 1
    };
    let last = events.len().saturating_sub(1);
    let unit = |(index, event): (usize, &TraceEvent)| {
        if keeps_last && index == last {
            return None;
        }
        Some(match *event {
            TraceEvent::Allocate { id, .. } | TraceEvent::Free { id } | TraceEvent::RecordStream { id, .. } => {
                *of_ids.entry(id).or_insert_with(&mut fresh)
            }
            TraceEvent::BeginPool(pool) => {
                let unit = fresh();
                of_pools.insert(pool.0, unit);
                unit
            }
            TraceEvent::EndPool(pool) => of_pools.remove(&pool.0).unwrap_or_else(&mut fresh),
            _ => fresh(),
        })
    };
    let unit_of = events.iter().enumerate().map(unit).collect();
    (unit_of, count)
}

/// The trace without operations that have no effect: peak resets, and frees and uses of dead blocks. Also returns the original
/// index of each event.
pub(super) fn settled(case: &Case) -> (Case, Vec<usize>) {
    let mut live = BTreeSet::new();
    let does_something = |event: &TraceEvent| match *event {
        TraceEvent::Allocate { id, .. } => live.insert(id),
        TraceEvent::Free { id } => live.remove(&id),
        TraceEvent::RecordStream { id, .. } => live.contains(&id),
        TraceEvent::ResetPeaks => false,
        _ => true,
    };
    let mut does_something = does_something;
    let kept = case.events.iter().enumerate().filter(|(_, event)| does_something(event));
    let (origins, events) = kept.map(|(index, &event)| (index, event)).unzip();
    (Case { events, ..case.clone() }, origins)
}
