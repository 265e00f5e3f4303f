use std::collections::BTreeSet;

use anstyle::Style as Paint;
use indexmap::IndexMap;

use super::escape::log_line;
use super::sections::{Failure, Place};
use super::terminal::{FAILED, PASSED, Style, Text, painted, verdict_paint};
use super::timing::{self, Timing};
use super::words::{self, Grid, NOTHING};
use super::{Report, claims, recovery, steps::Selection, why};
use harness_record::{RunRecord, StepRecord, Verdict, Violation};

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
        for (_, Failure { run, .. }) in report.failures() {
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
    for Place {
        scenario,
        device,
        arm,
        ..
    } in report.places()
    {
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

impl Text {
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
            .places()
            .filter_map(|place| {
                let unmet = words::not_judged(place.arm.shown())?;
                Some(format!("observed: {}: {unmet}", place.name()))
            })
            .collect();
        self.some(&observed, "more observation", detail);
        let processes: Vec<String> = report
            .places()
            .filter_map(|place| processes_of(&place))
            .collect();
        self.some(&processes, "more multi-process run", detail);
        if detail == Detail::Full {
            for place in report.places() {
                if let Some(settings) = place.arm.unnamed_settings() {
                    self.wrapped(&format!("settings: {}: {settings}", place.name()), 2);
                }
            }
        }
        self.reasons(report, detail);
    }

    /// Adds one line per reason for which runs were skipped or are contended.
    fn reasons(&mut self, report: &Report<'_>, detail: Detail) {
        let mut reasons: IndexMap<[&str; 2], Vec<String>> = IndexMap::new();
        for (place, verdict, reason) in report.unjudged() {
            reasons
                .entry([verdict, reason])
                .or_default()
                .push(place.name());
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
        let all = report.places().count();
        let arms: Vec<Place<'_, '_>> = report
            .places()
            .filter(|place| !is_brief || all <= BRIEF_ROWS || place.arm.is_noteworthy())
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
                        .any(|place| timing::whole_scenario(place.arm).is_some()) =>
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
        let rows = arms.iter().map(|place| {
            let Place {
                scenario,
                device,
                arm,
                ..
            } = place;
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
            .map(|place| verdict_paint(&place.arm.shown().verdict))
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
        for Place { scenario, arm, .. } in
            report.places().filter(|place| place.arm.counts.failed == 0)
        {
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
                words::joined(counted, ", ")
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
                let failure = Failure::new(run, first, rest);
                failure
                    .violations()
                    .for_each(|seen| self.wrapped(&words::violation(seen), 12));
                if let Some((last, failed_request)) = failure.request
                    && let Some((title, why)) = failure.why()
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
                    self.wrapped(&format!("{title}: {why}"), 2);
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
fn processes_of(place: &Place<'_, '_>) -> Option<String> {
    let processes = place.arm.shown().processes.as_ref()?;
    Some(format!(
        "peak reserved per process: {}: {}",
        place.name(),
        words::peaks(processes)
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

#[cfg(test)]
mod tests;
