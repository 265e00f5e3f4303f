//! `synchronize`: waits for all work of the device, so that blocks that wait for events can be reused.

use super::applied::Applied;
use crate::rig::Stop;
use crate::world::World;
use harness_scenario::Plan;

/// Whether a wait was of use shows when the allocator looks at its events, so it always counts as something.
pub(super) fn apply(world: &mut World, plan: &Plan) -> Result<Applied, Stop> {
    world.rig.synchronize()?;
    Ok(Applied::changed(plan.clone()))
}
