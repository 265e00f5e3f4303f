//! Selects and formats the rows of the step table, for Markdown and the terminal.

use std::collections::BTreeSet;

use harness_allocator::{device::Clock, units::Bytes};

use super::words::{self, Grid};
use harness_record::{Accounts, Outcome, RunRecord, StepRecord};

/// Longest run, in steps, that is shown whole.
const WHOLE: usize = 200;
/// Steps shown at each end of a longer run.
const EDGE: usize = 30;
/// Steps with events shown between the ends of a longer run.
const NOTABLE: usize = 100;

pub(super) struct Selection<'a> {
    pub(super) run: &'a RunRecord,
    shown: Vec<usize>,
}

impl<'a> Selection<'a> {
    pub(super) fn last(run: &'a RunRecord, count: usize) -> Self {
        Self {
            run,
            shown: (run.steps.len().saturating_sub(count)..run.steps.len()).collect(),
        }
    }

    /// Selects all steps of a short run.
    pub(super) fn notable(run: &'a RunRecord) -> Self {
        let steps = &run.steps;
        if steps.len() <= WHOLE {
            return Self::last(run, WHOLE);
        }
        // An unusual outcome, a note, a table, a retry or an OOM.
        let has_event = |&index: &usize| {
            let step = &steps[index];
            let earlier = steps[..index]
                .iter()
                .rev()
                .find(|earlier| earlier.process == step.process);
            let [retries, ooms] = earlier.map_or([0; 2], |earlier| {
                [earlier.accounts.retries, earlier.accounts.ooms]
            });
            let is_usual = matches!(step.outcome, Outcome::Done | Outcome::Fits { retries: 0 });
            let is_plain = is_usual && step.notes.is_empty() && step.tables.is_empty();
            !is_plain || step.accounts.retries > retries || step.accounts.ooms > ooms
        };
        let notable = (EDGE..steps.len() - EDGE).filter(has_event).take(NOTABLE);
        let shown: BTreeSet<usize> = (0..EDGE)
            .chain(notable)
            .chain(steps.len() - EDGE..steps.len())
            .collect();
        Self {
            run,
            shown: shown.into_iter().collect(),
        }
    }

    pub(super) fn steps(&self) -> impl Iterator<Item = &'a StepRecord> {
        self.shown.iter().map(|&index| &self.run.steps[index])
    }

    pub(super) fn left_out(&self) -> usize {
        self.run.steps.len() - self.shown.len()
    }

    pub(super) fn grid(&self) -> Grid {
        let names = ["step", "line", "what", "outcome"];
        let sizes = [
            "allocated",
            "reserved",
            "active",
            "device used − overhead",
            "external memory",
            "peak allocated",
            "peak reserved",
        ];
        let time = if self.run.device.clock == Clock::Measured {
            "time"
        } else {
            "model time"
        };
        let mut grid = Grid::new(
            "rrllr",
            names
                .into_iter()
                .chain(sizes)
                .chain(["allocator retries", time]),
            [],
        );
        let mut next = 0;
        for &index in &self.shown {
            push_gap(&mut grid, index - next, "left out");
            let before = if index > 0 {
                self.run.steps[index - 1].number
            } else {
                0
            };
            push_gap(
                &mut grid,
                self.run.steps[index].number.saturating_sub(before + 1) as usize,
                "not recorded",
            );
            grid.rows.push(cells(&self.run.steps[index]));
            next = index + 1;
        }
        let has_external_memory = self
            .steps()
            .any(|step| step.accounts.device.external_memory > Bytes::ZERO);
        grid.with_columns(|head| has_external_memory || head != "external memory")
    }
}

fn push_gap(grid: &mut Grid, steps: usize, what: &str) {
    if steps > 0 {
        let mut row = vec![String::new(); grid.columns.len()];
        (row[0], row[2]) = (
            "…".to_owned(),
            format!("{} {what}", words::count(steps, "step")),
        );
        grid.rows.push(row);
    }
}

fn cells(step: &StepRecord) -> Vec<String> {
    let Accounts {
        allocated,
        reserved,
        active,
        peak_allocated,
        peak_reserved,
        retries,
        device,
        ..
    } = step.accounts;
    let names = [
        step.number.to_string(),
        step.line.to_string(),
        what(step),
        words::outcome(&step.outcome),
    ];
    let sizes = [
        allocated,
        reserved,
        active,
        device.used_without_contexts(),
        device.external_memory,
    ]
    .map(words::size);
    let figures = match &step.program {
        Some(program) => {
            let [reserved, allocated, _, retries] = words::figures(program);
            [allocated, reserved, retries]
        }
        None => [
            words::size(peak_allocated),
            words::size(peak_reserved),
            retries.to_string(),
        ],
    };
    names
        .into_iter()
        .chain(sizes)
        .chain(figures)
        .chain([words::or_nothing(step.duration)])
        .collect()
}

fn what(step: &StepRecord) -> String {
    let text = if step.text.is_empty() {
        step.kind.clone()
    } else {
        format!("{}: {}", step.kind, step.text)
    };
    let size = step
        .size
        .map(|size| size.to_string())
        .filter(|size| !text.contains(size));
    let size = size.map_or_else(String::new, |size| format!(" (= {size})"));
    let iteration = step
        .iteration
        .as_ref()
        .map_or_else(String::new, |iteration| format!(", {iteration}"));
    format!("{text}{size}{iteration}")
}

#[cfg(test)]
mod tests;
