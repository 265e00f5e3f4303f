//! Simplifies a reduced trace: less memory, fewer streams, small and round sizes, fewer settings.

use harness_allocator::allocator::caching::Config;
use harness_allocator::device::StreamId;
use harness_allocator::device::sim::GRANULARITY;
use harness_allocator::units::Bytes;
use harness_trace::trace::TraceEvent;

use super::Watch;
use super::candidate::Candidate;
use super::trial::Trial;
use crate::delta::{self, Flow};

/// Finds the least memory with which the trace still fails the same way, by bisection.
pub(super) fn memory(best: &mut Candidate, trial: &mut Trial<'_>, watch: &mut Watch<'_>) -> Flow {
    let given = best.case.memory.0 / GRANULARITY.0;
    delta::least(0, given, &mut |units| {
        let mut candidate = best.clone();
        candidate.case.memory = Bytes(units * GRANULARITY.0);
        take(best, candidate, trial, watch)
    })
    .map_continue(drop)
}

/// Moves the work of each stream to the default stream.
pub(super) fn streams(best: &mut Candidate, trial: &mut Trial<'_>, watch: &mut Watch<'_>) -> Flow {
    let mut named: Vec<StreamId> = best.case.events.iter().filter_map(|event| stream_of(*event)).collect();
    named.sort_unstable();
    named.dedup();
    named.retain(|&stream| stream != StreamId::DEFAULT);
    for stream in named {
        let mut candidate = best.clone();
        for event in &mut candidate.case.events {
            if let TraceEvent::Allocate { stream: there, .. } | TraceEvent::RecordStream { stream: there, .. } = event
                && *there == stream
            {
                *there = StreamId::DEFAULT;
            }
        }
        trial.accept(best, candidate, watch)?;
    }
    Flow::Continue(())
}

const fn stream_of(event: TraceEvent) -> Option<StreamId> {
    match event {
        TraceEvent::Allocate { stream, .. } | TraceEvent::RecordStream { stream, .. } => Some(stream),
        _ => None,
    }
}

/// Makes sizes smaller and rounder, largest first.
pub(super) fn sizes(best: &mut Candidate, trial: &mut Trial<'_>, watch: &mut Watch<'_>) -> Flow {
    let mut sizes: Vec<(Bytes, u64)> = best
        .case
        .events
        .iter()
        .filter_map(|event| match *event {
            TraceEvent::Allocate { id, size, .. } => Some((size, id)),
            _ => None,
        })
        .collect();
    sizes.sort_unstable_by_key(|&(size, id)| (std::cmp::Reverse(size), id));
    for (size, id) in sizes {
        let mut now = size;
        delta::simpler_size(size, &mut |new| {
            // A round size may be larger and need more memory than before.
            let more = Bytes(new.saturating_sub(now).0.next_multiple_of(GRANULARITY.0));
            let mut with_more = resized(best, id, new);
            with_more.case.memory += more;
            let is_taken = trial.accept(best, resized(best, id, new), watch)? || (new > now && take(best, with_more, trial, watch)?);
            now = if is_taken { new } else { now };
            Flow::Continue(is_taken)
        })?;
    }
    Flow::Continue(())
}

/// Accepts the candidate with its own memory if it fails the same way.
fn take(best: &mut Candidate, candidate: Candidate, trial: &mut Trial<'_>, watch: &mut Watch<'_>) -> Flow<bool> {
    let fails = trial.fails_alike(&candidate, watch)?;
    if fails {
        *best = candidate;
    }
    Flow::Continue(fails)
}

fn resized(best: &Candidate, of: u64, new: Bytes) -> Candidate {
    let mut candidate = best.clone();
    for event in &mut candidate.case.events {
        if let TraceEvent::Allocate { id, size, .. } = event
            && *id == of
        {
            *size = new;
        }
    }
    candidate
}

/// Resets each setting to PyTorch's default.
pub(super) fn settings(best: &mut Candidate, trial: &mut Trial<'_>, watch: &mut Watch<'_>) -> Flow {
    for default in DEFAULTS {
        for is_other in [false, true] {
            let mut candidate = best.clone();
            default(if is_other { &mut candidate.other } else { &mut candidate.case.config });
            if candidate != *best {
                trial.accept(best, candidate, watch)?;
            }
        }
    }
    Flow::Continue(())
}

/// Each function resets one setting and those that depend on it.
const DEFAULTS: [fn(&mut Config); 6] = [
    |config| {
        (config.max_split_size, config.max_non_split_rounding) = (None, config.large_segment_size);
    },
    |config| config.roundup_power2_divisions = [0; 16],
    |config| config.garbage_collection_threshold = None,
    |config| config.memory_fraction = Config::default().memory_fraction,
    |config| config.expandable_segments = false,
    |config| {
        if config.max_split_size.is_none() {
            let Config { large_segment_size, max_non_split_rounding, .. } = Config::default();
            (config.large_segment_size, config.max_non_split_rounding) = (large_segment_size, max_non_split_rounding);
        }
    },
];
