//! Policies that free memory of the run before the next attempt, and the effect of a policy:
//! [`Applied`].

use harness_allocator::units::Bytes;
use harness_scenario::{AttemptPlan, BufferName};

use crate::context::{RunContext, buffer_name};
use crate::rig::Stop;

#[derive(Default)]
pub(super) struct Applied {
    /// The plan of the next attempt; `None` if it stays the same.
    pub(super) plan: Option<AttemptPlan>,
    /// True if it found anything to do.
    pub(super) did_something: bool,
    /// Cached bytes released to the driver.
    pub(super) given_back: Bytes,
    pub(super) then: Option<String>,
}

impl Applied {
    /// The effect of a policy that only makes another plan, if it can.
    pub(super) fn replanned(plan: Option<AttemptPlan>) -> Self {
        Self {
            did_something: plan.is_some(),
            plan,
            ..Self::default()
        }
    }

    pub(super) fn saying(then: String) -> Self {
        Self {
            did_something: true,
            then: Some(then),
            ..Self::default()
        }
    }
}

pub(super) fn free(ctx: &mut RunContext, buffers: &[BufferName]) -> Result<Applied, Stop> {
    let mut freed = Vec::new();
    for name in buffers {
        if let Some(buffer) = ctx.buffers.take(&(name.clone(), None)) {
            ctx.rig.free(buffer)?;
            freed.push(name.name());
        }
    }
    Ok(if freed.is_empty() {
        Applied::default()
    } else {
        Applied::saying(format!("free {}", freed.join(", ")))
    })
}

/// Frees the least recently used buffer or request cache, and describes that. `None`: there is
/// none.
pub(super) fn evict(ctx: &mut RunContext, buffers: &[BufferName]) -> Result<Option<String>, Stop> {
    if buffers.is_empty() {
        let Some((request, cache)) = ctx.requests.evict() else {
            return Ok(None);
        };
        cache
            .into_iter()
            .try_for_each(|buffer| ctx.rig.free(buffer))?;
        return Ok(Some(format!("evict request {request}")));
    }
    let Some(key) = ctx.buffers.least_recently_used(buffers) else {
        return Ok(None);
    };
    ctx.buffers
        .take(&key)
        .into_iter()
        .try_for_each(|buffer| ctx.rig.free(buffer))?;
    Ok(Some(format!("evict {}", buffer_name(&key))))
}
