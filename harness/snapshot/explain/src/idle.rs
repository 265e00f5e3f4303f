//! Streams that no longer allocate, although memory is cached for them and others reserve more. A
//! request uses only the cached memory of its own stream.

use std::collections::BTreeMap;

use harness_allocator::{stats::BlockState, units::Bytes};
use harness_trace::snapshot::{Action, Event};
use serde::Serialize;

use crate::{sites::SiteId, view::View};

/// Memory that is cached for a stream without further allocations.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct IdleStream {
    pub stream: u64,
    pub cached: Bytes,
    /// The site of the stream's last allocation.
    pub site: String,
    pub id: SiteId,
    pub last_allocated_at: u32,
    /// Memory that other streams reserved since.
    pub reserved_since: Bytes,
}

/// A stream's last allocation, and the first request of another stream since that the cache of that
/// stream did not serve. Both are event indices.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Idle {
    pub(crate) stream: u64,
    pub(crate) last: usize,
    pub(crate) next: usize,
    reserved_since: Bytes,
}

/// Takes linear time for a fixed number of streams.
pub(crate) fn streams(events: &[Event]) -> Vec<Idle> {
    let mut last: BTreeMap<u64, usize> = BTreeMap::new();
    for (index, event) in events
        .iter()
        .enumerate()
        .filter(|(_, event)| event.action == Action::Alloc)
    {
        last.insert(event.stream, index);
    }
    let idle = |(stream, last): (u64, usize)| {
        let later = || {
            events
                .iter()
                .enumerate()
                .skip(last + 1)
                .filter(|(_, event)| event.stream != stream)
        };
        let (first, _) =
            later().find(|(_, event)| event.action.reserves() || event.action == Action::Oom)?;
        let (next, _) = later().find(|(index, event)| {
            *index >= first && matches!(event.action, Action::Alloc | Action::Oom)
        })?;
        let reserved_since = later()
            .filter(|(_, event)| event.action.reserves())
            .map(|(_, event)| event.size)
            .sum();
        Some(Idle {
            stream,
            last,
            next,
            reserved_since,
        })
    };
    last.into_iter().filter_map(idle).collect()
}

/// The idle streams of a moment with cached memory in the default pool, most cached bytes first.
pub(crate) fn list(view: &View<'_>) -> Vec<IdleStream> {
    let before = view
        .moment
        .event
        .map_or(&[][..], |event| &view.history.events()[..=event]);
    let idle = streams(before).into_iter().map(
        |Idle {
             stream,
             last,
             reserved_since,
             ..
         }| {
            let own =
                view.state.segments.iter().filter(|segment| {
                    segment.stream == stream && segment.private_pool.is_default()
                });
            let free = own
                .flat_map(|segment| &segment.blocks)
                .filter(|block| block.state == BlockState::Inactive);
            let (cached, id) = (
                free.map(|block| block.size).sum(),
                view.sites.of_event(last),
            );
            IdleStream {
                stream,
                cached,
                site: view.sites.get(id).name.clone(),
                id,
                last_allocated_at: last as u32,
                reserved_since,
            }
        },
    );
    let mut idle: Vec<IdleStream> = idle.filter(|idle| idle.cached > Bytes::ZERO).collect();
    idle.sort_by_key(|idle| std::cmp::Reverse(idle.cached));
    idle
}
