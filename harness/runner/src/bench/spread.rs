//! By how much entries differ from night to night when the build is the same: a floor at first, what the machine's own nights showed later.

use std::collections::BTreeMap;

use super::evidence::ALLOWED_DEVIATIONS;
use super::history::{History, NightFigure, is_measured_time};
use super::inference::spread_about_zero;
use super::nights;
use super::record::{EntryName, NightRecord, Quantity};

/// The least that is assumed of the standard deviation of the logarithm of the ratio of two nights' corrected medians, where the build is
/// the same. It is a floor that suites of threshold 5 % can afford: with [`ALLOWED_DEVIATIONS`] times as much allowed, a change of a tenth is
/// found. Where earlier nights show more, that is taken instead.
///
/// Measured on two cores of a virtual machine on 20 November 2026, as 1.4826 times the median difference between successive nights of one
/// build: 1.1 % over the 60 entries of the suite `traces` in ten nights; 0.4 % for cache hits where addresses were not randomised (`setarch -R`) and 2.2 %
/// where they were, with ten programs beside; 3 % for traces while eight processes wanted each core. Since the layout is drawn anew for each visit
/// ([`super::layout`]), 1.0 % for traces, over 14 nights, which is what the spread of their rounds makes of it.
pub(super) const BETWEEN_NIGHTS: f64 = 0.010;

/// So many nights before a night tell what nights differ by: more would tell what they differed by when the code was another.
const RECENT_NIGHTS: usize = 30;

/// From so many differences between successive nights on, an entry's own spread is known.
const LEAST_DIFFERENCES: usize = 6;

/// By how much entries differ between nights without cause: the standard deviation of the logarithm of the ratio of two medians.
pub(super) struct Spreads {
    history: History,
    /// Of all arms of a case together, by suite and case.
    common: BTreeMap<(String, String, Quantity), f64>,
}

impl Spreads {
    pub(super) fn of(new: &NightRecord, earlier: &[&NightRecord]) -> Self {
        let mut earlier: Vec<&NightRecord> = nights::before(earlier, new).collect();
        earlier.sort_by(|a, b| a.started.cmp(&b.started));
        let history = History::of(&earlier[earlier.len().saturating_sub(RECENT_NIGHTS)..]);
        let mut together: BTreeMap<(String, String, Quantity), Vec<f64>> = BTreeMap::new();
        for (name, figures) in history.entries() {
            together.entry((name.suite.clone(), name.case.clone(), name.quantity)).or_default().extend(differences(figures));
        }
        let common = together.into_iter().filter_map(|(key, differences)| Some((key, spread_about_zero(&differences)?))).collect();
        Self { history, common }
    }

    /// The least that is assumed, what all arms of the case show together, or what this one shows: whichever is most.
    ///
    /// This one shows its own spread once there are enough nights; and, sooner, its second largest difference between successive nights,
    /// taken for as far as it goes by itself: an entry that is slow in one night and back in the next leaves two, a true change only one.
    pub(super) fn of_entry(&self, entry: &EntryName) -> f64 {
        if !is_measured_time(entry.quantity) {
            return 0.0;
        }
        let common = self.common.get(&(entry.suite.clone(), entry.case.clone(), entry.quantity)).copied().unwrap_or_default();
        let own = differences(self.history.figures(entry));
        let spread = if own.len() < LEAST_DIFFERENCES { 0.0 } else { spread_about_zero(&own).unwrap_or_default() };
        let mut sizes: Vec<f64> = own.iter().map(|difference| difference.abs()).collect();
        sizes.sort_unstable_by(f64::total_cmp);
        let usual_extreme = sizes.iter().rev().nth(1).copied().unwrap_or_default() / ALLOWED_DEVIATIONS;
        [BETWEEN_NIGHTS, common, spread, usual_extreme].into_iter().fold(0.0, f64::max)
    }
}

/// Of the logarithms of successive figures, of which none counts as less than one of its unit.
fn differences(figures: &[NightFigure]) -> Vec<f64> {
    figures.windows(2).map(|pair| (pair[1].figure.max(1.0) / pair[0].figure.max(1.0)).ln()).collect()
}
