//! A benchmark run for the terminal: one table per suite and quantity with cases by arms. Cells are
//! medians with half the width of their confidence intervals.

use std::fmt::Write;

use harness_bench::record::{BenchRun, Entry, EntryResult, Quantity, SuiteRecord};
use harness_bench::summary::precision;

use super::super::terminal::{Style, table};
use super::super::words::{Grid, count};
use super::{arms_of, cases_of, entries_of, reasons, row, verdict, words};

pub fn terminal(run: &BenchRun) -> String {
    let mut text = verdict::other_profile(run)
        .map(|profile| profile + "\n")
        .unwrap_or_default();
    for suite in &run.suites {
        write_suite(&mut text, suite);
    }
    let shard = run
        .shard
        .map(|shard| format!(", shard {shard}"))
        .unwrap_or_default();
    let (entries, suites) = (
        count(run.entries().count(), "entry"),
        count(run.suites.len(), "suite"),
    );
    let (failed, skipped, seconds) = (run.failed(), run.skipped(), run.took_ms as f64 / 1000.0);
    let (seed, device) = (run.seed, &run.machine.device);
    let _ = writeln!(
        text,
        "{entries} in {suites}, {failed} failed, {skipped} skipped, in {seconds:.1} s, seed \
         {seed}{shard}, on {device}"
    );
    for reason in &run.conditions.contended {
        let _ = writeln!(text, "contended: {reason}");
    }
    text
}

fn write_suite(text: &mut String, suite: &SuiteRecord) {
    let (rounds, why) = (
        count(suite.rounds as usize, "round"),
        words::stopped(suite.stopped),
    );
    let timing = worst_overhead(suite)
        .map(|(share, case)| format!("; timing adds at most {:.2} % ({case})", share * 100.0));
    let _ = writeln!(
        text,
        "{}: {rounds}, {why}{}",
        suite.name,
        timing.unwrap_or_default()
    );
    for (quantity, entries) in entries_of(suite) {
        let arms = arms_of(&entries);
        let rows = cases_of(&entries)
            .into_iter()
            .map(|case| row(case.clone(), &case, &arms, &entries, cell));
        let heads = std::iter::once(words::short(quantity)).chain(arms.iter().copied());
        for line in table(&Grid::new("lr", heads, rows), None, Style::Plain).lines() {
            let _ = writeln!(text, "  {line}");
        }
    }
    for (reason, entries) in reasons(suite) {
        let word = if matches!(entries[0].outcome, EntryResult::Failed { .. }) {
            "failed"
        } else {
            "skipped"
        };
        let _ = match entries.as_slice() {
            [entry] => writeln!(text, "  {word}: {}, {}: {reason}", entry.case(), entry.arm),
            _ => writeln!(
                text,
                "  {word}: {} of {}: {reason}",
                count(entries.len(), "entry"),
                arms_of(&entries).join(", ")
            ),
        };
    }
    text.push('\n');
}

/// The entry whose measured time has the largest share of timing overhead, and that share.
fn worst_overhead(suite: &SuiteRecord) -> Option<(f64, String)> {
    let shares = suite
        .entries
        .iter()
        .filter(|entry| entry.quantity == Quantity::HostTime)
        .filter_map(|entry| {
            let measured = entry.outcome.measured()?;
            let region = measured.summary.median.saturating_mul(measured.batch);
            // An arm without driver calls loses no time to retries.
            (region > 0).then(|| {
                (
                    suite.overhead_ps as f64 / region as f64,
                    format!("{}, {}", entry.case(), entry.arm),
                )
            })
        });
    shares.max_by(|(a, _), (b, _)| a.total_cmp(b))
}

/// `1.23 µs ± 0.5 % (20)`: median, half the width of its interval if there are enough rounds, and
/// the number of samples if there are several.
fn cell(entry: &Entry) -> String {
    let median = words::figure(entry);
    let Some(measured) = entry.outcome.measured() else {
        return median;
    };
    let summary = &measured.summary;
    if !entry.quantity.is_time()
        || (entry.quantity == Quantity::ModelTime && summary.low == summary.high)
    {
        return median;
    }
    let half = precision(summary, measured.rounds.iter().flatten().count())
        .map(|half| format!(" ± {:.1} %", 100.0 * half));
    format!("{median}{} ({})", half.unwrap_or_default(), summary.count)
}
