//! By how much entries differ from night to night when the build is the same: a floor at first, what the machine's own nights showed later.

use std::collections::BTreeMap;

use super::drift::{Drifts, Step};
use super::evidence::ALLOWED_DEVIATIONS;
use super::history::{History, NightFigure, is_measured_time};
use super::inference::spread_about_zero;
use super::nights;
use super::record::{EntryName, NightRecord, Quantity, SuiteRecord};

/// The least that is assumed of the standard deviation of the logarithm of the ratio of two nights' corrected medians, where the build is
/// the same. It is a floor that suites of threshold 5 % can afford: with [`ALLOWED_DEVIATIONS`] times as much allowed, a change of a tenth is
/// found. Where earlier nights show more, that is taken instead.
///
/// Measured on two cores of a virtual machine on 20 November 2026, as 1.4826 times the median difference between successive nights of one
/// build: 1.1 % over the 60 entries of the suite `traces` in ten nights; 0.4 % for cache hits where addresses were not randomised (`setarch -R`) and 2.2 %
/// where they were, with ten programs beside; 3 % for traces while eight processes wanted each core. Since the layout is drawn anew for each visit,
/// and each has a yardstick of its own, 0.7 % for traces, over 14 nights.
pub(super) const BETWEEN_NIGHTS: f64 = 0.010;

/// So many nights before a night tell what nights differ by: more would tell what they differed by when the code was another.
const RECENT_NIGHTS: usize = 30;

/// From so many differences between successive nights on, an entry's own spread is known.
const LEAST_DIFFERENCES: usize = 6;

/// By how much entries differ between nights without cause: the standard deviation of the logarithm of the ratio of two medians, beside what
/// all allocators changed by together.
pub(super) struct Spreads {
    /// Of each entry of a measured time, from night to night.
    differences: BTreeMap<EntryName, Vec<f64>>,
    /// Of all arms of a case together, by suite and case.
    common: BTreeMap<(String, String, Quantity), f64>,
}

impl Spreads {
    pub(super) fn of(new: &NightRecord, earlier: &[&NightRecord]) -> Self {
        let mut earlier: Vec<&NightRecord> = nights::before(earlier, new).collect();
        earlier.sort_by(|a, b| a.started.cmp(&b.started));
        let history = History::of(&earlier[earlier.len().saturating_sub(RECENT_NIGHTS)..]);
        let differences = differences(&history, new);
        let mut together: BTreeMap<(String, String, Quantity), Vec<f64>> = BTreeMap::new();
        for (name, differences) in &differences {
            together.entry((name.suite.clone(), name.case.clone(), name.quantity)).or_default().extend(differences);
        }
        let common = together.into_iter().filter_map(|(key, differences)| Some((key, spread_about_zero(&differences)?))).collect();
        Self { differences, common }
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
        let own = self.differences.get(entry).map_or(&[][..], Vec::as_slice);
        let spread = if own.len() < LEAST_DIFFERENCES { 0.0 } else { spread_about_zero(own).unwrap_or_default() };
        let mut sizes: Vec<f64> = own.iter().map(|difference| difference.abs()).collect();
        sizes.sort_unstable_by(f64::total_cmp);
        let usual_extreme = sizes.iter().rev().nth(1).copied().unwrap_or_default() / ALLOWED_DEVIATIONS;
        [BETWEEN_NIGHTS, common, spread, usual_extreme].into_iter().fold(0.0, f64::max)
    }
}

/// Of the logarithms of each entry's successive figures, less what all allocators of its suite changed by together between the same nights.
/// Which arms are which allocators' is what the new night says.
fn differences(history: &History, new: &NightRecord) -> BTreeMap<EntryName, Vec<f64>> {
    let suites: BTreeMap<&str, &SuiteRecord> = new.suites.iter().map(|suite| (suite.name.as_str(), suite)).collect();
    let measured = || history.entries().filter(|(name, _)| is_measured_time(name.quantity));
    let mut steps: BTreeMap<(usize, usize), Vec<Step<'_>>> = BTreeMap::new();
    for (name, figures) in measured() {
        if let Some(allocator) = suites.get(name.suite.as_str()).and_then(|suite| suite.allocators.get(&name.arm)) {
            for (nights, log) in successive(figures) {
                steps.entry(nights).or_default().push(Step { suite: &name.suite, quantity: name.quantity, allocator, log });
            }
        }
    }
    let drifts: BTreeMap<(usize, usize), Drifts<'_>> =
        steps.into_iter().map(|(nights, steps)| (nights, Drifts::of(steps.into_iter()))).collect();
    let drift = |name: &EntryName, nights| drifts.get(&nights).map_or(0.0, |drifts| drifts.get(&name.suite, name.quantity).log);
    let of_entry = |(name, figures): (&EntryName, &[NightFigure])| {
        (name.clone(), successive(figures).map(|(nights, log)| log - drift(name, nights)).collect())
    };
    measured().map(of_entry).collect()
}

/// Pairs of successive nights, each with the logarithm of the ratio of its figures, of which none counts as less than one of its unit.
fn successive(figures: &[NightFigure]) -> impl Iterator<Item = ((usize, usize), f64)> {
    figures.windows(2).map(|pair| ((pair[0].night, pair[1].night), (pair[1].figure.max(1.0) / pair[0].figure.max(1.0)).ln()))
}
