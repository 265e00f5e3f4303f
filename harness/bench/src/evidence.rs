//! What the figures of an entry in two nights prove: their ratio, its interval, and how likely it is without a cause.

use rand_chacha::ChaCha8Rng;

use super::history::{corrected_rounds, rounds, unit};
use super::inference::{least_p, median, rank_sum_p, ratio_interval};
use super::record::{ChangeFigures, Measured, Quantity, Stopped, SuiteRecord};

/// Of fewer rounds nothing is concluded: no rank test over two times five values can reach a hundredth on both sides together.
const LEAST_ROUNDS: usize = 6;

/// How many standard deviations two nights of one build are allowed to differ by: 3 are exceeded by 0.3 % of normal differences,
/// and what exceeds them must still be significant.
pub(super) const ALLOWED_DEVIATIONS: f64 = 3.0;

/// The share of normally distributed values within so many standard deviations is 95 %.
const WITHIN_95: f64 = 1.96;

/// An entry's figures in both nights, in one unit: corrected where both can be.
pub(super) struct Two {
    /// As they are.
    medians: (u64, u64),
    /// The medians of rounds, where both have enough of them for a test.
    rounds: Option<(Vec<f64>, Vec<f64>)>,
    /// The medians of all with their intervals.
    summaries: ([f64; 3], [f64; 3]),
    is_exact: bool,
}

impl Two {
    pub(super) fn of(old: Sample, new: Sample) -> Self {
        let rounds = match (old.corrected, new.corrected) {
            (Some(old), Some(new)) => (old, new),
            _ => (old.rounds, new.rounds),
        };
        let summaries = match (old.corrected_summary, new.corrected_summary) {
            (Some(old), Some(new)) => (old, new),
            _ => (old.summary, new.summary),
        };
        let is_exact = old.is_exact && new.is_exact;
        let enough = !is_exact && rounds.0.len() >= LEAST_ROUNDS && rounds.1.len() >= LEAST_ROUNDS;
        Self { medians: (old.median, new.median), rounds: enough.then_some(rounds), summaries, is_exact }
    }

    /// New over old.
    pub(super) fn ratio(&self) -> f64 {
        let of_rounds = |(old, new): &(Vec<f64>, Vec<f64>)| Some(median(&mut new.clone())? / median(&mut old.clone())?);
        self.rounds.as_ref().and_then(of_rounds).unwrap_or(self.summaries.1[0] / self.summaries.0[0])
    }

    pub(super) fn judged(&self, expected: Expected, rng: &mut ChaCha8Rng) -> Finding {
        let ((base, new), ratio) = (self.medians, self.ratio());
        let of = |(low, high): (f64, f64), p: f64| ChangeFigures { base, new, ratio, low, high, p };
        if self.is_exact {
            let p = if base == new { 1.0 } else { 0.0 };
            return Finding { figures: of((ratio, ratio), p), p_without_drift: p, basis: Basis::Exact };
        }
        let tested = self.rounds.as_ref().and_then(|(base, new)| Some((base, new, ratio_interval(base, new, rng)?)));
        if let Some((base, new, interval)) = tested {
            return Finding {
                figures: of(widened(ratio, interval, expected.deviation), p_beyond(base, new, expected)),
                p_without_drift: p_beyond(base, new, Expected { drift: 0.0, ..expected }),
                basis: Basis::Test { least: least_p(base.len(), new.len()) },
            };
        }
        let ([_, base_low, base_high], [_, new_low, new_high]) = self.summaries;
        // Two intervals of 95 % make a wider one than that, which is all that is left of rounds that were not kept.
        let interval = (new_low / base_high, new_high / base_low);
        Finding { figures: of(widened(ratio, interval, expected.deviation), 1.0), p_without_drift: 1.0, basis: Basis::Nothing }
    }
}

/// What two nights of one build may differ by, as logarithms of ratios.
#[derive(Clone, Copy, Debug)]
pub(super) struct Expected {
    /// What all allocators of the suite changed by together.
    pub(super) drift: f64,
    /// The standard deviation beside that.
    pub(super) deviation: f64,
}

/// Figures of both nights. Probabilities are corrected later, where there was a test.
pub(super) struct Finding {
    pub(super) figures: ChangeFigures,
    /// The probability if all allocators together had not changed.
    pub(super) p_without_drift: f64,
    pub(super) basis: Basis,
}

/// What a conclusion from figures rests on.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Basis {
    /// All rounds of a night are equal: any difference is certain.
    Exact,
    /// A test over rounds, which can come to no probability below this.
    Test { least: f64 },
    /// Rounds are too few for a test, among so many entries, or were not kept.
    Nothing,
}

/// An entry's figures in one night, ready to be compared.
pub(super) struct Sample {
    median: u64,
    /// The medians of rounds, corrected or as they are; empty where only medians were kept.
    rounds: Vec<f64>,
    /// The same divided by the yardstick of their round, where the quantity is one that it corrects and each round has one.
    corrected: Option<Vec<f64>>,
    /// The median of all and its interval, as they are and divided by the undisturbed yardstick.
    summary: [f64; 3],
    corrected_summary: Option<[f64; 3]>,
    is_exact: bool,
}

impl Sample {
    pub(super) fn of(suite: &SuiteRecord, measured: &Measured, quantity: Quantity) -> Self {
        let summary = measured.summary;
        let is_corrected = quantity == Quantity::HostTime;
        let figures = [summary.median, summary.low, summary.high].map(|figure| at_least_one(figure as f64));
        let is_virtual = match quantity {
            Quantity::ModelTime => true,
            // One sample alone cannot show that all are equal.
            Quantity::Memory => suite.stopped == Stopped::Deterministic || summary.count > 1,
            Quantity::HostTime | Quantity::DeviceTime => false,
        };
        Self {
            median: summary.median,
            corrected: corrected_rounds(suite, measured).filter(|_| is_corrected),
            rounds: rounds(suite, measured).map(|(median, _)| median).collect(),
            summary: figures,
            corrected_summary: unit(suite).filter(|_| is_corrected).map(|unit| figures.map(|figure| figure / unit)),
            is_exact: is_virtual && summary.min == summary.max,
        }
    }
}

/// Ratios to nothing do not exist, and nothing is less than one picosecond or one byte: what is 0 counts as one of them.
const fn at_least_one(figure: f64) -> f64 {
    figure.max(1.0)
}

/// An interval within nights, made one that holds between nights too: on the logarithmic scale, independent errors add by their squares.
fn widened(ratio: f64, (low, high): (f64, f64), deviation: f64) -> (f64, f64) {
    let between = WITHIN_95 * deviation;
    let (below, above) = ((ratio / low).ln().max(0.0), (high / ratio).ln().max(0.0));
    (ratio * (-below.hypot(between)).exp(), ratio * above.hypot(between).exp())
}

/// The probability of a difference this large, in either direction, where the true one lies between none and the common one, or no farther
/// from them than is allowed.
fn p_beyond(base: &[f64], new: &[f64], expected: Expected) -> f64 {
    let allowance = ALLOWED_DEVIATIONS * expected.deviation;
    let moved = |by: f64| base.iter().map(|figure| figure * by.exp()).collect::<Vec<f64>>();
    let up = rank_sum_p(&moved(expected.drift.max(0.0) + allowance), new);
    let down = rank_sum_p(new, &moved(expected.drift.min(0.0) - allowance));
    (2.0 * up.min(down)).min(1.0)
}
