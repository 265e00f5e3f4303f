//! The search: the smallest scenario so far, and whether a smaller one still fails the same way. See [`Search::accept`].

use std::collections::BTreeSet;
use std::path::Path;

use harness_allocator::units::Bytes;
use harness_record::RunRecord;
use harness_scenario::Scenario;

use super::document::{Document, Node, value};
use super::engine::Engine;
use super::failure::{Failure, Wanted};
use super::writer::Written;
use crate::Progress;
use crate::delta::Flow;

/// So many steps are few.
const FEW: usize = 12;

pub(super) struct Search<'a> {
    engine: &'a dyn Engine,
    path: &'a Path,
    wanted: Wanted,
    pub(super) best: Document,
    /// How many steps the run of the best one took. None smaller may take more, so that a search ends in a time in proportion to that of the
    /// first run.
    pub(super) most_steps: u32,
    /// How many steps the file had.
    pub(super) steps_before: usize,
    /// The memory that it asked for, where that is an amount.
    pub(super) memory_before: Option<Bytes>,
    /// Texts that were tried. The passes come by again.
    tried: BTreeSet<String>,
    pub(super) runs: u64,
    watch: &'a mut dyn FnMut(&Progress) -> Flow,
}

impl<'a> Search<'a> {
    pub(super) fn new(
        engine: &'a dyn Engine,
        path: &'a Path,
        wanted: Wanted,
        best: Document,
        most_steps: u32,
        watch: &'a mut dyn FnMut(&Progress) -> Flow,
    ) -> Self {
        let (steps_before, memory_before) = (best.steps().len(), memory(&best));
        Self { engine, path, wanted, best, most_steps, steps_before, memory_before, tried: BTreeSet::new(), runs: 0, watch }
    }

    /// The best one as the check of the language sees it, with its text.
    pub(super) fn checked(&self) -> Option<(Scenario, Written)> {
        let written = Written::of(&self.best);
        Scenario::parse(&written.text, self.path).ok().map(|scenario| (scenario, written))
    }

    /// Takes the candidate for the best one where it is a scenario and fails as it should. Whether it does.
    pub(super) fn accept(&mut self, candidate: Document) -> Flow<bool> {
        let text = Written::of(&candidate).text;
        match Scenario::parse(&text, self.path) {
            Ok(scenario) => self.accept_checked(candidate, text, &scenario),
            Err(_) => Flow::Continue(false),
        }
    }

    /// The same without some steps, and without those that cannot stand without them: a free of what is not allocated any more, say. Which these
    /// are, the check of the language tells one after the other.
    pub(super) fn accept_without(&mut self, gone: &BTreeSet<usize>) -> Flow<bool> {
        let mut candidate = self.best.without(gone);
        loop {
            // Where much depends on what is gone, looking for it takes longer than a run.
            let memory = self.memory().unwrap_or_default();
            (self.watch)(&Progress { operations: candidate.steps().len(), memory, runs: self.runs })?;
            let written = Written::of(&candidate);
            let error = match Scenario::parse(&written.text, self.path) {
                Ok(scenario) => return self.accept_checked(candidate, written.text, &scenario),
                Err(error) => error,
            };
            let Some(step) = error.position().and_then(|at| written.step_at(at.line)) else { return Flow::Continue(false) };
            candidate = candidate.without(&BTreeSet::from([step]));
        }
    }

    fn accept_checked(&mut self, candidate: Document, text: String, scenario: &Scenario) -> Flow<bool> {
        if candidate == self.best || !self.tried.insert(text) {
            return Flow::Continue(false);
        }
        let taken = self.fails_alike(scenario, candidate.steps().len())?;
        if let Some(steps) = taken {
            (self.best, self.most_steps) = (candidate, steps);
        }
        Flow::Continue(taken.is_some())
    }

    /// How many steps a run of the scenario takes until it fails as it should.
    fn fails_alike(&mut self, scenario: &Scenario, steps: usize) -> Flow<Option<u32>> {
        let progress = Progress { operations: steps, memory: scenario.needs.memory, runs: self.runs };
        (self.watch)(&progress)?;
        self.runs += 1;
        let (most, watch) = (self.most_steps, &mut *self.watch);
        let mut is_over = false;
        let records = self.engine.run(scenario, &mut |step| {
            is_over |= watch(&progress).is_break();
            if is_over || step > most { Flow::Break(()) } else { Flow::Continue(()) }
        });
        if is_over {
            return Flow::Break(());
        }
        let records = records.unwrap_or_default();
        let fails = |record: &&RunRecord| self.wanted.in_run(record).is_some();
        Flow::Continue(records.iter().find(fails).map(steps_of).filter(|&steps| steps <= most))
    }

    /// How many steps the best one may have at most, if the steps of a loop are written out: fewer than now, or where a request is refused few
    /// enough to be read, for then the last one can say so.
    pub(super) fn most_written_out(&self) -> usize {
        let fewer = self.best.steps().len() - 1;
        if matches!(self.wanted.failure, Failure::Oom { .. }) { fewer.max(self.steps_before.min(FEW)) } else { fewer }
    }

    /// The device's memory that the best one asks for, where it is an amount and no formula.
    pub(super) fn memory(&self) -> Option<Bytes> {
        memory(&self.best)
    }
}

/// How many steps a run took.
pub(super) fn steps_of(record: &RunRecord) -> u32 {
    record.steps.last().map_or(0, |step| step.number)
}

/// The device's memory that a scenario asks for, where it is an amount and no formula.
pub(super) fn memory(document: &Document) -> Option<Bytes> {
    match document.value("needs") {
        Some(Node::Map(needs)) => match value(needs, "memory") {
            Some(Node::Scalar(text)) => Bytes::parse(text).ok(),
            _ => None,
        },
        _ => None,
    }
}
