//! Axes of pictures: where a figure stands, and which figures are written beside it.

use harness_allocator::units::Bytes;

use super::super::words;
use harness_bench::record::Quantity;

/// Pixels between the places of zero and of the least positive figure on a logarithmic axis.
const ROOM_FOR_ZERO: f64 = 26.0;

/// What figures along an axis are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Unit {
    /// Figures of an entry.
    Of(Quantity),
    /// Bare numbers.
    Number,
    /// Shares of the first figure: 1 is unchanged.
    Share,
}

impl Unit {
    /// A figure beside an axis: no more digits than it has.
    fn label(self, value: f64) -> String {
        match self {
            Self::Of(Quantity::Memory) => Bytes(value.round() as u64).to_string().replace(".00 ", " "),
            Self::Of(Quantity::HostTime | Quantity::DeviceTime | Quantity::ModelTime) => plain_time(value),
            Self::Number => format!("{}", value.round()),
            Self::Share => format!("{:+.1} %", (value - 1.0) * 100.0).replace("+0.0", "0").replace("-0.0", "0").replace(".0 %", " %"),
        }
    }
}

/// Picoseconds of a round number, without zeros at the end.
fn plain_time(value: f64) -> String {
    let text = words::time(value.round() as u64);
    let Some((number, unit)) = text.split_once(' ') else { return text };
    let number = if number.contains('.') { number.trim_end_matches('0').trim_end_matches('.') } else { number };
    format!("{number} {unit}")
}

/// A stretch of figures on a stretch of pixels.
#[derive(Clone, Copy, Debug)]
pub(super) struct Axis {
    unit: Unit,
    is_log: bool,
    /// Whether figures of zero occur on a logarithmic axis: they stand at its start, apart.
    has_zero: bool,
    low: f64,
    high: f64,
    from: f64,
    to: f64,
}

impl Axis {
    /// An axis of ratios: equal distances are equal multiples. It starts at `from` and ends at `to` pixels and holds all of `values`.
    pub(super) fn log(unit: Unit, values: impl IntoIterator<Item = u64>, (from, to): (i32, i32)) -> Self {
        let (mut low, mut high, mut has_zero) = (f64::INFINITY, 0.0_f64, false);
        for value in values {
            if value == 0 {
                has_zero = true;
            } else {
                low = low.min(value as f64);
                high = high.max(value as f64);
            }
        }
        if high == 0.0 {
            (low, high) = (1.0, 10.0);
        }
        // A margin on both sides, and never less than a few percent in all: what varies by nothing must not look as if it did.
        let middle = (low * high).sqrt();
        let (low, high) = (low.min(middle / 1.02), high.max(middle * 1.02));
        let margin = (high / low).powf(0.06);
        Self { unit, is_log: true, has_zero, low: low / margin, high: high * margin, from: f64::from(from), to: f64::from(to) }
    }

    /// An axis of differences.
    pub(super) fn linear(unit: Unit, low: f64, high: f64, (from, to): (i32, i32)) -> Self {
        let middle = f64::midpoint(low, high);
        let least = (middle.abs() * 0.04).max(f64::MIN_POSITIVE);
        let (low, high) = if high - low < least { (middle - least / 2.0, middle + least / 2.0) } else { (low, high) };
        let margin = (high - low) * 0.08;
        let low = if low >= 0.0 { (low - margin).max(0.0) } else { low - margin };
        Self { unit, is_log: false, has_zero: false, low, high: high + margin, from: f64::from(from), to: f64::from(to) }
    }

    /// Where a figure stands, in pixels.
    pub(super) fn place(&self, value: f64) -> i32 {
        let start = self.start();
        let share = if !self.is_log {
            (value - self.low) / (self.high - self.low)
        } else if value <= 0.0 {
            return self.from.round() as i32;
        } else {
            (value / self.low).ln() / (self.high / self.low).ln()
        };
        (start + share * (self.to - start)).round() as i32
    }

    /// Where positive figures start.
    fn start(&self) -> f64 {
        if self.has_zero { self.from + ROOM_FOR_ZERO.copysign(self.to - self.from) } else { self.from }
    }

    /// Round figures along the axis, at least about `apart` pixels from each other, with their words.
    pub(super) fn ticks(&self, apart: f64) -> Vec<(i32, String)> {
        let room = (((self.to - self.start()).abs() / apart) as usize).max(2);
        let values = match self.unit {
            _ if !self.is_log => linear_ticks(self.low, self.high, room),
            Unit::Of(_) | Unit::Number | Unit::Share => log_ticks(self.low, self.high, room),
        };
        let zero = self.has_zero.then_some(0.0);
        zero.into_iter().chain(values).map(|value| (self.place(value), self.label(value))).collect()
    }

    /// Those of `values`, in their order, that stand at least `apart` pixels from the one before, with their words.
    pub(super) fn marks(&self, values: impl IntoIterator<Item = u64>, apart: i32) -> Vec<(i32, String)> {
        let mut marks: Vec<(i32, String)> = Vec::new();
        for value in values {
            let place = self.place(value as f64);
            if marks.last().is_none_or(|(before, _)| place - before >= apart) {
                marks.push((place, self.label(value as f64)));
            }
        }
        marks
    }

    fn label(&self, value: f64) -> String {
        if value == 0.0 && self.is_log { "0".to_owned() } else { self.unit.label(value) }
    }
}

/// Multiples of 1, 2 or 5 times a power of ten.
fn linear_ticks(low: f64, high: f64, room: usize) -> Vec<f64> {
    let rough = (high - low) / room as f64;
    let decade = 10_f64.powf(rough.log10().floor());
    let step = [1.0, 2.0, 5.0, 10.0].map(|factor| factor * decade).into_iter().find(|&step| step >= rough).unwrap_or(decade * 10.0);
    let first = (low / step).ceil() as i64;
    let last = (high / step).floor() as i64;
    (first..=last).map(|index| index as f64 * step).collect()
}

/// Powers of ten, with 2 and 5 times them where there is room, or equal steps where there is less than a decade of them.
fn log_ticks(low: f64, high: f64, room: usize) -> Vec<f64> {
    let (first, last) = (low.log10().floor() as i32, high.log10().ceil() as i32);
    let within = |factors: &[f64], every: usize| -> Vec<f64> {
        let decades = (first..=last).filter(|decade| decade.rem_euclid(every.max(1) as i32) == 0);
        let values = decades.flat_map(|decade| factors.iter().map(move |factor| factor * 10_f64.powi(decade)));
        values.filter(|value| (low..=high).contains(value)).collect()
    };
    let finest = within(&[1.0, 2.0, 5.0], 1);
    if finest.len() < 3 {
        let finer = within(&[1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 7.0], 1);
        return if (3..=room).contains(&finer.len()) { finer } else { linear_ticks(low, high, room.min(5)) };
    }
    let coarser = [finest, within(&[1.0], 1), within(&[1.0], 2), within(&[1.0], 3)];
    coarser.into_iter().find(|ticks| (2..=room).contains(&ticks.len())).unwrap_or_else(|| within(&[1.0], 6))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn labels(axis: &Axis, apart: f64) -> Vec<String> {
        axis.ticks(apart).into_iter().map(|(_, label)| label).collect()
    }

    #[test]
    fn a_logarithmic_axis_has_round_figures_whatever_it_spans() {
        let host = Unit::Of(Quantity::HostTime);
        assert_eq!(
            labels(&Axis::log(host, [3_000, 900_000], (0, 600)), 60.0),
            ["5 ns", "10 ns", "20 ns", "50 ns", "100 ns", "200 ns", "500 ns", "1 µs"]
        );
        assert_eq!(
            labels(&Axis::log(host, [3_000, 9_000_000_000], (0, 600)), 60.0),
            ["10 ns", "100 ns", "1 µs", "10 µs", "100 µs", "1 ms", "10 ms"]
        );
        assert_eq!(labels(&Axis::log(host, [100_000, 103_000], (0, 600)), 60.0), ["100 ns", "101 ns", "102 ns", "103 ns"]);
    }

    #[test]
    fn marks_stand_at_the_points_that_there_are() {
        let axis = Axis::log(Unit::Number, [1, 2, 4, 5], (0, 600));
        let marks: Vec<String> = axis.marks([1, 2, 4, 5], 120).into_iter().map(|(_, label)| label).collect();
        assert_eq!(marks, ["1", "2", "4"]);
    }

    #[test]
    fn zero_has_a_place_of_its_own_on_a_logarithmic_axis() {
        let axis = Axis::log(Unit::Of(Quantity::ModelTime), [0, 1_000, 1_000_000], (300, 20));
        assert_eq!((axis.place(0.0), axis.place(1_000.0) < 300 - 26), (300, true));
        assert_eq!(labels(&axis, 40.0)[0], "0");
    }

    #[test]
    fn figures_that_do_not_differ_do_not_look_as_if_they_did() {
        let axis = Axis::log(Unit::Of(Quantity::HostTime), [1_000_000, 1_000_001], (0, 600));
        assert!((axis.place(1_000_000.0) - axis.place(1_000_001.0)).abs() <= 1);
        let axis = Axis::linear(Unit::Share, 1.0, 1.0, (0, 600));
        assert!((290..=310).contains(&axis.place(1.0)));
    }

    #[test]
    fn shares_are_told_as_changes() {
        assert_eq!(labels(&Axis::linear(Unit::Share, 0.9, 1.1, (100, 0)), 25.0), ["-10 %", "0 %", "+10 %"]);
    }
}
