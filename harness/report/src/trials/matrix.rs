//! A matrix of runs.

#[cfg(feature = "parquet")]
pub mod parquet;

use std::cmp::Reverse;

use harness_allocator::units::{Bytes, Nanos};
use harness_exec::doubts::Doubt;
use harness_exec::matrix::{GrownPeak, MatrixReport, MatrixRow, PeakKind};
use harness_exec::summary::change;

use super::{Grid, Parts, notes_on_doubts, words};

/// Rows of the table, and peaks that grew, in a text.
const MOST: usize = 10;

pub(super) fn parts(report: &MatrixReport) -> Parts {
    (
        sentence(report),
        !report.is_success(),
        grid(report),
        notes(report),
    )
}

fn sentence(report: &MatrixReport) -> String {
    let well = report.rows.iter().filter(|row| row.figures.is_success());
    let grown = match report.grown.len() {
        0 => String::new(),
        grown => format!("; {} larger than before", words::count(grown, "peak")),
    };
    format!(
        "{} of {} ended with exit code 0{grown}.",
        well.count(),
        words::count(report.rows.len(), "run")
    )
}

/// The rows that failed, then those with the highest peaks.
fn grid(report: &MatrixReport) -> Grid {
    let mut rows: Vec<&MatrixRow> = report.rows.iter().collect();
    rows.sort_by_key(|row| {
        let figures = &row.figures;
        let outcome = (
            figures.is_success(),
            figures.num_ooms.unwrap_or_default() == 0,
        );
        (
            outcome,
            Reverse(figures.peak_reserved.max(figures.peak_allocated)),
        )
    });
    let heads = [
        "run",
        "outcome",
        "peak reserved",
        "peak allocated",
        "retries",
        "OOMs",
        "time",
    ];
    let name = report.names();
    let row = |row: &&MatrixRow| {
        let figures = &row.figures;
        let [reserved, allocated] = [figures.peak_reserved, figures.peak_allocated];
        let took = figures.took_ms.map(Nanos::millis);
        vec![
            name(&row.cell),
            outcome(row),
            words::or_unknown(reserved.map(Bytes)),
            words::or_unknown(allocated.map(Bytes)),
            words::or_unknown(figures.num_alloc_retries),
            words::or_unknown(figures.num_ooms),
            words::or_nothing(took),
        ]
    };
    Grid::new("llr", heads, rows.iter().take(MOST).map(row))
}

fn outcome(row: &MatrixRow) -> String {
    let figures = &row.figures;
    let failure = figures.failure.as_deref().unwrap_or_default();
    let failure = words::shortened(failure, super::LONGEST_ERROR);
    match figures.exit_code {
        Some(0) if figures.num_ooms > Some(0) => "success after OOM".to_owned(),
        Some(0) => "success".to_owned(),
        Some(code) if failure.is_empty() => format!("exit code {code}"),
        Some(code) => format!("{failure}, exit code {code}"),
        None => format!("no result: {failure}"),
    }
}

fn notes(report: &MatrixReport) -> Vec<String> {
    let name = report.names();
    let grown = |grown: &GrownPeak| {
        let peak = match grown.peak {
            PeakKind::Allocated => "allocated",
            PeakKind::Reserved => "reserved",
        };
        format!(
            "{}: peak {peak} is {}",
            name(&grown.cell),
            change("", grown.before, grown.after)
        )
    };
    let mut notes: Vec<String> = report.grown.iter().take(MOST).map(grown).collect();
    let hidden = report.grown.len().saturating_sub(MOST);
    notes.extend((hidden > 0).then(|| format!("and {} that grew", words::count(hidden, "peak"))));
    let lacking = report.not_compared.filter(|lacking| *lacking > 0);
    notes.extend(lacking.map(|lacking| {
        format!(
            "The earlier rows have no peak, or another exit code, for {}.",
            words::count(lacking, "run")
        )
    }));
    let doubtful = report
        .rows
        .iter()
        .filter(|row| !row.figures.doubts.is_empty());
    let mut doubts = Vec::new();
    let mut runs = 0;
    for row in doubtful {
        Doubt::add(&mut doubts, &row.figures.doubts);
        runs += 1;
    }
    notes.extend((runs > 0).then(|| {
        let of = words::count(report.rows.len(), "run");
        format!("The figures of {runs} of {of} are uncertain; each row has its reasons.")
    }));
    notes.extend(notes_on_doubts(&doubts));
    notes
}
