//! `free`: frees buffers of the scenario that are still live.

use crate::rig::Stop;
use crate::world::World;
use harness_scenario::BufferName;

pub(super) fn prepare(world: &mut World, buffers: &[BufferName]) -> Result<(), Stop> {
    for name in buffers {
        if let Some(buffer) = world.take(&(name.clone(), None)) {
            world.rig.free(buffer)?;
        }
    }
    Ok(())
}
