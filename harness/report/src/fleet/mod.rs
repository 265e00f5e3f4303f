//! Many snapshots as one table: [`FleetSummary`].

pub mod html;
#[cfg(feature = "parquet")]
pub mod parquet;
mod text;

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};

use harness_allocator::units::Bytes;
use harness_explain::fleet::{FleetOutcome, Row, SETTINGS};
use indexmap::IndexMap;
use serde::Serialize;

pub use text::render;

/// Settings, and changes of the program, that are listed at most.
const LISTED: usize = 6;

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct FleetSummary {
    pub snapshots: usize,
    pub jobs: usize,
    pub out_of_memory: usize,
    pub ended: usize,
    pub unreadable: usize,
    /// Most jobs first.
    pub causes: Vec<FleetCause>,
    /// Out-of-memory errors that a replay reproduces.
    pub replayed: usize,
    /// Settings, then changes of the program. What prevents most errors first.
    pub changes: Vec<FleetChange>,
    pub not_faithful: Vec<FleetProblem>,
    pub unreadable_because: Vec<FleetProblem>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct FleetCause {
    pub cause: String,
    pub jobs: usize,
    pub ranks: usize,
    pub bytes: Bytes,
    /// The line that holds most of these bytes in most ranks, and the number of these ranks.
    pub top_site: Option<String>,
    pub top_site_ranks: usize,
    /// The largest category of allocated memory in most ranks.
    pub category: Option<String>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct FleetChange {
    pub change: String,
    /// Changes that prevent the same errors.
    pub same: Vec<String>,
    pub prevents: usize,
    pub jobs: usize,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct FleetProblem {
    pub problem: String,
    pub snapshots: usize,
    pub example: String,
}

impl FleetSummary {
    pub fn of(rows: &[Row]) -> Self {
        let with = |outcome| {
            rows.iter()
                .filter(move |row| row.analysis.outcome == outcome)
        };
        let failed: Vec<&Row> = with(FleetOutcome::OutOfMemory).collect();
        let mut by_cause: BTreeMap<&str, Vec<&Row>> = BTreeMap::new();
        failed.iter().for_each(|row| {
            by_cause
                .entry(row.analysis.cause.as_deref().unwrap_or_default())
                .or_default()
                .push(row)
        });
        let mut causes: Vec<FleetCause> = by_cause
            .into_iter()
            .map(|(cause, rows)| FleetCause::of(cause, &rows))
            .collect();
        causes.sort_by_key(|cause| Reverse((cause.jobs, cause.ranks, cause.bytes)));
        let faithful: Vec<&Row> = failed
            .iter()
            .copied()
            .filter(|row| row.analysis.faithful == Some(true))
            .collect();
        Self {
            snapshots: rows.len(),
            jobs: jobs(rows),
            out_of_memory: failed.len(),
            ended: with(FleetOutcome::Ended).count(),
            unreadable: with(FleetOutcome::Unreadable).count(),
            causes,
            replayed: faithful.len(),
            changes: changes(&faithful),
            not_faithful: problems(
                failed
                    .iter()
                    .copied()
                    .filter(|row| row.analysis.faithful != Some(true)),
                "no events were recorded",
            ),
            unreadable_because: problems(with(FleetOutcome::Unreadable), ""),
        }
    }
}

impl FleetCause {
    fn of(cause: &str, rows: &[&Row]) -> Self {
        let top = most(
            rows.iter()
                .filter_map(|row| row.analysis.top_site.as_deref()),
        );
        Self {
            cause: cause.to_owned(),
            jobs: jobs(rows.iter().copied()),
            ranks: rows.len(),
            bytes: Bytes(
                rows.iter()
                    .fold(0, |sum, row| sum.saturating_add(row.analysis.cause_bytes)),
            ),
            top_site: top.map(|(site, _)| site.to_owned()),
            top_site_ranks: top.map_or(0, |(_, ranks)| ranks),
            category: most(
                rows.iter()
                    .filter_map(|row| row.analysis.category.as_deref()),
            )
            .map(|(category, _)| category.to_owned()),
        }
    }
}

fn jobs<'a>(rows: impl IntoIterator<Item = &'a Row>) -> usize {
    rows.into_iter()
        .map(|row| row.job.as_str())
        .collect::<BTreeSet<_>>()
        .len()
}

/// The most frequent text and its number. The first one in alphabetical order if several are.
fn most<'a>(texts: impl Iterator<Item = &'a str>) -> Option<(&'a str, usize)> {
    let mut counts: BTreeMap<&str, usize> = BTreeMap::new();
    texts.for_each(|text| *counts.entry(text).or_default() += 1);
    counts.into_iter().rev().max_by_key(|&(_, count)| count)
}

fn changes(rows: &[&Row]) -> Vec<FleetChange> {
    // In the order of the rows, which have expandable segments first.
    let mut by_change: IndexMap<&str, BTreeSet<usize>> = IndexMap::new();
    for (index, row) in rows.iter().enumerate() {
        row.analysis.cures.iter().for_each(|cure| {
            by_change.entry(cure).or_default().insert(index);
        });
    }
    let mut by_rows: BTreeMap<BTreeSet<usize>, Vec<&str>> = BTreeMap::new();
    by_change
        .into_iter()
        .for_each(|(change, rows)| by_rows.entry(rows).or_default().push(change));
    let mut changes: Vec<FleetChange> = by_rows
        .into_iter()
        .map(|(cured, mut same)| {
            // The simplest setting first.
            same.sort_by_key(|change| change.matches(':').count());
            let mut same = same.into_iter().map(str::to_owned);
            let change = same.next().unwrap_or_default();
            FleetChange {
                change,
                same: same.collect(),
                prevents: cured.len(),
                jobs: jobs(cured.iter().map(|&index| rows[index])),
            }
        })
        .collect();
    changes.sort_by(|a, b| {
        b.prevents
            .cmp(&a.prevents)
            .then_with(|| a.change.cmp(&b.change))
    });
    let (mut settings, mut others): (Vec<FleetChange>, Vec<FleetChange>) = changes
        .into_iter()
        .partition(|change| change.change.starts_with(SETTINGS));
    settings.truncate(LISTED);
    others.truncate(LISTED);
    settings.into_iter().chain(others).collect()
}

/// Groups problems that differ only in words with numbers.
fn problems<'a>(rows: impl Iterator<Item = &'a Row>, unknown: &str) -> Vec<FleetProblem> {
    let mut groups: BTreeMap<String, FleetProblem> = BTreeMap::new();
    for row in rows {
        let problem = row.analysis.problem.as_deref().unwrap_or(unknown);
        let without = |word: &str| {
            if word.contains(|c: char| c.is_ascii_digit()) {
                "…".to_owned()
            } else {
                word.to_owned()
            }
        };
        let key = problem
            .split_whitespace()
            .map(without)
            .collect::<Vec<_>>()
            .join(" ");
        let group = groups.entry(key).or_insert_with(|| FleetProblem {
            problem: problem.to_owned(),
            snapshots: 0,
            example: row.file.clone(),
        });
        group.snapshots += 1;
    }
    let mut problems: Vec<FleetProblem> = groups.into_values().collect();
    problems.sort_by(|a, b| {
        b.snapshots
            .cmp(&a.snapshots)
            .then_with(|| a.problem.cmp(&b.problem))
    });
    problems
}

#[cfg(test)]
mod tests;
