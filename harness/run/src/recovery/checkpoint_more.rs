//! `checkpoint_more`: keeps fewer activations for the backward pass and recomputes the others.

use harness_scenario::Plan;

/// Doubles the number of layers per checkpoint, from 2 up to `most`; `None`: `most` is reached.
pub(super) fn next(plan: &Plan, most: u64) -> Option<Plan> {
    let every = plan.checkpoint_every.map_or(2, |every| every.saturating_mul(2)).min(most);
    plan.checkpoint_every.is_none_or(|now| every > now).then(|| Plan { checkpoint_every: Some(every), ..plan.clone() })
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
                let Some(next) = next(&plan, most) else {
                    prop_assert_eq!(plan.checkpoint_every, Some(most));
                    return Ok(());
                };
                prop_assert!(next.asks_for_less_than(&plan) && next.batch == 8);
                plan = next;
            }
            prop_assert!(false, "it does not end");
        }
    }
}
