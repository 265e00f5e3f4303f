//! The same timing by the shared front: every operation locked, every free by address.

use std::time::Instant;

use harness_allocator::allocator::caching::Config;
use harness_allocator::allocator::shared::{Cores, SharedAllocator};
use harness_allocator::device::{DeviceError, DevicePtr};
use harness_allocator::trace::TraceEvent;
use harness_allocator::units::Bytes;

use super::{Bench, Mean, Op, Passes, SINGLE_PASSES, clock_overhead};

/// A core for each stream, unless the trace uses private pools, which need one core for all.
pub(super) struct SharedBench {
    allocator: SharedAllocator,
    ops: Vec<Op>,
    live: Vec<Option<DevicePtr>>,
}

impl SharedBench {
    /// The operations of a bench by the handle front, which has done none of them yet.
    pub(super) fn new(Bench { device, ops, live, .. }: Bench, config: Config) -> Self {
        let of_pools = |op: &Op| matches!(op, Op::Other(TraceEvent::BeginPool(_) | TraceEvent::EndPool(_) | TraceEvent::ReleasePool(_)));
        let cores = if ops.iter().any(of_pools) { Cores::One } else { Cores::PerStream };
        let live = vec![None; live.len()];
        Self { allocator: SharedAllocator::new(Box::new(device), config, cores), ops, live }
    }
}

impl Passes for SharedBench {
    fn pass(&mut self) -> Result<(u64, u64, u64), DeviceError> {
        let (mut allocations, mut frees, mut ooms) = (0, 0, 0);
        for op in &self.ops {
            match *op {
                Op::Allocate { slot, request } => {
                    allocations += 1;
                    self.live[slot] = self.allocator.allocate(request).ok().map(|allocation| allocation.ptr());
                    ooms += u64::from(self.live[slot].is_none());
                }
                Op::Free { slot } => {
                    if let Some(ptr) = self.live[slot].take() {
                        frees += 1;
                        self.allocator.free(ptr)?;
                    }
                }
                Op::RecordStream { slot, stream } => {
                    if let Some(ptr) = self.live[slot] {
                        self.allocator.record_stream(ptr, stream)?;
                    }
                }
                Op::Other(event) => other(&self.allocator, event)?,
            }
        }
        for ptr in self.live.iter_mut().filter_map(Option::take) {
            frees += 1;
            self.allocator.free(ptr)?;
        }
        Ok((allocations, frees, ooms))
    }

    fn single_operations(&mut self) -> Result<(f64, f64), DeviceError> {
        let overhead = clock_overhead();
        let (mut allocate, mut free) = (Mean::default(), Mean::default());
        for _ in 0..SINGLE_PASSES {
            for op in &self.ops {
                match *op {
                    Op::Allocate { slot, request } => {
                        let start = Instant::now();
                        self.live[slot] = self.allocator.allocate(request).ok().map(|allocation| allocation.ptr());
                        allocate.add(start.elapsed().as_nanos() as f64);
                    }
                    Op::Free { slot } => {
                        if let Some(ptr) = self.live[slot].take() {
                            let start = Instant::now();
                            self.allocator.free(ptr)?;
                            free.add(start.elapsed().as_nanos() as f64);
                        }
                    }
                    Op::RecordStream { slot, stream } => {
                        if let Some(ptr) = self.live[slot] {
                            self.allocator.record_stream(ptr, stream)?;
                        }
                    }
                    Op::Other(event) => other(&self.allocator, event)?,
                }
            }
            self.live.iter_mut().filter_map(Option::take).try_for_each(|ptr| self.allocator.free(ptr))?;
        }
        Ok(((allocate.value() - overhead).max(0.0), (free.value() - overhead).max(0.0)))
    }

    fn memory_calls(&self) -> u64 {
        self.allocator.device().calls().memory_calls()
    }
}

fn other(allocator: &SharedAllocator, event: TraceEvent) -> Result<(), DeviceError> {
    match event {
        TraceEvent::SynchronizeStream(stream) => return allocator.device().synchronize_stream(stream),
        TraceEvent::Synchronize => return allocator.device().synchronize(),
        TraceEvent::EmptyCache => return allocator.empty_cache(),
        TraceEvent::SetFraction(fraction) => allocator.set_memory_fraction(fraction),
        TraceEvent::ResetPeaks => allocator.reset_peaks(),
        TraceEvent::Pressure(change) => {
            let mut device = allocator.device();
            let held = device.memory()?.pressure.0.saturating_add_signed(change);
            device.set_pressure(Bytes(held))?;
        }
        // As by the handle front: misuse in a later pass is passed over.
        TraceEvent::BeginPool(pool) => drop(allocator.begin_pool(pool)),
        TraceEvent::EndPool(pool) => drop(allocator.end_pool(pool)),
        TraceEvent::ReleasePool(pool) => drop(allocator.release_pool(pool)),
        TraceEvent::Allocate { .. } | TraceEvent::Free { .. } | TraceEvent::RecordStream { .. } => {}
    }
    Ok(())
}
