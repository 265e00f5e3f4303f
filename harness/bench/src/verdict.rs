//! What a comparison comes to: how many entries changed how, whether anything became worse, and what is told first.

use serde::Serialize;

use super::record::{Change, ChangeVerdict, Comparison};

/// How the entries of a comparison came out: one number for each [`ChangeVerdict`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Counts {
    /// Entries that need more time or memory.
    pub worse: usize,
    /// Entries that need less.
    pub better: usize,
    /// Entries without a sure change.
    pub same: usize,
    /// Entries that fail and did not.
    pub broken: usize,
    /// Entries that failed and do not any more.
    pub mended: usize,
    /// Entries that fail as before.
    pub still_broken: usize,
    /// Entries of which nothing is known, though both nights have figures.
    pub untested: usize,
    /// Entries that one of the nights skipped.
    pub not_compared: usize,
}

impl Counts {
    /// Counts changes.
    #[must_use]
    pub fn of<'a>(changes: impl IntoIterator<Item = &'a Change>) -> Self {
        let mut counts = Self::default();
        for change in changes {
            *match change.verdict {
                ChangeVerdict::Worse => &mut counts.worse,
                ChangeVerdict::Better => &mut counts.better,
                ChangeVerdict::Same => &mut counts.same,
                ChangeVerdict::Broken => &mut counts.broken,
                ChangeVerdict::Mended => &mut counts.mended,
                ChangeVerdict::StillBroken => &mut counts.still_broken,
                ChangeVerdict::Untested => &mut counts.untested,
                ChangeVerdict::NotCompared => &mut counts.not_compared,
            } += 1;
        }
        counts
    }

    /// Entries of which it is known whether they changed.
    #[must_use]
    pub const fn compared(self) -> usize {
        self.worse + self.better + self.same + self.broken + self.mended + self.still_broken
    }

    /// Whether something became worse or broke.
    #[must_use]
    pub const fn is_regression(self) -> bool {
        self.worse + self.broken > 0
    }
}

/// Changes that the reader should know of, the most important first: what broke, what became worse, what became better, what was mended;
/// among equals by how large the change surely is, the end of the interval that is nearer to no change.
#[must_use]
pub fn by_importance(comparison: &Comparison) -> Vec<&Change> {
    let rank = |change: &Change| match change.verdict {
        ChangeVerdict::Broken => Some(0),
        ChangeVerdict::Worse => Some(1),
        ChangeVerdict::Better => Some(2),
        ChangeVerdict::Mended => Some(3),
        ChangeVerdict::Same | ChangeVerdict::StillBroken | ChangeVerdict::Untested | ChangeVerdict::NotCompared => None,
    };
    let mut changes: Vec<(u8, &Change)> = comparison.changes.iter().filter_map(|change| rank(change).map(|rank| (rank, change))).collect();
    changes.sort_by(|(rank_a, a), (rank_b, b)| rank_a.cmp(rank_b).then(surely(b).total_cmp(&surely(a))));
    changes.into_iter().map(|(_, change)| change).collect()
}

/// How large a change is at least, on a logarithmic scale; zero where the interval holds no change at all.
fn surely(change: &Change) -> f64 {
    let Some(figures) = &change.figures else { return 0.0 };
    figures.low.ln().max(-figures.high.ln()).max(0.0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::record::{Build, ChangeFigures, EntryName, Quantity};

    fn change(arm: &str, verdict: ChangeVerdict, interval: Option<(f64, f64)>) -> Change {
        let entry = EntryName { suite: "host".to_owned(), case: "hit".to_owned(), arm: arm.to_owned(), quantity: Quantity::HostTime };
        let figures = interval.map(|(low, high)| ChangeFigures { base: 1, new: 1, ratio: f64::midpoint(low, high), low, high, p: 0.0 });
        Change { entry, verdict, figures }
    }

    #[test]
    fn what_broke_comes_first_and_then_what_is_surely_largest() {
        let changes = vec![
            change("mended", ChangeVerdict::Mended, None),
            change("same", ChangeVerdict::Same, Some((0.9, 1.1))),
            change("few rounds", ChangeVerdict::Untested, Some((0.1, 9.0))),
            change("much better", ChangeVerdict::Better, Some((0.2, 0.3))),
            change("wide", ChangeVerdict::Worse, Some((1.1, 9.0))),
            change("sure", ChangeVerdict::Worse, Some((1.5, 1.6))),
            change("broken", ChangeVerdict::Broken, None),
            change("skipped", ChangeVerdict::NotCompared, None),
            change("still broken", ChangeVerdict::StillBroken, None),
        ];
        let (base_started, base_build) = (String::new(), Build::default());
        let none = Vec::new;
        let comparison = Comparison {
            base_started,
            base_build,
            across: none(),
            changes,
            new: Vec::new(),
            missing: Vec::new(),
            redefined: none(),
            earlier: Vec::new(),
            drifts: Vec::new(),
        };
        let order: Vec<&str> = by_importance(&comparison).into_iter().map(|change| change.entry.arm.as_str()).collect();
        assert_eq!(order, ["broken", "sure", "wide", "much better", "mended"]);
        let counts = Counts::of(&comparison.changes);
        assert_eq!((counts.worse, counts.better, counts.broken, counts.mended, counts.still_broken), (2, 1, 1, 1, 1));
        assert_eq!((counts.same, counts.untested, counts.not_compared, counts.compared(), counts.is_regression()), (1, 1, 1, 7, true));
        assert!(!Counts { worse: 0, broken: 0, ..counts }.is_regression());
    }
}
