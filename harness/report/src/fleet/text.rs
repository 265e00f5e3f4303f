//! The table for a terminal, whose parts the page repeats.

use harness_base::words::count;
use harness_explain::categories;

use super::{FleetCause, FleetChange, FleetProblem, FleetSummary};
use crate::terminal::{Style, Text};
use crate::words::{Grid, NOTHING};

pub fn render(summary: &FleetSummary, style: Style, width: Option<usize>) -> String {
    let mut out = Text::new(style, width);
    out.important(&headline(summary), summary.out_of_memory > 0);
    for (title, grid) in tables(summary) {
        out.wrapped(&format!("\n{title}:"), 2);
        out.table(&grid, 4, None);
    }
    out.text
}

pub(super) fn headline(summary: &FleetSummary) -> String {
    let FleetSummary {
        snapshots,
        jobs,
        out_of_memory,
        ended,
        unreadable,
        ..
    } = *summary;
    let unreadable = if unreadable > 0 {
        format!(", {unreadable} cannot be read")
    } else {
        String::new()
    };
    let (snapshots, jobs) = (count(snapshots, "snapshot"), count(jobs, "job"));
    format!(
        "{snapshots} of {jobs}: {out_of_memory} end with an out-of-memory error, {ended} do \
         not{unreadable}."
    )
}

/// The tables that have rows, with their titles.
pub(super) fn tables(summary: &FleetSummary) -> Vec<(String, Grid)> {
    let heads = [
        "jobs",
        "ranks",
        "bytes",
        "cause",
        "line that holds most, in ranks",
        "most memory is",
    ];
    let causes = Grid::new("rrrl", heads, summary.causes.iter().map(cause_cells));
    let change = |change: &FleetChange| {
        let others = if change.same.is_empty() {
            String::new()
        } else {
            format!(", or {}", count(change.same.len(), "other change"))
        };
        vec![
            format!("{} of {}", change.prevents, summary.replayed),
            change.jobs.to_string(),
            format!("{}{others}", change.change),
        ]
    };
    let changes = Grid::new(
        "rrl",
        ["prevents", "jobs", "change"],
        summary.changes.iter().map(change),
    );
    let problem = |problem: &FleetProblem| {
        vec![
            problem.snapshots.to_string(),
            problem.problem.clone(),
            problem.example.clone(),
        ]
    };
    let problems = |of: &[FleetProblem]| {
        Grid::new(
            "rl",
            ["snapshots", "why", "for example"],
            of.iter().map(problem),
        )
    };
    let of = summary.out_of_memory;
    let tables = [
        ("Causes of out-of-memory errors".to_owned(), causes),
        (
            format!(
                "Changes that prevent errors, tested by replays of the {} of {of} that a replay \
                 reproduces",
                summary.replayed
            ),
            changes,
        ),
        (
            format!("Not replayed: {} of {of}", of - summary.replayed),
            problems(&summary.not_faithful),
        ),
        (
            "Files that cannot be read".to_owned(),
            problems(&summary.unreadable_because),
        ),
    ];
    tables
        .into_iter()
        .filter(|(_, grid)| !grid.rows.is_empty())
        .collect()
}

fn cause_cells(cause: &FleetCause) -> Vec<String> {
    let FleetCause {
        cause,
        jobs,
        ranks,
        bytes,
        top_site,
        top_site_ranks,
        category,
    } = cause;
    let top = top_site.as_ref().map_or_else(
        || NOTHING.to_owned(),
        |site| format!("{site} ({top_site_ranks} of {ranks})"),
    );
    let category = category.as_deref().map_or(NOTHING, categories::about);
    vec![
        jobs.to_string(),
        ranks.to_string(),
        bytes.to_string(),
        about(cause).to_owned(),
        top,
        category.to_owned(),
    ]
}

pub(super) fn about(cause: &str) -> &str {
    match cause {
        "too_large" => "the program is too large; missing bytes",
        "nearly_full" => "nearly all memory is in use; cached bytes",
        "memory_fraction" => "refused by the memory fraction; its limit",
        "unproven" => "the device had enough; probably a memory fraction of the program",
        "rounding" => "rounded up; the rounded request",
        "pending_free" => "freed, but other streams still use it",
        "other_stream" => "cached for another stream",
        "other_pool" => "cached for blocks of the other size",
        "private_pool" => "cached in a private pool",
        "inactive_split" => "fragmented: free, but pinned by live blocks",
        "whole_segments" => "free whole segments",
        other => other,
    }
}
