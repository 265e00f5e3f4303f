//! Measures the host time of the caching allocator: repeats one trace on a simulated device whose
//! calls cost almost nothing.
//!
//! It measures the allocator's own code on this machine, not a GPU.

use std::{convert::Infallible, time::Instant};

use harness_allocator::allocator::caching::{CachingAllocator, Config};
use harness_allocator::allocator::shared::SharedAllocator;
use harness_allocator::device::sim::{SimConfig, SimDevice};
use serde::Serialize;

use crate::execute::{
    ByHandle, ByPointer, Executor, Kind, OperationCounts, OperationObserver, OperationOutcome,
    PassStopped, Target, Unobserved,
};
use crate::replay::{Front, ReplayError};
use crate::trace::TraceEvent;

/// Measured times in nanoseconds of host time. An operation is one allocation or one free.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct BenchResult {
    /// Operations per pass, including the frees of blocks that the trace leaves live.
    pub operations: u64,
    pub allocations: u64,
    pub frees: u64,
    /// Out-of-memory errors per pass.
    pub ooms: u64,
    /// The number of timed passes, without the two that warm up the cache.
    pub repetitions: u32,
    /// Time per operation, loop included: the median over the passes.
    pub ns_per_op: f64,
    pub ns_per_op_min: f64,
    /// Time per allocation, from passes that time each operation. It is the mean over all
    /// allocations of each allocation's median over the passes. The cost of reading the clock is
    /// subtracted.
    pub allocate_ns: f64,
    /// Time per free, measured like `allocate_ns`.
    pub free_ns: f64,
    /// Device calls for memory in all timed passes. Zero means that every request was a cache hit.
    pub device_calls: u64,
}

/// The number of passes that time each operation. Odd, so the median is one of the values.
const TIMED_PASSES: usize = 5;

/// Runs two passes that warm up the cache, then `repetitions` timed ones. Each pass ends by freeing
/// all live blocks. Ignores misused private pools.
pub fn bench(
    events: &[TraceEvent],
    config: Config,
    device: SimConfig,
    repetitions: u32,
    front: Front,
) -> Result<BenchResult, ReplayError> {
    let mut device = SimDevice::new(device);
    let measured = match front {
        Front::Handle => {
            let executor = Executor::new(events, &mut device)?;
            let mut allocator = CachingAllocator::new(config);
            measure(
                executor,
                &mut ByHandle {
                    device: &mut device,
                    allocator: &mut allocator,
                },
                repetitions,
            )
        }
        Front::Shared => {
            let executor = Executor::new(events, &mut device)?;
            let allocator = SharedAllocator::new(CachingAllocator::new(config), device);
            measure(executor, &mut ByPointer(&allocator), repetitions)
        }
    };
    measured.map_err(|stopped| match stopped {
        PassStopped::Device { operation, source } => ReplayError::Device { operation, source },
        PassStopped::Observer(never) => match never {},
    })
}

fn measure<T: Target>(
    mut executor: Executor<T::Live>,
    target: &mut T,
    repetitions: u32,
) -> Result<BenchResult, PassStopped<Infallible>> {
    let first = pass(&mut executor, target)?;
    pass(&mut executor, target)?;
    let operations = first.operations();
    let before = memory_calls(target);
    let mut passes = Vec::new();
    for _ in 0..repetitions {
        let start = Instant::now();
        pass(&mut executor, target)?;
        passes.push(start.elapsed().as_nanos() as f64 / operations.max(1) as f64);
    }
    let device_calls = memory_calls(target) - before;
    passes.sort_by(f64::total_cmp);
    let mut times = OperationTimes::default();
    for number in 0..TIMED_PASSES {
        times.pass = number;
        executor.pass(target, &mut times)?;
    }
    let overhead = clock_overhead();
    let net = |mean: f64| (mean - overhead).max(0.0);
    Ok(BenchResult {
        operations,
        allocations: first.allocations,
        frees: first.frees,
        ooms: first.refused,
        repetitions,
        ns_per_op: passes.get(passes.len() / 2).copied().unwrap_or_default(),
        ns_per_op_min: passes.first().copied().unwrap_or_default(),
        allocate_ns: net(times.mean(Kind::Allocate)),
        free_ns: net(times.mean(Kind::Free)),
        device_calls,
    })
}

#[inline(never)]
fn pass<T: Target>(
    executor: &mut Executor<T::Live>,
    target: &mut T,
) -> Result<OperationCounts, PassStopped<Infallible>> {
    executor.pass(target, &mut Unobserved)
}

fn memory_calls(target: &mut impl Target) -> u64 {
    target.with_device(|device| device.calls().memory_calls())
}

/// Times each operation separately and averages each operation's median over the passes.
///
/// The median removes interruptions: one interruption lasts as long as a hundred thousand
/// operations.
#[derive(Default)]
struct OperationTimes {
    pass: usize,
    start: Option<Instant>,
    /// Indexed by operation of the trace.
    operations: Vec<Option<OperationTime>>,
}

#[derive(Clone, Copy)]
struct OperationTime {
    kind: Kind,
    nanoseconds: [u32; TIMED_PASSES],
}

impl OperationTimes {
    fn add(&mut self, index: usize, kind: Kind, nanoseconds: u128) {
        if self.operations.len() <= index {
            self.operations.resize(index + 1, None);
        }
        let operation = self.operations[index].get_or_insert(OperationTime {
            kind,
            nanoseconds: [0; TIMED_PASSES],
        });
        operation.nanoseconds[self.pass] = u32::try_from(nanoseconds).unwrap_or(u32::MAX);
    }

    /// The mean over the operations of one kind, or 0 if the trace has none.
    fn mean(&self, kind: Kind) -> f64 {
        let of_kind = self
            .operations
            .iter()
            .flatten()
            .filter(|operation| operation.kind == kind);
        let (sum, count) = of_kind.fold((0.0, 0_u64), |(sum, count), operation| {
            let mut sorted = operation.nanoseconds;
            sorted.sort_unstable();
            (sum + f64::from(sorted[TIMED_PASSES / 2]), count + 1)
        });
        sum / count.max(1) as f64
    }
}

impl<T: Target> OperationObserver<T> for OperationTimes {
    type Error = Infallible;

    #[inline(always)]
    fn before(&mut self, _: Kind) {
        self.start = Some(Instant::now());
    }

    #[inline(always)]
    fn after(
        &mut self,
        index: usize,
        kind: Kind,
        _: OperationOutcome,
        _: &mut T,
    ) -> Result<(), Infallible> {
        if let Some(start) = self.start.take() {
            let nanoseconds = start.elapsed().as_nanos();
            self.add(index, kind, nanoseconds);
        }
        Ok(())
    }
}

/// The cost of reading the clock in nanoseconds: the median time between two adjacent readings.
fn clock_overhead() -> f64 {
    let mut samples: Vec<u128> = (0..10_001)
        .map(|_| Instant::now().elapsed().as_nanos())
        .collect();
    samples.sort_unstable();
    samples[samples.len() / 2] as f64
}

#[cfg(test)]
mod tests;
