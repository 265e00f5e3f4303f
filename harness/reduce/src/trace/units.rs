//! Leaving parts of a trace out: [`leave_out`].

use std::collections::{BTreeMap, BTreeSet};
use std::ops::ControlFlow;

use harness_trace::trace::TraceEvent;

use super::Case;
use super::candidate::Candidate;
use super::trial::Trial;
use crate::{Progress, delta};

/// Leaves out what can be left out.
pub(super) fn leave_out(
    best: &mut Candidate,
    trial: &mut Trial<'_>,
    watch: &mut dyn FnMut(&Progress) -> ControlFlow<()>,
) -> ControlFlow<()> {
    let keeps_last = trial.ends_with_failure();
    let (mut unit_of, count) = units(&best.case.events, keeps_last);
    delta::leave_out(count, &mut |range| {
        let candidate = best.without(|unit| range.contains(&unit), &unit_of);
        if !trial.accept(best, candidate, watch)? {
            return ControlFlow::Continue(None);
        }
        let count;
        (unit_of, count) = units(&best.case.events, keeps_last);
        ControlFlow::Continue(Some(count))
    })
}

/// Which unit each event belongs to, and how many units there are. Where the last event is the one that fails, it belongs to none.
///
/// A unit is an allocation with its free and its uses by other streams, the beginning and the end of a private pool's context, or any other
/// operation alone.
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

/// The trace without what does nothing: resets of peaks, frees and uses of what is not live. With it, which event each one was.
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
