//! A benchmark run for the terminal: one table a suite and quantity, cases by arms, medians with half the width of their confidence intervals.

use std::collections::BTreeMap;
use std::fmt::Write;

use harness_allocator::units::Bytes;
use unicode_width::UnicodeWidthStr;

use super::record::{BenchRun, Entry, Measured, Outcome, Quantity, Stopped, SuiteRecord};
use super::summary::precision;

/// Renders a run.
#[must_use]
pub fn render(run: &BenchRun) -> String {
    let mut text = String::new();
    for suite in &run.suites {
        render_suite(&mut text, suite);
    }
    let (entries, failed, skipped) = counts(run);
    let shard = run.shard.map(|shard| format!(", shard {shard}")).unwrap_or_default();
    let _ = writeln!(
        text,
        "{} in {}, {failed} failed, {skipped} skipped, in {:.1} s, seed {}{shard}, on {}",
        counted(entries, "entry", "entries"),
        counted(run.suites.len(), "suite", "suites"),
        run.took_ms as f64 / 1000.0,
        run.seed,
        run.machine.device
    );
    for reason in &run.conditions.contended {
        let _ = writeln!(text, "contended: {reason}");
    }
    text
}

/// Entries, and those of them that failed or were skipped. What ran out of memory was skipped.
#[must_use]
pub fn counts(run: &BenchRun) -> (usize, usize, usize) {
    let entries = || run.suites.iter().flat_map(|suite| &suite.entries);
    let failed = entries().filter(|entry| matches!(entry.outcome, Outcome::Failed { .. })).count();
    let skipped = entries().filter(|entry| matches!(entry.outcome, Outcome::Skipped { .. } | Outcome::OutOfMemory { .. })).count();
    (entries().count(), failed, skipped)
}

fn render_suite(text: &mut String, suite: &SuiteRecord) {
    let _ = writeln!(text, "{}: {}", suite.name, story(suite));
    for quantity in [Quantity::HostTime, Quantity::DeviceTime, Quantity::ModelTime, Quantity::Memory] {
        let entries: Vec<&Entry> = suite.entries.iter().filter(|entry| entry.quantity == quantity).collect();
        if !entries.is_empty() {
            table(text, &entries, quantity);
        }
    }
    for entry in &suite.entries {
        if let Outcome::Failed { reason } = &entry.outcome {
            let _ = writeln!(text, "  failed: {}, {}: {reason}", entry.case(), entry.arm);
        }
    }
    for (reason, entries) in skipped(suite) {
        let _ = match entries.as_slice() {
            [entry] => writeln!(text, "  skipped: {}, {}: {reason}", entry.case(), entry.arm),
            _ => writeln!(text, "  skipped: {} entries of {}: {reason}", entries.len(), arms_of(&entries).join(", ")),
        };
    }
    text.push('\n');
}

fn counted(number: usize, one: &str, several: &str) -> String {
    format!("{number} {}", if number == 1 { one } else { several })
}

/// What was skipped, by reason, in the order of its first entries.
fn skipped(suite: &SuiteRecord) -> Vec<(&str, Vec<&Entry>)> {
    let mut reasons: Vec<(&str, Vec<&Entry>)> = Vec::new();
    for entry in &suite.entries {
        if let Outcome::Skipped { reason } | Outcome::OutOfMemory { reason } = &entry.outcome {
            match reasons.iter_mut().find(|(known, _)| known == reason) {
                Some((_, entries)) => entries.push(entry),
                None => reasons.push((reason, vec![entry])),
            }
        }
    }
    reasons
}

/// The names of these entries' arms, in the order of their first appearance.
fn arms_of<'a>(entries: &[&'a Entry]) -> Vec<&'a str> {
    let mut arms: Vec<&str> = Vec::new();
    for entry in entries {
        if !arms.contains(&entry.arm.as_str()) {
            arms.push(&entry.arm);
        }
    }
    arms
}

/// How it went.
fn story(suite: &SuiteRecord) -> String {
    let rounds = counted(suite.rounds as usize, "round", "rounds");
    let why = match suite.stopped {
        Stopped::Precise => "every interval is as narrow as asked",
        Stopped::Budget => "the time or the rounds were used up",
        Stopped::Deterministic => "a virtual clock gives the same figures each time",
        Stopped::Interrupted => "interrupted",
    };
    let timing = worst_overhead(suite).map(|(share, case)| format!("; timing adds at most {:.2} % ({case})", share * 100.0));
    format!("{rounds}, {why}{}", timing.unwrap_or_default())
}

/// The entry of the host's clock to which timing adds the largest share, and that share.
#[must_use]
pub fn worst_overhead(suite: &SuiteRecord) -> Option<(f64, String)> {
    let shares = suite.entries.iter().filter(|entry| entry.quantity == Quantity::HostTime).filter_map(|entry| match &entry.outcome {
        Outcome::Measured(measured) => {
            let region = measured.summary.median.saturating_mul(measured.batch).max(1);
            Some((suite.overhead_ps as f64 / region as f64, format!("{}, {}", entry.case(), entry.arm)))
        }
        _ => None,
    });
    shares.max_by(|(a, _), (b, _)| a.total_cmp(b))
}

fn table(text: &mut String, entries: &[&Entry], quantity: Quantity) {
    let arms = arms_of(entries);
    let mut cases: Vec<String> = Vec::new();
    let mut cells: BTreeMap<(String, &str), String> = BTreeMap::new();
    for entry in entries {
        let case = entry.case();
        if cases.last() != Some(&case) {
            cases.push(case.clone());
        }
        cells.insert((case, &entry.arm), cell(entry));
    }
    let mut rows = vec![std::iter::once(head(quantity).to_owned()).chain(arms.iter().map(|arm| (*arm).to_owned())).collect::<Vec<_>>()];
    for case in cases {
        let figures = arms.iter().map(|arm| cells.get(&(case.clone(), *arm)).cloned().unwrap_or_default());
        let figures: Vec<String> = figures.collect();
        rows.push(std::iter::once(case).chain(figures).collect());
    }
    let widths: Vec<usize> = (0..=arms.len()).map(|column| rows.iter().map(|row| row[column].width()).max().unwrap_or(0)).collect();
    for row in rows {
        let mut line = String::from("  ");
        for (column, (cell, width)) in row.iter().zip(&widths).enumerate() {
            let space = " ".repeat(width - cell.width());
            let _ = if column == 0 { write!(line, "{cell}{space}") } else { write!(line, "  {space}{cell}") };
        }
        let _ = writeln!(text, "{}", line.trim_end());
    }
}

const fn head(quantity: Quantity) -> &'static str {
    match quantity {
        Quantity::HostTime => "host time, measured",
        Quantity::DeviceTime => "device time, measured",
        Quantity::ModelTime => "model time, not measured",
        Quantity::Memory => "memory",
    }
}

/// `1.23 µs ± 0.5 % (20)`: the median, half the width of its interval where there are rounds enough for one, and the number of samples where
/// there is more than a model's one.
fn cell(entry: &Entry) -> String {
    let Measured { summary, rounds, .. } = match &entry.outcome {
        Outcome::Measured(measured) => measured,
        Outcome::Failed { .. } => return "failed".to_owned(),
        Outcome::OutOfMemory { .. } => return "out of memory".to_owned(),
        Outcome::Skipped { .. } => return "–".to_owned(),
    };
    match entry.quantity {
        Quantity::Memory => Bytes(summary.median).to_string(),
        Quantity::ModelTime if summary.low == summary.high => picoseconds(summary.median),
        Quantity::ModelTime | Quantity::HostTime | Quantity::DeviceTime => {
            let measured = rounds.iter().flatten().count();
            let half = precision(summary, measured).map(|half| format!(" ± {:.1} %", 100.0 * half));
            format!("{}{} ({})", picoseconds(summary.median), half.unwrap_or_default(), summary.count)
        }
    }
}

/// A time with three figures: `12.3 ns`, `1.23 µs`.
fn picoseconds(time: u64) -> String {
    const UNITS: [(&str, f64); 4] = [("s", 1e12), ("ms", 1e9), ("µs", 1e6), ("ns", 1e3)];
    let (unit, scale) = UNITS.into_iter().find(|(_, scale)| time as f64 >= *scale).unwrap_or(("ns", 1e3));
    let value = time as f64 / scale;
    let decimals = match value {
        _ if time == 0 => 0,
        100.0.. => 0,
        10.0.. => 1,
        _ => 2,
    };
    format!("{value:.decimals$} {unit}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_have_three_figures_and_a_unit_that_suits() {
        let times = [0, 900, 12_345, 999_000, 1_234_000, 45_678_900, 1_000_000_000, 2_500_000_000_000];
        let expected = ["0 ns", "0.90 ns", "12.3 ns", "999 ns", "1.23 µs", "45.7 µs", "1.00 ms", "2.50 s"];
        assert_eq!(times.map(picoseconds), expected);
    }
}
