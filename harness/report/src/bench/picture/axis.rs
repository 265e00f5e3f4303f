use std::ops::Range;

use harness_allocator::units::Bytes;
use plotters::coord::ranged1d::{KeyPointHint, NoDefaultFormatting, Ranged, ValueFormatter};

use super::super::words;
use harness_bench::record::Quantity;

type Unit = Option<Quantity>;

fn label(unit: Unit, value: u64) -> String {
    match unit {
        None => value.to_string(),
        Some(Quantity::Memory) => Bytes(value).to_string().replace(".00 ", " "),
        Some(Quantity::HostTime | Quantity::DeviceTime | Quantity::ModelTime) => {
            let time = words::time(value);
            let Some((number, unit)) = time.split_once(' ') else {
                return time;
            };
            let number = if number.contains('.') {
                number.trim_end_matches('0').trim_end_matches('.')
            } else {
                number
            };
            format!("{number} {unit}")
        }
    }
}

/// A logarithmic scale: equal distances are equal ratios. Zero has its own position below all other
/// values.
#[derive(Clone, Debug)]
pub(super) struct LogAxis {
    unit: Unit,
    ends: Range<f64>,
    /// The position of zero, if it occurs.
    zero: Option<f64>,
    /// Labelled values, if they are not round ones.
    marks: Option<Vec<u64>>,
}

impl LogAxis {
    /// Creates an axis that contains `values` with a margin on both sides.
    pub(super) fn new(unit: Unit, values: impl IntoIterator<Item = u64>) -> Self {
        let (zeros, others): (Vec<u64>, Vec<u64>) =
            values.into_iter().partition(|value| *value == 0);
        let log = |value: Option<&u64>, none| value.map_or(none, |value| (*value as f64).ln());
        let (low, high) = (log(others.iter().min(), 0.0), log(others.iter().max(), 1.0));
        let middle = f64::midpoint(low, high);
        let (low, high) = (low.min(middle - 0.02), high.max(middle + 0.02));
        let margin = (high - low) * 0.06;
        let zero = (!zeros.is_empty()).then_some(low - (high - low) * 0.15);
        Self {
            unit,
            ends: zero.unwrap_or(low) - margin..high + margin,
            zero,
            marks: None,
        }
    }

    /// Creates an axis labelled with those of the ascending `values` that have at least this
    /// distance from the previous label, as a share of the axis.
    pub(super) fn marked(
        unit: Unit,
        values: impl IntoIterator<Item = u64> + Clone,
        apart: f64,
    ) -> Self {
        let axis = Self::new(unit, values.clone());
        let mut marks: Vec<u64> = Vec::new();
        for value in values {
            if marks
                .last()
                .is_none_or(|before| axis.share(value) - axis.share(*before) >= apart)
            {
                marks.push(value);
            }
        }
        Self {
            marks: Some(marks),
            ..axis
        }
    }

    fn share(&self, value: u64) -> f64 {
        let place = if value == 0 {
            self.zero.unwrap_or(self.ends.start)
        } else {
            (value as f64).ln()
        };
        (place - self.ends.start) / (self.ends.end - self.ends.start)
    }

    /// At most `most` round values, and zero.
    fn round_figures(&self, most: usize) -> Vec<u64> {
        let low = self
            .zero
            .map_or(self.ends.start, |zero| zero + (self.ends.end - zero) * 0.1);
        let figures = round_figures(low.exp(), self.ends.end.exp(), most)
            .into_iter()
            .map(|figure| figure.round() as u64);
        self.zero.map(|_| 0).into_iter().chain(figures).collect()
    }
}

impl Ranged for LogAxis {
    type FormatOption = NoDefaultFormatting;
    type ValueType = u64;

    fn map(&self, value: &u64, (from, to): (i32, i32)) -> i32 {
        from + (self.share(*value) * f64::from(to - from)).round() as i32
    }

    fn key_points<Hint: KeyPointHint>(&self, hint: Hint) -> Vec<u64> {
        self.marks
            .clone()
            .unwrap_or_else(|| self.round_figures(hint.max_num_points()))
    }

    fn range(&self) -> Range<u64> {
        self.ends.start.exp() as u64..self.ends.end.exp() as u64
    }
}

impl ValueFormatter<u64> for LogAxis {
    fn format_ext(&self, value: &u64) -> String {
        if *value == 0 && self.zero.is_some() {
            "0".to_owned()
        } else {
            label(self.unit, *value)
        }
    }
}

/// Powers of ten, with 2 and 5 times them if there is room. An axis shorter than a decade has equal
/// steps.
fn round_figures(low: f64, high: f64, most: usize) -> Vec<f64> {
    let (first, last) = (low.log10().floor() as i32, high.log10().ceil() as i32);
    let within = |factors: &[f64], every: usize| -> Vec<f64> {
        let decades = (first..=last).step_by(every);
        let values = decades.flat_map(|decade| {
            factors
                .iter()
                .map(move |factor| factor * 10_f64.powi(decade))
        });
        values
            .filter(|value| (low..=high).contains(value))
            .collect()
    };
    let steps = || {
        let rough = (high - low) / most.min(5) as f64;
        let decade = 10_f64.powf(rough.log10().floor());
        let step = [1.0, 2.0, 5.0]
            .map(|factor| factor * decade)
            .into_iter()
            .find(|&step| step >= rough)
            .unwrap_or(decade * 10.0);
        ((low / step).ceil() as i64..=(high / step).floor() as i64)
            .map(|index| index as f64 * step)
            .collect()
    };
    let finest = within(&[1.0, 2.0, 5.0], 1);
    if finest.len() < 3 {
        return steps();
    }
    let coarser = [
        finest,
        within(&[1.0], 1),
        within(&[1.0], 2),
        within(&[1.0], 3),
    ];
    coarser
        .into_iter()
        .find(|ticks| (2..=most).contains(&ticks.len()))
        .unwrap_or_else(|| within(&[1.0], 6))
}

#[cfg(test)]
mod tests;
