//! `halve_batch`, `shrink_batch` and `bisect_batch`: the failed iteration is kind again with
//! another batch.

use harness_scenario::{AttemptPlan, BatchRule};

/// The next batch after a failed one, never below the floor; `None`: there is no smaller batch.
pub(super) fn next(
    rule: BatchRule,
    plan: &AttemptPlan,
    floor: u64,
    known: &Known,
) -> Option<AttemptPlan> {
    let wanted = match rule {
        BatchRule::Halve => plan.batch / 2,
        // Exactly nine tenths of the batch, rounded down, for every batch.
        BatchRule::Shrink => plan.batch - plan.batch.div_ceil(10),
        BatchRule::Bisect => known.works + (plan.batch - known.works.min(plan.batch)) / 2,
    };
    let batch = wanted.max(floor).max(1);
    (batch < plan.batch).then(|| with_batch(plan, batch))
}

/// The plan with another batch. Keeps the number of micro-batches unless some would be empty.
pub(super) fn with_batch(plan: &AttemptPlan, batch: u64) -> AttemptPlan {
    AttemptPlan {
        batch,
        micro_batches: plan.micro_batches.min(batch),
        ..plan.clone()
    }
}

/// What earlier iterations revealed about the largest batch that fits.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Known {
    /// The largest batch that succeeded, or 0.
    works: u64,
    fails: Option<u64>,
}

impl Known {
    /// Notes that a batch failed. Larger successes no longer count.
    pub(super) fn failed(&mut self, batch: u64) {
        self.fails = Some(self.fails.map_or(batch, |fails| fails.min(batch)));
        if self.works >= batch {
            self.works = 0;
        }
    }

    /// Notes that a batch succeeded, and returns the plan of the next iteration: half way to the
    /// smallest failed batch.
    pub(super) fn worked(&mut self, plan: &AttemptPlan) -> AttemptPlan {
        self.works = self.works.max(plan.batch);
        match self.fails {
            Some(fails) if fails > plan.batch + 1 => AttemptPlan {
                batch: plan.batch + (fails - plan.batch) / 2,
                ..plan.clone()
            },
            _ => plan.clone(),
        }
    }
}

#[cfg(test)]
mod tests;
