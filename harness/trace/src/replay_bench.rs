//! Timing the host path of the caching allocator: the same trace over and over, on a simulated device whose calls cost next to nothing.
//!
//! It times the allocator's own code on this machine, not anything a device does.

use std::convert::Infallible;
use std::time::Instant;

use harness_allocator::allocator::caching::{CachingAllocator, Config};
use harness_allocator::allocator::shared::{Cores, SharedAllocator};
use harness_allocator::device::sim::{SimConfig, SimDevice};
use harness_allocator::units::Bytes;
use serde::Serialize;

use crate::execute::{ByHandle, ByPointer, Counts, Executor, Kind, Observer, Outcome, Stopped, Target, Unobserved};
use crate::replay::{Front, ReplayError};
use crate::trace::TraceEvent;

/// What was measured, in nanoseconds on this machine's own clock. An operation is one allocation or one free.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct BenchResult {
    /// Operations of one pass over the trace, the frees of what it leaves live included.
    pub operations: u64,
    /// Allocations of one pass.
    pub allocations: u64,
    /// Frees of one pass.
    pub frees: u64,
    /// Allocations of one pass that found no memory.
    pub ooms: u64,
    /// Timed passes. Two passes before them fill the cache.
    pub repetitions: u32,
    /// Time of a pass divided by its operations: the median over the passes, the loop included.
    pub ns_per_op: f64,
    /// The same of the fastest pass.
    pub ns_per_op_min: f64,
    /// Time of one allocation, from passes in which each operation is timed by itself: the median over the passes of each allocation, and
    /// the mean of these. What reading the clock costs is subtracted.
    pub allocate_ns: f64,
    /// The same of one free.
    pub free_ns: f64,
    /// Calls of the device's memory manager in all timed passes: 0 where everything was a cache hit.
    pub device_calls: u64,
}

/// Passes in which each operation is timed by itself. Odd, so that there is a median.
const TIMED_PASSES: usize = 5;

/// Times a trace: two passes that fill the cache, then `repetitions` timed ones. Everything live is freed at the end of each.
///
/// # Errors
/// [`ReplayError`]; private pools that are misused are passed over.
pub fn bench(events: &[TraceEvent], config: Config, capacity: Bytes, repetitions: u32, front: Front) -> Result<BenchResult, ReplayError> {
    let mut device = SimDevice::new(SimConfig::replay(capacity));
    let measured = match front {
        Front::Handle => {
            let executor = Executor::new(events, &mut device)?;
            let mut allocator = CachingAllocator::new(config);
            measure(executor, &mut ByHandle { device: &mut device, allocator: &mut allocator }, repetitions)
        }
        Front::Shared => {
            let executor = Executor::new(events, &mut device)?;
            let allocator = SharedAllocator::new(device, config, cores(events));
            measure(executor, &mut ByPointer(&allocator), repetitions)
        }
    };
    measured.map_err(|stopped| match stopped {
        Stopped::Device { operation, source } => ReplayError::Device { operation, source },
        Stopped::Observer(never) => match never {},
    })
}

/// A core for each stream, unless the trace uses private pools, which need one core for all.
fn cores(events: &[TraceEvent]) -> Cores {
    let of_pools = |event: &TraceEvent| matches!(event, TraceEvent::BeginPool(_) | TraceEvent::EndPool(_) | TraceEvent::ReleasePool(_));
    if events.iter().any(of_pools) { Cores::One } else { Cores::PerStream }
}

fn measure<T: Target>(mut executor: Executor<T::Live>, target: &mut T, repetitions: u32) -> Result<BenchResult, Stopped<Infallible>> {
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

/// One pass that nobody observes, in a function of its own, so that profilers show it by name.
#[inline(never)]
fn pass<T: Target>(executor: &mut Executor<T::Live>, target: &mut T) -> Result<Counts, Stopped<Infallible>> {
    executor.pass(target, &mut Unobserved)
}

fn memory_calls(target: &mut impl Target) -> u64 {
    target.with_device(|device| device.calls().memory_calls())
}

/// Times each operation by itself.
///
/// The mean over operations is taken of each operation's median over the passes: one interruption of the program lasts as long as a
/// hundred thousand operations, and it must not count as one.
#[derive(Default)]
struct OperationTimes {
    /// The number of the present pass.
    pass: usize,
    start: Option<Instant>,
    /// By the trace's operation.
    operations: Vec<Option<OperationTime>>,
}

/// One operation, timed in each pass.
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
        let operation = self.operations[index].get_or_insert(OperationTime { kind, nanoseconds: [0; TIMED_PASSES] });
        operation.nanoseconds[self.pass] = u32::try_from(nanoseconds).unwrap_or(u32::MAX);
    }

    /// The mean over the operations of a kind; 0 where there are none.
    fn mean(&self, kind: Kind) -> f64 {
        let of_kind = self.operations.iter().flatten().filter(|operation| operation.kind == kind);
        let (sum, count) = of_kind.fold((0.0, 0_u64), |(sum, count), operation| {
            let mut sorted = operation.nanoseconds;
            sorted.sort_unstable();
            (sum + f64::from(sorted[TIMED_PASSES / 2]), count + 1)
        });
        sum / count.max(1) as f64
    }
}

impl<T: Target> Observer<T> for OperationTimes {
    type Error = Infallible;

    #[inline(always)]
    fn before(&mut self, _: Kind) {
        self.start = Some(Instant::now());
    }

    #[inline(always)]
    fn after(&mut self, index: usize, kind: Kind, _: Outcome, _: &mut T) -> Result<(), Infallible> {
        if let Some(start) = self.start.take() {
            let nanoseconds = start.elapsed().as_nanos();
            self.add(index, kind, nanoseconds);
        }
        Ok(())
    }
}

/// What two readings of the clock cost with nothing between them: the median of many, in nanoseconds.
fn clock_overhead() -> f64 {
    let mut samples: Vec<u128> = (0..10_001).map(|_| Instant::now().elapsed().as_nanos()).collect();
    samples.sort_unstable();
    samples[samples.len() / 2] as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_interruption_of_the_program_is_not_the_time_of_an_allocation() {
        let mut times = OperationTimes::default();
        for pass in 0..TIMED_PASSES {
            times.pass = pass;
            times.add(0, Kind::Allocate, 40);
            // The program was interrupted for 20 ms.
            times.add(1, Kind::Allocate, if pass == 2 { 20_000_000 } else { 60 });
            times.add(2, Kind::Free, 30);
        }
        assert_eq!((times.mean(Kind::Allocate), times.mean(Kind::Free)), (50.0, 30.0));
        assert_eq!(times.mean(Kind::Other), 0.0, "there was none");
    }

    #[test]
    fn an_operation_that_is_slow_in_each_pass_counts() {
        let mut times = OperationTimes::default();
        for pass in 0..TIMED_PASSES {
            times.pass = pass;
            times.add(0, Kind::Allocate, 5_000);
            times.add(7, Kind::Allocate, 50);
        }
        assert_eq!(times.mean(Kind::Allocate), 2_525.0);
    }
}
