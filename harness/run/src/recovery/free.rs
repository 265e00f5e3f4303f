//! `free`: frees live buffers of the scenario.

use super::applied::Applied;
use crate::context::RunContext;
use crate::rig::Stop;
use harness_scenario::{BufferName, Plan};

pub(super) fn apply(ctx: &mut RunContext, plan: &Plan, buffers: &[BufferName]) -> Result<Applied, Stop> {
    let mut freed = Vec::new();
    for name in buffers {
        if let Some(buffer) = ctx.take(&(name.clone(), None)) {
            ctx.rig.free(buffer)?;
            freed.push(name.name());
        }
    }
    let then = (!freed.is_empty()).then(|| format!("free {}", freed.join(", ")));
    Ok(Applied { did_something: !freed.is_empty(), then, ..Applied::nothing(plan) })
}
