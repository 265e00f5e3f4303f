//! Entries over many nights: their figures, and where they changed to stay changed.

use std::collections::{BTreeMap, BTreeSet};

use super::inference::{median, spread_about_zero};
use super::record::{Entry, EntryName, EntryOutcome, Measured, NightRecord, Quantity, SuiteRecord};
use harness_base::statistics::nearest_rank;

/// The least number of nights that a change must last, and that must lie before it: fewer may be bad nights.
pub const LEAST_NIGHTS: usize = 3;

/// What one change point more must save, in squared standard deviations and as a multiple of the logarithm of the number of nights. 2 pays
/// for its place and its level (Y.-C. Yao, "Estimating the Number of Change-Points via Schwarz' Criterion", 1988,
/// <https://doi.org/10.1016/0167-7152(88)90118-6>); four times that, because figures of nights have longer tails than the normal
/// distribution that the criterion assumes.
const PENALTY: f64 = 8.0;

/// A figure farther than this many standard deviations from the median of itself and two on each side is taken for that median while
/// changes are sought, so that one bad night is no change (R. K. Pearson, "Outliers in Process Modeling and Identification", 2002,
/// <https://doi.org/10.1109/87.974338>).
const FAR_OUT: f64 = 3.0;

/// Figures of one entry are never taken for steadier than this share: below it they differ by rounding.
const STEADIEST: f64 = 0.001;

/// The figures of every entry over nights.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct History {
    entries: BTreeMap<EntryName, Vec<NightFigure>>,
}

/// An entry's figure in one night.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct NightFigure {
    /// Which of the nights.
    pub night: usize,
    /// The median, in the unit of the quantity. Host times are corrected by the yardstick, and scaled to what it took in the last night,
    /// so that what only the processor's clock did is not seen.
    pub figure: f64,
}

/// Where an entry changed to stay changed.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ChangePoint {
    /// Index of the first figure after the change.
    pub at: usize,
    /// Median of the stretch before it.
    pub before: f64,
    /// Median of the stretch from it on.
    pub after: f64,
}

impl History {
    /// Of nights in their order, all of one machine. Measured times of contended nights are left out, and so is what was measured in
    /// suites that were defined otherwise than in the last night that has them. Takes `n log n` time for `n` entries in all nights.
    #[must_use]
    pub fn of(nights: &[&NightRecord]) -> Self {
        let mut history = Self::default();
        let mut last: BTreeMap<&str, &SuiteRecord> = BTreeMap::new();
        for (index, night) in nights.iter().enumerate().rev() {
            for suite in &night.suites {
                let reference = last.entry(&suite.name).or_insert(suite);
                if reference.hash == suite.hash {
                    history.add(index, night, suite, reference);
                }
            }
        }
        for figures in history.entries.values_mut() {
            figures.reverse();
        }
        history
    }

    /// The entry's figures by night, oldest first; nights that did not measure it are left out.
    #[must_use]
    pub fn figures(&self, entry: &EntryName) -> &[NightFigure] {
        self.entries.get(entry).map_or(&[], Vec::as_slice)
    }

    /// All entries with their figures, by name.
    pub fn entries(&self) -> impl Iterator<Item = (&EntryName, &[NightFigure])> {
        self.entries.iter().map(|(name, figures)| (name, figures.as_slice()))
    }

    fn add(&mut self, night: usize, record: &NightRecord, suite: &SuiteRecord, reference: &SuiteRecord) {
        for entry in &suite.entries {
            if is_measured_time(entry.quantity) && !record.conditions.contended.is_empty() {
                continue;
            }
            if let Some(figure) = figure(suite, reference, entry) {
                self.entries.entry(entry_name(suite, entry)).or_default().push(NightFigure { night, figure });
            }
        }
    }
}

/// What identifies an entry of a suite from night to night.
#[must_use]
pub fn entry_name(suite: &SuiteRecord, entry: &Entry) -> EntryName {
    EntryName { suite: suite.name.clone(), case: entry.case(), arm: entry.arm.clone(), quantity: entry.quantity }
}

/// Whether other programs and the state of the machine act on the figures.
pub(super) const fn is_measured_time(quantity: Quantity) -> bool {
    match quantity {
        Quantity::HostTime | Quantity::DeviceTime => true,
        Quantity::ModelTime | Quantity::Memory => false,
    }
}

/// A yardstick that took more than this multiple of what it takes when nothing interrupts it was interrupted, and says nothing of the clock:
/// no processor's clock changes so much within a night. Where other programs wait for the processor, four yardsticks in ten were seen to take
/// five to fifteen times as long.
const MOST_OF_A_CLOCK: f64 = 2.0;

/// What the yardstick took in rounds in which nothing interrupted it, in picoseconds: the median of those.
fn undisturbed(yardsticks: &[u64]) -> Option<f64> {
    let first_quartile = nearest_rank(&mut yardsticks.to_vec(), 25).filter(|&value| value > 0)? as f64;
    let is_quiet = |value: &f64| *value <= MOST_OF_A_CLOCK * first_quartile;
    median(&mut yardsticks.iter().map(|&value| value as f64).filter(is_quiet).collect::<Vec<f64>>())
}

/// The medians of an entry's rounds, each with the yardstick beside the visit, or that of its round, where it has one. Rounds of other
/// shards have no samples of the entry, and yardsticks of other machines. What is 0 counts as 1, because ratios to nothing do not exist.
pub(super) fn rounds<'a>(suite: &'a SuiteRecord, measured: &'a Measured) -> impl Iterator<Item = (f64, Option<u64>)> + 'a {
    let yardsticks = if measured.yardstick_ps.is_empty() { &suite.yardstick_ps } else { &measured.yardstick_ps };
    let medians = measured.rounds.iter().map(|round| median(&mut round.iter().map(|&sample| sample as f64).collect::<Vec<_>>()));
    medians.enumerate().filter_map(|(round, median)| Some((median?.max(1.0), yardsticks.get(round).copied())))
}

/// The medians of rounds divided by their yardsticks, where each has one.
pub(super) fn corrected_rounds(suite: &SuiteRecord, measured: &Measured) -> Option<Vec<f64>> {
    let yardsticks: Vec<u64> = rounds(suite, measured).filter_map(|(_, yardstick)| yardstick).collect();
    let quiet = undisturbed(&yardsticks)?;
    let corrected = rounds(suite, measured).map(|(median, yardstick)| {
        let yardstick = yardstick? as f64;
        Some(median / if yardstick > MOST_OF_A_CLOCK * quiet || yardstick < quiet / MOST_OF_A_CLOCK { quiet } else { yardstick })
    });
    corrected.collect()
}

/// What an undisturbed yardstick took in the whole suite: what host times are divided by where their rounds were not kept.
pub(super) fn unit(suite: &SuiteRecord) -> Option<f64> {
    undisturbed(&suite.yardstick_ps)
}

fn figure(suite: &SuiteRecord, reference: &SuiteRecord, entry: &Entry) -> Option<f64> {
    let EntryOutcome::Measured(measured) = &entry.outcome else { return None };
    let uncorrected = measured.summary.median as f64;
    let (Quantity::HostTime, Some(reference)) = (entry.quantity, unit(reference)) else { return Some(uncorrected) };
    // As nights are compared: a clock that changed during the night is followed from round to round.
    let corrected = corrected_rounds(suite, measured).and_then(|mut rounds| median(&mut rounds));
    corrected.or_else(|| Some(uncorrected / unit(suite)?)).map(|figure| figure * reference)
}

/// Where figures changed to stay changed by more than the share `least`, as in 0.05. Exact figures are those of a virtual clock or of
/// memory: there every such difference is a change. Of others, a change must last [`LEAST_NIGHTS`] and stand out of the spread from night
/// to night.
///
/// The figures are cut where the squares of the distances of their logarithms from the mean of their stretch, together with a penalty for
/// every cut, are least (B. Jackson and others, "An Algorithm for Optimal Partitioning of Data on an Interval", 2005,
/// <https://doi.org/10.1109/LSP.2001.838216>). The spread comes from differences between neighbours, which few changes hardly touch. Takes
/// quadratic time.
#[must_use]
pub fn change_points(figures: &[f64], exact: bool, least: f64) -> Vec<ChangePoint> {
    // The least amount of any unit is one.
    let logs: Vec<f64> = figures.iter().map(|figure| figure.max(1.0).ln()).collect();
    let differences: Vec<f64> = logs.windows(2).map(|pair| pair[1] - pair[0]).collect();
    let mut cuts: BTreeSet<usize> = if exact {
        (1..logs.len()).filter(|&at| differences[at - 1] != 0.0).collect()
    } else {
        let deviation = spread_about_zero(&differences).unwrap_or_default() / std::f64::consts::SQRT_2;
        let deviation = deviation.max(STEADIEST);
        best_cuts(&without_far_out(&logs, deviation), PENALTY * deviation * deviation * (logs.len() as f64).ln())
    };
    loop {
        let points = points(figures, &cuts);
        let smallest = points.iter().min_by(|a, b| size(a).total_cmp(&size(b)));
        match smallest {
            // What it divided becomes one stretch, which may differ otherwise from its neighbours.
            Some(smallest) if size(smallest) <= least.ln_1p() => cuts.remove(&smallest.at),
            _ => return points,
        };
    }
}

fn size(point: &ChangePoint) -> f64 {
    (point.after.max(1.0) / point.before.max(1.0)).ln().abs()
}

fn points(figures: &[f64], cuts: &BTreeSet<usize>) -> Vec<ChangePoint> {
    let ends = cuts.iter().copied().skip(1).chain([figures.len()]);
    let middle = |from: usize, to: usize| median(&mut figures[from..to].to_vec()).unwrap_or_default();
    let mut from = 0;
    let mut points = Vec::new();
    for (&at, to) in cuts.iter().zip(ends) {
        points.push(ChangePoint { at, before: middle(from, at), after: middle(at, to) });
        from = at;
    }
    points
}

fn without_far_out(logs: &[f64], deviation: f64) -> Vec<f64> {
    let around = |at: usize| &logs[at.saturating_sub(2)..(at + 3).min(logs.len())];
    let kept = logs.iter().enumerate().map(|(at, &value)| {
        let middle = median(&mut around(at).to_vec()).unwrap_or(value);
        if (value - middle).abs() > FAR_OUT * deviation { middle } else { value }
    });
    kept.collect()
}

/// The cuts that make the squared distances from the means of the stretches, and `penalty` for each cut, least.
fn best_cuts(values: &[f64], penalty: f64) -> BTreeSet<usize> {
    let count = values.len();
    // Distances from the first value, so that sums of squares lose no digits.
    let (mut sums, mut squares) = (vec![0.0], vec![0.0]);
    for value in values.iter().map(|value| value - values[0]) {
        sums.push(sums[sums.len() - 1] + value);
        squares.push(squares[squares.len() - 1] + value * value);
    }
    let cost = |from: usize, to: usize| {
        let sum: f64 = sums[to] - sums[from];
        squares[to] - squares[from] - sum * sum / (to - from) as f64
    };
    // The least cost of the first `to` values, and where their last stretch begins.
    let mut best = vec![(f64::INFINITY, 0); count + 1];
    best[0] = (0.0, 0);
    for to in LEAST_NIGHTS..=count {
        let starts = std::iter::once(0).chain(LEAST_NIGHTS..=to - LEAST_NIGHTS);
        let costs = starts.map(|from| (best[from].0 + cost(from, to) + if from == 0 { 0.0 } else { penalty }, from));
        best[to] = costs.min_by(|a, b| a.0.total_cmp(&b.0)).unwrap_or((f64::INFINITY, 0));
    }
    let mut cuts = BTreeSet::new();
    let mut at = best[count].1;
    while at > 0 {
        cuts.insert(at);
        at = best[at].1;
    }
    cuts
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use rand::{Rng, SeedableRng};
    use rand_chacha::ChaCha8Rng;

    use super::*;
    use crate::examples::{self, Sampled};

    /// Figures about 1 ns, each with its own level, normally distributed with 2 %, one in twenty off by up to a half.
    fn noisy(levels: impl Iterator<Item = f64>, seed: u64) -> Vec<f64> {
        let mut rng = ChaCha8Rng::seed_from_u64(seed);
        let mut figure = |level: f64| {
            let bell: f64 = (0..12).map(|_| rng.random::<f64>()).sum::<f64>() - 6.0;
            let far = if rng.random_bool(0.05) { 1.0 + rng.random::<f64>() / 2.0 } else { 1.0 };
            1e6 * level * (0.02 * bell).exp() * far
        };
        levels.map(&mut figure).collect()
    }

    fn places(points: &[ChangePoint]) -> Vec<usize> {
        points.iter().map(|point| point.at).collect()
    }

    #[test]
    fn of_twenty_years_of_noise_with_bad_nights_at_most_one_has_change_points() {
        // What is left are bad nights that happen to stand together, which are a change as far as anybody can tell.
        let with_points = (0..200).filter(|&seed| !change_points(&noisy((0..365).map(|_| 1.0), seed), false, 0.05).is_empty()).count();
        assert!(with_points <= 10, "{with_points} of 200 years");
    }

    #[test]
    fn a_change_of_a_tenth_is_found_where_it_was_and_so_is_the_way_back() {
        let level = |night: usize| if (100..160).contains(&night) { 1.1 } else { 1.0 };
        let mut found = 0;
        for seed in 0..100 {
            let points = change_points(&noisy((0..365).map(level), seed), false, 0.05);
            found += usize::from(points.len() == 2 && points[0].at.abs_diff(100) <= 2 && points[1].at.abs_diff(160) <= 2);
        }
        assert!(found >= 95, "{found} of 100");
    }

    #[test]
    fn a_change_smaller_than_asked_for_is_no_change_point() {
        let figures = noisy((0..365).map(|night| if night < 180 { 1.0 } else { 1.03 }), 1);
        assert_eq!(change_points(&figures, false, 0.05), []);
        assert_eq!(change_points(&figures, false, 0.01).len(), 1);
    }

    #[test]
    fn of_exact_figures_one_night_is_enough() {
        let figures = [100.0, 100.0, 100.0, 110.0, 100.0, 101.0];
        assert_eq!(places(&change_points(&figures, true, 0.05)), [3, 4]);
        assert_eq!(places(&change_points(&figures, true, 0.0)), [3, 4, 5]);
        assert_eq!(change_points(&[0.0, 0.0, 4096.0], true, 0.05), [ChangePoint { at: 2, before: 0.0, after: 4096.0 }]);
    }

    #[test]
    fn too_few_nights_have_no_change_points() {
        for count in 0..2 * LEAST_NIGHTS {
            let figures: Vec<f64> = (0..count).map(|night| if night < count / 2 { 1e6 } else { 2e6 }).collect();
            assert_eq!(change_points(&figures, false, 0.05), [], "{count} nights");
        }
    }

    #[test]
    fn figures_of_a_slower_clock_are_the_same_figures() {
        let mut nights: Vec<NightRecord> = (1..=3).map(|day| examples::night(day, &[Sampled::steady("caching", 1000)])).collect();
        // The processor ran at half its speed in the first night.
        let suite = &mut nights[0].suites[0];
        suite.yardstick_ps.iter_mut().for_each(|value| *value *= 2);
        for entry in &mut suite.entries {
            if let EntryOutcome::Measured(measured) = &mut entry.outcome {
                measured.summary.median *= 2;
                measured.rounds.iter_mut().flatten().for_each(|sample| *sample *= 2);
            }
        }
        nights[1].conditions.contended.push("a busy processor".to_owned());
        let figures = |nights: &[NightRecord]| -> Vec<Vec<NightFigure>> {
            let history = History::of(&nights.iter().collect::<Vec<_>>());
            history.entries().map(|(_, figures)| figures.to_vec()).collect()
        };
        let expected = [[NightFigure { night: 0, figure: 1000.0 }, NightFigure { night: 2, figure: 1000.0 }]];
        assert_eq!(figures(&nights), expected);
        for entry in nights.iter_mut().flat_map(|night| &mut night.suites[0].entries) {
            if let EntryOutcome::Measured(measured) = &mut entry.outcome {
                measured.rounds.clear();
            }
        }
        assert_eq!(figures(&nights), expected, "nights of which only medians were kept");
        nights[2].suites[0].hash = "other".to_owned();
        let history = History::of(&nights.iter().collect::<Vec<_>>());
        assert_eq!(history.entries().map(|(_, figures)| figures.len()).collect::<Vec<_>>(), [1]);
    }

    proptest! {
        #[test]
        fn change_points_are_in_order_and_larger_than_asked_for(
            figures in prop::collection::vec(prop_oneof![Just(1e6), 1e5..1e7], 0..60), exact in any::<bool>()
        ) {
            let points = change_points(&figures, exact, 0.05);
            prop_assert!(points.windows(2).all(|pair| pair[0].at < pair[1].at));
            prop_assert!(points.iter().all(|point| point.at > 0 && point.at < figures.len() && size(point) > 0.05_f64.ln_1p()));
        }
    }
}
