//! Statistics of samples: median, deviation, 99th percentile, and a confidence interval of the
//! median over rounds.
//!
//! Samples of one round share the machine's state and are not independent, so the interval is taken
//! over the medians of rounds. It assumes no distribution: it is a pair of order statistics (W. J.
//! Conover, Practical Nonparametric Statistics, 3rd ed., section 3.2), because times have long
//! tails that a mean and a standard deviation hide.

use super::record::EntrySummary;
use harness_base::statistics::{LEAST_FOR_P99, median_absolute_deviation, nearest_rank};

pub use harness_base::statistics::median;

/// Minimum number of rounds for 95 % coverage; the range of fewer rounds covers less.
pub const LEAST_ROUNDS: usize = 6;

/// The 95 % confidence interval of the median of independent values: the narrowest symmetric pair
/// of order statistics with that coverage. The full range for fewer than [`LEAST_ROUNDS`] values.
/// Reorders the values.
pub fn median_interval(values: &mut [u64]) -> Option<(u64, u64)> {
    values.sort_unstable();
    let rank = interval_rank(values.len());
    Some((
        *values.get(rank)?,
        *values.get(values.len().checked_sub(1 + rank)?)?,
    ))
}

/// Number of values outside the interval at each end: the greatest k with 2 · P(Binomial(n, ½)
/// ≤ k) ≤ 5 %, or 0.
fn interval_rank(count: usize) -> usize {
    // P(Binomial(n, ½) = 0). 2^-n underflows beyond a thousand rounds; the full range is returned
    // then, which is never too narrow.
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

/// Summarizes samples by round. Ignores rounds without samples; all fields are 0 without any
/// sample.
pub fn summarize(rounds: &[Vec<u64>]) -> EntrySummary {
    let mut all: Vec<u64> = rounds.iter().flatten().copied().collect();
    let Some(middle) = median(&mut all) else {
        return EntrySummary::default();
    };
    let mut medians: Vec<u64> = rounds
        .iter()
        .filter_map(|round| median(&mut round.clone()))
        .collect();
    let (low, high) = median_interval(&mut medians).unwrap_or((middle, middle));
    EntrySummary {
        count: all.len() as u64,
        median: middle,
        mad: median_absolute_deviation(&all, middle).unwrap_or_default(),
        p99: if all.len() < LEAST_FOR_P99 {
            None
        } else {
            nearest_rank(&mut all, 99)
        },
        min: all.iter().copied().min().unwrap_or_default(),
        max: all.iter().copied().max().unwrap_or_default(),
        // With unequal sample counts, all medians of rounds may be on one side of the overall
        // median.
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
mod tests;
