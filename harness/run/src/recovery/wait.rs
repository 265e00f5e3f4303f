//! `wait`: lets time pass, and what goes on meanwhile go on: others may give memory back.

use harness_allocator::units::Nanos;

use super::applied::Applied;
use crate::between::{Between, pause};
use crate::rig::Stop;
use crate::world::World;
use harness_scenario::Plan;

/// `before` is how often it has waited already.
pub(super) fn apply(
    world: &mut World,
    plan: &Plan,
    between: &mut Between<'_>,
    (first, factor, before): (Nanos, u32, u32),
) -> Result<Applied, Stop> {
    let duration = Nanos(first.0.saturating_mul(u64::from(factor).saturating_pow(before))).min(LONGEST);
    world.rig.sleep(duration)?;
    pause(between, world)?;
    Ok(Applied { then: Some(format!("wait {duration}")), ..Applied::changed(plan.clone()) })
}

/// No wait is longer, as no duration in a scenario is.
const LONGEST: Nanos = Nanos(3_600 * 1_000_000_000);
