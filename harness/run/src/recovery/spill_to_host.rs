//! `spill_to_host`: keeps a part of a training in host memory.

use harness_allocator::device::HostMemory;
use harness_scenario::{Plan, SpilledPart};

/// Moves the part to `memory`; `None`: it is already there, or in memory that is at least as plentiful.
pub(super) fn next(plan: &Plan, part: SpilledPart, memory: &HostMemory) -> Option<Plan> {
    let next = Plan { spilled: plan.spilled.clone().with(part, memory.clone()), ..plan.clone() };
    let now = plan.spilled.part(part).map(HostMemory::rank);
    now.is_none_or(|now| memory.rank() > now).then_some(next)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_part_moves_only_to_more_plentiful_memory() {
        let file = HostMemory::MappedFile { folder: None };
        let kinds = [HostMemory::Pinned, HostMemory::Pageable, file];
        for part in [SpilledPart::Activations, SpilledPart::OptimizerState] {
            for (from, first) in kinds.iter().enumerate() {
                let spilled = next(&Plan::of_batch(8), part, first).expect("it was on the device");
                assert!(spilled.asks_for_less_than(&Plan::of_batch(8)));
                for (to, second) in kinds.iter().enumerate() {
                    let again = next(&spilled, part, second);
                    assert_eq!(again.is_some(), to > from);
                    assert!(again.is_none_or(|again| again.asks_for_less_than(&spilled) && !spilled.asks_for_less_than(&again)));
                }
            }
        }
    }
}
