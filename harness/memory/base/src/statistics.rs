//! Order statistics of durations: median, median absolute deviation and nearest-rank percentile.
//! Means and standard deviations would hide the long tails of allocator times.

use harness_allocator::units::Nanos;

/// Minimum number of samples for a 99th percentile. With fewer, the nearest rank is the maximum.
pub const LEAST_FOR_P99: usize = 100;

/// Summary of an operation's durations. A figure is `None` if there are too few samples.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Summary {
    pub count: u64,
    pub kept: usize,
    pub median: Option<Nanos>,
    /// The median absolute deviation, unscaled. Needs two samples.
    pub mad: Option<Nanos>,
    /// The 99th percentile by nearest rank. Needs [`LEAST_FOR_P99`] samples.
    pub p99: Option<Nanos>,
    pub max: Option<Nanos>,
}

impl Summary {
    /// Summarizes samples of `count` operations, in any order. Linear time.
    pub fn new(count: u64, mut samples: Vec<u64>) -> Self {
        let median = median(&mut samples);
        let max = samples.iter().copied().max();
        let p99 = if samples.len() < LEAST_FOR_P99 {
            None
        } else {
            nearest_rank(&mut samples, 99)
        };
        let mad = median
            .filter(|_| samples.len() > 1)
            .and_then(|median| median_absolute_deviation(&samples, median));
        Self {
            count,
            kept: samples.len(),
            median: median.map(Nanos),
            mad: mad.map(Nanos),
            p99: p99.map(Nanos),
            max: max.map(Nanos),
        }
    }
}

/// Returns the middle value. For an even count, returns the midpoint of the two middle values,
/// rounded down. Reorders the values; linear time.
///
/// Source: NIST/SEMATECH e-Handbook of Statistical Methods, 1.3.5.1,
/// <https://www.itl.nist.gov/div898/handbook/eda/section3/eda351.htm>.
pub fn median(values: &mut [u64]) -> Option<u64> {
    if values.is_empty() {
        return None;
    }
    let is_odd = values.len() % 2 == 1;
    let (below, &mut upper, _) = values.select_nth_unstable(values.len() / 2);
    let lower = if is_odd {
        upper
    } else {
        below.iter().copied().max()?
    };
    Some(u64::midpoint(lower, upper))
}

/// Returns the median distance from `centre`. It is not scaled to a standard deviation, because
/// durations are not normally distributed.
///
/// Source: NIST/SEMATECH e-Handbook of Statistical Methods, 1.3.5.6,
/// <https://www.itl.nist.gov/div898/handbook/eda/section3/eda356.htm>.
pub fn median_absolute_deviation(values: &[u64], centre: u64) -> Option<u64> {
    let mut distances: Vec<u64> = values.iter().map(|value| value.abs_diff(centre)).collect();
    median(&mut distances)
}

/// Returns the smallest value that is at least as large as `percent` (1 to 100) of all values.
/// Reorders the values; linear time.
///
/// Source: R. J. Hyndman and Y. Fan, "Sample Quantiles in Statistical Packages", The American
/// Statistician 50(4), 1996, definition 1.
pub fn nearest_rank(values: &mut [u64], percent: usize) -> Option<u64> {
    let rank = (values.len() * percent).div_ceil(100);
    let index = rank.checked_sub(1).filter(|&index| index < values.len())?;
    Some(*values.select_nth_unstable(index).1)
}

/// Returns `value` as a multiple of `base`. `None` if `base` is zero.
pub fn ratio(value: Nanos, base: Nanos) -> Option<f64> {
    (base > Nanos::ZERO).then(|| value.get() as f64 / base.get() as f64)
}

#[cfg(test)]
mod tests;
