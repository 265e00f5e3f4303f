//! What is told first: how many entries changed, and which changes matter most.

use std::collections::BTreeMap;

use super::words::{self, Outcomes};
use crate::bench::record::{Change, ChangeVerdict, Comparison, EntryOutcome, NightRecord, Quantity};

/// How the entries of a comparison came out.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Counts {
    pub(super) worse: usize,
    pub(super) better: usize,
    pub(super) same: usize,
    pub(super) broken: usize,
    pub(super) mended: usize,
    pub(super) still_broken: usize,
    pub(super) not_compared: usize,
}

impl Counts {
    pub(super) fn of<'a>(changes: impl IntoIterator<Item = &'a Change>) -> Self {
        let mut counts = Self::default();
        for change in changes {
            *match change.verdict {
                ChangeVerdict::Worse => &mut counts.worse,
                ChangeVerdict::Better => &mut counts.better,
                ChangeVerdict::Same => &mut counts.same,
                ChangeVerdict::Broken => &mut counts.broken,
                ChangeVerdict::Mended => &mut counts.mended,
                ChangeVerdict::StillBroken => &mut counts.still_broken,
                ChangeVerdict::NotCompared => &mut counts.not_compared,
            } += 1;
        }
        counts
    }

    /// Entries of which it is known whether they changed.
    pub(super) const fn compared(self) -> usize {
        self.worse + self.better + self.same + self.broken + self.mended + self.still_broken
    }
}

/// The line that is read first.
pub(super) fn verdict(night: &NightRecord) -> String {
    let outcomes = Outcomes::of(night);
    match &night.comparison {
        _ if outcomes == Outcomes::default() => "Nothing was measured.".to_owned(),
        None => alone(outcomes),
        Some(comparison) => compared(comparison, outcomes),
    }
}

fn alone(outcomes: Outcomes) -> String {
    let failed = if outcomes.failed == 0 { "nothing failed".to_owned() } else { format!("{} FAILED", outcomes.failed) };
    format!("{} measured, {failed}. There is no earlier night to compare with.", words::entries(outcomes.measured))
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
    let kinds = [(counts.broken, "newly BROKEN"), (counts.still_broken, "still broken"), (counts.mended, "mended")];
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

/// Changes that the reader should know of, the most important first: what broke, what became worse, what became better, what was mended;
/// among equals by how large the change surely is, the end of the interval that is nearer to no change.
pub(super) fn by_importance(comparison: &Comparison) -> Vec<&Change> {
    let rank = |change: &Change| match change.verdict {
        ChangeVerdict::Broken => Some(0),
        ChangeVerdict::Worse => Some(1),
        ChangeVerdict::Better => Some(2),
        ChangeVerdict::Mended => Some(3),
        ChangeVerdict::Same | ChangeVerdict::StillBroken | ChangeVerdict::NotCompared => None,
    };
    let mut changes: Vec<(u8, &Change)> = comparison.changes.iter().filter_map(|change| rank(change).map(|rank| (rank, change))).collect();
    changes.sort_by(|(rank_a, a), (rank_b, b)| rank_a.cmp(rank_b).then(surely(b).total_cmp(&surely(a))));
    changes.into_iter().map(|(_, change)| change).collect()
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

/// How large a change is at least, on a logarithmic scale; zero where the interval holds no change at all.
fn surely(change: &Change) -> f64 {
    let Some(figures) = &change.figures else { return 0.0 };
    let (low, high) = (figures.low.ln(), figures.high.ln());
    if low > 0.0 {
        low
    } else if high < 0.0 {
        -high
    } else {
        0.0
    }
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
