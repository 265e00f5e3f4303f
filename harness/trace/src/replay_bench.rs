//! Timing the host path of the caching allocator: the same trace over and over, on a simulated device whose calls cost next to nothing.
//!
//! It times the allocator's own code on this machine, not anything a device does. [`Access`] is how operations reach the allocator: by handle,
//! or by pointer behind the shared front's locks.

mod handle;
mod shared;

use std::collections::BTreeMap;
use std::time::Instant;

use crate::trace::TraceEvent;
use harness_allocator::allocator::Request;
use harness_allocator::allocator::caching::Config;
use harness_allocator::device::sim::{SimConfig, SimDevice};
use harness_allocator::device::{DeviceError, StreamId};
use harness_allocator::units::Bytes;
use serde::Serialize;

pub use self::handle::ByHandle;
use self::shared::ByPointer;
use crate::replay::{Front, Streams};

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
    /// Timed passes, behind two that warm the cache.
    pub repetitions: u32,
    /// Time of a pass by its operations: the median over the passes, the loop included.
    pub ns_per_op: f64,
    /// The fastest pass.
    pub ns_per_op_min: f64,
    /// Mean of one allocation, measured apart, the clock's own cost taken off.
    pub allocate_ns: f64,
    /// Mean of one free, likewise.
    pub free_ns: f64,
    /// Calls of the device's memory manager in all timed passes: 0 where everything was a cache hit.
    pub device_calls: u64,
}

/// Passes in which each operation is timed by itself.
const SINGLE_PASSES: u32 = 5;

/// One operation, its allocation known by its place in a table.
enum Op {
    Allocate { slot: usize, request: Request },
    Free { slot: usize },
    RecordStream { slot: usize, stream: StreamId },
    Other(TraceEvent),
}

/// How operations reach the allocator.
pub trait Access {
    /// What an allocation is freed by.
    type Live;

    /// Allocates; `None` where there is no memory.
    fn allocate(&mut self, request: Request) -> Option<Self::Live>;

    /// Frees.
    ///
    /// # Errors
    /// [`DeviceError`]: the trace uses a device wrongly.
    fn free(&mut self, live: Self::Live) -> Result<(), DeviceError>;

    /// Tells of a use by another stream.
    ///
    /// # Errors
    /// [`DeviceError`], as [`Access::free`].
    fn record_stream(&mut self, live: &Self::Live, stream: StreamId) -> Result<(), DeviceError>;

    /// Everything that is no allocation, free or use. A pass must be repeatable, and a pool that was released cannot be opened again: misuse
    /// of pools in a later pass is passed over.
    ///
    /// # Errors
    /// [`DeviceError`], as [`Access::free`].
    fn other(&mut self, event: TraceEvent) -> Result<(), DeviceError>;

    /// Calls of the device's memory manager so far.
    fn memory_calls(&self) -> u64;
}

/// A trace, ready to be run over and over.
pub struct Bench<A: Access> {
    access: A,
    ops: Vec<Op>,
    live: Vec<Option<A::Live>>,
}

/// Times a trace: two passes to warm up, `repetitions` timed ones; everything live is freed at the end of each.
///
/// # Errors
/// [`DeviceError`]: the trace uses a device wrongly.
pub fn bench(events: &[TraceEvent], config: Config, capacity: Bytes, repetitions: u32, front: Front) -> Result<BenchResult, DeviceError> {
    match front {
        Front::Handle => measure(Bench::by_handle(events, config, capacity)?, repetitions),
        Front::Shared => measure(Bench::new(events, capacity, |device, ops| ByPointer::new(device, ops, config))?, repetitions),
    }
}

fn measure<A: Access>(mut bench: Bench<A>, repetitions: u32) -> Result<BenchResult, DeviceError> {
    let (allocations, frees, ooms) = bench.pass()?;
    bench.pass()?;
    let operations = allocations + frees;
    let before = bench.access.memory_calls();
    let mut passes = Vec::new();
    for _ in 0..repetitions {
        let start = Instant::now();
        bench.pass()?;
        passes.push(start.elapsed().as_nanos() as f64 / operations.max(1) as f64);
    }
    let device_calls = bench.access.memory_calls() - before;
    passes.sort_by(f64::total_cmp);
    let (allocate_ns, free_ns) = bench.single_operations()?;
    Ok(BenchResult {
        operations,
        allocations,
        frees,
        ooms,
        repetitions,
        ns_per_op: passes.get(passes.len() / 2).copied().unwrap_or_default(),
        ns_per_op_min: passes.first().copied().unwrap_or_default(),
        allocate_ns,
        free_ns,
        device_calls,
    })
}

impl Bench<ByHandle> {
    /// A trace by the plain allocator, on a fresh simulated device.
    ///
    /// # Errors
    /// [`DeviceError`]: the device cannot make the streams that the trace names.
    pub fn by_handle(events: &[TraceEvent], config: Config, capacity: Bytes) -> Result<Self, DeviceError> {
        Self::new(events, capacity, |device, _| ByHandle::new(device, config))
    }
}

impl<A: Access> Bench<A> {
    fn new(events: &[TraceEvent], capacity: Bytes, access: impl FnOnce(SimDevice, &[Op]) -> A) -> Result<Self, DeviceError> {
        let mut slots = BTreeMap::new();
        let mut device = SimDevice::new(SimConfig::replay(capacity));
        let streams = Streams::make(events, &mut device)?;
        let mut ops = Vec::with_capacity(events.len());
        for event in events {
            let mut slot = |id: u64| {
                let next = slots.len();
                *slots.entry(id).or_insert(next)
            };
            let op = match streams.on_device(*event) {
                TraceEvent::Allocate { id, size, stream } => Op::Allocate { slot: slot(id), request: Request { size, stream } },
                TraceEvent::Free { id } => Op::Free { slot: slot(id) },
                TraceEvent::RecordStream { id, stream } => Op::RecordStream { slot: slot(id), stream },
                other => Op::Other(other),
            };
            ops.push(op);
        }
        let live = (0..slots.len()).map(|_| None).collect();
        Ok(Self { access: access(device, &ops), ops, live })
    }

    /// One pass over the trace; everything live is freed at its end. Returns allocations, frees and out-of-memories.
    ///
    /// # Errors
    /// [`DeviceError`]: the trace uses a device wrongly.
    pub fn pass(&mut self) -> Result<(u64, u64, u64), DeviceError> {
        let (mut allocations, mut frees, mut ooms) = (0, 0, 0);
        for op in &self.ops {
            match *op {
                Op::Allocate { slot, request } => {
                    allocations += 1;
                    self.live[slot] = self.access.allocate(request);
                    ooms += u64::from(self.live[slot].is_none());
                }
                Op::Free { slot } => {
                    if let Some(live) = self.live[slot].take() {
                        frees += 1;
                        self.access.free(live)?;
                    }
                }
                Op::RecordStream { slot, stream } => {
                    if let Some(live) = &self.live[slot] {
                        self.access.record_stream(live, stream)?;
                    }
                }
                Op::Other(event) => self.access.other(event)?,
            }
        }
        for live in self.live.iter_mut().filter_map(Option::take) {
            frees += 1;
            self.access.free(live)?;
        }
        Ok((allocations, frees, ooms))
    }

    /// Mean time of an allocation and of a free, each timed by itself.
    fn single_operations(&mut self) -> Result<(f64, f64), DeviceError> {
        let overhead = clock_overhead();
        let (mut allocate, mut free) = (Mean::default(), Mean::default());
        for _ in 0..SINGLE_PASSES {
            for op in &self.ops {
                match *op {
                    Op::Allocate { slot, request } => {
                        let start = Instant::now();
                        self.live[slot] = self.access.allocate(request);
                        allocate.add(start.elapsed().as_nanos() as f64);
                    }
                    Op::Free { slot } => {
                        if let Some(live) = self.live[slot].take() {
                            let start = Instant::now();
                            self.access.free(live)?;
                            free.add(start.elapsed().as_nanos() as f64);
                        }
                    }
                    Op::RecordStream { slot, stream } => {
                        if let Some(live) = &self.live[slot] {
                            self.access.record_stream(live, stream)?;
                        }
                    }
                    Op::Other(event) => self.access.other(event)?,
                }
            }
            for live in self.live.iter_mut().filter_map(Option::take) {
                self.access.free(live)?;
            }
        }
        Ok(((allocate.value() - overhead).max(0.0), (free.value() - overhead).max(0.0)))
    }
}

/// What two readings of the clock cost with nothing between them: the median of many.
fn clock_overhead() -> f64 {
    let mut samples: Vec<u128> = (0..10_001).map(|_| Instant::now().elapsed().as_nanos()).collect();
    samples.sort_unstable();
    samples[samples.len() / 2] as f64
}

#[derive(Default)]
struct Mean {
    sum: f64,
    count: u64,
}

impl Mean {
    fn add(&mut self, value: f64) {
        self.sum += value;
        self.count += 1;
    }

    fn value(&self) -> f64 {
        if self.count == 0 { 0.0 } else { self.sum / self.count as f64 }
    }
}
