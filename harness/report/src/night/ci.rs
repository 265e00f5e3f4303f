//! What continuous integration shows of a night: the step summary and annotations of GitHub Actions, and figures for github-action-benchmark.

use serde_json::{Value, json};

use super::super::github::{self, Level};
use super::super::page::Page;
use super::super::words::count;
use super::words;
use super::{important, machine, suite, top};
use harness_bench::record::{Change, ChangeVerdict, EntryOutcome, NightRecord, Quantity};

/// The night as a step summary: its report without pictures, at most `limit` bytes long.
#[must_use]
pub fn summary(night: &NightRecord, limit: usize) -> String {
    let mut page = Page::default();
    top::write(&mut page, night);
    for suite in &night.suites {
        suite::write_without_pictures(&mut page, night, suite);
    }
    machine(&mut page, night);
    page.end();
    github::cut(&page.text, limit)
}

/// The night as workflow commands, at most [`github::ANNOTATIONS`]: what broke, what became worse, whether it was contended, what became
/// better.
#[must_use]
pub fn annotations(night: &NightRecord) -> Vec<String> {
    let mut told = Vec::new();
    if night.comparison.is_none() {
        let failed = important::failed(night);
        told.extend(failed.map(|(suite, case, arm, reason)| (Level::Error, format!("{suite}: {case} by {arm} FAILED"), reason.to_owned())));
    }
    let changes = night.comparison.iter().flat_map(|comparison| important::kinds(night, comparison));
    let (bad, good): (Vec<_>, Vec<_>) =
        changes.partition(|(change, _)| matches!(change.verdict, ChangeVerdict::Broken | ChangeVerdict::Worse));
    told.extend(bad.into_iter().map(|(change, alike)| annotation(night, change, alike)));
    if !night.conditions.contended.is_empty() {
        told.push((Level::Warning, "Contended: this night is no baseline".to_owned(), night.conditions.contended.join("; ")));
    }
    told.extend(good.into_iter().map(|(change, alike)| annotation(night, change, alike)));
    github::annotations(&told)
}

fn annotation(night: &NightRecord, change: &Change, alike: usize) -> (Level, String, String) {
    let entry = &change.entry;
    let (level, word) = match change.verdict {
        ChangeVerdict::Broken => (Level::Error, "broke"),
        ChangeVerdict::Worse => (Level::Warning, "became worse"),
        ChangeVerdict::Better => (Level::Notice, "became better"),
        ChangeVerdict::Mended => (Level::Notice, "was mended"),
        ChangeVerdict::StillBroken => (Level::Notice, "is still broken"),
        ChangeVerdict::Same | ChangeVerdict::Untested | ChangeVerdict::NotCompared => (Level::Notice, "is as before"),
    };
    let alike = if alike > 0 { format!(" (and {} alike)", count(alike, "other point")) } else { String::new() };
    (level, format!("{}: {}{alike} by {} {word}", entry.suite, entry.case, entry.arm), in_figures(night, change))
}

/// What changed, in one line of plain text.
pub(crate) fn in_figures(night: &NightRecord, change: &Change) -> String {
    match &change.figures {
        Some(figures) => format!(
            "{} → {}, {}, p {} ({})",
            words::amount(change.entry.quantity, figures.base),
            words::amount(change.entry.quantity, figures.new),
            words::change(figures),
            words::probability(figures.p),
            words::short(change.entry.quantity)
        ),
        None => top::reason(night, change).unwrap_or("see the report").to_owned(),
    }
}

/// The night's medians as `customSmallerIsBetter` of github-action-benchmark, one figure an entry. Times are in nanoseconds; those of a
/// simulated clock have a unit that says so.
///
/// Source: <https://github.com/benchmark-action/github-action-benchmark#examples>.
#[must_use]
pub fn smaller_is_better(night: &NightRecord) -> String {
    let mut figures: Vec<Value> = Vec::new();
    for suite in &night.suites {
        for entry in &suite.entries {
            let EntryOutcome::Measured(measured) = &entry.outcome else { continue };
            let summary = &measured.summary;
            let (unit, scale) = match entry.quantity {
                Quantity::HostTime | Quantity::DeviceTime => ("ns", 1e3),
                Quantity::ModelTime => ("ns of model time (simulated clock), not measured", 1e3),
                Quantity::Memory => ("bytes", 1.0),
            };
            let half = (summary.high - summary.low.min(summary.high)) as f64 / 2.0 / scale;
            figures.push(json!({
                "name": format!("{} / {} / {} ({})", suite.name, entry.case(), entry.arm, words::slug(entry.quantity)),
                "unit": unit,
                "value": summary.median as f64 / scale,
                "range": format!("± {half}"),
                "extra": format!(
                    "n = {}\n95 % interval of the median: {} to {}\n{}\n{}",
                    summary.count,
                    words::amount(entry.quantity, summary.low),
                    words::amount(entry.quantity, summary.high),
                    words::commit(&night.build),
                    night.machine.device
                ),
            }));
        }
    }
    let mut text = serde_json::to_string_pretty(&Value::Array(figures)).expect("plain values always serialize");
    text.push('\n');
    text
}
