//! Restores an allocator from its segments: the inverse of [`Allocator::snapshot`].

use super::CachingAllocator;
use super::blocks::State;
use super::config::Config;
use super::ids::{BlockId, StreamPoolId};
use crate::allocator::{Allocation, PrivatePoolId, Request};
use crate::device::{DevicePtr, MemoryRange};
use crate::stats::{BlockState, PoolKind, SegmentInfo};
use crate::units::Bytes;

/// The segments are not a possible state of a caching allocator.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RestoreError {
    /// Order the segments by address. They must not overlap.
    #[error("the segment at {at} starts before the end of the previous one")]
    SegmentsOverlap { at: DevicePtr },
    /// Blocks have at least one byte, follow each other without gaps, and add up to their segment.
    #[error("the blocks of the segment at {segment} leave a gap or overlap at {at}")]
    BlocksDoNotTile { segment: DevicePtr, at: DevicePtr },
    /// Merge them.
    #[error("two adjacent blocks at {at} are both free")]
    FreeNeighbours { at: DevicePtr },
    /// Restore it as allocated, call [`record_stream`](crate::allocator::Allocator::record_stream) for the streams it waits for,
    /// and free it.
    #[error("the block at {at} waits for an event, which segments do not describe")]
    PendingFree { at: DevicePtr },
    /// Pass the reserved addresses around it.
    #[error("the expandable segment at {at} is in none of the reservations")]
    NotReserved { at: DevicePtr },
    /// Each segment of this allocator serves one stream.
    #[error("the segment at {at} has no stream")]
    NoStream { at: DevicePtr },
}

impl CachingAllocator {
    /// Makes an allocator with these segments, in address order as [`Allocator::snapshot`] returns them. For expandable segments
    /// they are the mapped ranges, and `reservations` has the reserved addresses around them. The device must have the memory
    /// already; no device call is made. Returns the allocations of the allocated blocks in address order. Statistics start with
    /// the values of this state; driver calls count from 0.
    ///
    /// Linear in blocks and logarithmic in segments.
    /// Fails with [`RestoreError`] if an allocator cannot have this state.
    ///
    /// [`Allocator::snapshot`]: crate::allocator::Allocator::snapshot
    pub fn restore(
        config: Config,
        segments: &[SegmentInfo],
        reservations: &[MemoryRange],
    ) -> Result<(Self, Vec<Allocation>), RestoreError> {
        let mut allocator = Self::new(config);
        let mut allocations = Vec::new();
        let mut end = DevicePtr::NULL;
        // The unmapped rest of the last segment's reservation.
        let mut rest: Option<(MemoryRange, BlockId)> = None;
        for segment in segments {
            if segment.address < end {
                return Err(RestoreError::SegmentsOverlap { at: segment.address });
            }
            end = segment.address.offset(segment.size);
            check(segment)?;
            let stream_pool = allocator.stream_pool_of(segment)?;
            let first = if segment.expandable {
                let inside = |range: &MemoryRange| range.start <= segment.address && end <= range.end();
                let range = *reservations.iter().find(|range| inside(range)).ok_or(RestoreError::NotReserved { at: segment.address })?;
                let unmapped = match rest.filter(|(of, _)| *of == range) {
                    Some((_, unmapped)) => unmapped,
                    None => allocator.add_reservation(range, stream_pool, segment.pool),
                };
                let (mapped, behind) = allocator.cut_mapped(unmapped, segment);
                rest = behind.map(|behind| (range, behind));
                mapped
            } else {
                let range = MemoryRange::new(segment.address, segment.size);
                allocator.pools.segment_added(stream_pool);
                allocator.counters.segments.increase(segment.pool, 1);
                allocator.blocks.add_segment(range, stream_pool, segment.pool, false)
            };
            allocator.counters.reserved_bytes.increase(segment.pool, segment.size.0);
            allocator.fill(first, stream_pool, segment, &mut allocations);
        }
        Ok((allocator, allocations))
    }

    /// The reserved addresses of all expandable segments, in address order, for [`CachingAllocator::restore`].
    pub fn reservations(&self) -> Vec<MemoryRange> {
        self.blocks.reservations()
    }

    /// The stream pool of a segment.
    fn stream_pool_of(&mut self, segment: &SegmentInfo) -> Result<StreamPoolId, RestoreError> {
        let stream = segment.stream.ok_or(RestoreError::NoStream { at: segment.address })?;
        let pool = match segment.private_pool.map(PrivatePoolId) {
            None => self.pools.route(segment.pool),
            Some(id) => self.pools.private(id, segment.pool),
        };
        Ok(self.pools.stream_pool(pool, stream))
    }

    /// A reservation without mapped memory.
    fn add_reservation(&mut self, range: MemoryRange, stream_pool: StreamPoolId, kind: PoolKind) -> BlockId {
        let unmapped = self.blocks.add_segment(range, stream_pool, kind, true);
        self.pools.segment_added(stream_pool);
        self.remember_unmapped(unmapped);
        unmapped
    }

    /// Cuts a mapped range out of the unmapped block that contains it. Returns it as one free block outside the index, and the
    /// unmapped block after it.
    fn cut_mapped(&mut self, unmapped: BlockId, segment: &SegmentInfo) -> (BlockId, Option<BlockId>) {
        self.forget_unmapped(unmapped);
        let mut mapped = unmapped;
        let before = segment.address.0 - self.blocks[unmapped].address;
        if before > 0 {
            mapped = self.blocks.split(unmapped, before);
            self.remember_unmapped(unmapped);
        }
        let behind = (self.blocks[mapped].size > segment.size.0).then(|| {
            let behind = self.blocks.split(mapped, segment.size.0);
            self.remember_unmapped(behind);
            behind
        });
        self.blocks[mapped].state = State::Free;
        (mapped, behind)
    }

    /// Splits a free block that spans a range into the blocks of a segment.
    fn fill(&mut self, first: BlockId, stream_pool: StreamPoolId, segment: &SegmentInfo, allocations: &mut Vec<Allocation>) {
        let mut id = first;
        for (index, block) in segment.blocks.iter().enumerate() {
            let rest = (index + 1 < segment.blocks.len()).then(|| self.blocks.split(id, block.size.0));
            self.blocks[id].requested = block.requested.0;
            if block.state == BlockState::Allocated {
                self.blocks[id].state = State::Allocated;
                self.counters.handed_out(segment.pool, block.size.0, block.requested.0);
                let stream = self.pools.owner(stream_pool).stream;
                allocations.push(self.allocation(id, Request { size: block.requested, stream }));
            } else {
                if !segment.expandable && segment.blocks.len() > 1 {
                    self.counters.piece_was_there(segment.pool, block.size.0);
                }
                self.put_into_pool(stream_pool, id);
            }
            id = rest.unwrap_or(id);
        }
    }
}

/// Checks whether a caching allocator can have these blocks in a segment.
fn check(segment: &SegmentInfo) -> Result<(), RestoreError> {
    let mut at = segment.address;
    let mut free = false;
    for block in &segment.blocks {
        if block.address != at || block.size == Bytes::ZERO {
            return Err(RestoreError::BlocksDoNotTile { segment: segment.address, at });
        }
        match block.state {
            BlockState::PendingFree => return Err(RestoreError::PendingFree { at }),
            BlockState::Inactive if free => return Err(RestoreError::FreeNeighbours { at }),
            BlockState::Inactive | BlockState::Allocated => free = block.state == BlockState::Inactive,
        }
        at = at.offset(block.size);
    }
    if at == segment.address.offset(segment.size) { Ok(()) } else { Err(RestoreError::BlocksDoNotTile { segment: segment.address, at }) }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::allocator::{Allocator, PrivatePools};
    use crate::device::sim::{SimConfig, SimDevice};
    use crate::device::{Device, StreamId};
    use crate::stats::BlockInfo;

    /// A step of a program: a free and an allocation.
    #[derive(Clone, Debug)]
    struct Step {
        free: Option<prop::sample::Index>,
        size: u64,
        stream: u32,
        private: bool,
    }

    fn a_step() -> impl Strategy<Value = Step> {
        let size = prop_oneof![1_u64..4096, 1_u64 << 19..3 << 20, 9_u64 << 20..40 << 20];
        (any::<Option<prop::sample::Index>>(), size, 0..2_u32, any::<bool>()).prop_map(|(free, size, stream, private)| Step {
            free,
            size,
            stream,
            private,
        })
    }

    fn run(steps: &[Step], allocator: &mut CachingAllocator, device: &mut SimDevice, live: &mut Vec<Allocation>) {
        for step in steps {
            if let Some(free) = step.free.filter(|_| !live.is_empty()) {
                let freed = live.remove(free.index(live.len()));
                allocator.free(device, freed).expect("it is live");
            }
            let pool = step.private.then_some(PrivatePoolId(3));
            pool.into_iter().for_each(|pool| allocator.begin(pool).expect("no pool is open"));
            live.extend(allocator.allocate(device, Request::new(Bytes(step.size)).on(StreamId(step.stream))));
            pool.into_iter().for_each(|pool| allocator.end(pool).expect("it is open"));
        }
        live.sort_by_key(Allocation::ptr);
    }

    /// Clears the requested size of free blocks. Memory that is mapped again keeps its last figure, but snapshots do not contain
    /// unmapped memory.
    fn without_past_requests(mut segments: Vec<SegmentInfo>) -> Vec<SegmentInfo> {
        let blocks = segments.iter_mut().flat_map(|segment| &mut segment.blocks);
        blocks.filter(|block| block.state == BlockState::Inactive).for_each(|block| block.requested = Bytes::ZERO);
        segments
    }

    proptest! {
        #[test]
        fn a_restored_allocator_behaves_like_the_original(
            expandable in any::<bool>(),
            before in prop::collection::vec(a_step(), 0..60),
            after in prop::collection::vec(a_step(), 0..60),
        ) {
            let config = Config { expandable_segments: expandable, ..Config::default() };
            let mut device = SimDevice::new(SimConfig::replay(Bytes::mib(400)));
            device.create_stream().expect("it can be made");
            let (mut allocator, mut live) = (CachingAllocator::new(config.clone()), Vec::new());
            run(&before, &mut allocator, &mut device, &mut live);
            let (segments, reservations) = (allocator.snapshot(), allocator.reservations());
            // Snapshots do not contain an expandable segment without memory, which a refused request leaves.
            let has_memory = |range: &MemoryRange| segments.iter().any(|segment| (range.start.0..range.start.0 + range.len.0).contains(&segment.address.0));
            prop_assume!(reservations.iter().all(has_memory));
            let (mut restored, mut restored_live) =
                CachingAllocator::restore(config, &segments, &reservations).expect("an allocator had this state");
            prop_assert_eq!(restored.snapshot(), segments);
            let current = |stats: crate::stats::MemoryStats| {
                [stats.allocated_bytes, stats.reserved_bytes, stats.requested_bytes, stats.inactive_split_bytes, stats.segment, stats.active]
                    .map(|stat| [stat.all.current, stat.small_pool.current, stat.large_pool.current])
            };
            prop_assert_eq!(current(restored.stats()), current(allocator.stats()));
            let mut same_device = device.clone();
            run(&after, &mut allocator, &mut device, &mut live);
            run(&after, &mut restored, &mut same_device, &mut restored_live);
            prop_assert_eq!(without_past_requests(restored.snapshot()), without_past_requests(allocator.snapshot()));
            prop_assert_eq!(current(restored.stats()), current(allocator.stats()));
            let addresses = |live: &[Allocation]| live.iter().map(Allocation::ptr).collect::<Vec<_>>();
            prop_assert_eq!(addresses(&restored_live), addresses(&live));
        }
    }

    #[test]
    fn a_large_piece_of_a_state_with_other_settings_is_not_released_as_a_segment() {
        let mut device = SimDevice::new(SimConfig::replay(Bytes::mib(120)));
        let mut allocator = CachingAllocator::default();
        let mut allocate = |mib: u64| allocator.allocate(&mut device, Request::new(Bytes::mib(mib)));
        let whole = allocate(100).expect("it fits");
        allocator.free(&mut device, whole).expect("it is live");
        let mut allocate = |mib: u64| allocator.allocate(&mut device, Request::new(Bytes::mib(mib)));
        let (piece, _kept) = (allocate(40).expect("it fits"), allocate(40).expect("it fits"));
        allocator.free(&mut device, piece).expect("it is live");
        let config = Config { max_split_size: Some(Bytes::mib(32)), ..Config::default() };
        let (mut restored, live) = CachingAllocator::restore(config, &allocator.snapshot(), &[]).expect("an allocator had this state");
        assert!(restored.allocate(&mut device, Request::new(Bytes::mib(50))).is_err_and(|error| error.is_out_of_memory()));
        assert_eq!((live.len(), restored.stats().reserved_bytes.all.current), (1, 100 << 20));
    }

    #[test]
    fn an_impossible_state_is_refused() {
        let block = |address, size, state| BlockInfo {
            address: DevicePtr(address),
            size: Bytes(size),
            stream: StreamId::DEFAULT,
            requested: Bytes(size),
            state,
        };
        let segment = |address, size, blocks: &[BlockInfo]| SegmentInfo {
            address: DevicePtr(address),
            size: Bytes(size),
            stream: Some(StreamId::DEFAULT),
            pool: PoolKind::Small,
            private_pool: None,
            expandable: false,
            blocks: blocks.to_vec(),
        };
        let refusal = |segments: &[SegmentInfo]| CachingAllocator::restore(Config::default(), segments, &[]).expect_err("no such state");
        let (free, live, pending) = (BlockState::Inactive, BlockState::Allocated, BlockState::PendingFree);
        let (at, segment_at) = (DevicePtr(4608), DevicePtr(4096));
        assert_eq!(refusal(&[segment(4096, 1024, &[block(4096, 512, live)])]), RestoreError::BlocksDoNotTile { segment: segment_at, at });
        let halves = |first, second| segment(4096, 1024, &[block(4096, 512, first), block(4608, 512, second)]);
        assert_eq!(refusal(&[halves(free, free)]), RestoreError::FreeNeighbours { at });
        assert_eq!(refusal(&[halves(free, pending)]), RestoreError::PendingFree { at });
        assert_eq!(refusal(&[halves(free, live), halves(free, live)]), RestoreError::SegmentsOverlap { at: segment_at });
        let expandable = SegmentInfo { expandable: true, ..halves(free, live) };
        assert_eq!(refusal(&[expandable]), RestoreError::NotReserved { at: segment_at });
        let shared = SegmentInfo { stream: None, ..halves(free, live) };
        assert_eq!(refusal(&[shared]), RestoreError::NoStream { at: segment_at });
    }
}
