//! Policies that change only the plan of the next attempt.

use harness_allocator::device::HostMemory;
use harness_scenario::{AttemptPlan, Precision, SpilledPart};

/// Keeps fewer activations for the backward pass and recomputes the others: doubles the number of
/// layers per checkpoint, from 2 up to `most`; `None`: `most` is reached.
pub(super) fn checkpoint_more(plan: &AttemptPlan, most: u64) -> Option<AttemptPlan> {
    let every = plan
        .checkpoint_every
        .map_or(2, |every| every.saturating_mul(2))
        .min(most);
    plan.checkpoint_every
        .is_none_or(|now| every > now)
        .then(|| AttemptPlan {
            checkpoint_every: Some(every),
            ..plan.clone()
        })
}

/// Switches activations to 16-bit numbers; `None`: the precision is already mixed.
pub(super) fn half_precision(plan: &AttemptPlan) -> Option<AttemptPlan> {
    match plan.precision {
        Precision::Fp32 => Some(AttemptPlan {
            precision: Precision::Mixed,
            ..plan.clone()
        }),
        Precision::Mixed => None,
    }
}

/// Keeps a part of a training in host memory of this kind; `None`: it is already there, or in
/// memory that is at least as plentiful.
pub(super) fn spill_to_host(
    plan: &AttemptPlan,
    part: SpilledPart,
    memory: &HostMemory,
) -> Option<AttemptPlan> {
    let mut next = plan.clone();
    let before = next.spilled.insert(part, memory.clone());
    before
        .is_none_or(|before| memory.rank() > before.rank())
        .then_some(next)
}

/// Splits the batch further, into micro-batches of at least `floor` samples; `None`: they cannot be
/// smaller.
pub(super) fn split_and_accumulate(plan: &AttemptPlan, floor: u64) -> Option<AttemptPlan> {
    let floor = floor.max(1);
    let most = plan.batch.div_ceil(floor);
    let micro_batches = plan.parts().saturating_mul(2).min(most);
    let next = AttemptPlan {
        micro_batches,
        micro_batch: None,
        ..plan.clone()
    };
    (next.samples_at_once() < plan.samples_at_once() && next.samples_at_once() >= floor)
        .then_some(next)
}

/// Halves the samples of a micro-batch, rounded down; `None`: it has one sample.
pub(super) fn halve_micro_batch(plan: &AttemptPlan) -> Option<AttemptPlan> {
    let size = plan.samples_at_once() / 2;
    (size > 0).then(|| AttemptPlan {
        micro_batch: Some(size),
        ..plan.clone()
    })
}

#[cfg(test)]
mod tests;
