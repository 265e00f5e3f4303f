//! Replays a trace and classifies its failed requests: [`Failure`].

use harness_allocator::allocator::caching::{CachingAllocator, Config, Quirks};
use harness_allocator::device::sim::{SimConfig, SimDevice};
use harness_allocator::units::Bytes;
use harness_record::Invariant;
use harness_trace::execute::{ByHandle, Executor, Kind, Outcome, Stopped, Target};
use harness_trace::trace::TraceEvent;

use super::Case;

/// Why a request failed, in the order in which the reasons are tested.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Failure {
    /// At least half of the free memory was in partly used segments.
    #[error("enough memory is free, but it is fragmented")]
    Fragmented,
    #[error("enough memory is free in total, but neither the device nor the allocator has a large enough part")]
    DeviceShort,
    #[error("the device has enough free memory, but not for the rounded size of the request")]
    Rounding,
    #[error("enough memory was freed, but it waits for events of other streams")]
    PendingFree,
    #[error("the memory fraction refuses it")]
    Fraction,
    #[error("less memory is free than requested")]
    TooLarge,
    #[error("the request exceeds the device memory")]
    NeverFits,
    /// An always-checked invariant is violated when a scenario replays the trace.
    #[error("the invariant {} does not hold: {}", .0, .0.promise())]
    Violates(Invariant),
}

#[derive(Clone, Copy, Debug)]
pub(super) struct Refused {
    /// Counted from 0.
    pub(super) operation: usize,
    pub(super) failure: Failure,
}

pub(super) enum Early {
    Refused,
    /// Why the trace cannot be replayed.
    Trace(String),
}

/// Replays a trace with these settings and returns the failed requests. `may_fail` decides by operation and id.
pub(super) fn run(case: &Case, config: &Config, may_fail: &dyn Fn(usize, u64) -> bool) -> Result<Vec<Refused>, Early> {
    let Case { ref events, memory, .. } = *case;
    let mut device = SimDevice::new(SimConfig::replay(memory));
    let mut executor = Executor::new(events, &mut device).map_err(|error| Early::Trace(error.to_string()))?;
    let config = Config { quirks: Quirks::AsTorch, ..config.clone() };
    let (mut fraction, mut refused) = (config.memory_fraction, Vec::new());
    let mut watch = |operation: usize, _: Kind, outcome: Outcome, target: &mut ByHandle<'_, CachingAllocator>| {
        match events[operation] {
            TraceEvent::SetFraction(set) => fraction = set,
            TraceEvent::Allocate { id, size, .. } if outcome == Outcome::OutOfMemory => {
                refused.push(Refused { operation, failure: failure(target, size, memory, fraction.limit(memory)) });
                return if may_fail(operation, id) { Ok(()) } else { Err(RefusedToo) };
            }
            _ => {}
        }
        Ok(())
    };
    let mut allocator = CachingAllocator::new(config);
    match executor.run(&mut ByHandle { device: &mut device, allocator: &mut allocator }, &mut watch) {
        Ok(_) => Ok(refused),
        Err(Stopped::Device { operation, source }) => Err(Early::Trace(format!("operation {operation}: {source}"))),
        Err(Stopped::Observer(RefusedToo)) => Err(Early::Refused),
    }
}

/// A request that must succeed failed.
struct RefusedToo;

fn failure(target: &mut impl Target, requested: Bytes, memory: Bytes, limit: Option<Bytes>) -> Failure {
    let stats = target.stats();
    // The simulated device never fails this query.
    let free = target.with_device(|device| device.free_memory().unwrap_or_default());
    let [reserved, active, allocated] =
        [stats.reserved_bytes, stats.active_bytes, stats.allocated_bytes].map(|pooled| Bytes(pooled.all.current));
    let room = limit.map_or(free, |limit| limit.saturating_sub(reserved).min(free));
    let cached = reserved.saturating_sub(active);
    let waiting = active.saturating_sub(allocated);
    match requested {
        _ if requested <= room => Failure::Rounding,
        _ if requested <= room + cached && cached >= room => Failure::Fragmented,
        _ if requested <= room + cached => Failure::DeviceShort,
        _ if requested <= room + cached + waiting => Failure::PendingFree,
        _ if requested <= free + cached => Failure::Fraction,
        _ if requested <= memory => Failure::TooLarge,
        _ => Failure::NeverFits,
    }
}
