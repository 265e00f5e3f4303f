//! `synchronize`: waits for all work of the device, so that blocks that wait for events can be reused.

use super::applied::Applied;
use crate::context::RunContext;
use crate::rig::Stop;
use harness_scenario::Plan;

/// The effect of a wait is unknown until the allocator polls its events, so it always counts as progress.
pub(super) fn apply(ctx: &mut RunContext, plan: &Plan) -> Result<Applied, Stop> {
    ctx.rig.synchronize()?;
    Ok(Applied::changed(plan.clone()))
}
