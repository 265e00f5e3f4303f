//! Access by the shared front: every operation locked, every free by address.

use crate::trace::TraceEvent;
use harness_allocator::allocator::Request;
use harness_allocator::allocator::caching::Config;
use harness_allocator::allocator::shared::{Cores, SharedAllocator};
use harness_allocator::device::sim::SimDevice;
use harness_allocator::device::{Device, DeviceError, DevicePtr, StreamId, TestDevice};
use harness_allocator::units::Bytes;

use super::{Access, Op};

/// A core for each stream, unless the trace uses private pools, which need one core for all.
pub(super) struct ByPointer(SharedAllocator<SimDevice>);

impl ByPointer {
    pub(super) fn new(device: SimDevice, ops: &[Op], config: Config) -> Self {
        let of_pools = |op: &Op| matches!(op, Op::Other(TraceEvent::BeginPool(_) | TraceEvent::EndPool(_) | TraceEvent::ReleasePool(_)));
        let cores = if ops.iter().any(of_pools) { Cores::One } else { Cores::PerStream };
        Self(SharedAllocator::new(device, config, cores))
    }
}

impl Access for ByPointer {
    type Live = DevicePtr;

    #[inline(always)]
    fn allocate(&mut self, request: Request) -> Option<DevicePtr> {
        self.0.allocate(request).ok().map(|allocation| allocation.ptr())
    }

    #[inline(always)]
    fn free(&mut self, live: DevicePtr) -> Result<(), DeviceError> {
        self.0.free(live)
    }

    fn record_stream(&mut self, live: &DevicePtr, stream: StreamId) -> Result<(), DeviceError> {
        self.0.record_stream(*live, stream)
    }

    fn other(&mut self, event: TraceEvent) -> Result<(), DeviceError> {
        let allocator = &self.0;
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
            TraceEvent::BeginPool(pool) => drop(allocator.begin_pool(pool)),
            TraceEvent::EndPool(pool) => drop(allocator.end_pool(pool)),
            TraceEvent::ReleasePool(pool) => drop(allocator.release_pool(pool)),
            TraceEvent::Allocate { .. } | TraceEvent::Free { .. } | TraceEvent::RecordStream { .. } => {}
        }
        Ok(())
    }

    fn memory_calls(&self) -> u64 {
        self.0.device().calls().memory_calls()
    }
}
