use proptest::prelude::*;

use super::*;

proptest! {
    #[test]
    fn checkpoints_become_fewer_until_the_limit_is_reached(most in 2_u64..10_000) {
        let mut plan = AttemptPlan::of_batch(8);
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
    fn parts_become_strictly_smaller_and_the_batch_stays(
        batch in 1_u64..1_000_000, floor in 1_u64..1_000
    ) {
        let mut plan = AttemptPlan::of_batch(batch);
        for _ in 0..25 {
            let Some(next) = split_and_accumulate(&plan, floor) else {
                prop_assert!(
                    plan.samples_at_once() < 2 * floor + 2,
                    "{plan:?} could be split down to {floor}"
                );
                return Ok(());
            };
            prop_assert!(
                next.asks_for_less_than(&plan)
                    && next.batch == batch
                    && next.samples_at_once() >= floor
            );
            plan = next;
        }
        prop_assert!(false, "it does not end");
    }
}

/// Recorded with Composer 0.32.1: `_adjust_device_train_microbatch_size`, called until it raises
/// its error.
#[test]
fn micro_batches_are_halved_as_in_composer() {
    for (batch, sizes) in [
        (10, &[10, 5, 2, 1][..]),
        (9, &[9, 4, 2, 1]),
        (7, &[7, 3, 1]),
        (64, &[64, 32, 16, 8, 4, 2, 1]),
    ] {
        let plans = std::iter::successors(Some(AttemptPlan::of_batch(batch)), halve_micro_batch);
        assert_eq!(
            plans.map(|plan| plan.samples_at_once()).collect::<Vec<_>>(),
            sizes
        );
    }
    let plan = AttemptPlan {
        micro_batch: Some(4),
        ..AttemptPlan::of_batch(9)
    };
    assert_eq!(
        (0..plan.parts())
            .map(|part| plan.samples_of(part))
            .collect::<Vec<_>>(),
        [4, 4, 1]
    );
}

#[test]
fn each_part_moves_only_to_more_plentiful_memory() {
    let file = HostMemory::MappedFile { folder: None };
    let kinds = [HostMemory::Pinned, HostMemory::Pageable, file];
    for part in [SpilledPart::Activations, SpilledPart::OptimizerState] {
        for (from, first) in kinds.iter().enumerate() {
            let spilled = spill_to_host(&AttemptPlan::of_batch(8), part, first)
                .expect("it was on the device");
            assert!(spilled.asks_for_less_than(&AttemptPlan::of_batch(8)));
            for (to, second) in kinds.iter().enumerate() {
                let again = spill_to_host(&spilled, part, second);
                assert_eq!(again.is_some(), to > from);
                assert!(again.is_none_or(|again| again.asks_for_less_than(&spilled)
                    && !spilled.asks_for_less_than(&again)));
            }
        }
    }
}
