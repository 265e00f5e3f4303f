//! Keeps the smallest scenario so far and tests whether smaller ones fail the same way:
//! [`Search::accept`].

use std::{collections::BTreeSet, path::Path};

use harness_allocator::units::Bytes;
use harness_record::RunRecord;
use harness_scenario::Scenario;

use super::document::{Document, Node, value};
use super::engine::Engine;
use super::failure::{Failure, Wanted};
use crate::{ReductionProgress, delta::Flow};

const FEW: usize = 12;

pub(super) struct Search<'a> {
    engine: &'a dyn Engine,
    pub(super) path: &'a Path,
    wanted: Wanted,
    pub(super) best: Document,
    /// The number of steps that the best run executed. Smaller candidates may not exceed it, so the
    /// search takes time proportional to the first run.
    pub(super) most_steps: u32,
    pub(super) steps_before: usize,
    /// The requested device memory, if it is an amount.
    pub(super) memory_before: Option<Bytes>,
    /// Texts that were already tried, because passes repeat.
    tried: BTreeSet<String>,
    pub(super) runs: u64,
    watch: &'a mut dyn FnMut(&ReductionProgress) -> Flow,
}

impl<'a> Search<'a> {
    pub(super) fn new(
        engine: &'a dyn Engine,
        path: &'a Path,
        wanted: Wanted,
        best: Document,
        most_steps: u32,
        watch: &'a mut dyn FnMut(&ReductionProgress) -> Flow,
    ) -> Self {
        let (steps_before, memory_before) = (best.steps().len(), memory(&best));
        Self {
            engine,
            path,
            wanted,
            best,
            most_steps,
            steps_before,
            memory_before,
            tried: BTreeSet::new(),
            runs: 0,
            watch,
        }
    }

    /// Replaces the best scenario if the candidate is valid and fails the same way. Returns whether
    /// it did.
    pub(super) fn accept(&mut self, candidate: Document) -> Flow<bool> {
        match candidate.checked(self.path) {
            (written, Ok(scenario)) => self.accept_checked(candidate, written.text, &scenario),
            (_, Err(_)) => Flow::Continue(false),
        }
    }

    /// Tries to remove steps and those that depend on them, such as a free. The language's checker
    /// reports these one by one.
    pub(super) fn accept_without(&mut self, gone: &BTreeSet<usize>) -> Flow<bool> {
        let mut candidate = self.best.without(gone);
        loop {
            // With many dependent steps, the search for them takes longer than a run.
            let memory = memory(&self.best).unwrap_or_default();
            (self.watch)(&ReductionProgress {
                operations: candidate.steps().len(),
                memory,
                runs: self.runs,
            })?;
            let step = match candidate.checked(self.path) {
                (written, Ok(scenario)) => {
                    return self.accept_checked(candidate, written.text, &scenario);
                }
                (written, Err(error)) => error.position().and_then(|at| written.step_at(at.line)),
            };
            let Some(step) = step else {
                return Flow::Continue(false);
            };
            candidate = candidate.without(&BTreeSet::from([step]));
        }
    }

    fn accept_checked(
        &mut self,
        candidate: Document,
        text: String,
        scenario: &Scenario,
    ) -> Flow<bool> {
        if candidate == self.best || !self.tried.insert(text) {
            return Flow::Continue(false);
        }
        let taken = self.fails_alike(scenario, candidate.steps().len())?;
        if let Some(steps) = taken {
            (self.best, self.most_steps) = (candidate, steps);
        }
        Flow::Continue(taken.is_some())
    }

    /// The number of steps that a run executes until it fails the same way.
    fn fails_alike(&mut self, scenario: &Scenario, steps: usize) -> Flow<Option<u32>> {
        let progress = ReductionProgress {
            operations: steps,
            memory: scenario.needs.memory,
            runs: self.runs,
        };
        (self.watch)(&progress)?;
        self.runs += 1;
        let (most, watch) = (self.most_steps, &mut *self.watch);
        let mut is_over = false;
        let records = self.engine.run(scenario, &mut |step| {
            is_over |= watch(&progress).is_break();
            if is_over || step > most {
                Flow::Break(())
            } else {
                Flow::Continue(())
            }
        });
        if is_over {
            return Flow::Break(());
        }
        let records = records.unwrap_or_default();
        let fails = |record: &&RunRecord| self.wanted.in_run(record).is_some();
        Flow::Continue(
            records
                .iter()
                .find(fails)
                .map(steps_of)
                .filter(|&steps| steps <= most),
        )
    }

    /// The maximum number of steps after unrolling a loop: fewer than now. For an OOM, a number
    /// that is easy to read also counts, because the last step can then declare the failure.
    pub(super) fn most_written_out(&self) -> usize {
        let fewer = self.best.steps().len() - 1;
        if matches!(self.wanted.failure, Failure::Oom { .. }) {
            fewer.max(self.steps_before.min(FEW))
        } else {
            fewer
        }
    }
}

pub(super) fn steps_of(record: &RunRecord) -> u32 {
    record.steps.last().map_or(0, |step| step.number)
}

/// The device memory that a scenario requests, if it is an amount and not a formula.
pub(super) fn memory(document: &Document) -> Option<Bytes> {
    let Some(Node::Map(needs)) = document.value("needs") else {
        return None;
    };
    let Some(Node::Scalar(text)) = value(needs, "memory") else {
        return None;
    };
    Bytes::parse(text).ok()
}
