//! How figures moved over the nights: one panel a series, change points marked; and small ones for the index.

use plotters::prelude::*;

use super::axis::{Axis, Unit};
use super::{Canvas, Side, colour, document, fitted};
use crate::night::series::Night;
use crate::night::words;
use crate::picture::{Drawn, GRID, INK, LIMIT, WIDTH};
use harness_bench::record::{EntrySummary, Quantity};

/// Pixels of a panel with its title and axis, and of a small one.
const PANEL: i32 = 170;
const SMALL: i32 = 54;
const LEFT: i32 = 84;
const RIGHT: i32 = WIDTH as i32 - 24;
/// Where a median stays in one place, more marks than this would be a smear.
const MARKED_NIGHTS: usize = 60;
/// A change point's line and words.
const CHANGE: RGBColor = RGBColor(150, 60, 0);

const FAILED: RGBColor = RGBColor(200, 40, 0);

/// A series over nights.
pub(in super::super) struct Panel<'a> {
    /// What it is.
    pub(in super::super) title: String,
    /// What its figures are.
    pub(in super::super) quantity: Quantity,
    /// One a night.
    pub(in super::super) figures: &'a [Option<EntrySummary>],
    /// Nights in which it failed.
    pub(in super::super) failed: &'a [usize],
    /// Nights from which on the level is another one.
    pub(in super::super) change_points: Vec<usize>,
}

/// Draws series over the same nights below each other; `None` where there is no second night or no series.
pub(in super::super) fn draw(suite: &str, nights: &[Night<'_>], panels: &[Panel<'_>]) -> Option<String> {
    let last = nights.last().filter(|_| nights.len() > 1 && !panels.is_empty())?;
    let title = format!("{suite} over {} nights, to {}", nights.len(), words::date(last.started));
    let top = 82;
    let height = top + panels.len() as i32 * PANEL;
    let described: Vec<String> = panels.iter().map(|panel| in_words(panel, nights)).collect();
    Some(document(height, &title, &described.join(" "), |canvas| {
        canvas.text(&title, (12, 16), Side::Right, 13, INK)?;
        let keys =
            [(0, "median of a night"), (1, "its 95 % confidence interval"), (2, "contended night"), (3, "change point"), (4, "failed")];
        canvas.legend(40, &keys, |key, place| legend(canvas, key, place))?;
        canvas.caption("Each axis starts where its figures do, not at zero. Host times are corrected by the yardstick, to the clock of the last night.", (12, 60))?;
        for (index, panel) in panels.iter().enumerate() {
            self::panel(canvas, panel, nights, top + index as i32 * PANEL)?;
        }
        Ok(())
    }))
}

fn legend(canvas: &Canvas<'_, '_>, key: usize, (x, y): (i32, i32)) -> Drawn {
    match key {
        0 => {
            canvas.line(&[(x - 10, y), (x + 10, y)], colour(0).stroke_width(2))?;
            canvas.dot((x, y), 3, colour(0).filled())
        }
        1 => canvas.bar((x - 10, y - 6), (x + 10, y + 6), colour(0).mix(0.22).filled()),
        2 => hollow(canvas, (x, y)),
        3 => canvas.dashes((x, y - 10), (x, y + 10), CHANGE.stroke_width(2)),
        _ => canvas.cross((x, y), FAILED.stroke_width(3)),
    }
}

fn hollow(canvas: &Canvas<'_, '_>, place: (i32, i32)) -> Drawn {
    canvas.dot(place, 4, WHITE.filled())?;
    canvas.dot(place, 4, colour(0).stroke_width(2))
}

fn panel(canvas: &Canvas<'_, '_>, panel: &Panel<'_>, nights: &[Night<'_>], top: i32) -> Drawn {
    let (upper, lower) = (top + 34, top + PANEL - 28);
    let across = |night: usize| LEFT + 8 + (RIGHT - LEFT - 16) * night as i32 / (nights.len() as i32 - 1).max(1);
    let told: Vec<(usize, EntrySummary)> =
        panel.figures.iter().enumerate().filter_map(|(night, figure)| figure.map(|figure| (night, figure))).collect();
    let low = told.iter().map(|(_, figure)| figure.low).min().unwrap_or_default();
    let high = told.iter().map(|(_, figure)| figure.high).max().unwrap_or_default();
    let up = Axis::linear(Unit::Of(panel.quantity), low as f64, high as f64, (lower, upper));
    canvas.text(&fitted(&format!("{} ({})", panel.title, words::short(panel.quantity)), 120), (12, top + 8), Side::Right, 12, INK)?;
    canvas.rules(&up, (LEFT, RIGHT), 26.0)?;
    canvas.line(&[(LEFT, upper), (LEFT, lower), (RIGHT, lower)], INK)?;
    dates(canvas, nights, across, lower)?;
    for run in told.chunk_by(|(before, _), (after, _)| after - before == 1) {
        stretch(canvas, run, across, &up)?;
    }
    for &(night, figure) in &told {
        let place = (across(night), up.place(figure.median as f64));
        if nights[night].is_contended {
            hollow(canvas, place)?;
        } else if nights.len() <= MARKED_NIGHTS {
            canvas.dot(place, 3, colour(0).filled())?;
        }
    }
    for &night in panel.failed {
        canvas.cross((across(night), lower - 10), FAILED.stroke_width(3))?;
    }
    for (index, &night) in panel.change_points.iter().enumerate() {
        change_point(canvas, panel, index, nights, (across(night), upper, lower))?;
    }
    Ok(())
}

/// Nights without a gap between them.
fn stretch(canvas: &Canvas<'_, '_>, run: &[(usize, EntrySummary)], across: impl Fn(usize) -> i32, up: &Axis) -> Drawn {
    let place = |night: usize, figure: u64| (across(night), up.place(figure as f64));
    if let [(night, figure)] = run {
        return canvas.line(&[place(*night, figure.low), place(*night, figure.high)], colour(0).mix(0.4).stroke_width(3));
    }
    let lows = run.iter().map(|&(night, figure)| place(night, figure.low));
    let highs = run.iter().rev().map(|&(night, figure)| place(night, figure.high));
    canvas.area(lows.chain(highs).collect(), colour(0).mix(0.22))?;
    let medians: Vec<(i32, i32)> = run.iter().map(|&(night, figure)| place(night, figure.median)).collect();
    canvas.line(&medians, colour(0).stroke_width(2))
}

/// As many dates as there is room for, the last among them.
fn dates(canvas: &Canvas<'_, '_>, nights: &[Night<'_>], across: impl Fn(usize) -> i32, lower: i32) -> Drawn {
    let every = nights.len().div_ceil(9).max(1);
    for night in (0..nights.len()).rev().step_by(every) {
        let x = across(night);
        canvas.line(&[(x, lower), (x, lower + 4)], INK)?;
        // Those at the ends stay within the picture.
        let (x, side) = if night + 1 == nights.len() { (RIGHT + 16, Side::Left) } else { (x, Side::Below) };
        let y = if night + 1 == nights.len() { lower + 12 } else { lower + 6 };
        canvas.text(words::date(nights[night].started), (x, y), side, 11, INK)?;
    }
    Ok(())
}

fn change_point(
    canvas: &Canvas<'_, '_>,
    panel: &Panel<'_>,
    index: usize,
    nights: &[Night<'_>],
    (x, upper, lower): (i32, i32, i32),
) -> Drawn {
    canvas.dashes((x, upper - 6), (x, lower), CHANGE.stroke_width(2))?;
    let words = words_of(panel, index, nights);
    let side = if x > i32::midpoint(LEFT, RIGHT) { Side::Left } else { Side::Right };
    let gap = if matches!(side, Side::Left) { -6 } else { 6 };
    // Neighbours take turns in two heights.
    canvas.text(&words, (x + gap, upper - 8 + (index as i32 % 2) * 12), side, 11, CHANGE)
}

/// `+12 % from 2026-11-18 on, commit abc`.
fn words_of(panel: &Panel<'_>, index: usize, nights: &[Night<'_>]) -> String {
    let night = panel.change_points[index];
    let start = index.checked_sub(1).map_or(0, |before| panel.change_points[before]);
    let end = panel.change_points.get(index + 1).copied().unwrap_or(panel.figures.len());
    let (before, after) = (level(&panel.figures[start..night]), level(&panel.figures[night..end]));
    let by = match (before, after) {
        (Some(before), Some(after)) if before > 0 => format!("{} ", words::changed_by(after as f64 / before as f64)),
        _ => String::new(),
    };
    let commit =
        nights[night].build.commit.as_deref().map_or_else(String::new, |commit| format!(", {}", fitted(commit, 8).replace('…', "")));
    format!("{by}from {}{commit}", words::date(nights[night].started))
}

/// The median of medians.
fn level(figures: &[Option<EntrySummary>]) -> Option<u64> {
    let mut medians: Vec<u64> = figures.iter().flatten().map(|figure| figure.median).collect();
    harness_base::statistics::median(&mut medians)
}

fn in_words(panel: &Panel<'_>, nights: &[Night<'_>]) -> String {
    let mut told = panel.figures.iter().flatten().map(|figure| words::amount(panel.quantity, figure.median));
    let first = told.next().unwrap_or_default();
    let last = told.next_back().unwrap_or_else(|| first.clone());
    let changes: Vec<String> = (0..panel.change_points.len()).map(|index| words_of(panel, index, nights)).collect();
    let failed = if panel.failed.is_empty() { String::new() } else { format!(" It failed in {} of the nights.", panel.failed.len()) };
    let changes = if changes.is_empty() { "no change point".to_owned() } else { changes.join("; ") };
    format!("{}: {first} in the first night, {last} in the last; {changes}.{failed}", panel.title)
}

/// A small line for the index: what it is, and its level in each night, 1 at the first.
pub(in super::super) struct Small {
    /// What it is.
    pub(in super::super) title: String,
    /// One a night.
    pub(in super::super) levels: Vec<f64>,
}

/// Draws small lines below each other; `None` where none has two nights.
pub(in super::super) fn small(title: &str, lines: &[Small]) -> Option<String> {
    let lines: Vec<&Small> = lines.iter().filter(|line| line.levels.len() > 1).collect();
    if lines.is_empty() {
        return None;
    }
    let top = 48;
    let described: Vec<String> =
        lines.iter().map(|line| format!("{}: {} over {} nights.", line.title, moved(line), line.levels.len())).collect();
    Some(document(top + lines.len() as i32 * SMALL + 6, title, &described.join(" "), |canvas| {
        canvas.text(title, (12, 14), Side::Right, 13, INK)?;
        canvas.caption("Geometric mean of all medians, as a change from the first night shown (grey line); lower is better. Host times corrected by the yardstick.", (12, 32))?;
        for (index, line) in lines.iter().enumerate() {
            small_line(canvas, line, top + index as i32 * SMALL)?;
        }
        Ok(())
    }))
}

fn moved(line: &Small) -> String {
    line.levels.last().map_or_else(String::new, |&level| words::changed_by(level))
}

fn small_line(canvas: &Canvas<'_, '_>, line: &Small, top: i32) -> Drawn {
    let (left, right) = (330, WIDTH as i32 - 80);
    let low = line.levels.iter().copied().fold(0.98, f64::min);
    let high = line.levels.iter().copied().fold(1.02, f64::max);
    let up = Axis::linear(Unit::Share, low, high, (top + SMALL - 8, top + 8));
    let across = |night: usize| left + (right - left) * night as i32 / (line.levels.len() as i32 - 1).max(1);
    canvas.text(&fitted(&line.title, 48), (12, top + SMALL / 2), Side::Right, 12, INK)?;
    canvas.line(&[(left, up.place(1.0)), (right, up.place(1.0))], GRID.stroke_width(2))?;
    let points: Vec<(i32, i32)> = line.levels.iter().enumerate().map(|(night, &level)| (across(night), up.place(level))).collect();
    canvas.line(&points, colour(0).stroke_width(2))?;
    if let Some(&end) = points.last() {
        canvas.dot(end, 4, colour(0).filled())?;
    }
    canvas.text(&moved(line), (WIDTH as i32 - 10, top + SMALL / 2), Side::Left, 12, LIMIT)
}
