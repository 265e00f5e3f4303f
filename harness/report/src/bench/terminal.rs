//! A benchmark run for the terminal: one table per suite and quantity with cases by arms. Cells are medians with half the width
//! of their confidence intervals.

use std::fmt::Write;

use harness_bench::record::{BenchRun, Entry, Outcome, Quantity, SuiteRecord};
use harness_bench::summary::precision;
use unicode_width::UnicodeWidthStr;

use super::super::words::{NOTHING, count};
use super::{arms_of, cases_of, entries_of, reasons, words};

/// Renders a run.
#[must_use]
pub fn terminal(run: &BenchRun) -> String {
    let mut text = String::new();
    for suite in &run.suites {
        write_suite(&mut text, suite);
    }
    let shard = run.shard.map(|shard| format!(", shard {shard}")).unwrap_or_default();
    let (entries, suites) = (words::entries(run.entries().count()), count(run.suites.len(), "suite"));
    let (failed, skipped, seconds) = (run.failed(), run.skipped(), run.took_ms as f64 / 1000.0);
    let (seed, device) = (run.seed, &run.machine.device);
    let _ = writeln!(text, "{entries} in {suites}, {failed} failed, {skipped} skipped, in {seconds:.1} s, seed {seed}{shard}, on {device}");
    for reason in &run.conditions.contended {
        let _ = writeln!(text, "contended: {reason}");
    }
    text
}

fn write_suite(text: &mut String, suite: &SuiteRecord) {
    let (rounds, why) = (count(suite.rounds as usize, "round"), words::stopped(suite.stopped));
    let timing = worst_overhead(suite).map(|(share, case)| format!("; timing adds at most {:.2} % ({case})", share * 100.0));
    let _ = writeln!(text, "{}: {rounds}, {why}{}", suite.name, timing.unwrap_or_default());
    for (quantity, entries) in entries_of(suite) {
        table(text, &entries, quantity);
    }
    for (reason, entries) in reasons(suite) {
        let word = if matches!(entries[0].outcome, Outcome::Failed { .. }) { "failed" } else { "skipped" };
        let _ = match entries.as_slice() {
            [entry] => writeln!(text, "  {word}: {}, {}: {reason}", entry.case(), entry.arm),
            _ => writeln!(text, "  {word}: {} of {}: {reason}", words::entries(entries.len()), arms_of(&entries).join(", ")),
        };
    }
    text.push('\n');
}

/// The entry whose measured time has the largest share of timing overhead, and that share.
fn worst_overhead(suite: &SuiteRecord) -> Option<(f64, String)> {
    let shares = suite.entries.iter().filter(|entry| entry.quantity == Quantity::HostTime).filter_map(|entry| {
        let measured = entry.outcome.measured()?;
        let region = measured.summary.median.saturating_mul(measured.batch).max(1);
        Some((suite.overhead_ps as f64 / region as f64, format!("{}, {}", entry.case(), entry.arm)))
    });
    shares.max_by(|(a, _), (b, _)| a.total_cmp(b))
}

fn table(text: &mut String, entries: &[&Entry], quantity: Quantity) {
    let arms = arms_of(entries);
    let mut rows = vec![std::iter::once(words::short(quantity)).chain(arms.iter().copied()).map(str::to_owned).collect::<Vec<_>>()];
    for case in cases_of(entries) {
        let cell = |arm: &&str| entries.iter().find(|entry| entry.arm == **arm && entry.case() == case).map(|entry| cell(entry));
        let cells: Vec<String> = arms.iter().map(|arm| cell(arm).unwrap_or_default()).collect();
        rows.push(std::iter::once(case.clone()).chain(cells).collect());
    }
    let widths: Vec<usize> = (0..=arms.len()).map(|column| rows.iter().map(|row| row[column].width()).max().unwrap_or(0)).collect();
    for row in rows {
        let mut line = String::from("  ");
        for (column, (cell, width)) in row.iter().zip(&widths).enumerate() {
            let space = " ".repeat(width - cell.width());
            line += &if column == 0 { format!("{cell}{space}") } else { format!("  {space}{cell}") };
        }
        let _ = writeln!(text, "{}", line.trim_end());
    }
}

/// `1.23 µs ± 0.5 % (20)`: median, half the width of its interval if there are enough rounds, and the number of samples if there
/// are several.
fn cell(entry: &Entry) -> String {
    let measured = match &entry.outcome {
        Outcome::Measured(measured) => measured,
        Outcome::Failed { .. } => return "failed".to_owned(),
        Outcome::OutOfMemory { .. } => return "out of memory".to_owned(),
        Outcome::Skipped { .. } => return NOTHING.to_owned(),
    };
    let (summary, median) = (&measured.summary, words::amount(entry.quantity, measured.summary.median));
    if !entry.quantity.is_time() || (entry.quantity == Quantity::ModelTime && summary.low == summary.high) {
        return median;
    }
    let half = precision(summary, measured.rounds.iter().flatten().count()).map(|half| format!(" ± {:.1} %", 100.0 * half));
    format!("{median}{} ({})", half.unwrap_or_default(), summary.count)
}
