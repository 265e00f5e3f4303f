//! `evict`: frees the least recently used buffer or request cache.

use super::applied::Applied;
use crate::context::RunContext;
use crate::rig::Stop;
use harness_scenario::{BufferName, Plan};

pub(super) fn apply(ctx: &mut RunContext, plan: &Plan, buffers: &[BufferName]) -> Result<Applied, Stop> {
    if buffers.is_empty() {
        let Some((request, cache)) = ctx.requests.evict() else { return Ok(Applied::nothing(plan)) };
        cache.into_iter().try_for_each(|buffer| ctx.rig.free(buffer))?;
        return Ok(Applied { then: Some(format!("evict request {request}")), ..Applied::changed(plan.clone()) });
    }
    let Some(key) = ctx.least_recently_used(buffers) else { return Ok(Applied::nothing(plan)) };
    if let Some(buffer) = ctx.take(&key) {
        ctx.rig.free(buffer)?;
    }
    let (name, index) = key;
    let buffer = index.map_or_else(|| name.to_string(), |index| format!("{name}[{index}]"));
    Ok(Applied { then: Some(format!("evict {buffer}")), ..Applied::changed(plan.clone()) })
}
