//! `split_and_accumulate`: repeats the failed iteration with twice as many micro-batches, so fewer samples are in
//! memory.

use harness_scenario::Plan;

/// Splits the batch further, into micro-batches of at least `floor` samples; `None`: they cannot be smaller.
pub(super) fn next(plan: &Plan, floor: u64) -> Option<Plan> {
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
        fn parts_become_strictly_smaller_and_the_batch_stays(batch in 1_u64..1_000_000, floor in 1_u64..1_000) {
            let mut plan = Plan::of_batch(batch);
            for _ in 0..25 {
                let Some(next) = next(&plan, floor) else {
                    prop_assert!(plan.samples_at_once() < 2 * floor + 2, "{plan:?} could be split down to {floor}");
                    return Ok(());
                };
                prop_assert!(next.asks_for_less_than(&plan) && next.batch == batch && next.samples_at_once() >= floor);
                plan = next;
            }
            prop_assert!(false, "it does not end");
        }
    }
}
