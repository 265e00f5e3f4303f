//! Reports for a terminal, and the step table that a failing test prints.

use std::fmt::Write as _;

use anstyle::{AnsiColor, Style as Paint};
use unicode_width::UnicodeWidthStr;

use super::Report;
use super::escape::{log_line, log_lines};
use super::steps::Selection;
use super::timing::{self, Timing};
use super::words::{self, Align, Grid, NOTHING};
use harness_record::{RunRecord, StepRecord, Verdict};

/// Whether the terminal shows colours.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Style {
    /// Text only: for files, pipes and tests.
    Plain,
    /// Verdicts in colour, by ANSI escape codes.
    Colour,
}

/// Steps that a failing test prints.
const STEPS_OF_A_FAILURE: usize = 25;

/// Renders times, verdicts and failures with their commands; what failed comes last, where a terminal shows it.
#[must_use]
pub fn render(report: &Report<'_>, style: Style) -> String {
    let mut out = String::new();
    if report.counts.total() == 0 {
        line(&mut out, &words::verdict_line(report.counts));
        words::not_started(report.records).iter().for_each(|text| line(&mut out, text));
        return out;
    }
    for device in &report.devices {
        line(&mut out, &format!("{}: memory {}, clock {}", device.label, words::memory(device), words::clock(device)));
    }
    times(&mut out, report);
    if let Some(warning) = words::model_time_warning(report) {
        line(&mut out, &format!("\n{warning}"));
    }
    out.push('\n');
    out.push_str(&verdicts(report, style));
    for (_, _, arm) in report.arms().filter(|(_, _, arm)| arm.counts.failed > 0) {
        out.push('\n');
        out.push_str(&failure(arm.shown(), style));
    }
    let paint = if report.counts.failed > 0 { FAILED } else { PASSED };
    out.push_str(&format!("\n{}\n", painted(&words::verdict_line(report.counts), paint, style)));
    words::not_started(report.records).iter().for_each(|text| line(&mut out, text));
    out
}

/// For each run that was done, what [`harness_allocator::stats::MemoryStats::summary`] makes of its counters at the end.
#[must_use]
pub fn memory_summaries(report: &Report<'_>) -> String {
    let mut out = String::new();
    for (scenario, device, arm) in report.arms() {
        for run in arm.runs.iter().filter(|run| !matches!(run.verdict, Verdict::Skipped { .. })) {
            let repetition = if arm.runs.len() > 1 { format!(", repetition {}", run.repetition + 1) } else { String::new() };
            line(&mut out, &format!("\n{} on {} with {}{repetition}, at its end:", scenario.info.name, device.label, arm.allocator));
            out.push_str(&run.stats.summary());
        }
    }
    out
}

/// The last steps of one run, its violations and the command that reproduces it: what a failing test has to say.
#[must_use]
pub fn step_table(run: &RunRecord) -> String {
    let mut out = format!(
        "{} on {} with {}, seed {}, repetition {}: {}\n",
        run.scenario.name,
        run.device.name,
        run.allocator,
        run.seed,
        run.repetition,
        words::verdict(&run.verdict)
    );
    let selection = Selection::last(run, STEPS_OF_A_FAILURE);
    if selection.left_out() > 0 {
        line(&mut out, &format!("{} before these are left out.", words::count(selection.left_out(), "step")));
    }
    if run.steps.is_empty() {
        line(&mut out, "No step was done.");
    } else {
        out.push_str(&table(&selection.grid(), None, Style::Plain));
    }
    words::unrecorded(run).iter().for_each(|text| line(&mut out, text));
    selection.steps().for_each(|step| remarks(&mut out, step));
    if let Some(step) = run.steps.last() {
        tables(&mut out, step);
        line(&mut out, &format!("context overhead: {}", words::size(step.accounts.device.context_overhead)));
    }
    ending(&mut out, run);
    out
}

const FAILED: Paint = AnsiColor::Red.on_default().bold();
const PASSED: Paint = AnsiColor::Green.on_default();
const SKIPPED: Paint = AnsiColor::Yellow.on_default();

fn line(out: &mut String, text: &str) {
    out.push_str(&log_lines(text));
    out.push('\n');
}

fn painted(text: &str, paint: Paint, style: Style) -> String {
    match style {
        Style::Plain => log_line(text),
        Style::Colour => format!("{paint}{}{paint:#}", log_line(text)),
    }
}

const fn verdict_paint(verdict: &Verdict) -> Paint {
    match verdict {
        Verdict::Passed | Verdict::FailedAsExpected { .. } => PASSED,
        Verdict::Failed { .. } => FAILED,
        Verdict::Skipped { .. } | Verdict::Contended { .. } | Verdict::Interrupted => SKIPPED,
    }
}

fn verdicts(report: &Report<'_>, style: Style) -> String {
    let has_devices = report.devices.len() > 1;
    let names = ["scenario"].into_iter().chain(has_devices.then_some("device")).chain(["allocator", "verdict"]);
    let figures = ["limit", "peak allocated", "peak reserved", "allocator retries", "OOMs"].map(|head| (head, Align::Right));
    let mut grid = Grid::new(names.map(|head| (head, Align::Left)).chain(figures));
    let mut paints = Vec::new();
    for (scenario, device, arm) in report.arms() {
        let names = [scenario.info.name.clone()].into_iter().chain(has_devices.then(|| device.label.clone()));
        let names = names.chain([arm.allocator.to_owned(), words::arm_verdicts(arm)]);
        let limit = words::size(arm.shown().scenario.memory);
        grid.rows.push(names.chain([limit]).chain(figures_of(arm.shown())).collect());
        paints.push(verdict_paint(&arm.shown().verdict));
    }
    let painted = if has_devices { 3 } else { 2 };
    let mut out = table(&grid, Some((painted, &paints)), style);
    for (scenario, _, arm) in report.arms() {
        if let Some(unmet) = words::not_judged(arm.shown()) {
            line(&mut out, &format!("observed: {} with {}: {unmet}", scenario.info.name, arm.allocator));
        }
    }
    for (scenario, _, arm) in report.arms() {
        if let Some(settings) = arm.settings_untold() {
            line(&mut out, &format!("settings: {} with {}: {settings}", scenario.info.name, arm.allocator));
        }
    }
    for (scenario, _, arm) in report.arms() {
        if let verdict @ (Verdict::Skipped { reason } | Verdict::Contended { reason }) = &arm.shown().verdict {
            line(&mut out, &format!("{}: {} with {}: {reason}", words::verdict(verdict), scenario.info.name, arm.allocator));
        }
    }
    out
}

fn figures_of(run: &RunRecord) -> [String; 4] {
    let Some(last) = run.steps.last() else { return [NOTHING; 4].map(str::to_owned) };
    let accounts = || run.steps.iter().map(|step| &step.accounts);
    [
        words::or_nothing(accounts().map(|accounts| accounts.peak_allocated).max().map(words::size)),
        words::or_nothing(accounts().map(|accounts| accounts.peak_reserved).max().map(words::size)),
        last.accounts.retries.to_string(),
        last.accounts.ooms.to_string(),
    ]
}

fn failure(run: &RunRecord, style: Style) -> String {
    let head = format!("FAILED {} on {} with {}", run.scenario.name, run.device.name, run.allocator);
    let mut out = painted(&head, FAILED, style);
    out.push('\n');
    ending(&mut out, run);
    out
}

/// How the run ended, and how to do it again.
fn ending(out: &mut String, run: &RunRecord) {
    match &run.verdict {
        Verdict::Passed | Verdict::Interrupted => {}
        Verdict::FailedAsExpected { reason, first, .. } => {
            line(out, &format!("failed as expected ({reason}): {}", words::violation(first)));
        }
        Verdict::Skipped { reason } => line(out, &format!("skipped: {reason}")),
        Verdict::Contended { reason } => line(out, &format!("contended: {reason}")),
        Verdict::Failed { first, rest } => std::iter::once(first).chain(rest).for_each(|seen| line(out, &words::violation(seen))),
    }
    if let Some(settings) = &run.settings {
        line(out, &format!("settings: {settings}"));
    }
    line(out, &format!("reproduce: {}", run.reproduce));
}

fn remarks(out: &mut String, step: &StepRecord) {
    for note in &step.notes {
        line(out, &format!("step {}: {note}", step.number));
    }
    if !step.reports.is_empty() {
        let counted: Vec<String> = step.reports.iter().map(|(name, &value)| format!("{name} = {}", words::metric(name, value))).collect();
        line(out, &format!("step {} counted: {}", step.number, counted.join(", ")));
    }
}

fn tables(out: &mut String, step: &StepRecord) {
    for of_step in &step.tables {
        line(out, &format!("step {}: {}", step.number, of_step.title));
        let mut grid = Grid::new(of_step.columns.iter().map(|head| (head.as_str(), Align::Left)));
        grid.rows.clone_from(&of_step.rows);
        out.push_str(&table(&grid, None, Style::Plain));
    }
}

/// One table for each device, so that two clocks never share one.
fn times(out: &mut String, report: &Report<'_>) {
    for (index, device) in report.devices.iter().enumerate() {
        let benches = report.scenarios.iter().flat_map(|scenario| scenario.benches.iter().map(move |bench| (scenario, bench)));
        let timings = benches.filter(|(_, bench)| bench.device == index);
        let timings: Vec<(&str, Timing<'_>)> =
            timings.filter_map(|(scenario, bench)| Some((scenario.info.name.as_str(), Timing::new(bench, device)?))).collect();
        if !timings.is_empty() {
            line(out, &format!("\n{} on {}, medians", timing::title(device.info.clock), device.label));
            out.push_str(&table(&Timing::overview(&timings), None, Style::Plain));
        }
    }
}

/// A table with columns as wide as their widest cell. One column may have a paint for each row.
pub(super) fn table(grid: &Grid, paints: Option<(usize, &[Paint])>, style: Style) -> String {
    let harmless = |row: &Vec<String>| row.iter().map(|cell| log_line(cell)).collect();
    let grid = &Grid { columns: grid.columns.clone(), rows: grid.rows.iter().map(harmless).collect() };
    let mut widths: Vec<usize> = grid.columns.iter().map(|(head, _)| head.width()).collect();
    for row in &grid.rows {
        for (width, cell) in widths.iter_mut().zip(row) {
            *width = (*width).max(cell.width());
        }
    }
    let heads: Vec<String> = grid.columns.iter().map(|(head, _)| head.clone()).collect();
    let mut out = String::new();
    table_row(&mut out, grid, &widths, &heads, None);
    for (index, row) in grid.rows.iter().enumerate() {
        let paint = paints.filter(|_| style == Style::Colour).map(|(column, paints)| (column, paints[index]));
        table_row(&mut out, grid, &widths, row, paint);
    }
    out
}

fn table_row(out: &mut String, grid: &Grid, widths: &[usize], row: &[String], paint: Option<(usize, Paint)>) {
    let start = out.len();
    for (column, (cell, &width)) in row.iter().zip(widths).enumerate() {
        let gap = " ".repeat(width - cell.width());
        let shown = match paint {
            Some((painted_column, paint)) if painted_column == column => painted(cell, paint, Style::Colour),
            _ => cell.clone(),
        };
        let between = if column == 0 { "" } else { "  " };
        // Writing to a string cannot fail.
        let _ = match grid.columns[column].1 {
            Align::Left => write!(out, "{between}{shown}{gap}"),
            Align::Right => write!(out, "{between}{gap}{shown}"),
        };
    }
    out.truncate(start + out[start..].trim_end().len());
    out.push('\n');
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::examples;

    #[test]
    fn the_terminal_shows_verdicts_failures_and_times() {
        let records = examples::night();
        insta::assert_snapshot!(render(&Report::new(&records), Style::Plain));
    }

    #[test]
    fn the_settings_of_an_arm_are_told_where_its_name_does_not_tell_them() {
        let mut records = examples::night();
        records.runs.truncate(2);
        let conf = "max_split_size_mb:512";
        for (run, name) in records.runs.iter_mut().zip(["tuned", "caching(max_split_size_mb:512)"]) {
            (run.allocator, run.settings) = (name.to_owned(), Some(conf.to_owned()));
        }
        let text = render(&Report::new(&records), Style::Plain);
        assert!(text.contains("\nsettings: oom_retry with tuned: max_split_size_mb:512\n"), "{text}");
        assert!(!text.contains("with caching("), "{text}");
        assert!(step_table(&records.runs[0]).contains("\nsettings: max_split_size_mb:512\nreproduce: "));
    }

    #[test]
    fn the_memory_summary_of_each_run_that_was_done_stands_under_its_name() {
        let mut records = examples::night();
        records.runs[0].stats.num_ooms = 4;
        records.runs[16].stats.num_ooms = 5;
        let text = memory_summaries(&Report::new(&records));
        assert!(text.starts_with(&format!(
            "\noom_retry on simulated with caching, repetition 1, at its end:\n{}",
            records.runs[0].stats.summary()
        )));
        let last = records.runs[16].stats.summary();
        assert!(text.ends_with(&format!("\nnvml_ledger on Example GPU with caching, at its end:\n{last}")), "{text}");
        assert_eq!(text.matches(", at its end:\n|====").count(), 16, "all but the one that was skipped");
        assert!(!text.contains("async_pool"));
    }

    #[test]
    fn colours_add_nothing_but_escape_codes() {
        let records = examples::night();
        let report = Report::new(&records);
        let coloured = render(&report, Style::Colour);
        assert!(coloured.contains("\u{1b}[1m\u{1b}[31m"));
        let mut plain = String::new();
        let mut rest = coloured.as_str();
        while let Some((before, code)) = rest.split_once('\u{1b}') {
            plain.push_str(before);
            rest = code.split_once('m').expect("a code ends with m").1;
        }
        plain.push_str(rest);
        assert_eq!(plain, render(&report, Style::Plain));
    }

    #[test]
    fn a_failing_test_prints_the_steps_the_violations_and_the_command() {
        insta::assert_snapshot!(step_table(&examples::failed("caching", 1)));
    }

    #[test]
    fn a_failing_test_prints_the_last_25_steps_and_says_how_many_it_left_out() {
        let text = step_table(&examples::long_run(40, &[]));
        assert!(text.contains("15 steps before these are left out.\n"), "{text}");
        assert_eq!(text.lines().filter(|line| line.contains("touch: batch")).count(), 25);
    }

    #[test]
    fn a_run_without_steps_says_so() {
        insta::assert_snapshot!(step_table(&examples::skipped()));
    }
}
