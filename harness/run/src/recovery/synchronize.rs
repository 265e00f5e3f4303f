//! `synchronize`: waits for all work of the device, so that blocks that wait for events can be reused.

use crate::rig::Stop;
use crate::world::World;

pub(super) fn prepare(world: &mut World) -> Result<(), Stop> {
    world.rig.synchronize()
}
