//! Finds leak suspects: sites whose live bytes grow with each iteration.
//!
//! Memory rises and falls within an iteration, so sites are compared at low points. The recording
//! is divided into equal stretches that each contain at least one full rise and fall. The low point
//! of each stretch counts.

use harness_allocator::units::Bytes;
use harness_trace::snapshot::{Action, Event};
use serde::Serialize;

use crate::sites::{AllocationSite, SiteId};
use crate::view::View;

const MOST_STRETCHES: usize = 8;
/// Minimum number of stretches, so the warm-up does not count as growth.
const LEAST_STRETCHES: usize = 4;
const LEAST_GROWTH: u64 = 1 << 20;
const LISTED: usize = 10;

#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Growth {
    pub site: String,
    pub id: SiteId,
    /// The growth after the warm-up.
    pub grown: Bytes,
    /// Live bytes at the low point of each stretch, counting allocations of the recording.
    pub held: Vec<Bytes>,
}

/// Sites whose live bytes rise from each low point to the next, most growth first. Empty with too
/// few iterations.
pub(crate) fn list(view: &View<'_>) -> Vec<Growth> {
    let events = &view.history.events()[..view.moment.event.map_or(0, |event| event + 1)];
    let curve = curve(view, events);
    let stretches = stretches(&curve).min(MOST_STRETCHES);
    if stretches < LEAST_STRETCHES {
        return Vec::new();
    }
    let lowest = lowest_points(&curve, stretches);
    let held = held_at(view, events, &lowest);
    let growth = |(site, id): (&AllocationSite, u32)| {
        let held: Vec<Bytes> = held.iter().map(|sites| Bytes(sites[id as usize])).collect();
        Some(Growth {
            site: site.name.clone(),
            id: SiteId(id),
            grown: grown(&held)?,
            held,
        })
    };
    let mut growing: Vec<Growth> = view
        .sites
        .all()
        .iter()
        .zip(0..)
        .filter_map(growth)
        .collect();
    growing.sort_by(|a, b| b.grown.cmp(&a.grown).then_with(|| a.site.cmp(&b.site)));
    growing.truncate(LISTED);
    growing
}

/// The growth after the first stretch, which is the warm-up. `None` if the growth is not steady.
fn grown(held: &[Bytes]) -> Option<Bytes> {
    let steady = held.get(1..)?;
    let (first, last) = (*steady.first()?, *steady.last()?);
    let never_less = steady.windows(2).all(|pair| pair[0] <= pair[1]);
    let rises = steady.windows(2).filter(|pair| pair[0] < pair[1]).count();
    let grown = last.saturating_sub(first);
    (never_less && 4 * rises >= 3 * (steady.len() - 1) && grown.get() >= LEAST_GROWTH)
        .then_some(grown)
}

/// Live bytes after each event, relative to the start of the recording. Leaves out blocks of the
/// warm-up that live longer than it, such as weights, because they rise and fall with no iteration.
fn curve(view: &View<'_>, events: &[Event]) -> Vec<i64> {
    let warm_up = events.len() / LEAST_STRETCHES;
    let mut curve = vec![0_i64; events.len()];
    for (index, event) in events.iter().enumerate() {
        let size = i64::try_from(event.size.get()).unwrap_or(i64::MAX);
        match event.action {
            Action::Alloc if index >= warm_up => curve[index] += size,
            Action::FreeRequested => {
                let allocated = view
                    .history
                    .freed(index)
                    .allocated
                    .map(|event| event as usize);
                let since = allocated.unwrap_or(0);
                if since >= warm_up || index - since < warm_up {
                    curve[index] -= size;
                    if let Some(allocated) = allocated.filter(|allocated| *allocated < warm_up) {
                        curve[allocated] += size;
                    }
                }
            }
            _ => {}
        }
    }
    let mut current = 0_i64;
    for change in &mut curve {
        current = current.saturating_add(*change);
        *change = current;
    }
    curve
}

/// The number of full rises and falls: total freed bytes divided by the height of the curve.
fn stretches(curve: &[i64]) -> usize {
    let (mut before, mut lowest, mut highest, mut freed) = (0_i64, 0_i64, 0_i64, 0_i64);
    for &current in curve {
        (lowest, highest) = (lowest.min(current), highest.max(current));
        freed = freed.saturating_add(before.saturating_sub(current).max(0));
        before = current;
    }
    usize::try_from(freed / (highest - lowest).max(1)).unwrap_or(0)
}

/// The index of the event with the least live bytes in each stretch.
fn lowest_points(curve: &[i64], stretches: usize) -> Vec<usize> {
    let bound = |stretch: usize| stretch * curve.len() / stretches;
    let lowest = |stretch| (bound(stretch)..bound(stretch + 1)).min_by_key(|&index| curve[index]);
    (0..stretches).filter_map(lowest).collect()
}

/// Live bytes of each site after the given events, which are in order.
fn held_at(view: &View<'_>, events: &[Event], at: &[usize]) -> Vec<Vec<u64>> {
    let mut current = vec![0_u64; view.sites.all().len()];
    let mut held = Vec::with_capacity(at.len());
    let mut at = at.iter().copied().peekable();
    for (index, event) in events.iter().enumerate() {
        let size = event.size.get();
        match event.action {
            Action::Alloc => current[view.sites.of_event(index).0 as usize] += size,
            Action::FreeRequested => {
                if let Some(alloc) = view.history.freed(index).allocated {
                    let site = &mut current[view.sites.of_event(alloc as usize).0 as usize];
                    *site = site.saturating_sub(size);
                }
            }
            _ => {}
        }
        if at.next_if_eq(&index).is_some() {
            held.push(current.clone());
        }
    }
    held
}
