//! Frees that waited for other streams.

use std::cmp::Reverse;

use harness_allocator::{stats::BlockState, units::Bytes};
use harness_trace::snapshot::Action;
use serde::Serialize;

use crate::{sites::SiteId, state::StateOrigin, view::View};

const LISTED: usize = 20;

/// The time between a block's free and its reuse.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct FreeWait {
    pub address: u64,
    /// The block's size. For completed waits, the requested size.
    pub size: Bytes,
    pub site: String,
    pub id: SiteId,
    pub freed_at: Option<u32>,
    /// The event that completed the free. `None` while the block waits.
    pub completed_at: Option<u32>,
    pub events: u32,
    /// Microseconds of the wait, on the recording's clock.
    pub time_us: Option<u64>,
}

/// Unfinished waits, then the longest finished ones by bytes times events. Those that end with the
/// next event do not count.
pub(crate) fn list(view: &View<'_>) -> Vec<FreeWait> {
    let blocks = view
        .state
        .segments
        .iter()
        .flat_map(|segment| &segment.blocks);
    let pending = blocks.filter(|block| block.state == BlockState::PendingFree);
    let mut waits: Vec<FreeWait> = pending
        .map(|block| {
            wait(
                view,
                view.site_of(block),
                block.address,
                block.size,
                view.state.origin(block.address),
                None,
            )
        })
        .collect();
    waits.sort_by_key(|wait| (Reverse(weight(wait)), wait.address));

    let events = &view.history.events()[..view.moment.event.map_or(0, |event| event + 1)];
    let completed = (0_u32..)
        .zip(events)
        .filter(|(_, event)| event.action == Action::FreeCompleted);
    let waited = completed.filter_map(|(index, event)| {
        let origin = view.history.freed(index as usize);
        let is_long = origin.freed.is_some_and(|freed| index > freed + 1);
        let site = || view.sites.of_block(origin.allocated, event.stack);
        is_long.then(|| wait(view, site(), event.address, event.size, origin, Some(index)))
    });
    let begun = waits.len();
    waits.extend(waited);
    waits[begun..].sort_by_key(|wait| (Reverse(weight(wait)), wait.freed_at));
    waits.truncate(LISTED);
    waits
}

fn weight(wait: &FreeWait) -> u128 {
    u128::from(wait.size.get()) * u128::from(wait.events)
}

fn wait(
    view: &View<'_>,
    id: SiteId,
    address: u64,
    size: Bytes,
    origin: StateOrigin,
    completed_at: Option<u32>,
) -> FreeWait {
    let now = completed_at.or_else(|| {
        view.moment
            .event
            .and_then(|event| u32::try_from(event).ok())
    });
    let time = |event: u32| view.history.events()[event as usize].time_us;
    let times = origin.freed.and_then(time).zip(now.and_then(time));
    FreeWait {
        address,
        size,
        site: view.sites.get(id).name.clone(),
        id,
        freed_at: origin.freed,
        completed_at,
        events: now.map_or(0, |now| now.saturating_sub(origin.freed.unwrap_or(0))),
        time_us: times.and_then(|(from, to)| to.checked_sub(from)),
    }
}
