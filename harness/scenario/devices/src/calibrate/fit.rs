//! Robust estimates from disturbed samples: medians, and lines through samples of several sizes.

use crate::profile::{FitError, MeasuredFigure, Share, Spread, UnitText};

/// Samples in nanoseconds, by size.
pub(super) type Curve = Vec<(f64, Vec<f64>)>;

#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Line {
    /// Cost at size zero, not negative.
    pub(super) base: f64,
    /// Additional cost per unit of size, not negative.
    pub(super) slope: f64,
}

/// Fits a line through the medians of a curve: of the lines through two of them, the one with the
/// least median relative error, and of equal ones that through the most distant sizes. The medians
/// reject disturbed samples, and the fit rejects up to half of the sizes, as where a driver takes
/// longer for some allocations of many GiB.
///
/// Source: P. J. Rousseeuw, "Least Median of Squares Regression", Journal of the American
/// Statistical Association 79 (388), 1984, <https://doi.org/10.1080/01621459.1984.10477105>. Cubic
/// in the number of sizes.
pub(super) fn line(curve: &Curve) -> Line {
    // Errors of less than this share are equal.
    const SHARE: f64 = 1e-4;
    // A time is the difference of two readings of a clock that counts nanoseconds.
    const CLOCK: f64 = 2.0;
    let points = medians(curve);
    let pairs = points
        .iter()
        .enumerate()
        .flat_map(|(index, a)| points[index..].iter().map(move |b| (a, b)));
    let lines = pairs.map(|(a, b)| {
        let distance = (b.0 - a.0).abs();
        let slope = if distance == 0.0 {
            0.0
        } else {
            ((b.1 - a.1) / (b.0 - a.0)).max(0.0)
        };
        let line = Line {
            base: (a.1 - slope * a.0).max(0.0),
            slope,
        };
        let error = |(size, cost): &(f64, f64)| {
            ((line.base + line.slope * size - cost).abs() - CLOCK).max(0.0) / cost.max(1.0)
        };
        let relative = points.iter().map(error).collect();
        (
            (median(relative).unwrap_or(0.0) / SHARE).round(),
            -distance,
            line,
        )
    });
    let best = lines.min_by(|a, b| a.0.total_cmp(&b.0).then(a.1.total_cmp(&b.1)));
    best.map_or(
        Line {
            base: 0.0,
            slope: 0.0,
        },
        |(.., line)| line,
    )
}

fn medians(curve: &Curve) -> Vec<(f64, f64)> {
    curve
        .iter()
        .filter_map(|(size, samples)| Some((*size, median(samples.clone())?)))
        .collect()
}

/// Returns the model's relative error at the median cost of each size.
pub(super) fn error_of(curve: &Curve, model: impl Fn(f64) -> f64) -> FitError {
    errors(
        medians(curve)
            .into_iter()
            .map(|(size, cost)| (cost, model(size)))
            .collect(),
    )
}

/// Returns a figure of a curve: its value, and the spread of the samples at one size, each divided
/// by `units`.
pub(super) fn of_curve<U: UnitText>(
    value: f64,
    curve: &Curve,
    at: Option<&(f64, Vec<f64>)>,
    units: f64,
    fit_error: FitError,
) -> MeasuredFigure<U> {
    let samples = curve.iter().map(|(_, samples)| samples.len() as u64).sum();
    let spread = at.map_or(0.0, |(_, samples)| deviation(samples) / units);
    MeasuredFigure::new(whole(value), samples, Spread::of(spread), fit_error)
}

/// Returns a figure without a size: the median of its samples.
pub(super) fn constant<U: UnitText>(samples: &[f64]) -> MeasuredFigure<U> {
    let value = median(samples.to_vec()).unwrap_or(0.0);
    let fit_error = errors(samples.iter().map(|sample| (*sample, value)).collect());
    MeasuredFigure::new(
        whole(value),
        samples.len() as u64,
        Spread::of(deviation(samples)),
        fit_error,
    )
}

/// Returns the median and the maximum relative error of pairs of measured and modelled costs.
fn errors(pairs: Vec<(f64, f64)>) -> FitError {
    let relative: Vec<f64> = pairs
        .into_iter()
        .filter_map(|(cost, model)| relative_error(cost, model))
        .collect();
    let worst = relative.iter().copied().fold(0.0, f64::max);
    FitError {
        median: Share::of(median(relative).unwrap_or(0.0)),
        worst: Share::of(worst),
    }
}

/// Returns `None` if the cost is too small for the clock, which is not the model's error.
fn relative_error(cost: f64, model: f64) -> Option<f64> {
    (cost > 0.0).then(|| (model - cost).abs() / cost)
}

/// Returns the median absolute deviation from the median, unscaled.
fn deviation(samples: &[f64]) -> f64 {
    let Some(centre) = median(samples.to_vec()) else {
        return 0.0;
    };
    median(
        samples
            .iter()
            .map(|sample| (sample - centre).abs())
            .collect(),
    )
    .unwrap_or(0.0)
}

fn median(mut values: Vec<f64>) -> Option<f64> {
    values.sort_unstable_by(f64::total_cmp);
    let middle = values.len() / 2;
    let upper = *values.get(middle)?;
    Some(if values.len() % 2 == 1 {
        upper
    } else {
        f64::midpoint(values[middle - 1], upper)
    })
}

/// Rounds to a whole number, at least 0.
fn whole(value: f64) -> u64 {
    // `as` saturates, and finite times give no NaN.
    value.round() as u64
}

#[cfg(test)]
mod tests;
