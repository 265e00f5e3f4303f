//! The live allocations of an allocator that makes one driver allocation for each.

use std::collections::BTreeMap;
use std::ops::Index;

use super::{Allocation, AllocatorError, Handle, OomCause, OutOfMemory, slab::Slab};
use crate::device::{Device, DeviceError, DevicePtr, MemoryRange, StreamId};
use crate::stats::{BlockInfo, BlockState, MemoryStats, PoolKind, PooledStat, SegmentInfo};
use crate::units::Bytes;

#[derive(Debug)]
pub(super) struct LiveAllocation {
    pub(super) range: MemoryRange,
    pub(super) stream: StreamId,
    pub(super) pool: PoolKind,
    pub(super) other_streams: Vec<StreamId>,
}

impl LiveAllocation {
    fn segment(&self) -> SegmentInfo {
        let MemoryRange {
            start: address,
            len: size,
        } = self.range;
        let Self { stream, pool, .. } = *self;
        let block = BlockInfo {
            address,
            size,
            stream,
            requested: size,
            state: BlockState::Allocated,
        };
        SegmentInfo {
            address,
            size,
            stream: Some(stream),
            pool,
            private_pool: None,
            expandable: false,
            blocks: vec![block],
        }
    }
}

/// All live allocations by slot and by address, with their statistics and the memory limit.
#[derive(Debug, Default)]
pub(super) struct LiveAllocations {
    live: Slab<LiveAllocation>,
    by_address: BTreeMap<DevicePtr, u32>,
    /// Without reserved bytes and driver calls, which the allocator counts itself.
    pub(super) stats: MemoryStats,
    /// The limit on allocated memory.
    pub(super) limit: Option<Bytes>,
}

impl LiveAllocations {
    pub(super) fn insert(&mut self, allocation: LiveAllocation) -> Handle {
        count(&mut self.stats, &allocation, PooledStat::increase);
        let start = allocation.range.start;
        let slot = self.live.insert(allocation);
        self.by_address.insert(start, slot);
        Handle::new(slot)
    }

    /// Fails with [`DeviceError::InvalidFree`] for a foreign allocation.
    pub(super) fn slot_of(&self, allocation: &Allocation) -> Result<u32, DeviceError> {
        self.live
            .slot_of(allocation, |live| live.range.start == allocation.ptr())
    }

    /// Records that another stream uses an allocation. Ignores the null allocation.
    /// Fails like [`Self::slot_of`].
    pub(super) fn record_use(
        &mut self,
        allocation: &Allocation,
        stream: StreamId,
    ) -> Result<(), DeviceError> {
        if allocation.is_null() {
            return Ok(());
        }
        let slot = self.slot_of(allocation)?;
        let live = &mut self.live[slot];
        if live.stream != stream && !live.other_streams.contains(&stream) {
            live.other_streams.push(stream);
        }
        Ok(())
    }

    pub(super) fn remove(&mut self, slot: u32) -> LiveAllocation {
        let allocation = self.live.remove(slot);
        self.by_address.remove(&allocation.range.start);
        count(&mut self.stats, &allocation, PooledStat::decrease);
        allocation
    }

    pub(super) fn first(&self) -> Option<(DevicePtr, u32)> {
        self.by_address
            .first_key_value()
            .map(|(&start, &slot)| (start, slot))
    }

    pub(super) const fn stats(&self) -> MemoryStats {
        self.stats
    }

    pub(super) fn reset_peaks(&mut self) {
        self.stats.reset_peaks();
    }

    pub(super) fn snapshot(&self) -> Vec<SegmentInfo> {
        self.by_address
            .values()
            .map(|&slot| self.live[slot].segment())
            .collect()
    }

    pub(super) fn segment_at(&self, address: DevicePtr) -> Option<SegmentInfo> {
        let (&start, &slot) = self.by_address.range(..=address).next_back()?;
        let allocation = &self.live[slot];
        (address.0 - start.0 < allocation.range.len.0).then(|| allocation.segment())
    }

    pub(super) fn exceeded_limit(&self, size: Bytes) -> Option<Bytes> {
        exceeded(self.limit, &self.stats, size)
    }

    /// Counts a failed request and explains it.
    pub(super) fn out_of_memory(
        &mut self,
        device: &dyn Device,
        requested: Bytes,
        cause: OomCause,
        largest_free_block: Option<Bytes>,
    ) -> AllocatorError {
        out_of_memory(
            &mut self.stats,
            device,
            [requested; 2],
            cause,
            largest_free_block,
        )
    }
}

fn count(
    stats: &mut MemoryStats,
    allocation: &LiveAllocation,
    apply: fn(&mut PooledStat, PoolKind, u64),
) {
    count_block(stats, allocation.pool, allocation.range.len, apply);
    apply(&mut stats.segment, allocation.pool, 1);
}

/// Counts the allocation or the free of a block that is as large as its request.
pub(super) fn count_block(
    stats: &mut MemoryStats,
    pool: PoolKind,
    size: Bytes,
    apply: fn(&mut PooledStat, PoolKind, u64),
) {
    for bytes in [
        &mut stats.requested_bytes,
        &mut stats.allocated_bytes,
        &mut stats.active_bytes,
    ] {
        apply(bytes, pool, size.0);
    }
    for pieces in [&mut stats.allocation, &mut stats.active] {
        apply(pieces, pool, 1);
    }
}

/// The limit on allocated memory, if `size` more bytes would exceed it.
pub(super) fn exceeded(limit: Option<Bytes>, stats: &MemoryStats, size: Bytes) -> Option<Bytes> {
    let allocated = Bytes(stats.allocated_bytes.all.current);
    limit.filter(|&limit| {
        allocated
            .checked_add(size)
            .is_none_or(|total| total > limit)
    })
}

/// Counts a failed request and explains it. `segment` is the size that the device or a limit
/// refused.
pub(super) fn out_of_memory(
    stats: &mut MemoryStats,
    device: &dyn Device,
    [requested, segment]: [Bytes; 2],
    cause: OomCause,
    largest_free_block: Option<Bytes>,
) -> AllocatorError {
    stats.num_ooms += 1;
    AllocatorError::OutOfMemory(Box::new(OutOfMemory {
        requested,
        missing: requested,
        segment,
        cause,
        allocated: Bytes(stats.allocated_bytes.all.current),
        reserved: Bytes(stats.reserved_bytes.all.current),
        largest_free_block,
        total: device.info().total,
    }))
}

impl Index<u32> for LiveAllocations {
    type Output = LiveAllocation;
    fn index(&self, slot: u32) -> &LiveAllocation {
        &self.live[slot]
    }
}
