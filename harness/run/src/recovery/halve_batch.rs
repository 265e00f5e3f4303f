//! `halve_batch`: tries again with half the batch.

use crate::rig::Stop;
use crate::world::World;
use harness_scenario::Plan;

/// Returns how the next try is done.
pub(super) fn prepare(world: &mut World, plan: &Plan, floor: u64, empty_cache: bool) -> Result<Plan, Stop> {
    if empty_cache {
        world.rig.empty_cache()?;
    }
    Ok(Plan { batch: (plan.batch / 2).max(floor), ..plan.clone() })
}
