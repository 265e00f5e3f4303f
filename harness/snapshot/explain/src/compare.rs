//! Compares two snapshots of one program, for example before and after an upgrade, by site and by
//! cause: [`compare`].

use std::{cmp::Reverse, collections::BTreeMap};

use harness_allocator::units::Bytes;
use harness_trace::snapshot::Action;
use serde::Serialize;

use crate::byte_cause::ByteCause;
use crate::explanation::Explanation;
use crate::state::History;
use crate::view::TotalKnown;

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Whole {
    pub peak_allocated: Bytes,
    pub peak_reserved: Bytes,
    pub allocations: u64,
    /// Segments or page ranges reserved from the driver.
    pub driver_allocations: u64,
    pub driver_frees: u64,
    pub ooms: u64,
}

impl Whole {
    /// Computes the statistics. Peaks include memory from before the recording. Returns `None` for
    /// a snapshot without events. Takes `n log n` time for `n` events.
    pub fn of(history: &History<'_>) -> Option<Self> {
        if history.events().is_empty() {
            return None;
        }
        let count = |is_counted: fn(Action) -> bool| {
            history
                .events()
                .iter()
                .filter(|event| is_counted(event.action))
                .count() as u64
        };
        Some(Self {
            peak_allocated: history.allocated().into_iter().max()?,
            peak_reserved: history.reserved().into_iter().max()?,
            allocations: count(|action| action == Action::Alloc),
            driver_allocations: count(Action::reserves),
            driver_frees: count(Action::releases),
            ooms: count(|action| action == Action::Oom),
        })
    }
}

#[derive(Clone, Copy, Debug)]
pub struct Side<'a> {
    pub explanation: &'a Explanation,
    /// Over the whole recording, if there is one.
    pub whole: Option<Whole>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct SnapshotComparison {
    pub headline: String,
    /// `None` for a snapshot without events.
    pub before: Option<Whole>,
    pub after: Option<Whole>,
    /// Every cause in either snapshot, in display order.
    pub causes: Vec<CauseChange>,
    /// Sites whose live bytes differ, largest difference first. A site in only one snapshot is
    /// named without its line.
    pub sites: Vec<SiteChange>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct CauseChange {
    pub cause: ByteCause,
    pub before: Bytes,
    pub after: Bytes,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct SiteChange {
    pub site: String,
    pub before: Bytes,
    pub after: Bytes,
    pub blocks_before: u64,
    pub blocks_after: u64,
}

/// Compares two snapshots. Takes `n log n` time for `n` sites.
pub fn compare(before: Side<'_>, after: Side<'_>) -> SnapshotComparison {
    let causes = ByteCause::ALL.into_iter().map(|(cause, ..)| CauseChange {
        cause,
        before: before.explanation.bytes(cause),
        after: after.explanation.bytes(cause),
    });
    // Without the size of a device, memory outside of the allocator is unknown.
    let is_known = [before, after]
        .iter()
        .all(|side| side.explanation.device_total_is != TotalKnown::ReservedOnly);
    let causes = causes.filter(|change| {
        change.before.max(change.after) > Bytes::ZERO && (is_known || !is_outside(change.cause))
    });
    let sites = changed_sites(before.explanation, after.explanation);
    let headline = headline(before.whole, after.whole, &sites);
    SnapshotComparison {
        headline,
        before: before.whole,
        after: after.whole,
        causes: causes.collect(),
        sites,
    }
}

const fn is_outside(cause: ByteCause) -> bool {
    matches!(
        cause,
        ByteCause::OthersHold | ByteCause::Free | ByteCause::FreeOrOthersHold
    )
}

/// Live memory by site name, and without the line for sites that the other snapshot lacks.
fn live_by_site(explanation: &Explanation) -> BTreeMap<(String, String), (Bytes, u64)> {
    let mut sites: BTreeMap<(String, String), (Bytes, u64)> = BTreeMap::new();
    let causes = explanation
        .causes
        .iter()
        .filter(|cause| matches!(cause.cause, ByteCause::Allocated | ByteCause::Rounding));
    for (cause, of) in causes.flat_map(|cause| cause.sites.iter().map(move |of| (cause.cause, of)))
    {
        let site = &explanation.sites[&of.id];
        let without_line = match (site.line, &site.function) {
            (Some(line), Some(function)) if function != "<module>" => {
                site.name.replacen(&format!(":{line}"), "", 1)
            }
            _ => site.name.clone(),
        };
        let (bytes, blocks) = sites.entry((site.name.clone(), without_line)).or_default();
        *bytes += of.bytes;
        // Rounding is part of a block that is already counted.
        *blocks += if cause == ByteCause::Allocated {
            of.blocks
        } else {
            0
        };
    }
    sites
}

fn changed_sites(before: &Explanation, after: &Explanation) -> Vec<SiteChange> {
    let sides = [live_by_site(before), live_by_site(after)];
    let mut sites: BTreeMap<&str, [(Bytes, u64); 2]> = BTreeMap::new();
    for (side, own) in sides.iter().enumerate() {
        for (names, (bytes, blocks)) in own {
            // Lines move when code above them changes, so a site in only one snapshot is named
            // without its line.
            let (exact, without_line) = names;
            let is_in_both = sides[1 - side].contains_key(names);
            let (sum, count) = &mut sites
                .entry(if is_in_both { exact } else { without_line })
                .or_default()[side];
            *sum += *bytes;
            *count += blocks;
        }
    }
    let change =
        |(site, [(before, blocks_before), (after, blocks_after)]): (&str, [(Bytes, u64); 2])| {
            (before != after).then(|| SiteChange {
                site: site.to_owned(),
                before,
                after,
                blocks_before,
                blocks_after,
            })
        };
    let mut changes: Vec<SiteChange> = sites.into_iter().filter_map(change).collect();
    // The sort is stable, so equal differences are in the order of the names.
    changes.sort_by_key(|change| Reverse(change.before.get().abs_diff(change.after.get())));
    changes
}

/// For example `from 1 GiB to 2 GiB (+100.0 %)`, or `unchanged at 1 GiB`.
pub fn change(before: Bytes, after: Bytes) -> String {
    if before == after {
        return format!("{after} as before");
    }
    if before == Bytes::ZERO {
        return format!("from 0 B to {after}");
    }
    let percent = (after.get() as f64 / before.get() as f64 - 1.0) * 100.0;
    format!("from {before} to {after} ({percent:+.1} %)")
}

fn headline(before: Option<Whole>, after: Option<Whole>, sites: &[SiteChange]) -> String {
    let peaks = match (before, after) {
        (Some(before), Some(after)) => format!(
            "Peak reserved {}, peak allocated {}",
            change(before.peak_reserved, after.peak_reserved),
            change(before.peak_allocated, after.peak_allocated)
        ),
        _ => "Peaks are unknown without events, so only one moment is compared".to_owned(),
    };
    let most = sites.first().map_or_else(String::new, |most| {
        format!(
            "; at the moment compared, {} differs most: {}",
            most.site,
            change(most.before, most.after)
        )
    });
    format!("{peaks}{most}.")
}
