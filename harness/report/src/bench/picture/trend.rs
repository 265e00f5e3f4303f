//! One entry over the runs with the same accepted build: its ratio to that build, with the interval of each run.

use harness_bench::compare::{Place, over_runs};
use harness_bench::record::{BenchRun, Change};

use super::axis::{Axis, Unit};
use super::{Canvas, Side, colour, document};
use crate::bench::words;
use crate::picture::{Drawn, GRID, INK, WIDTH};

const HEIGHT: i32 = 260;
const LEFT: i32 = 86;
const RIGHT: i32 = WIDTH as i32 - 24;
const UPPER: i32 = 44;
const LOWER: i32 = HEIGHT - 34;

/// Fewer runs make no trend.
const LEAST_RUNS: usize = 3;

/// Draws an entry; `None` where there are too few runs, or all are alike.
pub(in super::super) fn draw(run: &BenchRun, earlier: &[&BenchRun], change: &Change) -> Option<String> {
    let places = over_runs(run, earlier, &change.entry);
    let is_flat = places.iter().all(|place| Some(place.middle) == places.first().map(|first| first.middle));
    if places.len() < LEAST_RUNS || is_flat {
        return None;
    }
    // Exact figures are shown relative to the first run.
    let unit = if change.entry.quantity.is_exact() { places[0].middle.max(1.0) } else { 1.0 };
    let title = format!("{}: {} by {}", change.entry.suite, change.entry.case, change.entry.arm);
    let what = if change.entry.quantity.is_exact() {
        "Change from the first run shown"
    } else {
        "Change from the accepted build, with the 99 % interval"
    };
    let (first, last) = (places.first()?, places.last()?);
    let described = format!(
        "{what}: {} in the run of {}, {} in the run of {}.",
        words::changed_by(first.middle / unit),
        words::date(&first.started),
        words::changed_by(last.middle / unit),
        words::date(&last.started)
    );
    Some(document(HEIGHT, &title, &described, |canvas| {
        canvas.text(&title, (12, 14), Side::Right, 13, INK)?;
        canvas.caption(&format!("{what}; lower is better."), (12, 32))?;
        lines(canvas, &places, unit)
    }))
}

fn lines(canvas: &Canvas<'_, '_>, places: &[Place], unit: f64) -> Drawn {
    let low = places.iter().map(|place| place.low / unit).fold(0.98, f64::min);
    let high = places.iter().map(|place| place.high / unit).fold(1.02, f64::max);
    let up = Axis::linear(Unit::Share, low, high, (LOWER, UPPER));
    let across = |run: usize| LEFT + (RIGHT - LEFT) * run as i32 / (places.len() as i32 - 1).max(1);
    canvas.rules(&up, (LEFT, RIGHT), 30.0)?;
    canvas.line(&[(LEFT, up.place(1.0)), (RIGHT, up.place(1.0))], GRID.stroke_width(2))?;
    for (run, place) in places.iter().enumerate() {
        let x = across(run);
        canvas.line(&[(x, up.place(place.low / unit)), (x, up.place(place.high / unit))], colour(0).stroke_width(1))?;
        canvas.mark((x, up.place(place.middle / unit)), 0)?;
    }
    let middles: Vec<(i32, i32)> = places.iter().enumerate().map(|(run, place)| (across(run), up.place(place.middle / unit))).collect();
    canvas.line(&middles, colour(0).stroke_width(2))?;
    canvas.text(words::date(&places[0].started), (LEFT, LOWER + 16), Side::Right, 11, INK)?;
    canvas.text(words::date(&places[places.len() - 1].started), (RIGHT, LOWER + 16), Side::Left, 11, INK)
}

use plotters::style::Color as _;
