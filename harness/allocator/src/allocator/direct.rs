//! The allocator without a cache: one driver allocation and one driver free per request. The baseline of every timing.

use super::live::{self, LiveAllocation, LiveAllocations};
use super::{Allocation, Allocator, AllocatorError, MemoryFraction, OomCause, Request};
use crate::device::{Device, DeviceError, DevicePtr, MemoryRange, StreamId};
use crate::stats::{MemoryStats, PoolKind, PooledStat, SegmentInfo};
use crate::units::Bytes;

/// See the module.
#[derive(Debug, Default)]
pub struct DirectAllocator {
    live: LiveAllocations,
    stats: MemoryStats,
    limit: Option<Bytes>,
}

impl DirectAllocator {
    fn forget(&mut self, slot: u32) {
        let live = self.live.remove(slot);
        live::count(&mut self.stats, &live, PooledStat::decrease);
        self.stats.num_device_free += 1;
    }
}

impl Allocator for DirectAllocator {
    fn name(&self) -> &'static str {
        "direct"
    }

    fn allocate(&mut self, device: &mut dyn Device, request: Request) -> Result<Allocation, AllocatorError> {
        let size = request.size;
        if size == Bytes::ZERO {
            return Ok(Allocation::null(request));
        }
        let reserved = Bytes(self.stats.reserved_bytes.all.current);
        if let Some(limit) = self.limit
            && reserved.checked_add(size).is_none_or(|total| total > limit)
        {
            return Err(live::out_of_memory(&mut self.stats, device, size, OomCause::Fraction { limit }, Some(Bytes::ZERO)));
        }
        match device.malloc(size) {
            Ok(start) => {
                let range = MemoryRange::new(start, size);
                let live = LiveAllocation { range, stream: request.stream, pool: PoolKind::of_block(size), other_streams: Vec::new() };
                live::count(&mut self.stats, &live, PooledStat::increase);
                self.stats.num_device_alloc += 1;
                Ok(Allocation::new(live.range, request, self.live.insert(live)))
            }
            Err(DeviceError::OutOfMemory { free, .. }) => {
                Err(live::out_of_memory(&mut self.stats, device, size, OomCause::Device { free }, Some(Bytes::ZERO)))
            }
            Err(error) => Err(error.into()),
        }
    }

    fn free(&mut self, device: &mut dyn Device, allocation: Allocation) -> Result<(), DeviceError> {
        if allocation.is_null() {
            return Ok(());
        }
        let slot = self.live.slot_of(&allocation)?;
        device.free(allocation.ptr())?;
        self.forget(slot);
        Ok(())
    }

    /// Notes nothing: the driver's free waits for work in flight.
    fn record_stream(&mut self, allocation: &Allocation, _stream: StreamId) -> Result<(), DeviceError> {
        if allocation.is_null() { Ok(()) } else { self.live.slot_of(allocation).map(drop) }
    }

    /// Does nothing: nothing is kept for a stream.
    fn release_stream(&mut self, _device: &mut dyn Device, _stream: StreamId) -> Result<(), DeviceError> {
        Ok(())
    }

    /// Nothing to do: there is no cache.
    fn empty_cache(&mut self, _device: &mut dyn Device) -> Result<(), DeviceError> {
        Ok(())
    }

    fn set_memory_fraction(&mut self, device: &dyn Device, fraction: MemoryFraction) {
        self.limit = fraction.limit(device.info().total);
    }

    fn reset_peaks(&mut self) {
        self.stats.reset_peaks();
    }

    fn stats(&self) -> MemoryStats {
        self.stats
    }

    fn snapshot(&self) -> Vec<SegmentInfo> {
        self.live.snapshot()
    }

    fn segment_at(&self, address: DevicePtr) -> Option<SegmentInfo> {
        self.live.segment_at(address)
    }

    fn close(&mut self, device: &mut dyn Device) -> Result<(), DeviceError> {
        while let Some((start, slot)) = self.live.first() {
            device.free(start)?;
            self.forget(slot);
        }
        Ok(())
    }
}
