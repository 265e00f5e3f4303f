//! Order statistics of durations: median, median absolute deviation and nearest-rank percentile. Means and standard deviations
//! would hide the long tails of allocator times.

use harness_allocator::units::Nanos;

/// Minimum number of samples for a 99th percentile. With fewer, the nearest rank is the maximum.
pub const LEAST_FOR_P99: usize = 100;

/// Summary of an operation's durations. A figure is `None` if there are too few samples.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Summary {
    /// Number of operations.
    pub count: u64,
    /// Number of samples.
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
        let p99 = if samples.len() < LEAST_FOR_P99 { None } else { nearest_rank(&mut samples, 99) };
        let mad = median.filter(|_| samples.len() > 1).and_then(|median| median_absolute_deviation(&samples, median));
        Self { count, kept: samples.len(), median: median.map(Nanos), mad: mad.map(Nanos), p99: p99.map(Nanos), max: max.map(Nanos) }
    }
}

/// Returns the middle value. For an even count, returns the midpoint of the two middle values, rounded down. Reorders the values;
/// linear time.
///
/// Source: NIST/SEMATECH e-Handbook of Statistical Methods, 1.3.5.1,
/// <https://www.itl.nist.gov/div898/handbook/eda/section3/eda351.htm>.
pub fn median(values: &mut [u64]) -> Option<u64> {
    if values.is_empty() {
        return None;
    }
    let is_odd = values.len() % 2 == 1;
    let (below, &mut upper, _) = values.select_nth_unstable(values.len() / 2);
    let lower = if is_odd { upper } else { below.iter().copied().max()? };
    Some(u64::midpoint(lower, upper))
}

/// Returns the median distance from `centre`. It is not scaled to a standard deviation, because durations are not normally
/// distributed.
///
/// Source: NIST/SEMATECH e-Handbook of Statistical Methods, 1.3.5.6,
/// <https://www.itl.nist.gov/div898/handbook/eda/section3/eda356.htm>.
pub fn median_absolute_deviation(values: &[u64], centre: u64) -> Option<u64> {
    let mut distances: Vec<u64> = values.iter().map(|value| value.abs_diff(centre)).collect();
    median(&mut distances)
}

/// Returns the smallest value that is at least as large as `percent` (1 to 100) of all values. Reorders the values; linear time.
///
/// Source: R. J. Hyndman and Y. Fan, "Sample Quantiles in Statistical Packages", The American Statistician 50(4), 1996,
/// definition 1.
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
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn small_samples_have_the_textbook_values() {
        assert_eq!(median(&mut []), None);
        assert_eq!(median(&mut [7]), Some(7));
        assert_eq!(median(&mut [9, 1, 4]), Some(4));
        assert_eq!(median(&mut [10, 1, 4, 7]), Some(5));
        assert_eq!(median(&mut [u64::MAX, u64::MAX]), Some(u64::MAX));
        assert_eq!(median_absolute_deviation(&[1, 1, 2, 2, 4, 6, 9], 2), Some(1));
        assert_eq!(nearest_rank(&mut [15, 20, 35, 40, 50], 30), Some(20));
        assert_eq!(nearest_rank(&mut [15, 20, 35, 40, 50], 100), Some(50));
        assert_eq!(nearest_rank(&mut [], 99), None);
    }

    #[test]
    fn a_99th_percentile_is_told_from_100_samples_on() {
        assert_eq!(Summary::new(99, (1..=99).collect()).p99, None);
        let summary = Summary::new(100, (1..=100).collect());
        assert_eq!((summary.p99, summary.max), (Some(Nanos(99)), Some(Nanos(100))));
    }

    #[test]
    fn a_ratio_to_nothing_does_not_exist() {
        assert_eq!(ratio(Nanos(3), Nanos::ZERO), None);
        assert_eq!(ratio(Nanos::ZERO, Nanos::ZERO), None);
        assert_eq!(ratio(Nanos(3), Nanos(2)), Some(1.5));
    }

    proptest! {
        #[test]
        fn the_median_lies_between_minimum_and_maximum(values in prop::collection::vec(any::<u64>(), 1..200)) {
            let median = median(&mut values.clone()).expect("there are values");
            prop_assert!(values.iter().min() <= Some(&median) && Some(&median) <= values.iter().max());
        }

        #[test]
        fn the_order_of_samples_does_not_matter(
            (values, shuffled) in prop::collection::vec(any::<u64>(), 0..300).prop_flat_map(|v| (Just(v.clone()), Just(v).prop_shuffle()))
        ) {
            prop_assert_eq!(Summary::new(5, values), Summary::new(5, shuffled));
        }

        #[test]
        fn the_deviation_of_equal_samples_is_zero(value in any::<u64>(), count in 2_usize..200) {
            let summary = Summary::new(count as u64, vec![value; count]);
            prop_assert_eq!((summary.median, summary.mad, summary.max), (Some(Nanos(value)), Some(Nanos(0)), Some(Nanos(value))));
        }

        #[test]
        fn at_least_99_of_100_samples_do_not_exceed_the_99th_percentile(values in prop::collection::vec(any::<u64>(), 1..500)) {
            let p99 = nearest_rank(&mut values.clone(), 99).expect("there are values");
            let not_above = values.iter().filter(|&&value| value <= p99).count();
            let below = values.iter().filter(|&&value| value < p99).count();
            prop_assert!(values.contains(&p99) && not_above * 100 >= values.len() * 99 && below * 100 < values.len() * 99);
        }

        #[test]
        fn at_least_half_of_the_samples_lie_within_one_deviation(values in prop::collection::vec(0_u64..1 << 40, 2..200)) {
            let summary = Summary::new(0, values.clone());
            let (Some(Nanos(median)), Some(Nanos(mad))) = (summary.median, summary.mad) else { unreachable!("there are samples") };
            let within = values.iter().filter(|value| value.abs_diff(median) <= mad).count();
            prop_assert!(within * 2 >= values.len());
        }
    }
}
