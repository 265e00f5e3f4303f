//! `synchronize`: waits for all work of the device, so that blocks that wait for events can be reused.

use super::applied::Applied;
use crate::rig::Stop;
use crate::world::World;
use harness_scenario::Plan;

/// The effect of a wait is unknown until the allocator polls its events, so it always counts as progress.
pub(super) fn apply(world: &mut World, plan: &Plan) -> Result<Applied, Stop> {
    world.rig.synchronize()?;
    Ok(Applied::changed(plan.clone()))
}
