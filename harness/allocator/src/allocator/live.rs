//! The live allocations of an allocator that has a driver allocation for each of them.

use std::collections::BTreeMap;
use std::ops::{Index, IndexMut};

use super::slab::Slab;
use super::{Allocation, AllocatorError, Handle, MemoryFraction, OomCause, OutOfMemory};
use crate::device::{Device, DeviceError, DevicePtr, MemoryRange, Place, StreamId};
use crate::stats::{BlockInfo, BlockState, MemoryStats, PoolKind, PooledStat, SegmentInfo};
use crate::units::Bytes;

/// One live allocation.
#[derive(Debug)]
pub(super) struct LiveAllocation {
    pub(super) range: MemoryRange,
    pub(super) stream: StreamId,
    /// The pool that it is counted in.
    pub(super) pool: PoolKind,
    /// The other streams that use it.
    pub(super) other_streams: Vec<StreamId>,
}

impl LiveAllocation {
    fn segment(&self) -> SegmentInfo {
        let MemoryRange { start: address, len: size } = self.range;
        let Self { stream, pool, .. } = *self;
        let block = BlockInfo { address, size, stream, requested: size, state: BlockState::Allocated };
        SegmentInfo { address, size, stream: Some(stream), pool, private_pool: None, expandable: false, blocks: vec![block] }
    }
}

/// All live allocations of an allocator, by slot and by address, with their statistics and the limit on what they may come to.
#[derive(Debug, Default)]
pub(super) struct LiveAllocations {
    live: Slab<LiveAllocation>,
    by_address: BTreeMap<DevicePtr, u32>,
    /// Counted here, apart from the reserved bytes and the calls to the driver, which the allocator counts.
    pub(super) stats: MemoryStats,
    /// What may be allocated at most, as the memory fraction says.
    limit: Option<Bytes>,
}

impl LiveAllocations {
    /// Keeps and counts an allocation and returns its handle.
    pub(super) fn insert(&mut self, allocation: LiveAllocation) -> Handle {
        count(&mut self.stats, &allocation, PooledStat::increase);
        let start = allocation.range.start;
        let slot = self.live.insert(allocation);
        self.by_address.insert(start, slot);
        Handle::new(slot)
    }

    /// The slot of an allocation.
    ///
    /// # Errors
    /// [`DeviceError::InvalidFree`] where it is not one of these.
    pub(super) fn slot_of(&self, allocation: &Allocation) -> Result<u32, DeviceError> {
        let slot = allocation.handle().slot();
        let ours = self.live.get(slot).is_some_and(|live| live.range.start == allocation.ptr());
        if ours { Ok(slot) } else { Err(DeviceError::InvalidFree { ptr: allocation.ptr(), place: Place::default() }) }
    }

    /// Forgets an allocation, which is counted no more.
    pub(super) fn remove(&mut self, slot: u32) -> LiveAllocation {
        let allocation = self.live.remove(slot);
        self.by_address.remove(&allocation.range.start);
        count(&mut self.stats, &allocation, PooledStat::decrease);
        allocation
    }

    /// The allocation at the lowest address.
    pub(super) fn first(&self) -> Option<(DevicePtr, u32)> {
        self.by_address.first_key_value().map(|(&start, &slot)| (start, slot))
    }

    /// All of them as segments, in address order.
    pub(super) fn snapshot(&self) -> Vec<SegmentInfo> {
        self.by_address.values().map(|&slot| self.live[slot].segment()).collect()
    }

    /// The one that an address lies in.
    pub(super) fn segment_at(&self, address: DevicePtr) -> Option<SegmentInfo> {
        let (&start, &slot) = self.by_address.range(..=address).next_back()?;
        let allocation = &self.live[slot];
        (address.0 - start.0 < allocation.range.len.0).then(|| allocation.segment())
    }

    /// The limit, where that much more would exceed it.
    pub(super) fn exceeded_limit(&self, size: Bytes) -> Option<Bytes> {
        let allocated = Bytes(self.stats.allocated_bytes.all.current);
        self.limit.filter(|&limit| allocated.checked_add(size).is_none_or(|total| total > limit))
    }

    /// Counts a request that failed, and says why.
    pub(super) fn out_of_memory(
        &mut self,
        device: &dyn Device,
        requested: Bytes,
        cause: OomCause,
        largest_free_block: Option<Bytes>,
    ) -> AllocatorError {
        self.stats.num_ooms += 1;
        AllocatorError::OutOfMemory(Box::new(OutOfMemory {
            requested,
            lacking: requested,
            segment: requested,
            cause,
            allocated: Bytes(self.stats.allocated_bytes.all.current),
            reserved: Bytes(self.stats.reserved_bytes.all.current),
            largest_free_block,
            total: device.info().total,
        }))
    }

    pub(super) fn set_memory_fraction(&mut self, device: &dyn Device, fraction: MemoryFraction) {
        self.limit = fraction.limit(device.info().total);
    }

    pub(super) fn reset_peaks(&mut self) {
        self.stats.reset_peaks();
    }

    pub(super) const fn stats(&self) -> MemoryStats {
        self.stats
    }
}

/// Counts an allocation in or out, in bytes and in pieces.
fn count(stats: &mut MemoryStats, allocation: &LiveAllocation, apply: fn(&mut PooledStat, PoolKind, u64)) {
    let (pool, size) = (allocation.pool, allocation.range.len.0);
    for bytes in [&mut stats.requested_bytes, &mut stats.allocated_bytes, &mut stats.active_bytes] {
        apply(bytes, pool, size);
    }
    for pieces in [&mut stats.allocation, &mut stats.active, &mut stats.segment] {
        apply(pieces, pool, 1);
    }
}

impl Index<u32> for LiveAllocations {
    type Output = LiveAllocation;
    fn index(&self, slot: u32) -> &LiveAllocation {
        &self.live[slot]
    }
}

impl IndexMut<u32> for LiveAllocations {
    fn index_mut(&mut self, slot: u32) -> &mut LiveAllocation {
        &mut self.live[slot]
    }
}
