//! `checkpoint_more`: fewer activations are kept for the backward pass, and the others computed again.

use harness_scenario::Plan;

/// Of twice as many layers only one input is kept, at first of 2, at last of `most`; `None`: it is so already.
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
        fn what_is_kept_becomes_less_until_the_most_is_reached(most in 2_u64..10_000) {
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
