//! How figures drifted within a night: the yardstick and each arm over the rounds. Where arms move with the yardstick, it was the
//! processor's clock or other programs; where they do not, it was the arm.

use plotters::prelude::*;

use super::axis::{Axis, Unit};
use super::{Canvas, LEGEND_LEFT, Side, arms, colour, document, legend_height};
use crate::night::words;
use crate::picture::{Drawn, GRID, INK};
use harness_base::statistics;
use harness_bench::record::{EntryOutcome, Quantity, SuiteRecord};

/// Fewer rounds show no drift.
const LEAST_ROUNDS: usize = 3;
/// Changes below this are no drift.
const STEADY: f64 = 0.001;
const PANEL: i32 = 170;
const LEFT: i32 = 84;
const RIGHT: i32 = 850;

/// A line: the number that it is drawn by, its name, and its level in each round, 1 in the middle.
struct Line<'a> {
    index: Option<usize>,
    name: &'a str,
    levels: Vec<f64>,
}

/// Draws the drift of the host times of a suite; `None` where there are few rounds, or nothing varies.
pub(in super::super) fn draw(suite: &SuiteRecord) -> Option<String> {
    let mut lines: Vec<Line<'_>> = arms(suite).into_iter().enumerate().filter_map(|(index, arm)| line(suite, index, arm)).collect();
    lines.extend(yardstick(suite));
    let rounds = lines.iter().map(|line| line.levels.len()).max().filter(|&rounds| rounds >= LEAST_ROUNDS)?;
    let levels = || lines.iter().flat_map(|line| line.levels.iter().copied());
    let (low, high) = (levels().fold(1.0, f64::min), levels().fold(1.0, f64::max));
    if high - low < STEADY {
        return None;
    }
    let title = format!("{} over the {rounds} rounds ({})", suite.name, words::short(Quantity::HostTime));
    let keys: Vec<(usize, &str)> = lines.iter().enumerate().map(|(number, line)| (number, line.name)).collect();
    let top = 58 + legend_height(&keys);
    let described: Vec<String> = lines.iter().map(in_words).collect();
    Some(document(top + PANEL, &title, &described.join(" "), |canvas| {
        canvas.text(&title, (LEGEND_LEFT, 16), Side::Right, 13, INK)?;
        canvas.caption("Each arm: the geometric mean of its entries in a round, as a change from its middle round. What moves with the yardstick is the processor.", (LEGEND_LEFT, 36))?;
        canvas.legend(58, &keys, |number, place| key(canvas, &lines[number], place))?;
        let up = Axis::linear(Unit::Share, low, high, (top + PANEL - 40, top));
        canvas.rules(&up, (LEFT, RIGHT), 26.0)?;
        let across = |round: usize| LEFT + 10 + (RIGHT - LEFT - 20) * round as i32 / (rounds as i32 - 1);
        numbers(canvas, rounds, across, top + PANEL - 40)?;
        lines.iter().try_for_each(|line| drift(canvas, line, across, &up))
    }))
}

/// Rounds counted from 1, as many as there is room for.
fn numbers(canvas: &Canvas<'_, '_>, rounds: usize, across: impl Fn(usize) -> i32, bottom: i32) -> Drawn {
    for round in (0..rounds).step_by(rounds.div_ceil(20)) {
        canvas.line(&[(across(round), bottom), (across(round), bottom + 4)], GRID)?;
        canvas.text(&(round + 1).to_string(), (across(round), bottom + 6), Side::Below, 11, INK)?;
    }
    canvas.text("round", (i32::midpoint(LEFT, RIGHT), bottom + 22), Side::Below, 11, INK)
}

fn key(canvas: &Canvas<'_, '_>, line: &Line<'_>, (x, y): (i32, i32)) -> Drawn {
    match line.index {
        Some(index) => canvas.mark((x, y), index),
        None => canvas.dashes((x - 10, y), (x + 10, y), BLACK.stroke_width(2)),
    }
}

fn drift(canvas: &Canvas<'_, '_>, line: &Line<'_>, across: impl Fn(usize) -> i32, up: &Axis) -> Drawn {
    let points: Vec<(i32, i32)> = line.levels.iter().enumerate().map(|(round, &level)| (across(round), up.place(level))).collect();
    let Some(index) = line.index else {
        return points.windows(2).try_for_each(|pair| canvas.dashes(pair[0], pair[1], BLACK.stroke_width(2)));
    };
    canvas.line(&points, colour(index).stroke_width(2))?;
    if points.len() > 40 { Ok(()) } else { points.iter().try_for_each(|&place| canvas.mark(place, index)) }
}

/// Rounds of an arm: the geometric mean of its entries' medians in each, in proportion to the middle one. Entries of which not every round
/// has samples are left out, for they would move the mean.
fn line<'a>(suite: &SuiteRecord, index: usize, name: &'a str) -> Option<Line<'a>> {
    let rounds: Vec<&Vec<Vec<u64>>> = suite
        .entries
        .iter()
        .filter(|entry| entry.arm == name && entry.quantity == Quantity::HostTime)
        .filter_map(|entry| match &entry.outcome {
            EntryOutcome::Measured(measured) => Some(&measured.rounds),
            EntryOutcome::Failed { .. } | EntryOutcome::Skipped { .. } => None,
        })
        .collect();
    let most = rounds.iter().map(|rounds| rounds.len()).max()?;
    let medians = |rounds: &&Vec<Vec<u64>>| -> Option<Vec<f64>> {
        let medians = rounds.iter().map(|round| statistics::median(&mut round.clone()).filter(|&median| median > 0));
        medians.map(|median| median.map(|median| (median as f64).ln())).collect()
    };
    let whole: Vec<Vec<f64>> = rounds.iter().filter(|rounds| rounds.len() == most).filter_map(medians).collect();
    if whole.is_empty() || most == 0 {
        return None;
    }
    let means = (0..most).map(|round| whole.iter().map(|entry| entry[round]).sum::<f64>() / whole.len() as f64);
    Some(Line { index: Some(index), name, levels: around_the_middle(means.map(f64::exp).collect()) })
}

fn yardstick(suite: &SuiteRecord) -> Option<Line<'static>> {
    let levels: Vec<f64> = suite.yardstick_ps.iter().map(|&picoseconds| picoseconds as f64).collect();
    (levels.len() >= LEAST_ROUNDS && levels.iter().all(|&level| level > 0.0)).then(|| Line {
        index: None,
        name: "yardstick",
        levels: around_the_middle(levels),
    })
}

/// Levels in proportion to their middle one.
fn around_the_middle(levels: Vec<f64>) -> Vec<f64> {
    let mut sorted = levels.clone();
    sorted.sort_by(f64::total_cmp);
    let middle = sorted[sorted.len() / 2];
    levels.into_iter().map(|level| level / middle).collect()
}

fn in_words(line: &Line<'_>) -> String {
    let least = line.levels.iter().copied().fold(1.0, f64::min);
    let greatest = line.levels.iter().copied().fold(1.0, f64::max);
    format!("{}: from {} to {} of its middle round.", line.name, words::changed_by(least), words::changed_by(greatest))
}
