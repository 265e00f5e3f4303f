//! `empty_cache`: gives the allocator's cache back to the driver.

use crate::rig::Stop;
use crate::world::World;

pub(super) fn prepare(world: &mut World) -> Result<(), Stop> {
    world.rig.empty_cache().map(drop)
}
