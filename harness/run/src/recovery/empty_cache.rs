//! `empty_cache`: releases the allocator's cache to the driver.

use super::applied::Applied;
use crate::context::RunContext;
use crate::rig::Stop;
use harness_allocator::units::Bytes;
use harness_scenario::Plan;

/// An empty cache counts as nothing to do.
pub(super) fn apply(ctx: &mut RunContext, plan: &Plan) -> Result<Applied, Stop> {
    let freed = ctx.rig.empty_cache()?;
    Ok(Applied { plan: plan.clone(), did_something: freed > Bytes::ZERO, given_back: freed, then: None })
}
