//! `free`: frees live buffers of the scenario.

use super::applied::Applied;
use crate::rig::Stop;
use crate::world::World;
use harness_scenario::{BufferName, Plan};

pub(super) fn apply(world: &mut World, plan: &Plan, buffers: &[BufferName]) -> Result<Applied, Stop> {
    let mut freed = Vec::new();
    for name in buffers {
        if let Some(buffer) = world.take(&(name.clone(), None)) {
            world.rig.free(buffer)?;
            freed.push(name.name());
        }
    }
    let then = (!freed.is_empty()).then(|| format!("free {}", freed.join(", ")));
    Ok(Applied { did_something: !freed.is_empty(), then, ..Applied::nothing(plan) })
}
