//! `halve_batch`: tries again with half the batch.

use crate::rig::Stop;
use crate::world::World;

/// Returns the batch of the next try.
pub(super) fn prepare(world: &mut World, batch: u64, floor: u64, empty_cache: bool) -> Result<u64, Stop> {
    if empty_cache {
        world.rig.empty_cache()?;
    }
    Ok((batch / 2).max(floor))
}
