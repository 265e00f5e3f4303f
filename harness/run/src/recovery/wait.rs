//! `wait`: waits and runs `meanwhile` steps, so that others may release memory.

use harness_allocator::units::Nanos;

use super::applied::Applied;
use crate::between::{Between, pause};
use crate::context::RunContext;
use crate::rig::Stop;
use harness_scenario::Plan;

/// `before` is the number of earlier waits.
pub(super) fn apply(
    ctx: &mut RunContext,
    plan: &Plan,
    between: &mut Between<'_>,
    (first, factor, before): (Nanos, u32, u32),
) -> Result<Applied, Stop> {
    let duration = Nanos(first.0.saturating_mul(u64::from(factor).saturating_pow(before))).min(LONGEST);
    ctx.rig.sleep(duration)?;
    pause(between, ctx)?;
    Ok(Applied { then: Some(format!("wait {duration}")), ..Applied::changed(plan.clone()) })
}

/// Equals the longest duration that a scenario may contain.
const LONGEST: Nanos = Nanos(3_600 * 1_000_000_000);
