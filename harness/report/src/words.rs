use std::{collections::BTreeSet, fmt::Display};

use harness_allocator::units::{Bytes, Nanos};
use harness_allocator::{device::Clock, stats::StatKey};
use harness_base::shell::quoted;
use indexmap::IndexSet;

use super::{ArmGroup, DeviceGroup, Report, VerdictCounts};
pub(super) use harness_base::words::{count, joined};
use harness_record::{
    MemoryFigures, NOT_JUDGED, Outcome, ProcessFigures, Records, Rule, RunProcesses, RunRecord,
    StepRecord, Verdict, Violation,
};

/// Shown in place of a missing figure.
pub(super) const NOTHING: &str = "–";

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Align {
    Left,
    Right,
}

#[derive(Clone, Debug, Default)]
pub(super) struct Grid {
    pub(super) columns: Vec<(String, Align)>,
    pub(super) rows: Vec<Vec<String>>,
}

impl Grid {
    /// Creates a table. `aligns` has a letter per column, `l` or `r`; the last one holds for all
    /// further columns.
    pub(super) fn new<S: Into<String>>(
        aligns: &str,
        heads: impl IntoIterator<Item = S>,
        rows: impl IntoIterator<Item = Vec<String>>,
    ) -> Self {
        let align = |letter| {
            if letter == 'l' {
                Align::Left
            } else {
                Align::Right
            }
        };
        let aligns = aligns
            .chars()
            .chain(aligns.chars().last().into_iter().cycle())
            .map(align);
        Self {
            columns: heads.into_iter().map(Into::into).zip(aligns).collect(),
            rows: rows.into_iter().collect(),
        }
    }

    pub(super) fn with_columns(self, is_kept: impl Fn(&str) -> bool) -> Self {
        let kept: Vec<usize> = (0..self.columns.len())
            .filter(|&column| is_kept(&self.columns[column].0))
            .collect();
        let rows = self
            .rows
            .iter()
            .map(|row| kept.iter().map(|&column| row[column].clone()).collect())
            .collect();
        Self {
            rows,
            columns: kept
                .iter()
                .map(|&column| self.columns[column].clone())
                .collect(),
        }
    }
}

/// Formats a size. If the short form rounds, the bytes follow in parentheses.
pub(super) fn size(bytes: Bytes) -> String {
    let human = bytes.to_string();
    if Bytes::parse(&human) == Ok(bytes) {
        human
    } else {
        format!("{human} ({})", bytes.get())
    }
}

/// Returns at most `most` characters; a longer text keeps both ends.
pub(super) fn shortened(text: &str, most: usize) -> String {
    let length = text.chars().count();
    if length <= most {
        return text.to_owned();
    }
    let (start, end) = (
        most.saturating_sub(1).div_ceil(2),
        most.saturating_sub(1) / 2,
    );
    text.chars()
        .take(start)
        .chain(['…'])
        .chain(text.chars().skip(length - end))
        .collect()
}

/// The step's kind and subject, for example `alloc weights`.
pub(super) fn step_name(step: &StepRecord) -> String {
    let subject = step.text.split(',').next().unwrap_or_default();
    format!("{} {subject}", step.kind).trim_end().to_owned()
}

/// The step's position, for example `step 3, line 12, i = 2`.
pub(super) fn step_place(step: &StepRecord) -> String {
    let iteration = step
        .iteration
        .as_ref()
        .map_or_else(String::new, |iteration| format!(", {iteration}"));
    format!("step {}, line {}{iteration}", step.number, step.line)
}

pub(super) fn or_nothing(value: Option<impl Display>) -> String {
    value.map_or_else(|| NOTHING.to_owned(), |value| value.to_string())
}

/// Formats a figure that may be unknown.
pub(super) fn or_unknown(value: Option<impl Display>) -> String {
    value.map_or_else(|| "unknown".to_owned(), |value| value.to_string())
}

/// Formats peak reserved, peak allocated, OOMs and retries.
pub(super) fn figures(figures: &MemoryFigures) -> [String; 4] {
    let [reserved, allocated] = [figures.peak_reserved, figures.peak_allocated].map(or_unknown);
    let [ooms, retries] = [figures.ooms, figures.retries].map(or_unknown);
    [reserved, allocated, ooms, retries]
}

pub(super) const FIGURES: [&str; 4] = [
    "peak reserved",
    "peak allocated",
    "OOMs",
    "allocator retries",
];

/// The peak of reserved memory of each process.
pub(super) fn peaks(processes: &RunProcesses) -> String {
    let peak = |one: &ProcessFigures| {
        let reserved = or_unknown(one.figures.peak_reserved);
        format!("{} {reserved}", one.name)
    };
    joined(processes.each.iter().map(peak), ", ")
}

/// Tabulates the figures of the processes of a run, and of all together.
pub(super) fn processes(processes: &RunProcesses) -> Grid {
    let each = processes
        .each
        .iter()
        .map(|one| (one.name.as_str(), &one.figures));
    let rows = each.chain([("together", &processes.together)]);
    let rows = rows.map(|(name, one)| {
        std::iter::once(name.to_owned())
            .chain(figures(one))
            .collect()
    });
    Grid::new("lr", ["process"].into_iter().chain(FIGURES), rows)
}

pub(super) fn unless_empty(text: String) -> String {
    if text.is_empty() {
        NOTHING.to_owned()
    } else {
        text
    }
}

/// Keeps the first `most` items. If there are others, adds the text that `more` returns for their
/// number.
pub(super) fn at_most(
    mut items: Vec<String>,
    most: usize,
    more: impl FnOnce(usize) -> String,
) -> Vec<String> {
    let others = items.len().saturating_sub(most);
    items.truncate(most);
    items.extend((others > 0).then(|| more(others)));
    items
}

pub(super) fn distinct<'a>(names: impl IntoIterator<Item = &'a str>) -> Vec<&'a str> {
    names
        .into_iter()
        .collect::<IndexSet<&str>>()
        .into_iter()
        .collect()
}

/// Formats a difference of sizes, for example `+2 MiB`, `−2 MiB` or `0 B`.
pub(super) fn signed(bytes: i64) -> String {
    let sign = ["−", "", "+"][(bytes.signum() + 1) as usize];
    format!("{sign}{}", Bytes(bytes.unsigned_abs()))
}

/// Formats a ratio, for example `1.25×`; small ratios have four decimals.
pub(super) fn multiple(ratio: Option<f64>) -> String {
    match ratio {
        None => NOTHING.to_owned(),
        Some(0.0) => "0×".to_owned(),
        Some(ratio) if ratio > 0.0 && ratio < 0.1 => format!("{ratio:.4}×"),
        Some(ratio) => format!("{ratio:.2}×"),
    }
}

/// Formats the minimum and maximum, for example `1965 to 1980`.
pub(super) fn range(figures: &BTreeSet<u32>) -> String {
    match (figures.first(), figures.last()) {
        (Some(least), Some(most)) if least < most => format!("{least} to {most}"),
        (one, _) => or_nothing(one),
    }
}

/// Step metrics in bytes whose names do not end with `bytes`.
const IN_BYTES: [&str; 11] = [
    "failed_request",
    "peak_reserved",
    "reserved_at_failure",
    "allocated_at_failure",
    "largest_free_at_failure",
    "device_free_at_failure",
    "free_in_pinned_segments",
    "given_back",
    "retained_after_oom",
    "host_peak",
    "host_copied",
];

/// Formats a step metric with the unit that its name implies.
pub(super) fn metric(name: &str, value: u64) -> String {
    let is_bytes = StatKey::from_name(name).is_some_and(StatKey::is_bytes)
        || name.ends_with("bytes")
        || IN_BYTES.contains(&name);
    if is_bytes {
        size(Bytes(value))
    } else if name.ends_with("_ns")
        || name.ends_with("nanos")
        || name.ends_with("time")
        || name == "waited_for_ranks"
    {
        Nanos(value).to_string()
    } else {
        value.to_string()
    }
}

pub(super) fn outcome(outcome: &Outcome) -> String {
    match outcome {
        Outcome::Done => "done".to_owned(),
        Outcome::Fits { retries: 0 } => "fits".to_owned(),
        Outcome::Fits { retries } => format!("fits after {}", count(*retries, "retry")),
        Outcome::OutOfMemory => "out of memory".to_owned(),
        Outcome::Failed => "FAILED".to_owned(),
    }
}

pub(super) const fn verdict(verdict: &Verdict) -> &'static str {
    match verdict {
        Verdict::Passed => "passed",
        Verdict::FailedAsExpected { .. } => "failed as expected",
        Verdict::Failed { .. } => "FAILED",
        Verdict::Skipped { .. } => "skipped",
        Verdict::Contended { .. } => "contended",
        Verdict::Interrupted => "interrupted",
    }
}

/// Describes a violation on lines that can be copied.
pub(super) fn violation(violation: &Violation) -> String {
    let place = violation.at.as_ref().map_or_else(
        || format!("after step {}", violation.step),
        ToString::to_string,
    );
    let promise = match &violation.rule {
        Rule::Invariant(invariant) => format!("\n  promise:  {}", invariant.promise()),
        _ => String::new(),
    };
    format!(
        "{place}: {}{promise}\n  expected: {}\n  seen:     {}",
        violation.rule, violation.expected, violation.seen
    )
}

/// Adds a full stop if the text has no final punctuation.
pub(super) fn sentence(text: &str) -> String {
    if text.ends_with(['.', '!', '?']) {
        text.to_owned()
    } else {
        format!("{text}.")
    }
}

/// Summarizes the repetitions of an arm: `passed`, `passed ×5`, `FAILED 1 of 5`.
pub(super) fn verdicts(counts: VerdictCounts) -> String {
    let total = counts.total();
    let parts = [
        ("FAILED", counts.failed),
        ("interrupted", counts.interrupted),
        ("contended", counts.contended),
        ("passed", counts.passed),
        ("skipped", counts.skipped),
    ];
    let parts = parts
        .into_iter()
        .filter(|&(_, number)| number > 0)
        .map(|(word, number)| match (number, total) {
            (1, 1) => word.to_owned(),
            _ if number == total => format!("{word} ×{number}"),
            _ => format!("{word} {number} of {total}"),
        });
    joined(parts, ", ")
}

pub(super) fn verdict_line(counts: VerdictCounts) -> String {
    let total = counts.total();
    let head = match (total, counts.failed) {
        (0, _) => return "Nothing was run.".to_owned(),
        (1, 0) if counts.passed == 1 => return "The one run passed.".to_owned(),
        (_, 0) if counts.passed == total => return format!("All {total} runs passed."),
        (_, 0) => "No run failed".to_owned(),
        (_, failed) => format!("{failed} of {} failed", count(total, "run")),
    };
    let always = [
        (counts.passed, "passed"),
        (counts.failed, "failed"),
        (counts.skipped, "skipped"),
    ];
    let if_any = [
        (counts.contended, "contended"),
        (counts.interrupted, "interrupted"),
    ]
    .into_iter()
    .filter(|(number, _)| *number > 0);
    let tail: Vec<String> = always
        .into_iter()
        .chain(if_any)
        .map(|(number, word)| format!("{number} {word}"))
        .collect();
    format!("{head}: {}.", tail.join(", "))
}

pub(super) fn not_started(records: &Records) -> Option<String> {
    const NAMED: usize = 5;
    let all = records.not_started.len();
    if all == 0 {
        return None;
    }
    let names = records
        .not_started
        .iter()
        .map(|run| format!("`{}` with `{}`", run.scenario, run.allocator));
    let names = at_most(names.collect(), NAMED, |more| format!("{more} more"));
    Some(format!(
        "Incomplete: {} of {} did not start: {}.",
        all,
        count(all + records.runs.len(), "run"),
        names.join(", ")
    ))
}

/// Summarizes an arm. An arm that the user added and that misses an expectation has neither passed
/// nor failed.
pub(super) fn arm_verdicts(arm: &ArmGroup<'_>) -> String {
    if not_judged(arm.shown()).is_some() {
        "not met".to_owned()
    } else {
        verdicts(arm.counts)
    }
}

pub(super) fn unnamed_settings(run: &RunRecord) -> Option<&str> {
    run.settings
        .as_deref()
        .filter(|settings| !run.allocator.contains(settings))
}

/// Expectations that an unjudged run did not meet. `None` if the run is judged or met them all.
pub(super) fn not_judged(run: &RunRecord) -> Option<String> {
    let mut unmet = run
        .steps
        .iter()
        .flat_map(|step| &step.notes)
        .filter_map(|note| note.strip_prefix(NOT_JUDGED));
    let first = unmet.next()?;
    let more = match unmet.count() {
        0 => String::new(),
        more => format!(" (and {more} more in the report)"),
    };
    Some(format!("not judged: {first}{more}"))
}

pub(super) fn clock(device: &DeviceGroup<'_>) -> String {
    match (device.info.clock, &device.info.fingerprint.cost_model) {
        (Clock::Measured, _) => "measured".to_owned(),
        (Clock::Simulated, Some(model)) => format!("simulated, cost model {model}"),
        (Clock::Simulated, None) => "simulated, without a named cost model".to_owned(),
    }
}

pub(super) fn memory(device: &DeviceGroup<'_>) -> String {
    or_nothing(device.info.fingerprint.memory.map(size))
}

/// Commands that record the run again and explain its memory, for a run whose last request failed.
/// `None` if the allocator has no cache to record.
pub(super) fn explain_command(run: &RunRecord) -> Option<String> {
    run.steps.last()?.failed_request.as_ref()?.lanes.as_ref()?;
    // The program's name may contain ` run ` itself, as in `cargo run --`.
    let (program, _) = run
        .reproduce
        .split_once(&format!(" run {}", quoted(&run.scenario.path)))?;
    Some(format!(
        "{} --repeat 1 --snapshot oom.pickle; {program} explain oom.pickle",
        run.reproduce
    ))
}

/// Describes steps that are missing from the record. `None` if all are recorded.
pub(super) fn unrecorded(run: &RunRecord) -> Option<String> {
    let missing = match run.unrecorded_steps {
        0 => return None,
        1 => "1 step more ran and is".to_owned(),
        more => format!("{more} steps more ran and are"),
    };
    let gap = run
        .steps
        .windows(2)
        .find(|pair| pair[1].number > pair[0].number + 1);
    let after = gap.map_or_else(String::new, |pair| {
        format!(" after step {}", pair[0].number)
    });
    Some(format!(
        "{missing} not recorded{after}: a record has a limited number of steps."
    ))
}

/// Warns that times come from a cost model. `None` if all times were measured.
pub(super) fn model_time_warning(report: &Report<'_>) -> Option<String> {
    let simulated: Vec<&DeviceGroup<'_>> = report
        .devices
        .iter()
        .filter(|device| device.info.clock == Clock::Simulated)
        .collect();
    if simulated.is_empty() {
        return None;
    }
    let models = distinct(
        simulated
            .iter()
            .filter_map(|device| device.info.fingerprint.cost_model.as_deref()),
    );
    let model = match models.as_slice() {
        [] => "its cost model".to_owned(),
        [one] => format!("the cost model {one}"),
        several => format!("the cost models {}", several.join(" and ")),
    };
    if simulated.len() == report.devices.len() {
        return Some(format!(
            "All times in this report are model times from {model}. No GPU was measured, and the \
             allocator's own work on the host is not included."
        ));
    }
    let labels: Vec<&str> = simulated
        .iter()
        .map(|device| device.label.as_str())
        .collect();
    Some(format!(
        "All times of {} are model times from {model}. They do not include the allocator's own \
         work on the host. They have separate tables \
         and are never compared with measured times.",
        labels.join(" and ")
    ))
}

#[cfg(test)]
mod tests;
