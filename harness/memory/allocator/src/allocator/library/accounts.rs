//! [`Accounts`]: the driver memory and the allocations of a library, with their statistics.

use std::collections::BTreeMap;

use super::super::live::{count_block, exceeded};
use super::super::{Allocation, Handle, slab::Slab};
use crate::device::{DeviceError, DevicePtr, MemoryRange, StreamId};
use crate::stats::{BlockInfo, BlockState, MemoryStats, PoolKind, PooledStat, SegmentInfo};
use crate::units::Bytes;

/// The pool in whose counters everything appears: libraries have no pools.
const POOL: PoolKind = PoolKind::Large;

#[derive(Debug, Default)]
pub(super) struct Accounts {
    live: Slab<Live>,
    /// Live allocations by address. An address that is allocated twice appears once, for the second
    /// owner.
    blocks: BTreeMap<DevicePtr, u32>,
    /// By start address.
    segments: BTreeMap<DevicePtr, Segment>,
    pub(super) stats: MemoryStats,
    pub(super) limit: Option<Bytes>,
}

#[derive(Clone, Copy, Debug)]
struct Live {
    range: MemoryRange,
    stream: StreamId,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Source {
    /// A driver allocation, which is a segment.
    Driver,
    /// A piece of a driver pool. The pool's reserved bytes count.
    Pool,
    /// Mapped memory. Each contiguous mapped range of a reservation is a segment.
    Mapping,
}

#[derive(Clone, Copy, Debug)]
struct Segment {
    source: Source,
    size: Bytes,
    /// The counted free pieces and their bytes, while it is partly used.
    splits: (u64, u64),
}

impl Accounts {
    /// Records memory that the library got, except by mapping.
    pub(super) fn took(&mut self, range: MemoryRange, source: Source) {
        self.segments.insert(
            range.start,
            Segment {
                source,
                size: range.len,
                splits: (0, 0),
            },
        );
        self.stats.segment.increase(POOL, 1);
        if source == Source::Driver {
            self.stats.reserved_bytes.increase(POOL, range.len.0);
            self.stats.num_device_alloc += 1;
        }
    }

    /// Records memory that the library released, except by unmapping.
    pub(super) fn gave_back(&mut self, start: DevicePtr) {
        let Some(segment) = self.segments.remove(&start) else {
            return;
        };
        self.count_splits(segment.splits, (0, 0));
        self.stats.segment.decrease(POOL, 1);
        if segment.source == Source::Driver {
            self.stats.reserved_bytes.decrease(POOL, segment.size.0);
            self.stats.num_device_free += 1;
        }
    }

    pub(super) fn set_reserved(&mut self, reserved: Bytes) {
        self.stats.reserved_bytes.set(POOL, reserved.0);
    }

    pub(super) const fn reserved(&self) -> Bytes {
        Bytes(self.stats.reserved_bytes.all.current)
    }

    /// Records memory that the library mapped in a reservation.
    pub(super) fn mapped(&mut self, range: MemoryRange, reservation: MemoryRange) {
        self.stats.reserved_bytes.increase(POOL, range.len.0);
        self.stats.num_device_alloc += 1;
        let (mut start, mut size) = (range.start, range.len);
        let before = self
            .segments
            .range(..range.start)
            .next_back()
            .map(|(&start, &segment)| (start, segment));
        if let Some((first, segment)) = before
            && segment.source == Source::Mapping
            && first >= reservation.start
            && first.offset(segment.size) == range.start
        {
            self.segments.remove(&first);
            (start, size) = (first, size + segment.size);
        }
        let behind = self
            .segments
            .get(&range.end())
            .filter(|segment| segment.source == Source::Mapping)
            .copied();
        if let Some(segment) = behind.filter(|_| range.end() < reservation.end()) {
            self.segments.remove(&range.end());
            size += segment.size;
        }
        self.segments.insert(
            start,
            Segment {
                source: Source::Mapping,
                size,
                splits: (0, 0),
            },
        );
    }

    /// Records memory that the library unmapped, possibly in the middle of a segment.
    pub(super) fn unmapped(&mut self, range: MemoryRange) {
        let Some(start) = self.start_of(range.start) else {
            return;
        };
        let Some(segment) = self.segments.remove(&start) else {
            return;
        };
        let end = start.offset(segment.size);
        for (from, to) in [(start, range.start), (range.end(), end)] {
            if from < to {
                self.segments.insert(
                    from,
                    Segment {
                        size: Bytes(to.0 - from.0),
                        ..segment
                    },
                );
            }
        }
        self.stats.reserved_bytes.decrease(POOL, range.len.0);
        self.stats.num_device_free += 1;
    }

    pub(super) fn is_pooled(&self, start: DevicePtr) -> bool {
        self.segments
            .get(&start)
            .is_some_and(|segment| segment.source == Source::Pool)
    }

    pub(super) fn handed_out(&mut self, range: MemoryRange, stream: StreamId) -> Handle {
        let slot = self.live.insert(Live { range, stream });
        self.blocks.insert(range.start, slot);
        count_block(&mut self.stats, POOL, range.len, PooledStat::increase);
        self.recount(range.start);
        Handle::new(slot)
    }

    pub(super) fn slot_of(&self, allocation: &Allocation) -> Result<u32, DeviceError> {
        self.live
            .slot_of(allocation, |live| live.range.start == allocation.ptr())
    }

    pub(super) fn taken_back(&mut self, slot: u32) {
        let Live { range, .. } = self.live.remove(slot);
        if self.blocks.get(&range.start) == Some(&slot) {
            self.blocks.remove(&range.start);
        }
        count_block(&mut self.stats, POOL, range.len, PooledStat::decrease);
        self.recount(range.start);
    }

    /// A segment that the library still holds.
    pub(super) fn first(&self) -> Option<(MemoryRange, Source)> {
        self.segments
            .first_key_value()
            .map(|(&start, segment)| (MemoryRange::new(start, segment.size), segment.source))
    }

    /// Forgets the live allocations, because the library has ended.
    pub(super) fn forget_all(&mut self) {
        while let Some((_, &slot)) = self.blocks.first_key_value() {
            self.taken_back(slot);
        }
    }

    fn start_of(&self, address: DevicePtr) -> Option<DevicePtr> {
        let (&start, segment) = self.segments.range(..=address).next_back()?;
        (address < start.offset(segment.size)).then_some(start)
    }

    /// The blocks of a segment, including its free pieces.
    fn pieces(&self, start: DevicePtr, segment: &Segment) -> Vec<BlockInfo> {
        let end = start.offset(segment.size);
        let free = |from: DevicePtr, to: DevicePtr| {
            let (size, state) = (Bytes(to.0.saturating_sub(from.0)), BlockState::Inactive);
            (from < to).then_some(BlockInfo {
                address: from,
                size,
                stream: StreamId::DEFAULT,
                requested: Bytes::ZERO,
                state,
            })
        };
        let (mut pieces, mut next) = (Vec::new(), start);
        for (&address, &slot) in self.blocks.range(start..end) {
            let Live { range, stream } = self.live[slot];
            pieces.extend(free(next, address));
            pieces.push(BlockInfo {
                address,
                size: range.len,
                stream,
                requested: range.len,
                state: BlockState::Allocated,
            });
            next = range.end();
        }
        pieces.extend(free(next, end));
        pieces
    }

    fn segment(&self, start: DevicePtr, segment: &Segment) -> SegmentInfo {
        let blocks = self.pieces(start, segment);
        let expandable = segment.source == Source::Mapping;
        SegmentInfo {
            address: start,
            size: segment.size,
            stream: None,
            pool: POOL,
            private_pool: None,
            expandable,
            blocks,
        }
    }

    /// Recounts the free pieces around an address.
    fn recount(&mut self, address: DevicePtr) {
        let Some(start) = self.start_of(address) else {
            return;
        };
        let segment = self.segments[&start];
        // As in PyTorch, free pieces of expandable segments are not inactive splits.
        if segment.source == Source::Mapping {
            return;
        }
        let pieces = self.pieces(start, &segment);
        let free = pieces
            .iter()
            .filter(|piece| piece.state == BlockState::Inactive && pieces.len() > 1);
        let splits = free.fold((0, 0), |(count, bytes), piece| {
            (count + 1, bytes + piece.size.0)
        });
        self.count_splits(segment.splits, splits);
        self.segments.insert(start, Segment { splits, ..segment });
    }

    fn count_splits(&mut self, before: (u64, u64), after: (u64, u64)) {
        let MemoryStats {
            inactive_split,
            inactive_split_bytes,
            ..
        } = &mut self.stats;
        inactive_split.decrease(POOL, before.0);
        inactive_split.increase(POOL, after.0);
        inactive_split_bytes.decrease(POOL, before.1);
        inactive_split_bytes.increase(POOL, after.1);
    }

    pub(super) fn exceeded_limit(&self, size: Bytes) -> Option<Bytes> {
        exceeded(self.limit, &self.stats, size)
    }

    pub(in crate::allocator) const fn stats(&self) -> MemoryStats {
        self.stats
    }

    pub(in crate::allocator) fn reset_peaks(&mut self) {
        self.stats.reset_peaks();
    }

    pub(super) fn snapshot(&self) -> Vec<SegmentInfo> {
        self.segments
            .iter()
            .map(|(&start, segment)| self.segment(start, segment))
            .collect()
    }

    pub(super) fn segment_at(&self, address: DevicePtr) -> Option<SegmentInfo> {
        let start = self.start_of(address)?;
        Some(self.segment(start, &self.segments[&start]))
    }
}
