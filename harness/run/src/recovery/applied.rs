//! Policies that change the state of the run before the next attempt, and what they achieved: [`Applied`].

use harness_allocator::units::{Bytes, Nanos};
use harness_scenario::{BufferName, Plan};

use crate::between::{Between, pause};
use crate::context::{RunContext, buffer_name};
use crate::rig::Stop;

/// The longest wait, which equals the longest duration that a scenario may contain.
const LONGEST: Nanos = Nanos(3_600 * 1_000_000_000);

pub(super) struct Applied {
    /// The plan of the next attempt.
    pub(super) plan: Plan,
    /// True if it found anything to do.
    pub(super) did_something: bool,
    /// Cached bytes released to the driver.
    pub(super) given_back: Bytes,
    /// A description of the effect, if the policy's name is not enough.
    pub(super) then: Option<String>,
}

impl Applied {
    pub(super) fn nothing(plan: &Plan) -> Self {
        Self { plan: plan.clone(), did_something: false, given_back: Bytes::ZERO, then: None }
    }

    pub(super) const fn changed(plan: Plan) -> Self {
        Self { plan, did_something: true, given_back: Bytes::ZERO, then: None }
    }
}

/// Releases the allocator's cache to the driver. An empty cache counts as nothing to do.
pub(super) fn empty_cache(ctx: &mut RunContext, plan: &Plan) -> Result<Applied, Stop> {
    let freed = ctx.rig.empty_cache()?;
    Ok(Applied { plan: plan.clone(), did_something: freed > Bytes::ZERO, given_back: freed, then: None })
}

pub(super) fn free(ctx: &mut RunContext, plan: &Plan, buffers: &[BufferName]) -> Result<Applied, Stop> {
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

/// Frees the least recently used buffer or request cache.
pub(super) fn evict(ctx: &mut RunContext, plan: &Plan, buffers: &[BufferName]) -> Result<Applied, Stop> {
    if buffers.is_empty() {
        let Some((request, cache)) = ctx.requests.evict() else { return Ok(Applied::nothing(plan)) };
        cache.into_iter().try_for_each(|buffer| ctx.rig.free(buffer))?;
        return Ok(Applied { then: Some(format!("evict request {request}")), ..Applied::changed(plan.clone()) });
    }
    let Some(key) = ctx.least_recently_used(buffers) else { return Ok(Applied::nothing(plan)) };
    if let Some(buffer) = ctx.take(&key) {
        ctx.rig.free(buffer)?;
    }
    Ok(Applied { then: Some(format!("evict {}", buffer_name(&key))), ..Applied::changed(plan.clone()) })
}

/// Waits for all work of the device, so that blocks that wait for events can be reused. The effect is unknown until the
/// allocator polls its events, so it always counts as progress.
pub(super) fn synchronize(ctx: &mut RunContext, plan: &Plan) -> Result<Applied, Stop> {
    ctx.rig.synchronize()?;
    Ok(Applied::changed(plan.clone()))
}

/// Waits and runs `meanwhile` steps, so that others may release memory. `before` is the number of earlier waits.
pub(super) fn wait(
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
