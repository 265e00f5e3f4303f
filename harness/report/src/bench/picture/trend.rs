//! The trend of one entry: its ratio to the accepted build, with the interval of each run.

use harness_bench::record::{BenchRun, Change};
use harness_bench::{compare::over_runs, inference::Estimate};

use plotters::{prelude::*, style::text_anchor::HPos};

use super::{LABELS, colour, mark};
use crate::bench::words;
use crate::svg::{Area, Drawn, GRID, INK, LIMIT, WIDTH, chart_on, document, mesh, text};

const HEIGHT: i32 = 260;
const MARGIN: i32 = 24;

const LEAST_RUNS: usize = 3;

/// Draws an entry. `None` if there are too few runs or all are equal.
pub(in super::super) fn draw(
    run: &BenchRun,
    earlier: &[&BenchRun],
    change: &Change,
) -> Option<String> {
    let mut levels = over_runs(run, earlier, &change.entry);
    let (first, last) = (*levels.first()?, *levels.last()?);
    if levels.len() < LEAST_RUNS
        || levels
            .iter()
            .all(|(_, level)| level.middle == first.1.middle)
    {
        return None;
    }
    let what = if change.entry.quantity.is_exact() {
        // Exact figures are shown relative to the first run.
        levels
            .iter_mut()
            .for_each(|(_, level)| *level = level.map(|figure| figure / first.1.middle.max(1.0)));
        "Change from the first run shown"
    } else {
        "Change from the accepted build, with the 99 % interval"
    };
    let title = format!(
        "{}: {} by {}",
        change.entry.suite, change.entry.case, change.entry.arm
    );
    let told = |(started, level): (&str, Estimate)| {
        format!(
            "{} in the run of {}",
            words::changed_by(level.middle),
            words::date(started)
        )
    };
    let described = format!(
        "{what}: {}, {}.",
        told(levels[0]),
        told(levels[levels.len() - 1])
    );
    Some(document(HEIGHT as u32, &title, &described, |root| {
        text(root, &title, (12, 14), HPos::Left, 13, INK)?;
        text(
            root,
            format!("{what}; lower is better."),
            (12, 32),
            HPos::Left,
            11,
            LIMIT,
        )?;
        lines(root, &levels)?;
        text(
            root,
            words::date(first.0),
            (LABELS as i32, HEIGHT - 18),
            HPos::Left,
            11,
            INK,
        )?;
        text(
            root,
            words::date(last.0),
            (WIDTH as i32 - MARGIN, HEIGHT - 18),
            HPos::Right,
            11,
            INK,
        )
    }))
}

fn lines(root: &Area<'_>, levels: &[(&str, Estimate)]) -> Drawn {
    let low = levels
        .iter()
        .map(|(_, level)| level.low)
        .fold(0.98, f64::min);
    let high = levels
        .iter()
        .map(|(_, level)| level.high)
        .fold(1.02, f64::max);
    let (last, room) = ((levels.len() - 1) as f64, (high - low) * 0.08);
    let mut chart = chart_on(root, (44, MARGIN as u32), (LABELS, 34))
        .build_cartesian_2d(0.0..last, low - room..high + room)?;
    mesh(&mut chart.configure_mesh())
        .disable_x_mesh()
        .x_labels(0)
        .y_labels(6)
        .y_label_formatter(&|ratio| words::changed_by(*ratio))
        .draw()?;
    chart.draw_series([PathElement::new(
        [(0.0, 1.0), (last, 1.0)],
        GRID.stroke_width(2),
    )])?;
    let place = |run: usize, ratio: f64| (run as f64, ratio);
    let bar = |(run, (_, level)): (usize, &(&str, Estimate))| {
        PathElement::new([place(run, level.low), place(run, level.high)], colour(0))
    };
    chart.draw_series(levels.iter().enumerate().map(bar))?;
    let middles = || {
        levels
            .iter()
            .enumerate()
            .map(|(run, (_, level))| place(run, level.middle))
    };
    chart.draw_series(LineSeries::new(middles(), colour(0).stroke_width(2)))?;
    middles().try_for_each(|middle| mark(root, chart.backend_coord(&middle), 0))
}
