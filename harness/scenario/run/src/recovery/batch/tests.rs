use proptest::prelude::*;

use super::*;

fn a_rule() -> impl Strategy<Value = BatchRule> {
    prop_oneof![
        Just(BatchRule::Halve),
        Just(BatchRule::Shrink),
        Just(BatchRule::Bisect)
    ]
}

proptest! {
    #[test]
    fn batches_fall_strictly_down_to_the_floor_and_never_below(
        rule in a_rule(), batch in 1_u64..1_000_000, floor in 1_u64..1_000_000
    ) {
        let (mut plan, mut known) = (AttemptPlan::of_batch(batch), Known::default());
        for _ in 0..200 {
            known.failed(plan.batch);
            let Some(next) = next(rule, &plan, floor, &known) else {
                prop_assert!(plan.batch <= floor, "{plan:?} stops above the floor {floor}");
                return Ok(());
            };
            prop_assert!(next.asks_for_less_than(&plan) && next.batch >= floor.min(batch));
            plan = next;
        }
        prop_assert!(false, "it does not end");
    }

    #[test]
    fn bisecting_finds_the_largest_batch_that_fits(
        batch in 1_u64..100_000, fits in 1_u64..100_000
    ) {
        let (mut plan, mut known) = (AttemptPlan::of_batch(batch), Known::default());
        let mut failures = 0;
        for _iteration in 0..64 {
            while plan.batch > fits {
                failures += 1;
                known.failed(plan.batch);
                plan = next(BatchRule::Bisect, &plan, 1, &known).expect("one sample fits");
            }
            plan = known.worked(&plan);
        }
        prop_assert_eq!(plan.batch, batch.min(fits));
        prop_assert!(failures <= 34, "{} failures for {} of {}", failures, fits, batch);
    }
}

#[test]
fn the_rules_match_the_published_ones() {
    let after = |rule, batch, floor| {
        next(
            rule,
            &AttemptPlan::of_batch(batch),
            floor,
            &Known::default(),
        )
        .map(|plan| plan.batch)
    };
    assert_eq!(
        after(BatchRule::Halve, 100, 16),
        Some(50),
        "max(16, 100 // 2)"
    );
    assert_eq!(
        after(BatchRule::Halve, 17, 16),
        Some(16),
        "max(16, 17 // 2)"
    );
    assert_eq!(
        after(BatchRule::Halve, 16, 16),
        None,
        "max(16, 16 // 2) is the same again"
    );
    let shrunk: Vec<u64> =
        std::iter::successors(Some(128), |&batch| after(BatchRule::Shrink, batch, 1)).collect();
    assert_eq!(shrunk[..6], [128, 115, 103, 92, 82, 73], "int(batch * 0.9)");
    assert_eq!(shrunk.last(), Some(&1));
}

#[test]
fn a_batch_that_fails_after_it_succeeded_is_forgotten() {
    let mut known = Known::default();
    assert_eq!(
        known.worked(&AttemptPlan::of_batch(64)),
        AttemptPlan::of_batch(64),
        "nothing has failed yet"
    );
    known.failed(64);
    assert_eq!(
        next(BatchRule::Bisect, &AttemptPlan::of_batch(64), 1, &known),
        Some(AttemptPlan::of_batch(32))
    );
}
