//! The allocator without a cache: one driver allocation and one driver free per request. The baseline of every timing.

use std::collections::BTreeMap;

use super::slab::Slab;
use super::{Allocation, Allocator, AllocatorError, Handle, MemoryFraction, OomCause, OutOfMemory, Request};
use crate::device::{Device, DeviceError, DevicePtr, MemoryRange, Place, StreamId};
use crate::stats::{BlockInfo, BlockState, MemoryStats, PoolKind, SegmentInfo};
use crate::units::Bytes;

/// See the module.
#[derive(Debug, Default)]
pub struct DirectAllocator {
    live: Slab<Live>,
    by_address: BTreeMap<DevicePtr, u32>,
    stats: MemoryStats,
    limit: Option<Bytes>,
}

#[derive(Clone, Copy, Debug)]
struct Live {
    range: MemoryRange,
    stream: StreamId,
}

impl Live {
    fn pool(self) -> PoolKind {
        PoolKind::of_block(self.range.len)
    }

    fn segment(self) -> SegmentInfo {
        let MemoryRange { start: address, len: size } = self.range;
        let block = BlockInfo { address, size, stream: self.stream, requested: size, state: BlockState::Allocated };
        let (stream, pool) = (Some(self.stream), self.pool());
        SegmentInfo { address, size, stream, pool, private_pool: None, expandable: false, blocks: vec![block] }
    }
}

impl DirectAllocator {
    fn out_of_memory(&mut self, device: &mut dyn Device, requested: Bytes, cause: OomCause) -> AllocatorError {
        self.stats.num_ooms += 1;
        AllocatorError::OutOfMemory(Box::new(OutOfMemory {
            requested,
            segment: requested,
            cause,
            allocated: Bytes(self.stats.allocated_bytes.all.current),
            reserved: Bytes(self.stats.reserved_bytes.all.current),
            largest_free_block: Bytes::ZERO,
            total: device.info().total,
        }))
    }

    fn count_in(&mut self, live: Live) {
        let (pool, size) = (live.pool(), live.range.len.0);
        for bytes in self.byte_stats() {
            bytes.increase(pool, size);
        }
        for pieces in [&mut self.stats.allocation, &mut self.stats.active, &mut self.stats.segment] {
            pieces.increase(pool, 1);
        }
        self.stats.num_device_alloc += 1;
    }

    fn count_out(&mut self, live: Live) {
        let (pool, size) = (live.pool(), live.range.len.0);
        for bytes in self.byte_stats() {
            bytes.decrease(pool, size);
        }
        for pieces in [&mut self.stats.allocation, &mut self.stats.active, &mut self.stats.segment] {
            pieces.decrease(pool, 1);
        }
        self.stats.num_device_free += 1;
    }

    fn byte_stats(&mut self) -> [&mut crate::stats::PooledStat; 4] {
        let stats = &mut self.stats;
        [&mut stats.requested_bytes, &mut stats.allocated_bytes, &mut stats.active_bytes, &mut stats.reserved_bytes]
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
            return Err(self.out_of_memory(device, size, OomCause::Fraction { limit }));
        }
        match device.malloc(size) {
            Ok(start) => {
                let live = Live { range: MemoryRange::new(start, size), stream: request.stream };
                self.count_in(live);
                let slot = self.live.insert(live);
                self.by_address.insert(start, slot);
                Ok(Allocation::new(live.range, request, Handle(slot)))
            }
            Err(DeviceError::OutOfMemory { free, .. }) => Err(self.out_of_memory(device, size, OomCause::Device { free })),
            Err(error) => Err(error.into()),
        }
    }

    fn free(&mut self, device: &mut dyn Device, allocation: Allocation) -> Result<(), DeviceError> {
        if allocation.is_null() {
            return Ok(());
        }
        let slot = allocation.handle().0;
        if self.live.get(slot).is_none_or(|live| live.range.start != allocation.ptr()) {
            return Err(DeviceError::InvalidFree { ptr: allocation.ptr(), place: Place::default() });
        }
        device.free(allocation.ptr())?;
        let live = self.live.remove(slot);
        self.by_address.remove(&live.range.start);
        self.count_out(live);
        Ok(())
    }

    /// Nothing to do: the driver's free waits for work in flight.
    fn record_stream(&mut self, _allocation: &Allocation, _stream: StreamId) {}

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
        self.by_address.values().map(|&slot| self.live[slot].segment()).collect()
    }

    fn segment_at(&self, address: DevicePtr) -> Option<SegmentInfo> {
        let (&start, &slot) = self.by_address.range(..=address).next_back()?;
        let live = self.live[slot];
        (address.0 - start.0 < live.range.len.0).then(|| live.segment())
    }

    fn close(&mut self, device: &mut dyn Device) -> Result<(), DeviceError> {
        while let Some((start, slot)) = self.by_address.pop_first() {
            device.free(start)?;
            let live = self.live.remove(slot);
            self.count_out(live);
        }
        Ok(())
    }
}
