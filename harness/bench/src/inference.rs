//! Estimates the centre of some values with an interval. Pure functions of numbers.
//!
//! The values are figures of rounds, because samples of one round share the machine's state and are
//! not independent (T. Kalibera and R. Jones, "Rigorous Benchmarking in Reasonable Time", ISMM
//! 2013, <https://doi.org/10.1145/2464157.2464160>).

/// The standard deviation of a normal distribution as a multiple of its median absolute deviation.
///
/// Source: P. J. Rousseeuw and C. Croux, "Alternatives to the Median Absolute Deviation", JASA
/// 88(424), 1993, <https://doi.org/10.1080/01621459.1993.10476408>.
const DEVIATIONS: f64 = 1.4826;

/// Probability that an interval misses the centre.
const MISSES: f64 = 0.01;

/// Number of values from which the signed-rank sum is treated as normal; the error is then less
/// than one rank.
const MANY: usize = 50;

#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Estimate {
    pub low: f64,
    pub middle: f64,
    pub high: f64,
}

impl Estimate {
    pub fn map(self, unit: impl Fn(f64) -> f64) -> Self {
        Self {
            low: unit(self.low),
            middle: unit(self.middle),
            high: unit(self.high),
        }
    }
}

/// The middle value, or the mean of the two middle ones. Sorts the values.
pub(crate) fn median(values: &mut [f64]) -> Option<f64> {
    values.sort_unstable_by(f64::total_cmp);
    let upper = values.get(values.len() / 2)?;
    Some(f64::midpoint(values[(values.len() - 1) / 2], *upper))
}

/// Robust standard deviation of values around zero: 1.4826 times the median of their absolute
/// values.
pub(crate) fn spread_about_zero(values: &[f64]) -> Option<f64> {
    let mut sizes: Vec<f64> = values.iter().map(|value| value.abs()).collect();
    Some(DEVIATIONS * median(&mut sizes)?)
}

/// The centre of symmetric values: the median of the means of all pairs, with the interval of
/// Wilcoxon's signed-rank test (J. L. Hodges and E. L. Lehmann, "Estimates of Location Based on
/// Rank Tests", 1963, <https://doi.org/10.1214/aoms/1177704172>). Outliers hardly affect it. The
/// ratio of two equal builds is symmetric, because either may be measured first. `None` for fewer
/// than eight values, which have no such interval. Quadratic time and space.
pub(crate) fn centre(values: &[f64]) -> Option<Estimate> {
    let outside = outside(values.len())?;
    let pairs = values
        .iter()
        .enumerate()
        .flat_map(|(i, a)| values[i..].iter().map(move |b| f64::midpoint(*a, *b)));
    let mut means: Vec<f64> = pairs.collect();
    let middle = median(&mut means)?;
    Some(Estimate {
        low: means[outside],
        middle,
        high: means[means.len() - 1 - outside],
    })
}

/// Number of pair means outside the interval at each end. `None` if even the full range misses the
/// centre too often.
fn outside(count: usize) -> Option<usize> {
    if count < MANY {
        // The number of subsets of the ranks 1 to n with each sum.
        let mut ways = vec![1.0_f64];
        for rank in 1..=count {
            let mut more = vec![0.0; ways.len() + rank];
            for (sum, ways) in ways.iter().enumerate() {
                more[sum] += ways;
                more[sum + rank] += ways;
            }
            ways = more;
        }
        let all = 2.0_f64.powi(i32::try_from(count).ok()?);
        let mut below = 0.0;
        let fits = ways.iter().take_while(|&&ways| {
            below += ways / all;
            2.0 * below <= MISSES
        });
        return fits.count().checked_sub(1);
    }
    // Two-sided 1 % of the normal distribution.
    const Z: f64 = 2.575_829;
    let n = count as f64;
    let sum = n * (n + 1.0) / 4.0 - Z * (n * (n + 1.0) * (2.0 * n + 1.0) / 24.0).sqrt();
    Some((sum.floor() as usize).saturating_sub(1))
}

#[cfg(test)]
mod tests;
