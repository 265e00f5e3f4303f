//! Statistics of differences: a rank test, its correction for many tests at once, and intervals by resampling. Pure functions of numbers.
//!
//! None assumes a distribution, for times have long tails and several modes. What is given to them are figures of rounds, not samples:
//! samples of one round are not independent (T. Kalibera and R. Jones, "Rigorous Benchmarking in Reasonable Time", ISMM 2013,
//! <https://doi.org/10.1145/2464157.2464160>).

use rand::Rng;

/// The distribution of the rank sum is computed as long as that takes no more steps than this, some milliseconds: up to 52 values of which
/// half are on each side, and up to hundreds where one side is small. Of more values on both sides it is near enough to normal.
const MOST_STEPS: usize = 4_000_000;

/// Resamples for an interval. Its ends are then the 25th and the 976th value.
const RESAMPLES: usize = 1000;

/// The standard deviation of a normal distribution as a multiple of its median absolute deviation.
///
/// Source: P. J. Rousseeuw and C. Croux, "Alternatives to the Median Absolute Deviation", JASA 88(424), 1993,
/// <https://doi.org/10.1080/01621459.1993.10476408>.
const DEVIATIONS: f64 = 1.4826;

/// The middle value; of an even number of values the mean of the two middle ones. Reorders the values. Linear time.
pub(super) fn median(values: &mut [f64]) -> Option<f64> {
    if values.is_empty() {
        return None;
    }
    let is_odd = values.len() % 2 == 1;
    let (below, &mut upper, _) = values.select_nth_unstable_by(values.len() / 2, f64::total_cmp);
    let lower = if is_odd { upper } else { below.iter().copied().max_by(f64::total_cmp)? };
    Some(f64::midpoint(lower, upper))
}

/// The standard deviation of values that are spread about zero, some of which may be far out: 1.4826 times the median of their sizes.
pub(super) fn spread_about_zero(values: &[f64]) -> Option<f64> {
    let mut sizes: Vec<f64> = values.iter().map(|value| value.abs()).collect();
    Some(DEVIATIONS * median(&mut sizes)?)
}

/// The probability that values drawn like `low` and `high` from one and the same distribution would have `high` rank so high above `low`,
/// or higher: the one-sided rank-sum test. 1 where one of them is empty.
///
/// Up to [`MOST_STEPS`] it is exact, with ties too, by counting subsets of the mid-ranks by their sum (B. Streitberg and J. Röhmel,
/// "Exact Distributions for Permutation and Rank Tests", Statistical Software Newsletter 12(1), 1986), in `2 · N² · m²` steps, `m` the size of
/// the smaller sample; above, by the normal distribution with corrections for ties and continuity (H. B. Mann and D. R. Whitney, "On a Test of Whether one of Two Random
/// Variables is Stochastically Larger than the Other", 1947, <https://doi.org/10.1214/aoms/1177730491>; ties: E. L. Lehmann,
/// "Nonparametrics", 1975, section 1.4).
pub(super) fn rank_sum_p(low: &[f64], high: &[f64]) -> f64 {
    if low.is_empty() || high.is_empty() {
        return 1.0;
    }
    let ranks = Ranks::of(low, high);
    let steps = 2 * (low.len() + high.len()).pow(2) * low.len().min(high.len()).pow(2);
    if steps <= MOST_STEPS { ranks.of_smaller().exact_p() } else { ranks.normal_p() }
}

/// The least probability that a two-sided [`rank_sum_p`] can come to with so many values: all of one sample above all of the other.
pub(super) fn least_p(one: usize, other: usize) -> f64 {
    let all = one + other;
    let ways: f64 = (0..one.min(other)).map(|chosen| (all - chosen) as f64 / (chosen + 1) as f64).product();
    (2.0 / ways).min(1.0)
}

/// Of tests that can come to probabilities no less than these, which to do so that the chance of any false finding is at most `level`: those
/// that could still be significant when corrected for as many as are done. Others could find nothing, and would only make the correction of
/// all harder (R. E. Tarone, "A Modified Bonferroni Method for Discrete Data", Biometrics 46(2), 1990, <https://doi.org/10.2307/2531456>).
pub(super) fn worth_testing(least: &[f64], level: f64) -> Vec<bool> {
    let able = |tests: usize| least.iter().filter(|&&least| least * (tests as f64) < level).count();
    let tests = (1..=least.len()).find(|&tests| able(tests) <= tests).unwrap_or(1);
    least.iter().map(|&least| least * (tests as f64) < level).collect()
}

/// Mid-ranks of two samples together, doubled so that they are whole numbers.
struct Ranks {
    all: Vec<usize>,
    /// How many of them are of the sample that may be high.
    high: usize,
    /// The sum of those.
    sum: usize,
    /// Over all groups of equal values, their number cubed less their number.
    ties: f64,
}

impl Ranks {
    fn of(low: &[f64], high: &[f64]) -> Self {
        let mut values: Vec<(f64, bool)> = low.iter().map(|&value| (value, false)).chain(high.iter().map(|&value| (value, true))).collect();
        values.sort_unstable_by(|a, b| a.0.total_cmp(&b.0));
        let mut ranks = Self { all: Vec::with_capacity(values.len()), high: high.len(), sum: 0, ties: 0.0 };
        for group in values.chunk_by(|a, b| a.0 == b.0) {
            // Ranks from `before + 1` to `before + group.len()`, whose mean is doubled here.
            let doubled = 2 * ranks.all.len() + group.len() + 1;
            ranks.sum += doubled * group.iter().filter(|(_, is_high)| *is_high).count();
            ranks.all.extend(std::iter::repeat_n(doubled, group.len()));
            let count = group.len() as f64;
            ranks.ties += count * (count * count - 1.0);
        }
        ranks
    }

    /// The same question about the smaller sample: that the other one ranks so high is that this one ranks so low, which on mirrored ranks is
    /// so high.
    fn of_smaller(self) -> Self {
        let count = self.all.len();
        if 2 * self.high <= count {
            return self;
        }
        // Ranks are doubled, the least is 2 and the greatest twice their number, but for ties, whose mid-ranks lie between.
        let (mirror, high) = (2 * (count + 1), count - self.high);
        let total: usize = self.all.iter().sum();
        Self { all: self.all.iter().rev().map(|rank| mirror - rank).collect(), high, sum: mirror * high - (total - self.sum), ..self }
    }

    fn exact_p(&self) -> f64 {
        // Row k counts the subsets of k ranks by their sum.
        let greatest: usize = self.all.iter().rev().take(self.high).sum();
        let width = greatest + 1;
        let mut counts = vec![0.0_f64; (self.high + 1) * width];
        counts[0] = 1.0;
        for (seen, &rank) in self.all.iter().enumerate() {
            for size in (1..=self.high.min(seen + 1)).rev() {
                let (smaller, larger) = counts.split_at_mut(size * width);
                let smaller = &smaller[(size - 1) * width..];
                for (to, from) in larger[rank.min(width)..width].iter_mut().zip(smaller) {
                    *to += from;
                }
            }
        }
        let whole = &counts[self.high * width..];
        whole[self.sum..].iter().sum::<f64>() / whole.iter().sum::<f64>()
    }

    fn normal_p(&self) -> f64 {
        let (count, high) = (self.all.len() as f64, self.high as f64);
        let low = count - high;
        let above = self.sum as f64 / 2.0 - high * (high + 1.0) / 2.0;
        let variance = low * high / 12.0 * (count + 1.0 - self.ties / (count * (count - 1.0)));
        if variance <= 0.0 {
            return 1.0;
        }
        let z = (above - low * high / 2.0 - 0.5) / variance.sqrt();
        libm::erfc(z / std::f64::consts::SQRT_2) / 2.0
    }
}

/// Corrects probabilities for being so many, so that the chance that any true hypothesis has one below a level is at most that level,
/// however they depend on each other (S. Holm, "A Simple Sequentially Rejective Multiple Test Procedure", Scandinavian Journal of
/// Statistics 6(2), 1979, <https://www.jstor.org/stable/4615733>).
pub(super) fn correct_for_many(probabilities: &mut [f64]) {
    let mut order: Vec<usize> = (0..probabilities.len()).collect();
    order.sort_by(|&a, &b| probabilities[a].total_cmp(&probabilities[b]));
    let mut least = 0.0_f64;
    for (position, &index) in order.iter().enumerate() {
        let remaining = (order.len() - position) as f64;
        least = least.max((probabilities[index] * remaining).min(1.0));
        probabilities[index] = least;
    }
}

/// The 95 % interval of `median(new) / median(base)` by the percentile bootstrap over rounds (B. Efron, "Bootstrap Methods: Another Look at
/// the Jackknife", Annals of Statistics 7(1), 1979, <https://doi.org/10.1214/aos/1176344552>). Values are positive. `None` where one of
/// them is empty.
pub(super) fn ratio_interval(base: &[f64], new: &[f64], rng: &mut impl Rng) -> Option<(f64, f64)> {
    let mut room = Vec::with_capacity(base.len().max(new.len()));
    let mut resampled = |values: &[f64]| {
        room.clear();
        room.extend((0..values.len()).map(|_| values[rng.random_range(0..values.len())]));
        median(&mut room)
    };
    let mut ratios = (0..RESAMPLES).map(|_| Some(resampled(new)? / resampled(base)?)).collect::<Option<Vec<f64>>>()?;
    ratios.sort_unstable_by(f64::total_cmp);
    Some((*ratios.get(RESAMPLES / 40 - 1)?, *ratios.get(RESAMPLES - RESAMPLES / 40)?))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use rand::{Rng, SeedableRng};
    use rand_chacha::ChaCha8Rng;

    use super::{DEVIATIONS, Ranks, correct_for_many, least_p, median, rank_sum_p, ratio_interval, spread_about_zero, worth_testing};

    fn near(a: f64, b: f64) -> bool {
        (a - b).abs() < 1e-9
    }

    #[test]
    fn the_exact_test_has_the_textbook_values() {
        // Of the C(6, 3) = 20 ways to choose three of six ranks, one has the greatest sum, and two the greatest or the next.
        assert!(near(rank_sum_p(&[1.0, 2.0, 3.0], &[4.0, 5.0, 6.0]), 1.0 / 20.0));
        assert!(near(rank_sum_p(&[1.0, 2.0, 4.0], &[3.0, 5.0, 6.0]), 2.0 / 20.0));
        assert!(near(rank_sum_p(&[4.0, 5.0, 6.0], &[1.0, 2.0, 3.0]), 1.0));
        // With ties: 1 1 | 1 2. Two of the four ranks (2, 2, 2, 4): 3 of 6 subsets hold the 4.
        assert!(near(rank_sum_p(&[1.0, 1.0], &[1.0, 2.0]), 0.5));
        assert!(near(rank_sum_p(&[5.0; 8], &[5.0; 9]), 1.0));
        assert!(near(rank_sum_p(&[], &[1.0]), 1.0));
    }

    #[test]
    fn the_exact_and_the_normal_probability_agree_where_both_hold() {
        let mut rng = ChaCha8Rng::seed_from_u64(1);
        for shift in [0.0, 0.1, 0.2, 0.3] {
            // Whole numbers, so that there are ties.
            let mut draw = |shift: f64| -> Vec<f64> { (0..20).map(|_| (20.0 * (rng.random::<f64>() + shift)).floor()).collect() };
            let ranks = Ranks::of(&draw(0.0), &draw(shift));
            let (exact, normal) = (ranks.exact_p(), ranks.normal_p());
            assert!((exact - normal).abs() < 0.01, "shift {shift}: {exact} against {normal}");
        }
    }

    #[test]
    fn the_least_probability_is_that_of_samples_wholly_apart() {
        for (one, other) in [(1, 1), (3, 3), (6, 9), (9, 6), (6, 200)] {
            let low: Vec<f64> = (0..one).map(f64::from).collect();
            let high: Vec<f64> = (0..other).map(|value| f64::from(value) + 1000.0).collect();
            let least = least_p(low.len(), high.len());
            assert!((2.0 * rank_sum_p(&low, &high) / least - 1.0).abs() < 1e-9 || least == 1.0, "{one} and {other}: {least}");
        }
        assert!(near(least_p(3, 3), 0.1));
    }

    #[test]
    fn the_larger_sample_is_judged_as_the_smaller_one_mirrored() {
        let mut rng = ChaCha8Rng::seed_from_u64(3);
        for _ in 0..50 {
            let mut draw = |count: usize| -> Vec<f64> { (0..count).map(|_| (9.0 * rng.random::<f64>()).floor()).collect() };
            let (low, high) = (draw(3), draw(12));
            assert!(near(Ranks::of(&low, &high).exact_p(), Ranks::of(&low, &high).of_smaller().exact_p()), "{low:?} {high:?}");
        }
    }

    #[test]
    fn tests_that_could_find_nothing_are_left_out_and_no_others() {
        assert_eq!(worth_testing(&[], 0.01), [false; 0]);
        assert_eq!(worth_testing(&[0.02, 0.001], 0.01), [false, true]);
        // Two tests of 0.004 are possible, three are not: each could come to 0.012 at least.
        assert_eq!(worth_testing(&[0.004; 2], 0.01), [true; 2]);
        assert_eq!(worth_testing(&[0.004; 3], 0.01), [false; 3]);
        assert_eq!(worth_testing(&[0.004, 0.004, 0.004, 1e-9], 0.01), [false, false, false, true]);
    }

    #[test]
    fn corrected_probabilities_are_those_of_holm() {
        let mut probabilities = [0.01, 0.04, 0.03, 0.005];
        correct_for_many(&mut probabilities);
        assert!(probabilities.iter().zip([0.03, 0.06, 0.06, 0.02]).all(|(&a, b)| near(a, b)), "{probabilities:?}");
        let mut many = [0.4; 9];
        correct_for_many(&mut many);
        assert_eq!(many, [1.0; 9]);
    }

    #[test]
    fn an_interval_covers_the_true_ratio_about_as_often_as_it_says() {
        let mut rng = ChaCha8Rng::seed_from_u64(2);
        let covered = (0..400).filter(|_| {
            let mut draw = |scale: f64| -> Vec<f64> { (0..20).map(|_| scale * (1.0 - (1.0 - rng.random::<f64>()).ln() / 10.0)).collect() };
            let (base, new) = (draw(1.0), draw(1.5));
            ratio_interval(&base, &new, &mut rng).is_some_and(|(low, high)| (low..=high).contains(&1.5))
        });
        let share = covered.count() as f64 / 400.0;
        assert!((0.92..=1.0).contains(&share), "{share}");
    }

    #[test]
    fn medians_and_spreads_have_the_textbook_values() {
        assert_eq!(median(&mut []), None);
        assert_eq!(median(&mut [3.0, 1.0, 2.0]), Some(2.0));
        assert_eq!(median(&mut [4.0, 1.0, 2.0, 3.0]), Some(2.5));
        assert_eq!(spread_about_zero(&[-1.0, 1.0, 50.0]), Some(DEVIATIONS));
    }

    proptest! {
        #[test]
        fn both_sides_of_the_test_cover_everything_once(
            low in prop::collection::vec(0_u8..6, 1..25), high in prop::collection::vec(0_u8..6, 1..25)
        ) {
            let (low, high): (Vec<f64>, Vec<f64>) = (low.into_iter().map(f64::from).collect(), high.into_iter().map(f64::from).collect());
            let (up, down) = (rank_sum_p(&low, &high), rank_sum_p(&high, &low));
            // Both count the outcomes equal to what is seen.
            prop_assert!((0.0..=1.0 + 1e-9).contains(&up) && (0.0..=1.0 + 1e-9).contains(&down) && up + down > 1.0 - 1e-9);
        }

        #[test]
        fn a_correction_keeps_the_order_and_lowers_nothing(before in prop::collection::vec(0.0_f64..=1.0, 0..50)) {
            let mut after = before.clone();
            correct_for_many(&mut after);
            for (i, a) in before.iter().enumerate() {
                prop_assert!(after[i] >= *a && after[i] <= 1.0);
                for (j, b) in before.iter().enumerate() {
                    prop_assert!(a > b || after[i] <= after[j]);
                }
            }
        }
    }
}
