//! `spill_to_host`: something of a training is kept in host memory.

use harness_allocator::device::HostMemory;
use harness_scenario::{Plan, SpilledPart};

/// The part in that memory; `None`: it is there already, or in memory that is as easy to have.
pub(super) fn next(plan: &Plan, part: SpilledPart, memory: &HostMemory) -> Option<Plan> {
    let next = Plan { spilled: plan.spilled.clone().with(part, memory.clone()), ..plan.clone() };
    let now = plan.spilled.part(part).map(HostMemory::rank);
    now.is_none_or(|now| memory.rank() > now).then_some(next)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_part_goes_to_memory_that_is_easier_to_have_and_never_back() {
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
