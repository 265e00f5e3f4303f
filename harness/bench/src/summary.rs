//! Statistics of samples: median, deviation, 99th percentile, and a confidence interval of the median over rounds.
//!
//! Samples of one round share the machine's state and are not independent, so the interval is taken over the medians of rounds.
//! It assumes no distribution: it is a pair of order statistics (W. J. Conover, Practical Nonparametric Statistics, 3rd ed.,
//! section 3.2), because times have long tails that a mean and a standard deviation hide.

use super::record::EntrySummary;
use harness_base::statistics::{LEAST_FOR_P99, median_absolute_deviation, nearest_rank};

pub use harness_base::statistics::median;

/// Minimum number of rounds for 95 % coverage; the range of fewer rounds covers less.
pub const LEAST_ROUNDS: usize = 6;

/// The 95 % confidence interval of the median of independent values: the narrowest symmetric pair of order statistics with that
/// coverage. The full range for fewer than [`LEAST_ROUNDS`] values. Reorders the values.
pub fn median_interval(values: &mut [u64]) -> Option<(u64, u64)> {
    values.sort_unstable();
    let rank = interval_rank(values.len());
    Some((*values.get(rank)?, *values.get(values.len().checked_sub(1 + rank)?)?))
}

/// Number of values outside the interval at each end: the greatest k with 2 · P(Binomial(n, ½) ≤ k) ≤ 5 %, or 0.
fn interval_rank(count: usize) -> usize {
    // P(Binomial(n, ½) = 0). 2^-n underflows beyond a thousand rounds; the full range is returned then, which is never too
    // narrow.
    let mut probability = 0.5_f64.powi(i32::try_from(count).unwrap_or(i32::MAX));
    let (mut below, mut rank) = (0.0, 0);
    for outside in 0..count / 2 {
        below += probability;
        if 2.0 * below > 0.05 {
            break;
        }
        rank = outside;
        probability *= (count - outside) as f64 / (outside + 1) as f64;
    }
    rank
}

/// Summarizes samples by round. Ignores rounds without samples; all fields are 0 without any sample.
pub fn summarize(rounds: &[Vec<u64>]) -> EntrySummary {
    let mut all: Vec<u64> = rounds.iter().flatten().copied().collect();
    let Some(middle) = median(&mut all) else { return EntrySummary::default() };
    let mut medians: Vec<u64> = rounds.iter().filter_map(|round| median(&mut round.clone())).collect();
    let (low, high) = median_interval(&mut medians).unwrap_or((middle, middle));
    EntrySummary {
        count: all.len() as u64,
        median: middle,
        mad: median_absolute_deviation(&all, middle).unwrap_or_default(),
        p99: if all.len() < LEAST_FOR_P99 { None } else { nearest_rank(&mut all, 99) },
        min: all.iter().copied().min().unwrap_or_default(),
        max: all.iter().copied().max().unwrap_or_default(),
        // With unequal sample counts, all medians of rounds may be on one side of the overall median.
        low: low.min(middle),
        high: high.max(middle),
    }
}

/// Half the interval's width as a share of the median. `None` if there are too few rounds.
pub fn precision(summary: &EntrySummary, rounds: usize) -> Option<f64> {
    let width = summary.high - summary.low;
    match (summary.median, width) {
        _ if rounds < LEAST_ROUNDS => None,
        (_, 0) => Some(0.0),
        (0, _) => None,
        (median, width) => Some(width as f64 / 2.0 / median as f64),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use rand::{Rng, SeedableRng};
    use rand_chacha::ChaCha8Rng;

    use super::*;

    #[test]
    fn ranks_are_those_of_the_published_tables() {
        // Conover's table A3 and any table of the sign test: the extremes for 6 to 8 values, the second ones for 9 to 11, and so
        // on.
        let expected = [(0, 0), (1, 0), (5, 0), (6, 0), (8, 0), (9, 1), (11, 1), (12, 2), (15, 3), (20, 5), (25, 7), (50, 17), (100, 39)];
        for (count, outside) in expected {
            assert_eq!(interval_rank(count), outside, "{count} values");
        }
    }

    #[test]
    fn the_interval_covers_the_true_median_as_often_as_it_says() {
        // Exponential times with median ln 2, because times are skewed.
        let mut rng = ChaCha8Rng::seed_from_u64(7);
        let (trials, truth) = (4000, (std::f64::consts::LN_2 * 1e6) as u64);
        for count in [6, 10, 30] {
            let covered = (0..trials)
                .filter(|_| {
                    let mut values: Vec<u64> = (0..count).map(|_| (-(1.0 - rng.random::<f64>()).ln() * 1e6) as u64).collect();
                    median_interval(&mut values).is_some_and(|(low, high)| (low..=high).contains(&truth))
                })
                .count();
            let share = covered as f64 / f64::from(trials);
            assert!((0.94..0.995).contains(&share), "{share} of intervals over {count} values cover the median");
        }
    }

    #[test]
    fn a_summary_has_the_textbook_values() {
        let rounds = vec![vec![10, 12], vec![11, 11], vec![10, 90]];
        let summary = summarize(&rounds);
        let expected = EntrySummary { count: 6, median: 11, mad: 1, p99: None, min: 10, max: 90, low: 11, high: 50 };
        assert_eq!(summary, expected);
        assert_eq!(precision(&summary, rounds.len()), None, "three rounds are too few");
        assert_eq!(summarize(&[]), EntrySummary::default());
        assert_eq!(summarize(&vec![vec![5]; 100]).p99, Some(5));
    }

    #[test]
    fn equal_rounds_are_precise_even_at_zero() {
        let summary = summarize(&vec![vec![0]; 6]);
        assert_eq!(precision(&summary, 6), Some(0.0));
        let summary = summarize(&[vec![99], vec![99], vec![100], vec![100], vec![101], vec![101]]);
        assert_eq!(precision(&summary, 6), Some(0.01));
    }

    proptest! {
        #[test]
        fn the_median_lies_in_its_interval(rounds in prop::collection::vec(prop::collection::vec(any::<u64>(), 0..9), 0..30)) {
            let summary = summarize(&rounds);
            prop_assert!(summary.min <= summary.low && summary.low <= summary.median);
            prop_assert!(summary.median <= summary.high && summary.high <= summary.max);
        }
    }
}
