//! Access by the plain allocator: an allocation is freed by the handle in it.

use crate::trace::TraceEvent;
use harness_allocator::allocator::caching::{CachingAllocator, Config};
use harness_allocator::allocator::{Allocation, Allocator, PrivatePools, Request};
use harness_allocator::device::sim::SimDevice;
use harness_allocator::device::{Device, DeviceError, StreamId, TestDevice};
use harness_allocator::units::Bytes;

use super::Access;

/// An allocator and its device.
pub struct ByHandle {
    device: SimDevice,
    allocator: CachingAllocator,
}

impl ByHandle {
    pub(super) fn new(device: SimDevice, config: Config) -> Self {
        Self { device, allocator: CachingAllocator::new(config) }
    }
}

impl Access for ByHandle {
    type Live = Allocation;

    #[inline(always)]
    fn allocate(&mut self, request: Request) -> Option<Allocation> {
        match self.allocator.allocate(&mut self.device, request) {
            Ok(allocation) => Some(allocation),
            Err(error) => {
                // In a box the error asks for no memory where the result stands, which can then stay in registers.
                drop(Box::new(error));
                None
            }
        }
    }

    #[inline(always)]
    fn free(&mut self, live: Allocation) -> Result<(), DeviceError> {
        self.allocator.free(&mut self.device, live)
    }

    fn record_stream(&mut self, live: &Allocation, stream: StreamId) -> Result<(), DeviceError> {
        self.allocator.record_stream(live, stream)
    }

    fn other(&mut self, event: TraceEvent) -> Result<(), DeviceError> {
        let Self { device, allocator } = self;
        match event {
            TraceEvent::SynchronizeStream(stream) => return device.synchronize_stream(stream),
            TraceEvent::Synchronize => return device.synchronize(),
            TraceEvent::EmptyCache => return allocator.empty_cache(device),
            TraceEvent::SetFraction(fraction) => allocator.set_memory_fraction(device, fraction),
            TraceEvent::ResetPeaks => allocator.reset_peaks(),
            TraceEvent::Pressure(change) => {
                let held = device.memory()?.pressure.0.saturating_add_signed(change);
                device.set_pressure(Bytes(held))?;
            }
            TraceEvent::BeginPool(pool) => drop(allocator.begin(pool)),
            TraceEvent::EndPool(pool) => drop(allocator.end(pool)),
            TraceEvent::ReleasePool(pool) => drop(allocator.release(device, pool)),
            TraceEvent::Allocate { .. } | TraceEvent::Free { .. } | TraceEvent::RecordStream { .. } => {}
        }
        Ok(())
    }

    fn memory_calls(&self) -> u64 {
        self.device.calls().memory_calls()
    }
}
