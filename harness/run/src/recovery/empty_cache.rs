//! `empty_cache`: gives the allocator's cache back to the driver.

use super::applied::Applied;
use crate::rig::Stop;
use crate::world::World;
use harness_allocator::units::Bytes;
use harness_scenario::Plan;

/// Nothing is done where the cache was empty.
pub(super) fn apply(world: &mut World, plan: &Plan) -> Result<Applied, Stop> {
    let freed = world.rig.empty_cache()?;
    Ok(Applied { plan: plan.clone(), did_something: freed > Bytes::ZERO, given_back: freed, then: None })
}
