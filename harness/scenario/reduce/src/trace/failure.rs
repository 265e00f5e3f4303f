//! Replays a trace and classifies its failed requests: [`TraceFailure`].

use harness_allocator::allocator::caching::{CachingAllocator, Config, Quirks};
use harness_allocator::allocator::{Allocator, PrivatePoolId, Request};
use harness_allocator::device::sim::{SimConfig, SimDevice};
use harness_allocator::units::Bytes;
use harness_explain::causes;
use harness_record::{Cause, CauseKind, Invariant};
use harness_trace::execute::{ByHandle, Executor, Kind, OperationOutcome, PassStopped, Target};
use harness_trace::{snapshot::Snapshot, trace::TraceEvent};

use super::TraceCase;

/// Why a trace fails.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TraceFailure {
    /// The main cause of a refused request, as `harness explain` names it. `None` if the figures
    /// prove none.
    #[error("{}", .cause.map_or("the figures do not show why", CauseKind::about))]
    Refused {
        cause: Option<CauseKind>,
        /// True if the cause is fragmentation, and at least half of the free memory was in the
        /// allocator.
        is_mostly_cached: bool,
        /// True if the request is larger than the device.
        exceeds_device: bool,
    },
    /// An always-checked invariant is violated when a scenario replays the trace.
    #[error("the invariant {} does not hold: {}", .0, .0.promise())]
    Violates(Invariant),
}

#[derive(Clone, Copy, Debug)]
pub(super) struct Refused {
    /// Counted from 0.
    pub(super) operation: usize,
    pub(super) failure: TraceFailure,
}

pub(super) enum Early {
    Refused,
    /// Why the trace cannot be replayed.
    Trace(String),
}

/// Replays a trace with these settings and returns the failed requests. `may_fail` decides by
/// operation and id.
pub(super) fn run(
    case: &TraceCase,
    config: &Config,
    may_fail: &dyn Fn(usize, u64) -> bool,
) -> Result<Vec<Refused>, Early> {
    let TraceCase {
        ref events, memory, ..
    } = *case;
    let mut device = SimDevice::new(SimConfig::replay(memory));
    let mut executor =
        Executor::new(events, &mut device).map_err(|error| Early::Trace(error.to_string()))?;
    let config = Config {
        quirks: Quirks::AsTorch,
        ..config.clone()
    };
    let (mut now, mut open, mut refused) = (config.clone(), Vec::new(), Vec::new());
    let mut watch = |operation: usize,
                     _: Kind,
                     outcome: OperationOutcome,
                     target: &mut ByHandle<'_, CachingAllocator>| {
        match events[operation] {
            TraceEvent::SetFraction(set) => now.memory_fraction = set,
            TraceEvent::BeginPool(pool) if outcome == OperationOutcome::Done => open.push(pool),
            TraceEvent::EndPool(pool) => open.retain(|&known| known != pool),
            TraceEvent::Allocate { id, size, stream }
                if outcome == OperationOutcome::OutOfMemory =>
            {
                let pool = open.last().map(|pool: &PrivatePoolId| pool.0);
                refused.push(Refused {
                    operation,
                    failure: failure(target, Request { size, stream }, pool, &now, memory),
                });
                return if may_fail(operation, id) {
                    Ok(())
                } else {
                    Err(RefusedToo)
                };
            }
            _ => {}
        }
        Ok(())
    };
    let mut allocator = CachingAllocator::new(config);
    match executor.run(
        &mut ByHandle {
            device: &mut device,
            allocator: &mut allocator,
        },
        &mut watch,
    ) {
        Ok(_) => Ok(refused),
        Err(PassStopped::Device { operation, source }) => {
            Err(Early::Trace(format!("operation {operation}: {source}")))
        }
        Err(PassStopped::Observer(RefusedToo)) => Err(Early::Refused),
    }
}

/// A request that must succeed failed.
struct RefusedToo;

fn failure(
    target: &mut impl Target,
    request: Request,
    private_pool: Option<u32>,
    config: &Config,
    memory: Bytes,
) -> TraceFailure {
    // The simulated device never fails this query.
    let free = target.with_device(|device| device.free_memory().unwrap_or_default());
    let snapshot = Snapshot::of_refusal(
        &target.with(|allocator, _| allocator.snapshot()),
        request,
        private_pool,
        free,
    );
    let refused = causes::refused(&snapshot, config, memory);
    let cause = refused
        .as_ref()
        .and_then(|refused| harness_record::causes(refused).first().map(Cause::kind));
    let cached = refused.map(|refused| refused.cached()).unwrap_or_default();
    let is_mostly_cached = cause == Some(CauseKind::Fragmented) && cached >= free;
    TraceFailure::Refused {
        cause,
        is_mostly_cached,
        exceeds_device: request.size > memory,
    }
}
