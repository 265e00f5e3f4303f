//! Benchmark output for CI: step summary and annotations of GitHub Actions, and figures for
//! github-action-benchmark.

use harness_bench::compare::by_importance;
use harness_bench::record::{BenchRun, EntryName, EntryResult, Quantity, Verdict};
use serde_json::{Value, json};

use super::{super::github, verdict::in_figures, words};

/// Renders the report without pictures as a step summary of at most `limit` bytes.
pub fn summary(run: &BenchRun, limit: usize) -> String {
    github::cut(&super::page(run, false).ended().text, limit)
}

/// Renders at most [`github::ANNOTATIONS`] workflow commands: broken and worse entries, contention,
/// then better entries.
pub fn annotations(run: &BenchRun) -> Vec<String> {
    let mut told = Vec::new();
    if run.comparison.is_none() {
        for (suite, entry) in run.entries() {
            if let EntryResult::Failed { reason } = &entry.outcome {
                told.push((
                    "error",
                    format!("{}: {} by {} FAILED", suite.name, entry.case(), entry.arm),
                    reason.clone(),
                ));
            }
        }
    }
    for change in run.comparison.iter().flat_map(by_importance) {
        let (level, word) = match change.verdict {
            Verdict::Broken => ("error", "broke"),
            Verdict::Worse => ("warning", "is worse"),
            Verdict::Better => ("notice", "is better"),
            _ => ("notice", "is fixed"),
        };
        let EntryName {
            suite, case, arm, ..
        } = &change.entry;
        told.push((
            level,
            format!("{suite}: {case} by {arm} {word}"),
            in_figures(change),
        ));
    }
    if !run.conditions.contended.is_empty() {
        told.push((
            "warning",
            "The machine was contended".to_owned(),
            run.conditions.contended.join("; "),
        ));
    }
    github::annotations(&told)
}

/// Renders the medians in the `customSmallerIsBetter` format of github-action-benchmark, one figure
/// per entry. Times are in nanoseconds. Simulated times have a unit that says so.
///
/// Source: <https://github.com/benchmark-action/github-action-benchmark#examples>.
pub fn smaller_is_better(run: &BenchRun) -> String {
    let mut figures: Vec<Value> = Vec::new();
    for (suite, entry) in run.entries() {
        let Some(measured) = entry.outcome.measured() else {
            continue;
        };
        let summary = &measured.summary;
        let (unit, scale) = match entry.quantity {
            Quantity::HostTime | Quantity::DeviceTime => ("ns", 1e3),
            Quantity::ModelTime => ("ns of model time (simulated clock), not measured", 1e3),
            Quantity::Memory => ("bytes", 1.0),
        };
        figures.push(json!({
            "name": format!(
                "{} / {} / {} ({})", suite.name, entry.case(), entry.arm,
                words::slug(entry.quantity)
            ),
            "unit": unit,
            "value": summary.median as f64 / scale,
            "range": format!("± {}", summary.high.saturating_sub(summary.low) as f64 / 2.0 / scale),
            "extra": format!(
                "n = {}\n{}\n{}", summary.count, words::commit(&run.build), run.machine.device
            ),
        }));
    }
    let mut text = serde_json::to_string_pretty(&Value::Array(figures))
        .expect("plain values always serialize");
    text.push('\n');
    text
}
