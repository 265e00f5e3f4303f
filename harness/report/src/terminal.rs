//! The writer of reports for a terminal: colour, wrapped lines, and tables that fit.

use anstyle::{AnsiColor, Style as Paint};
use unicode_width::UnicodeWidthStr;

use super::escape::{log_line, log_lines};
use super::words::{self, Align, Grid};
use harness_record::Verdict;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Style {
    Plain,
    Colour,
}

pub(super) const FAILED: Paint = AnsiColor::Red.on_default().bold();
pub(super) const PASSED: Paint = AnsiColor::Green.on_default();
pub(super) const SKIPPED: Paint = AnsiColor::Yellow.on_default();

pub(super) fn painted(text: &str, paint: Paint, style: Style) -> String {
    match style {
        Style::Plain => log_line(text),
        Style::Colour => format!("{paint}{}{paint:#}", log_line(text)),
    }
}

pub(super) const fn verdict_paint(verdict: &Verdict) -> Paint {
    match verdict {
        Verdict::Passed | Verdict::FailedAsExpected { .. } => PASSED,
        Verdict::Failed { .. } => FAILED,
        Verdict::Skipped { .. } | Verdict::Contended { .. } | Verdict::Interrupted => SKIPPED,
    }
}

pub(super) struct Text {
    pub(super) text: String,
    style: Style,
    width: Option<usize>,
}

impl Text {
    pub(super) const fn new(style: Style, width: Option<usize>) -> Self {
        Self {
            text: String::new(),
            style,
            width,
        }
    }

    pub(super) fn important(&mut self, text: &str, is_bad: bool) {
        let paint = if is_bad { FAILED } else { PASSED };
        self.text.push('\n');
        self.painted(&log_line(text), paint, 0);
    }

    pub(super) fn painted(&mut self, text: &str, paint: Paint, indent: usize) {
        for part in wrap(text, self.width, indent).lines() {
            self.text
                .push_str(&format!("{}\n", painted(part, paint, self.style)));
        }
    }

    pub(super) fn line(&mut self, text: &str) {
        self.text.push_str(&log_lines(text));
        self.text.push('\n');
    }

    /// Adds wrapped paragraphs. Continuation lines are indented by `indent` more columns.
    pub(super) fn wrapped(&mut self, text: &str, indent: usize) {
        for paragraph in log_lines(text).lines() {
            self.text.push_str(&wrap(paragraph, self.width, indent));
            self.text.push('\n');
        }
    }

    /// Adds a table that fits. Columns that do not fit are omitted and named, except the first
    /// `names`.
    pub(super) fn table(&mut self, grid: &Grid, names: usize, paints: Option<(usize, &[Paint])>) {
        let (grid, left_out) = fitted(grid, names, self.width);
        self.text.push_str(&table(&grid, paints, self.style));
        if !left_out.is_empty() {
            self.wrapped(
                &format!(
                    "(in the report or a wider terminal: {})",
                    left_out.join(", ")
                ),
                1,
            );
        }
    }
}

/// Wraps a line at word boundaries.
fn wrap(text: &str, width: Option<usize>, indent: usize) -> String {
    let Some(width) = width else {
        return text.to_owned();
    };
    let start = text.len() - text.trim_start().len();
    let mut out = text[..start].to_owned();
    let mut column = start;
    for (index, word) in text[start..].split(' ').enumerate() {
        if index > 0 && column + 1 + word.width() > width && column > indent {
            out.push('\n');
            out.push_str(&" ".repeat(indent));
            column = indent;
        } else if index > 0 {
            out.push(' ');
            column += 1;
        }
        out.push_str(word);
        column += word.width();
    }
    out
}

const LEAST_CELL: usize = 8;

/// Returns whether a table fits into `width` columns whole.
pub(super) fn fits(grid: &Grid, width: Option<usize>) -> bool {
    width.is_none_or(|width| total(grid) <= width)
}

fn total(grid: &Grid) -> usize {
    let columns = widths(grid).into_iter().map(|width| width + 2);
    columns.sum::<usize>().saturating_sub(2)
}

/// Fits a table into `width` columns if possible: omits columns from the right, except the first
/// `names`, then shortens long cells in the middle. Returns the heads of omitted columns as well.
fn fitted(grid: &Grid, names: usize, width: Option<usize>) -> (Grid, Vec<String>) {
    let (mut grid, mut left_out) = (grid.clone(), Vec::new());
    let Some(width) = width else {
        return (grid, left_out);
    };
    while total(&grid) > width && grid.columns.len() > names {
        left_out.extend(grid.columns.pop().map(|(head, _)| head));
        grid.rows
            .iter_mut()
            .for_each(|row| row.truncate(grid.columns.len()));
    }
    while total(&grid) > width {
        let widths = widths(&grid);
        let Some((widest, size)) = widths
            .iter()
            .copied()
            .enumerate()
            .max_by_key(|&(_, size)| size)
            .filter(|&(_, size)| size > LEAST_CELL)
        else {
            break;
        };
        let most = size.saturating_sub(total(&grid) - width).max(LEAST_CELL);
        grid.columns[widest].0 = words::shortened(&grid.columns[widest].0, most);
        grid.rows
            .iter_mut()
            .for_each(|row| row[widest] = words::shortened(&row[widest], most));
    }
    left_out.reverse();
    (grid, left_out)
}

fn widths(grid: &Grid) -> Vec<usize> {
    let mut widths: Vec<usize> = grid.columns.iter().map(|(head, _)| head.width()).collect();
    for row in &grid.rows {
        for (width, cell) in widths.iter_mut().zip(row) {
            *width = (*width).max(log_line(cell).width());
        }
    }
    widths
}

/// Renders a table with columns as wide as their widest cell. One column may have a color per row.
pub(super) fn table(grid: &Grid, paints: Option<(usize, &[Paint])>, style: Style) -> String {
    let widths = widths(grid);
    let row = |cells: Vec<&String>, paint: Option<(usize, Paint)>| {
        let mut line = String::new();
        for (column, (cell, width)) in cells.into_iter().zip(&widths).enumerate() {
            let cell = log_line(cell);
            let gap = " ".repeat(width - cell.width());
            let shown = match paint {
                Some((painted_column, paint)) if painted_column == column => {
                    painted(&cell, paint, Style::Colour)
                }
                _ => cell,
            };
            let between = if column == 0 { "" } else { "  " };
            let is_left = grid.columns[column].1 == Align::Left;
            line += &if is_left {
                format!("{between}{shown}{gap}")
            } else {
                format!("{between}{gap}{shown}")
            };
        }
        format!("{}\n", line.trim_end())
    };
    let heads = row(grid.columns.iter().map(|(head, _)| head).collect(), None);
    let paint_of = |index: usize| {
        paints
            .filter(|_| style == Style::Colour)
            .map(|(column, paints)| (column, paints[index]))
    };
    let rows = grid
        .rows
        .iter()
        .enumerate()
        .map(|(index, cells)| row(cells.iter().collect(), paint_of(index)));
    std::iter::once(heads).chain(rows).collect()
}
