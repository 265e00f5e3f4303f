use std::collections::BTreeSet;

use anstyle::{AnsiColor, Style as Paint};
use indexmap::IndexMap;
use unicode_width::UnicodeWidthStr;

use super::escape::{log_line, log_lines};
use super::timing::{self, Timing};
use super::words::{self, Align, Grid, NOTHING};
use super::{ArmGroup, Report, claims, recovery, steps::Selection, why};
use harness_record::{RunRecord, StepRecord, Verdict, Violation};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Style {
    Plain,
    Colour,
}

/// How much [`render`] shows of a report.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Detail {
    /// About ten lines, and all of each failure.
    Brief,
    Full,
}

/// If there are more configurations, a brief report lists only those that did not pass.
const BRIEF_ROWS: usize = 10;

/// Lines of one kind in a brief report, such as reasons for skipped runs.
const BRIEF_LINES: usize = 3;

const STEPS_OF_A_FAILURE: usize = 25;

/// Maximum number of listed requests that failed as expected.
const EXPECTED_SHOWN: usize = 20;

/// Renders verdicts, and failures with causes and commands. In full, times, recoveries and requests
/// that failed as expected come between them. Tables and sentences fit into `width` columns; `None`
/// is for files and pipes. Failures come last, next to the prompt.
pub fn render(report: &Report<'_>, detail: Detail, style: Style, width: Option<usize>) -> String {
    let mut out = Text::new(style, width);
    if report.counts.total() > 0 {
        out.verdicts(report, detail);
        if detail == Detail::Full {
            out.times(report);
            out.recoveries(report);
            out.expected_failed_requests(report);
        }
        out.claims(report);
        for (_, _, arm) in report.arms().filter(|(_, _, arm)| arm.counts.failed > 0) {
            let run = arm.shown();
            let head = format!(
                "FAILED {} on {} with {}",
                run.scenario.name, run.device.name, run.allocator
            );
            let head = words::shortened(&head, width.unwrap_or(usize::MAX));
            out.text
                .push_str(&format!("\n{}\n", painted(&head, FAILED, style)));
            out.ending(run);
        }
        out.text.push('\n');
    }
    let paint = if report.counts.failed > 0 {
        FAILED
    } else {
        PASSED
    };
    let more = if detail == Detail::Brief && report.counts.total() > 0 {
        " `-v` adds times and recoveries."
    } else {
        ""
    };
    out.painted(
        &format!("{}{more}", words::verdict_line(report.counts)),
        paint,
        2,
    );
    words::not_started(report.records)
        .iter()
        .for_each(|text| out.line(text));
    out.text
}

pub fn run_line(run: &RunRecord, style: Style, width: Option<usize>) -> String {
    let verdict = words::verdict(&run.verdict);
    let place = match &run.verdict {
        Verdict::Failed {
            first: Violation { at: Some(at), .. },
            ..
        } => format!(", line {}", at.line),
        Verdict::Failed { first, .. } => format!(", step {}", first.step),
        _ => String::new(),
    };
    let repetition = if run.repetition > 0 {
        format!(", repetition {}", run.repetition + 1)
    } else {
        String::new()
    };
    let rest = format!(
        "{} with {}{repetition}{place}",
        run.scenario.name, run.allocator
    );
    let room = width.map_or(usize::MAX, |width| width.saturating_sub(WIDEST_VERDICT + 1));
    let gap = " ".repeat(WIDEST_VERDICT.saturating_sub(verdict.len()) + 1);
    format!(
        "{}{gap}{}",
        painted(verdict, verdict_paint(&run.verdict), style),
        log_line(&words::shortened(&rest, room))
    )
}

/// Width of `interrupted`; only `failed as expected` is wider.
const WIDEST_VERDICT: usize = 11;

/// The result of [`harness_allocator::stats::MemoryStats::summary`] for each run that started.
pub fn memory_summaries(report: &Report<'_>) -> String {
    let mut out = Text::new(Style::Plain, None);
    for (scenario, device, arm) in report.arms() {
        for run in arm
            .runs
            .iter()
            .filter(|run| !matches!(run.verdict, Verdict::Skipped { .. }))
        {
            let repetition = if arm.runs.len() > 1 {
                format!(", repetition {}", run.repetition + 1)
            } else {
                String::new()
            };
            out.line(&format!(
                "\n{} on {} with {}{repetition}, at its end:",
                scenario.info.name, device.label, arm.allocator
            ));
            out.text.push_str(&run.stats.summary());
        }
    }
    out.text
}

/// Renders a failing test: the last steps of a run, its violations and a command that repeats it.
pub fn step_table(run: &RunRecord) -> String {
    let mut out = Text::new(Style::Plain, None);
    let RunRecord {
        scenario,
        device,
        allocator,
        seed,
        repetition,
        verdict,
        ..
    } = run;
    let verdict = words::verdict(verdict);
    out.line(&format!(
        "{} on {} with {allocator}, seed {seed}, repetition {repetition}: {verdict}",
        scenario.name, device.name
    ));
    let selection = Selection::last(run, STEPS_OF_A_FAILURE);
    if selection.left_out() > 0 {
        out.line(&format!(
            "{} before these are omitted.",
            words::count(selection.left_out(), "step")
        ));
    }
    if run.steps.is_empty() {
        out.line("No step was done.");
    } else {
        out.table(&selection.grid(), 0, None);
    }
    words::unrecorded(run)
        .iter()
        .for_each(|text| out.line(text));
    selection.steps().for_each(|step| out.remarks(step));
    if let Some(step) = run.steps.last() {
        for table in &step.tables {
            out.line(&format!("step {}: {}", step.number, table.title));
            out.table(&Grid::new("l", &table.columns, table.rows.clone()), 0, None);
        }
        out.line(&format!(
            "context overhead: {}",
            words::size(step.accounts.device.context_overhead)
        ));
    }
    out.ending(run);
    out.text
}

const FAILED: Paint = AnsiColor::Red.on_default().bold();
const PASSED: Paint = AnsiColor::Green.on_default();
const SKIPPED: Paint = AnsiColor::Yellow.on_default();

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

    fn painted(&mut self, text: &str, paint: Paint, indent: usize) {
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

    fn verdicts(&mut self, report: &Report<'_>, detail: Detail) {
        for device in &report.devices {
            self.wrapped(
                &format!(
                    "{}: memory {}, clock {}",
                    device.label,
                    words::memory(device),
                    words::clock(device)
                ),
                2,
            );
        }
        self.table_of_verdicts(report, detail);
        let observed: Vec<String> = report
            .arms()
            .filter_map(|(scenario, _, arm)| {
                Some(format!(
                    "observed: {} with {}: {}",
                    scenario.info.name,
                    arm.allocator,
                    words::not_judged(arm.shown())?
                ))
            })
            .collect();
        self.some(&observed, "more observation", detail);
        let processes: Vec<String> = report
            .arms()
            .filter_map(|(scenario, _, arm)| processes_of(&scenario.info.name, arm))
            .collect();
        self.some(&processes, "more run with several processes", detail);
        if detail == Detail::Full {
            for (scenario, _, arm) in report.arms() {
                if let Some(settings) = arm.unnamed_settings() {
                    self.wrapped(
                        &format!(
                            "settings: {} with {}: {settings}",
                            scenario.info.name, arm.allocator
                        ),
                        2,
                    );
                }
            }
        }
        self.reasons(report, detail);
    }

    /// Adds one line per reason for which runs were skipped or are contended.
    fn reasons(&mut self, report: &Report<'_>, detail: Detail) {
        let mut reasons: IndexMap<[&str; 2], Vec<String>> = IndexMap::new();
        for (scenario, _, arm) in report.arms() {
            if let verdict @ (Verdict::Skipped { reason, .. } | Verdict::Contended { reason }) =
                &arm.shown().verdict
            {
                let run = format!("{} with {}", scenario.info.name, arm.allocator);
                reasons
                    .entry([words::verdict(verdict), reason])
                    .or_default()
                    .push(run);
            }
        }
        let most = if detail == Detail::Full {
            usize::MAX
        } else {
            2
        };
        let line = |([verdict, reason], runs): ([&str; 2], Vec<String>)| {
            format!(
                "{verdict}: {}: {reason}",
                words::at_most(runs, most, |more| format!("{more} more")).join(", ")
            )
        };
        self.some(
            &reasons.into_iter().map(line).collect::<Vec<_>>(),
            "more reason",
            detail,
        );
    }

    /// Adds these lines; in a brief report the first few, and the number of the others.
    fn some(&mut self, lines: &[String], noun: &str, detail: Detail) {
        let shown = if detail == Detail::Full {
            lines.len()
        } else {
            BRIEF_LINES.min(lines.len())
        };
        lines[..shown].iter().for_each(|line| self.wrapped(line, 2));
        if shown < lines.len() {
            self.line(&format!(
                "… {} with `-v`",
                words::count(lines.len() - shown, noun)
            ));
        }
    }

    fn claims(&mut self, report: &Report<'_>) {
        let tested = claims::tested(report);
        if tested.is_empty() {
            return;
        }
        self.text.push('\n');
        self.line("Claims:");
        for tested in &tested {
            let because = tested
                .claim
                .because
                .as_ref()
                .map(|because| format!(" ({})", because.replace('\n', " ")))
                .unwrap_or_default();
            self.wrapped(
                &format!(
                    "  {} [{}] {}{because}",
                    tested.claim.says, tested.scenario.info.name, tested.verdict
                ),
                4,
            );
            for figure in tested.figures {
                let [pytorch, harness] = [&figure.pytorch, &figure.harness]
                    .map(|value| words::or_nothing(value.as_deref()));
                self.wrapped(
                    &format!("    {}: PyTorch {pytorch}, harness {harness}", figure.name),
                    6,
                );
            }
        }
    }

    fn table_of_verdicts(&mut self, report: &Report<'_>, detail: Detail) {
        let is_brief = detail == Detail::Brief;
        let all = report.arms().count();
        let arms: Vec<_> = report
            .arms()
            .filter(|(_, _, arm)| !is_brief || all <= BRIEF_ROWS || arm.is_noteworthy())
            .collect();
        if arms.is_empty() {
            return;
        }
        // One column has one clock.
        let time = match report.devices.as_slice() {
            [only]
                if is_brief
                    && arms
                        .iter()
                        .any(|(_, _, arm)| timing::whole_scenario(arm).is_some()) =>
            {
                Some(timing::head(only.info.clock))
            }
            _ => None,
        };
        let heads = [
            "verdict",
            "scenario",
            "device",
            "allocator",
            "peak reserved",
            "peak allocated",
            "OOMs",
            "allocator retries",
            "limit",
        ];
        let rows = arms.iter().map(|(scenario, device, arm)| {
            let names = [
                words::arm_verdicts(arm),
                scenario.info.name.clone(),
                device.label.clone(),
                arm.allocator.to_owned(),
            ];
            let time = time.map(|_| words::or_nothing(timing::whole_scenario(arm)));
            names
                .into_iter()
                .chain(figures_of(arm.shown()))
                .chain([arm.shown().scenario.memory.to_string()])
                .chain(time)
                .collect()
        });
        let has_devices = report.devices.len() > 1;
        let grid = Grid::new("llllr", heads.into_iter().chain(time), rows)
            .with_columns(|head| has_devices || head != "device");
        let paints: Vec<Paint> = arms
            .iter()
            .map(|(_, _, arm)| verdict_paint(&arm.shown().verdict))
            .collect();
        self.text.push('\n');
        self.table(&grid, if has_devices { 4 } else { 3 }, Some((0, &paints)));
    }

    /// Adds one table of times per device, so clocks are never mixed.
    fn times(&mut self, report: &Report<'_>) {
        for (index, device) in report.devices.iter().enumerate() {
            let timings = report
                .by_device()
                .filter(|(_, on_device)| on_device.device == index);
            let timings: Vec<(&str, Timing<'_>)> = timings
                .filter_map(|(scenario, on_device)| {
                    Some((scenario.info.name.as_str(), Timing::new(on_device, device)?))
                })
                .collect();
            if !timings.is_empty() {
                self.wrapped(
                    &format!(
                        "\n{} on {}, medians",
                        timing::title(device.info.clock),
                        device.label
                    ),
                    2,
                );
                self.table(&Timing::overview(&timings), 2, None);
            }
        }
        if let Some(warning) = words::model_time_warning(report) {
            self.wrapped(&format!("\n{warning}"), 0);
        }
    }

    /// Adds one table per scenario with a failed attempt.
    fn recoveries(&mut self, report: &Report<'_>) {
        for (scenario, on_device) in report.by_device() {
            let (rows, device) = (recovery::rows(on_device), &report.devices[on_device.device]);
            if !rows.is_empty() {
                self.wrapped(
                    &format!("\nRecovery in {} on {}", scenario.info.name, device.label),
                    2,
                );
                self.table(&recovery::brief(&rows, device.info.clock), 2, None);
            }
        }
    }

    /// Adds one line per step whose requests failed as expected, with all allocators for which it
    /// failed.
    fn expected_failed_requests(&mut self, report: &Report<'_>) {
        let mut lines: IndexMap<[String; 2], Vec<&str>> = IndexMap::new();
        for (scenario, _, arm) in report.arms().filter(|(_, _, arm)| arm.counts.failed == 0) {
            let mut steps = BTreeSet::new();
            // In a loop, the first iteration.
            for (step, failed_request) in
                why::failed_requests(arm.shown()).filter(|(step, _)| steps.insert(step.line))
            {
                let iteration = step
                    .iteration
                    .as_ref()
                    .map_or_else(String::new, |iteration| format!(", {iteration}"));
                let place = format!("{}, line {}{iteration}", scenario.info.name, step.line);
                let rest = format!(
                    "{}: {}",
                    why::request(failed_request),
                    why::in_short(failed_request)
                );
                lines.entry([place, rest]).or_default().push(arm.allocator);
            }
        }
        if lines.is_empty() {
            return;
        }
        self.line("\nOut of memory as expected");
        for ([place, rest], arms) in lines.iter().take(EXPECTED_SHOWN) {
            self.wrapped(
                &format!(
                    "{place}, with {}: {rest}",
                    words::distinct(arms.iter().copied()).join(", ")
                ),
                2,
            );
        }
        if lines.len() > EXPECTED_SHOWN {
            self.line(&format!(
                "… {} more in the report",
                lines.len() - EXPECTED_SHOWN
            ));
        }
    }

    fn remarks(&mut self, step: &StepRecord) {
        step.notes
            .iter()
            .for_each(|note| self.line(&format!("step {}: {note}", step.number)));
        if !step.reports.is_empty() {
            let counted = step
                .reports
                .iter()
                .map(|(name, &value)| format!("{name} = {}", words::metric(name, value)));
            self.line(&format!(
                "step {} counted: {}",
                step.number,
                counted.collect::<Vec<_>>().join(", ")
            ));
        }
    }

    fn ending(&mut self, run: &RunRecord) {
        match &run.verdict {
            Verdict::Passed | Verdict::Interrupted => {}
            Verdict::FailedAsExpected { reason, first, .. } => {
                self.wrapped(
                    &format!("failed as expected, {reason}: {}", words::violation(first)),
                    12,
                );
            }
            verdict @ (Verdict::Skipped { reason, .. } | Verdict::Contended { reason }) => {
                self.wrapped(&format!("{}: {reason}", words::verdict(verdict)), 2);
            }
            Verdict::Failed { first, rest } => {
                std::iter::once(first)
                    .chain(rest)
                    .for_each(|seen| self.wrapped(&words::violation(seen), 12));
                if let Some(last) = run.steps.last()
                    && let Some(failed_request) = &last.failed_request
                {
                    let place = words::step_place(last);
                    self.wrapped(
                        &format!(
                            "{} ({place}): {}",
                            words::step_name(last),
                            why::request(failed_request)
                        ),
                        2,
                    );
                    self.wrapped(
                        &format!(
                            "{}: {}",
                            why::title(failed_request),
                            why::explain(failed_request)
                        ),
                        2,
                    );
                }
            }
        }
        if let Some(settings) = &run.settings {
            self.line(&format!("settings: {settings}"));
        }
        // Not wrapped, so it can be copied.
        self.line(&format!("reproduce: {}", run.reproduce));
        if let (Verdict::Failed { .. }, Some(command)) = (&run.verdict, words::explain_command(run))
        {
            self.line(&format!("explain: {command}"));
        }
    }
}

/// The peaks of each process of a run, which the table has together.
fn processes_of(scenario: &str, arm: &ArmGroup<'_>) -> Option<String> {
    let processes = arm.shown().processes.as_ref()?;
    let each = processes.each.iter().map(|one| {
        format!(
            "{} {}",
            one.name,
            words::or_unknown(one.figures.peak_reserved)
        )
    });
    Some(format!(
        "peak reserved per process: {scenario} with {}: {}",
        arm.allocator,
        each.collect::<Vec<_>>().join(", ")
    ))
}

fn figures_of(run: &RunRecord) -> [String; 4] {
    if let Some(processes) = &run.processes {
        return words::figures(&processes.together);
    }
    let Some(last) = run.steps.last() else {
        return [NOTHING; 4].map(str::to_owned);
    };
    let accounts = || run.steps.iter().map(|step| &step.accounts);
    [
        words::or_nothing(accounts().map(|accounts| accounts.peak_reserved).max()),
        words::or_nothing(accounts().map(|accounts| accounts.peak_allocated).max()),
        last.accounts.ooms.to_string(),
        last.accounts.retries.to_string(),
    ]
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

/// Fits a table into `width` columns if possible: omits columns from the right, except the first
/// `names`, then shortens long cells in the middle. Returns the heads of omitted columns as well.
fn fitted(grid: &Grid, names: usize, width: Option<usize>) -> (Grid, Vec<String>) {
    let (mut grid, mut left_out) = (grid.clone(), Vec::new());
    let Some(width) = width else {
        return (grid, left_out);
    };
    let total = |grid: &Grid| {
        widths(grid)
            .iter()
            .map(|width| width + 2)
            .sum::<usize>()
            .saturating_sub(2)
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

#[cfg(test)]
mod tests;
