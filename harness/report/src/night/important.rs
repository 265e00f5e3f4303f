//! What is told first: how many entries changed, and which changes matter most.

use std::collections::BTreeMap;

use super::words::{self, Outcomes};
use harness_bench::record::{Change, Comparison, EntryOutcome, NightRecord, Quantity};

pub(super) use harness_bench::verdict::{Counts, by_importance};

/// The line that is read first.
#[must_use]
pub fn verdict(night: &NightRecord) -> String {
    let outcomes = Outcomes::of(night);
    match &night.comparison {
        _ if outcomes == Outcomes::default() => "Nothing was measured.".to_owned(),
        None => alone(outcomes),
        Some(comparison) => compared(comparison, outcomes),
    }
}

fn alone(outcomes: Outcomes) -> String {
    let failed = if outcomes.failed == 0 { "nothing failed".to_owned() } else { format!("{} FAILED", outcomes.failed) };
    format!("{} measured, {failed}. There is no earlier uncontended night to compare with.", words::entries(outcomes.measured))
}

fn compared(comparison: &Comparison, outcomes: Outcomes) -> String {
    let counts = Counts::of(&comparison.changes);
    let since = format!("the night of {} ({})", words::moment(&comparison.base_started), words::commit(&comparison.base_build));
    let is_time = comparison.changes.iter().all(|change| change.entry.quantity.is_time());
    let (worse, better) = if is_time { ("slower", "faster") } else { ("worse", "better") };
    let of = counts.compared();
    let changed = match (counts.worse, counts.better) {
        (0, 0) if of == 0 => format!("No entry could be compared with {since}"),
        (0, 0) => format!("No entry became {worse} or {better}, of {of} compared with {since}"),
        (slower, 0) => format!("{} became {worse}, none {better}, of {of} compared with {since}", words::entries(slower)),
        (0, faster) => format!("{} became {better}, none {worse}, of {of} compared with {since}", words::entries(faster)),
        (slower, faster) => format!("{} became {worse}, {faster} {better}, of {of} compared with {since}", words::entries(slower)),
    };
    let mut rest = Vec::new();
    let kinds = [
        (counts.broken, "newly BROKEN"),
        (counts.still_broken, "still broken"),
        (counts.mended, "mended"),
        (counts.untested, "of which nothing can be told"),
    ];
    rest.extend(kinds.into_iter().filter(|&(number, _)| number > 0).map(|(number, word)| format!("{number} {word}")));
    let unknown = outcomes.failed.saturating_sub(counts.broken + counts.still_broken);
    if unknown > 0 {
        rest.push(format!("{unknown} FAILED without an earlier figure"));
    }
    if outcomes.failed == 0 {
        rest.push("nothing broken".to_owned());
    }
    format!("{changed}; {}.", rest.join(", "))
}

/// Changes by importance, with those of the points of one curve told once: the most important, and how many others went the same way.
pub(super) fn kinds<'a>(night: &NightRecord, comparison: &'a Comparison) -> Vec<(&'a Change, usize)> {
    let entries =
        night.suites.iter().flat_map(|suite| suite.entries.iter().map(|entry| ((suite.name.as_str(), entry.case()), entry.group.as_str())));
    let groups: BTreeMap<(&str, String), &str> = entries.collect();
    let kind = |change: &'a Change| {
        let entry = &change.entry;
        let group = groups.get(&(entry.suite.as_str(), entry.case.clone())).copied().unwrap_or(&entry.case);
        (&entry.suite, group, &entry.arm, entry.quantity, change.verdict)
    };
    let mut kinds: Vec<(&Change, usize)> = Vec::new();
    for change in by_importance(comparison) {
        match kinds.iter_mut().find(|(first, _)| kind(first) == kind(change)) {
            Some((_, alike)) => *alike += 1,
            None => kinds.push((change, 0)),
        }
    }
    kinds
}

/// What was left out and why, the most frequent reason first.
pub(super) fn skipped(night: &NightRecord) -> Vec<(&str, Vec<String>)> {
    let mut reasons: BTreeMap<&str, Vec<String>> = BTreeMap::new();
    for suite in &night.suites {
        for entry in &suite.entries {
            if let EntryOutcome::Skipped { reason } = &entry.outcome {
                reasons.entry(reason).or_default().push(format!("{} / {} / {}", suite.name, entry.case(), entry.arm));
            }
        }
    }
    let mut reasons: Vec<(&str, Vec<String>)> = reasons.into_iter().collect();
    reasons.sort_by_key(|(_, entries)| std::cmp::Reverse(entries.len()));
    reasons
}

/// What failed, in the order of the night: suite, case, arm, reason.
pub(super) fn failed(night: &NightRecord) -> impl Iterator<Item = (&str, String, &str, &str)> {
    night.suites.iter().flat_map(|suite| {
        suite.entries.iter().filter_map(|entry| match &entry.outcome {
            EntryOutcome::Failed { reason } => Some((suite.name.as_str(), entry.case(), entry.arm.as_str(), reason.as_str())),
            EntryOutcome::Measured(_) | EntryOutcome::Skipped { .. } => None,
        })
    })
}

/// Quantities that occur, in a fixed order.
pub(super) fn quantities(occurring: impl IntoIterator<Item = Quantity>) -> Vec<Quantity> {
    let mut quantities: Vec<Quantity> = occurring.into_iter().collect();
    quantities.sort_unstable();
    quantities.dedup();
    quantities
}
