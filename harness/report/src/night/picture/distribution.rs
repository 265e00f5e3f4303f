//! How the samples of a suite are spread: one row an arm, all on one axis, of figures or of changes from each row's median.

use plotters::prelude::*;

use super::axis::{Axis, Unit};
use super::{Canvas, Side, arms, colour, distinct, document, fitted};
use crate::night::words;
use crate::picture::{Drawn, GRID, INK, LIMIT};
use harness_bench::record::{Entry, EntryOutcome, Measured, Quantity, SuiteRecord};

/// Rows of one picture; a suite with more shows those of its first cases.
const ROWS: usize = 32;
/// Samples drawn a row; of more, evenly chosen ones by rank, the least and the greatest among them.
const DOTS: usize = 40;
/// Figures that differ by more than this multiple share no axis.
const MULTIPLE: u64 = 8;
/// The axis of changes goes no farther than half and twice the median, whatever other programs did to a few samples.
const FARTHEST: (f64, f64) = (0.5, 2.0);
/// Pixels of a row, and of the name of a case above its rows.
const ROW: i32 = 26;
const NAME: i32 = 24;
/// Where the axis starts and ends; left of it stand names, right of it medians.
const LEFT: i32 = 170;
const RIGHT: i32 = 790;

/// A row: an arm of a case, with its figures.
struct Row<'a> {
    entry: &'a Entry,
    measured: &'a Measured,
}

/// A picture and what it leaves out, if anything.
pub(in super::super) struct Distribution {
    /// The document.
    pub(in super::super) svg: String,
    /// What is not shown, in words.
    pub(in super::super) left_out: Option<String>,
}

/// Draws the figures of one quantity; `None` where there are no times that vary. Of a curve only its middle point is shown.
pub(in super::super) fn draw(suite: &SuiteRecord, quantity: Quantity) -> Option<Distribution> {
    let all = rows(suite, quantity);
    let middle: Vec<(&str, u64)> = middles(&all);
    let is_shown = |row: &Row<'_>| match &row.entry.point {
        None => true,
        Some(point) => middle.contains(&(row.entry.group.as_str(), point.value)),
    };
    let cases = all.len();
    let mut shown: Vec<Row<'_>> = all.into_iter().filter(is_shown).collect();
    if !quantity.is_time() || shown.iter().all(|row| row.measured.summary.min == row.measured.summary.max) {
        return None;
    }
    shown.sort_by_key(|row| shown_order(suite, row.entry));
    shown.truncate(ROWS);
    let left_out = cases - shown.len();
    let left_out = (left_out > 0).then(|| {
        format!(
            "Not in this picture: {} more. Of a curve it shows the middle point, and of many cases the first.",
            words::entries(left_out)
        )
    });
    Some(Distribution { svg: picture(suite, quantity, &shown), left_out })
}

fn rows(suite: &SuiteRecord, quantity: Quantity) -> Vec<Row<'_>> {
    let entries = suite.entries.iter().filter(|entry| entry.quantity == quantity);
    entries
        .filter_map(|entry| match &entry.outcome {
            EntryOutcome::Measured(measured) => Some(Row { entry, measured }),
            EntryOutcome::Failed { .. } | EntryOutcome::Skipped { .. } => None,
        })
        .collect()
}

/// The middle point of each group that has points.
fn middles<'a>(rows: &[Row<'a>]) -> Vec<(&'a str, u64)> {
    let groups = distinct(rows.iter().map(|row| row.entry.group.as_str()));
    let middle = |group: &'a str| {
        let points = rows.iter().filter(|row| row.entry.group == group).filter_map(|row| row.entry.point.as_ref());
        let mut values: Vec<u64> = points.map(|point| point.value).collect();
        values.sort_unstable();
        values.dedup();
        values.get(values.len() / 2).map(|&value| (group, value))
    };
    groups.into_iter().filter_map(middle).collect()
}

/// Cases stay in the order of the suite, with all their arms together.
fn shown_order(suite: &SuiteRecord, entry: &Entry) -> usize {
    suite.entries.iter().position(|other| other.group == entry.group && other.point == entry.point).unwrap_or(usize::MAX)
}

fn picture(suite: &SuiteRecord, quantity: Quantity, rows: &[Row<'_>]) -> String {
    let arms = arms(suite);
    let cases = rows.chunk_by(|a, b| a.entry.case() == b.entry.case());
    let top = 58;
    let height = top + cases.clone().count() as i32 * NAME + rows.len() as i32 * ROW + 34;
    let scale = Scale::of(rows, quantity);
    let title = format!("How the samples of {} are spread ({})", suite.name, words::short(quantity));
    let described: Vec<String> = rows.iter().map(|row| in_words(row, quantity)).collect();
    document(height, &title, &described.join(" "), |canvas| {
        canvas.text(&title, (12, 16), Side::Right, 13, INK)?;
        canvas.caption(scale.caption(), (12, 36))?;
        let bottom = height - 30;
        for (x, label) in scale.axis().ticks(64.0) {
            canvas.line(&[(x, top - 6), (x, bottom)], GRID)?;
            canvas.text(&label, (x, bottom + 6), Side::Below, 11, INK)?;
        }
        let mut y = top;
        for case in cases {
            canvas.text(&fitted(&case[0].entry.case(), 100), (12, y + NAME / 2), Side::Right, 12, INK)?;
            y += NAME;
            for row in case {
                let index = arms.iter().position(|arm| *arm == row.entry.arm).unwrap_or_default();
                self::row(canvas, row, &scale, y + ROW / 2, index, quantity)?;
                y += ROW;
            }
        }
        Ok(())
    })
}

fn row(canvas: &Canvas<'_, '_>, row: &Row<'_>, scale: &Scale, y: i32, index: usize, quantity: Quantity) -> Drawn {
    let (summary, ink) = (&row.measured.summary, colour(index));
    let at = |value: u64| scale.place(row, value);
    canvas.mark((24, y), index)?;
    canvas.text(&fitted(&row.entry.arm, 18), (36, y), Side::Right, 12, INK)?;
    canvas.line(&[(at(summary.min), y), (at(summary.max), y)], ink.stroke_width(1))?;
    let mut samples: Vec<u64> = row.measured.rounds.iter().flatten().copied().collect();
    samples.sort_unstable();
    if let (Some(low), Some(high)) = (rank(&samples, 25), rank(&samples, 75)) {
        canvas.bar((at(low), y - 8), (at(high), y + 8), ink.mix(0.22).filled())?;
        canvas.bar((at(low), y - 8), (at(high), y + 8), ink.stroke_width(1))?;
    }
    for (number, sample) in thinned(&samples).into_iter().enumerate().filter(|&(_, sample)| !scale.is_beyond(row, sample)) {
        // Dots are strewn over the height of the row, so that equal samples do not hide each other.
        let offset = (number as i32 * 5) % 13 - 6;
        canvas.dot((at(sample), y + offset), 1, ink.mix(0.55).filled())?;
    }
    if let Some(p99) = summary.p99 {
        canvas.line(&[(at(p99), y - 6), (at(p99), y + 6)], LIMIT.stroke_width(1))?;
    }
    canvas.line(&[(at(summary.low), y + 10), (at(summary.high).max(at(summary.low) + 1), y + 10)], BLACK.stroke_width(3))?;
    canvas.line(&[(at(summary.median), y - 9), (at(summary.median), y + 9)], ink.stroke_width(3))?;
    if scale.is_beyond(row, summary.max) {
        canvas.area(vec![(RIGHT + 4, y - 5), (RIGHT + 10, y), (RIGHT + 4, y + 5)], ink.filled())?;
    }
    if scale.is_beyond(row, summary.min) {
        canvas.area(vec![(LEFT - 4, y - 5), (LEFT - 10, y), (LEFT - 4, y + 5)], ink.filled())?;
    }
    canvas.text(&words::amount(quantity, summary.median), (RIGHT + 80, y), Side::Left, 12, INK)
}

/// What the axis of the picture shows.
enum Scale {
    /// Figures, where they are of about one size.
    Figures(Axis),
    /// Figures as a change from the median of their row, and the least and greatest that the axis shows: where the arms' figures differ by more than
    /// their samples do, nothing could be seen on one axis.
    Shares(Axis, (f64, f64)),
}

impl Scale {
    fn of(rows: &[Row<'_>], quantity: Quantity) -> Self {
        let summaries = || rows.iter().map(|row| &row.measured.summary);
        let least = summaries().map(|summary| summary.min).min().unwrap_or_default();
        let greatest = summaries().map(|summary| summary.max).max().unwrap_or_default();
        let all_positive = summaries().all(|summary| summary.median > 0);
        if !all_positive || greatest / MULTIPLE <= least {
            return Self::Figures(Axis::log(Unit::Of(quantity), summaries().flat_map(|summary| [summary.min, summary.max]), (LEFT, RIGHT)));
        }
        let share = |value: u64, median: u64| value as f64 / median as f64;
        let low = summaries().map(|summary| share(summary.min, summary.median)).fold(1.0, f64::min).max(FARTHEST.0);
        // One sample in a hundred may be far off; it must not press all others together.
        let high = summaries().map(|summary| share(summary.p99.unwrap_or(summary.max), summary.median)).fold(1.0, f64::max).min(FARTHEST.1);
        Self::Shares(Axis::linear(Unit::Share, low, high, (LEFT, RIGHT)), (low, high))
    }

    const fn axis(&self) -> &Axis {
        match self {
            Self::Figures(axis) | Self::Shares(axis, _) => axis,
        }
    }

    const fn caption(&self) -> &'static str {
        match self {
            Self::Figures(_) => "Dots: samples. Box: their middle half. Line in it: median. Black bar: its 95 % interval. Tick: p99.",
            Self::Shares(..) => {
                "As a change from the row's median. Box: middle half. Black bar: 95 % interval of the median. Tick: p99. Triangle: samples beyond."
            }
        }
    }

    fn share(row: &Row<'_>, value: u64) -> f64 {
        value as f64 / row.measured.summary.median as f64
    }

    fn place(&self, row: &Row<'_>, value: u64) -> i32 {
        match self {
            Self::Figures(axis) => axis.place(value as f64),
            Self::Shares(axis, (low, high)) => axis.place(Self::share(row, value).clamp(*low, *high)),
        }
    }

    fn is_beyond(&self, row: &Row<'_>, value: u64) -> bool {
        matches!(self, Self::Shares(_, (low, high)) if !(*low..=*high).contains(&Self::share(row, value)))
    }
}

fn in_words(row: &Row<'_>, quantity: Quantity) -> String {
    let summary = &row.measured.summary;
    format!(
        "{} by {}: median {} ({} to {}), from {} to {}.",
        row.entry.case(),
        row.entry.arm,
        words::amount(quantity, summary.median),
        words::amount(quantity, summary.low),
        words::amount(quantity, summary.high),
        words::amount(quantity, summary.min),
        words::amount(quantity, summary.max),
    )
}

/// The sample of a percentage of the way through sorted ones.
fn rank(sorted: &[u64], percent: usize) -> Option<u64> {
    sorted.get((sorted.len() * percent / 100).min(sorted.len().saturating_sub(1))).copied()
}

/// At most [`DOTS`] of sorted samples, evenly by rank, both ends among them.
fn thinned(sorted: &[u64]) -> Vec<u64> {
    if sorted.len() <= DOTS {
        return sorted.to_vec();
    }
    (0..DOTS).map(|index| sorted[index * (sorted.len() - 1) / (DOTS - 1)]).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn of_many_samples_both_ends_stay() {
        let sorted: Vec<u64> = (0..10_000).collect();
        let thinned = thinned(&sorted);
        assert_eq!((thinned.len(), thinned[0], thinned[DOTS - 1]), (DOTS, 0, 9_999));
        assert_eq!(rank(&[], 25), None);
        assert_eq!(rank(&sorted, 75), Some(7_500));
    }
}
