use std::collections::BTreeSet;

use crate::inference::{median, spread_about_zero};

/// Minimum number of runs on each side of a change; fewer may be chance.
pub const LEAST_RUNS: usize = 3;

/// Cost of a change point in squared standard deviations, as a multiple of the logarithm of the
/// number of runs. 2 pays for its position and level (Y.-C. Yao, "Estimating the Number of
/// Change-Points via Schwarz' Criterion", 1988, <https://doi.org/10.1016/0167-7152(88)90118-6>).
/// Four times that is used, because figures of runs have longer tails than the normal distribution
/// that the criterion assumes.
const PENALTY: f64 = 8.0;

/// Outlier limit in standard deviations. The search replaces a figure beyond it by the median of
/// itself and two neighbours on each side, so one bad run is not a change (R. K. Pearson, "Outliers
/// in Process Modeling and Identification", 2002, <https://doi.org/10.1109/87.974338>).
const FAR_OUT: f64 = 3.0;

/// Minimum relative spread: smaller differences are rounding.
const STEADIEST: f64 = 0.001;

#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ChangePoint {
    pub at: usize,
    pub before: f64,
    pub after: f64,
}

/// Lasting changes by more than the share `least`, as in 0.05. A change lasts at least
/// [`LEAST_RUNS`] and exceeds the spread between runs. Figures are positive.
///
/// The cuts minimize the squared distances of the logarithms from the mean of their stretch plus a
/// penalty per cut (B. Jackson and others, "An Algorithm for Optimal Partitioning of Data on an
/// Interval", 2005, <https://doi.org/10.1109/LSP.2001.838216>). The spread is estimated from
/// differences between neighbours, which few changes affect. Quadratic time.
pub fn change_points(figures: &[f64], least: f64) -> Vec<ChangePoint> {
    let logs: Vec<f64> = figures.iter().map(|figure| figure.ln()).collect();
    let differences: Vec<f64> = logs.windows(2).map(|pair| pair[1] - pair[0]).collect();
    let deviation = spread_about_zero(&differences).unwrap_or_default() / std::f64::consts::SQRT_2;
    let deviation = deviation.max(STEADIEST);
    let mut cuts = best_cuts(
        &without_far_out(&logs, deviation),
        PENALTY * deviation * deviation * (logs.len() as f64).ln(),
    );
    loop {
        let points = points(figures, &cuts);
        let smallest = points.iter().min_by(|a, b| size(a).total_cmp(&size(b)));
        match smallest {
            // The merged stretch may differ from its neighbours in another way.
            Some(smallest) if size(smallest) <= least.ln_1p() => cuts.remove(&smallest.at),
            _ => return points,
        };
    }
}

fn size(point: &ChangePoint) -> f64 {
    (point.after / point.before).ln().abs()
}

fn points(figures: &[f64], cuts: &BTreeSet<usize>) -> Vec<ChangePoint> {
    let ends = cuts.iter().copied().skip(1).chain([figures.len()]);
    let middle =
        |from: usize, to: usize| median(&mut figures[from..to].to_vec()).unwrap_or_default();
    let mut from = 0;
    let mut points = Vec::new();
    for (&at, to) in cuts.iter().zip(ends) {
        points.push(ChangePoint {
            at,
            before: middle(from, at),
            after: middle(at, to),
        });
        from = at;
    }
    points
}

fn without_far_out(logs: &[f64], deviation: f64) -> Vec<f64> {
    let around = |at: usize| &logs[at.saturating_sub(2)..(at + 3).min(logs.len())];
    let kept = logs.iter().enumerate().map(|(at, &value)| {
        let middle = median(&mut around(at).to_vec()).unwrap_or(value);
        if (value - middle).abs() > FAR_OUT * deviation {
            middle
        } else {
            value
        }
    });
    kept.collect()
}

/// The cuts that minimize squared distances from the means of the stretches plus `penalty` per cut.
fn best_cuts(values: &[f64], penalty: f64) -> BTreeSet<usize> {
    let count = values.len();
    if count == 0 {
        return BTreeSet::new();
    }
    // Distances from the first value keep the sums of squares precise.
    let (mut sums, mut squares) = (vec![0.0], vec![0.0]);
    for value in values.iter().map(|value| value - values[0]) {
        sums.push(sums[sums.len() - 1] + value);
        squares.push(squares[squares.len() - 1] + value * value);
    }
    let cost = |from: usize, to: usize| {
        let sum: f64 = sums[to] - sums[from];
        squares[to] - squares[from] - sum * sum / (to - from) as f64
    };
    // The least cost of the first `to` values, and the start of their last stretch.
    let mut best = vec![(f64::INFINITY, 0); count + 1];
    best[0] = (0.0, 0);
    for to in LEAST_RUNS..=count {
        let starts = std::iter::once(0).chain(LEAST_RUNS..=to - LEAST_RUNS);
        let costs = starts.map(|from| {
            (
                best[from].0 + cost(from, to) + if from == 0 { 0.0 } else { penalty },
                from,
            )
        });
        best[to] = costs
            .min_by(|a, b| a.0.total_cmp(&b.0))
            .unwrap_or((f64::INFINITY, 0));
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
mod tests;
