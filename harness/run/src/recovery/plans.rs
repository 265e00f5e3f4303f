//! Policies that change only the plan of the next attempt.

use harness_allocator::device::HostMemory;
use harness_scenario::{Plan, Precision, SpilledPart};

/// Keeps fewer activations for the backward pass and recomputes the others: doubles the number of layers per checkpoint,
/// from 2 up to `most`; `None`: `most` is reached.
pub(super) fn checkpoint_more(plan: &Plan, most: u64) -> Option<Plan> {
    let every = plan.checkpoint_every.map_or(2, |every| every.saturating_mul(2)).min(most);
    plan.checkpoint_every.is_none_or(|now| every > now).then(|| Plan { checkpoint_every: Some(every), ..plan.clone() })
}

/// Switches activations to 16-bit numbers; `None`: the precision is already mixed.
pub(super) fn half_precision(plan: &Plan) -> Option<Plan> {
    match plan.precision {
        Precision::Fp32 => Some(Plan { precision: Precision::Mixed, ..plan.clone() }),
        Precision::Mixed => None,
    }
}

/// Keeps a part of a training in host memory of this kind; `None`: it is already there, or in memory that is at least as
/// plentiful.
pub(super) fn spill_to_host(plan: &Plan, part: SpilledPart, memory: &HostMemory) -> Option<Plan> {
    let next = Plan { spilled: plan.spilled.clone().with(part, memory.clone()), ..plan.clone() };
    let now = plan.spilled.part(part).map(HostMemory::rank);
    now.is_none_or(|now| memory.rank() > now).then_some(next)
}

/// Splits the batch further, into micro-batches of at least `floor` samples; `None`: they cannot be smaller.
pub(super) fn split_and_accumulate(plan: &Plan, floor: u64) -> Option<Plan> {
    let floor = floor.max(1);
    let most = plan.batch.div_ceil(floor);
    let micro_batches = plan.micro_batches.saturating_mul(2).min(most);
    let next = Plan { micro_batches, ..plan.clone() };
    (next.samples_at_once() < plan.samples_at_once() && next.samples_at_once() >= floor).then_some(next)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn checkpoints_become_fewer_until_the_limit_is_reached(most in 2_u64..10_000) {
            let mut plan = Plan::of_batch(8);
            for _ in 0..16 {
                let Some(next) = checkpoint_more(&plan, most) else {
                    prop_assert_eq!(plan.checkpoint_every, Some(most));
                    return Ok(());
                };
                prop_assert!(next.asks_for_less_than(&plan) && next.batch == 8);
                plan = next;
            }
            prop_assert!(false, "it does not end");
        }

        #[test]
        fn parts_become_strictly_smaller_and_the_batch_stays(batch in 1_u64..1_000_000, floor in 1_u64..1_000) {
            let mut plan = Plan::of_batch(batch);
            for _ in 0..25 {
                let Some(next) = split_and_accumulate(&plan, floor) else {
                    prop_assert!(plan.samples_at_once() < 2 * floor + 2, "{plan:?} could be split down to {floor}");
                    return Ok(());
                };
                prop_assert!(next.asks_for_less_than(&plan) && next.batch == batch && next.samples_at_once() >= floor);
                plan = next;
            }
            prop_assert!(false, "it does not end");
        }
    }

    #[test]
    fn each_part_moves_only_to_more_plentiful_memory() {
        let file = HostMemory::MappedFile { folder: None };
        let kinds = [HostMemory::Pinned, HostMemory::Pageable, file];
        for part in [SpilledPart::Activations, SpilledPart::OptimizerState] {
            for (from, first) in kinds.iter().enumerate() {
                let spilled = spill_to_host(&Plan::of_batch(8), part, first).expect("it was on the device");
                assert!(spilled.asks_for_less_than(&Plan::of_batch(8)));
                for (to, second) in kinds.iter().enumerate() {
                    let again = spill_to_host(&spilled, part, second);
                    assert_eq!(again.is_some(), to > from);
                    assert!(again.is_none_or(|again| again.asks_for_less_than(&spilled) && !spilled.asks_for_less_than(&again)));
                }
            }
        }
    }
}
