//! Blocks and segments: slots with neighbour links. A segment is a chain of blocks without gaps, in address order.

use std::collections::BTreeMap;

use crate::device::{DevicePtr, MemoryRange, StreamId};
use crate::stats::{BlockInfo, BlockState, PoolKind, SegmentInfo};
use crate::units::Bytes;

use super::super::slab::Slab;
use super::pools::PoolId;

/// A block's slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct BlockId(pub(super) u32);

/// A segment's slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct SegmentId(u32);

/// A slice of a segment.
#[derive(Clone, Debug)]
pub(super) struct Block {
    pub(super) address: u64,
    pub(super) size: u64,
    /// What its owner asked for; a free block keeps the figure of its last owner.
    pub(super) requested: u64,
    pub(super) state: BlockState,
    /// Whether there is memory behind it: not always in an expandable segment.
    pub(super) mapped: bool,
    pub(super) previous: Option<BlockId>,
    pub(super) next: Option<BlockId>,
    pub(super) segment: SegmentId,
    pub(super) pool: PoolId,
    pub(super) stream: StreamId,
    /// Whether other streams use it: then the deferred frees know which.
    pub(super) shared: bool,
    /// Events that have to be seen complete before it is free.
    pub(super) pending_events: u32,
    /// Look-ups in its pool when it went into the free set: its birth, as garbage collection counts age.
    pub(super) free_since: u64,
}

impl Block {
    /// Whether it is a part of its segment and not the whole.
    pub(super) fn is_split(&self) -> bool {
        self.previous.is_some() || self.next.is_some()
    }

    /// Whether a neighbour may swallow it: nobody uses it, and it is as mapped as the neighbour.
    fn joins(&self, mapped: bool) -> bool {
        self.state == BlockState::Inactive && self.mapped == mapped
    }
}

#[derive(Clone, Debug)]
struct Segment {
    first: BlockId,
    size: u64,
    expandable: bool,
}

/// All blocks and segments of an allocator.
#[derive(Debug, Default)]
pub(super) struct Blocks {
    blocks: Slab<Block>,
    segments: Slab<Segment>,
    /// Segments by their first address. Touched at driver calls only.
    by_address: BTreeMap<u64, SegmentId>,
}

impl std::ops::Index<BlockId> for Blocks {
    type Output = Block;
    fn index(&self, id: BlockId) -> &Block {
        &self.blocks[id.0]
    }
}

impl std::ops::IndexMut<BlockId> for Blocks {
    fn index_mut(&mut self, id: BlockId) -> &mut Block {
        &mut self.blocks[id.0]
    }
}

impl Blocks {
    /// The block in a slot, if there is one.
    pub(super) fn get(&self, id: BlockId) -> Option<&Block> {
        self.blocks.get(id.0)
    }

    /// A new segment that is one free block.
    pub(super) fn add_segment(&mut self, range: MemoryRange, pool: PoolId, stream: StreamId) -> BlockId {
        self.add(range, pool, stream, false)
    }

    /// A new expandable segment that is one unmapped block.
    pub(super) fn add_reservation(&mut self, range: MemoryRange, pool: PoolId, stream: StreamId) -> BlockId {
        self.add(range, pool, stream, true)
    }

    fn add(&mut self, range: MemoryRange, pool: PoolId, stream: StreamId, expandable: bool) -> BlockId {
        let (address, size) = (range.start.0, range.len.0);
        let segment = SegmentId(self.segments.insert(Segment { first: BlockId(u32::MAX), size, expandable }));
        let block = Block {
            address,
            size,
            requested: 0,
            state: BlockState::Inactive,
            mapped: !expandable,
            previous: None,
            next: None,
            segment,
            pool,
            stream,
            shared: false,
            pending_events: 0,
            free_since: 0,
        };
        let first = BlockId(self.blocks.insert(block));
        self.segments[segment.0].first = first;
        self.by_address.insert(address, segment);
        first
    }

    /// Whether the block lies in an expandable segment.
    pub(super) fn is_expandable(&self, block: BlockId) -> bool {
        self.segments[self[block].segment.0].expandable
    }

    /// The addresses of the segment that the block lies in.
    pub(super) fn reservation(&self, block: BlockId) -> MemoryRange {
        let segment = &self.segments[self[block].segment.0];
        MemoryRange::new(DevicePtr(self[segment.first].address), Bytes(segment.size))
    }

    /// The mapped stretches of the segment that begins with a block.
    pub(super) fn mapped_stretches(&self, first: BlockId) -> Vec<MemoryRange> {
        let segment = &self.segments[self[first].segment.0];
        let stretches = self.stretches(segment, &|_| (PoolKind::Large, None));
        stretches.into_iter().map(|stretch| MemoryRange::new(stretch.address, stretch.size)).collect()
    }

    /// The neighbours that the block would swallow if it became free: previous, next.
    pub(super) fn mergeable(&self, block: BlockId) -> (Option<BlockId>, Option<BlockId>) {
        let block = &self[block];
        let joins = |neighbour: &BlockId| self[*neighbour].joins(block.mapped);
        (block.previous.filter(joins), block.next.filter(joins))
    }

    /// Forgets a segment, given as the one block that it is, and returns that block.
    pub(super) fn remove_segment(&mut self, whole: BlockId) -> Block {
        let block = self.blocks.remove(whole.0);
        debug_assert!(!block.is_split(), "a segment goes back whole");
        self.segments.remove(block.segment.0);
        self.by_address.remove(&block.address);
        block
    }

    /// Cuts the first `size` bytes off a free block and returns them as a new block; the old one becomes the rest.
    pub(super) fn split_front(&mut self, rest: BlockId, size: u64) -> BlockId {
        let old = &self[rest];
        debug_assert!(size < old.size, "both parts have bytes");
        let front = Block { size, requested: 0, next: Some(rest), ..old.clone() };
        let (previous, segment) = (front.previous, front.segment);
        let front = BlockId(self.blocks.insert(front));
        match previous {
            Some(previous) => self[previous].next = Some(front),
            None => self.segments[segment.0].first = front,
        }
        let rest = &mut self[rest];
        rest.previous = Some(front);
        rest.address += size;
        rest.size -= size;
        front
    }

    /// Cuts all but the first `size` bytes off a free block and returns them as a new block; the old one stays in front.
    pub(super) fn split_back(&mut self, front: BlockId, size: u64) -> BlockId {
        let old = &self[front];
        debug_assert!(size < old.size, "both parts have bytes");
        let (address, rest) = (old.address + size, old.size - size);
        let back = Block { address, size: rest, requested: 0, previous: Some(front), ..old.clone() };
        let next = back.next;
        let back = BlockId(self.blocks.insert(back));
        if let Some(next) = next {
            self[next].previous = Some(back);
        }
        let front = &mut self[front];
        front.next = Some(back);
        front.size = size;
        back
    }

    /// Makes `block` swallow its previous neighbour.
    pub(super) fn absorb_previous(&mut self, block: BlockId, previous: BlockId) {
        let swallowed = self.blocks.remove(previous.0);
        match swallowed.previous {
            Some(before) => self[before].next = Some(block),
            None => self.segments[swallowed.segment.0].first = block,
        }
        let block = &mut self[block];
        block.address = swallowed.address;
        block.size += swallowed.size;
        block.previous = swallowed.previous;
    }

    /// Makes `block` swallow its next neighbour.
    pub(super) fn absorb_next(&mut self, block: BlockId, next: BlockId) {
        let swallowed = self.blocks.remove(next.0);
        if let Some(after) = swallowed.next {
            self[after].previous = Some(block);
        }
        let block = &mut self[block];
        block.size += swallowed.size;
        block.next = swallowed.next;
    }

    /// The segment that an address lies in, described: of an expandable one the mapped stretch around it. Linear in its blocks.
    pub(super) fn describe_at(&self, address: DevicePtr, describe_pool: impl Fn(PoolId) -> (PoolKind, Option<u32>)) -> Option<SegmentInfo> {
        let (_, segment) = self.by_address.range(..=address.0).next_back()?;
        let around = |stretch: &SegmentInfo| stretch.address <= address && address < stretch.address.offset(stretch.size);
        self.stretches(&self.segments[segment.0], &describe_pool).into_iter().find(around)
    }

    /// All segments in address order: of an expandable one each mapped stretch for itself, as PyTorch's snapshots have it.
    pub(super) fn snapshot(&self, describe_pool: impl Fn(PoolId) -> (PoolKind, Option<u32>)) -> Vec<SegmentInfo> {
        self.by_address.values().flat_map(|segment| self.stretches(&self.segments[segment.0], &describe_pool)).collect()
    }

    /// The first block of every segment.
    pub(super) fn first_blocks(&self) -> Vec<BlockId> {
        self.by_address.values().map(|segment| self.segments[segment.0].first).collect()
    }

    fn stretches(&self, segment: &Segment, describe_pool: &impl Fn(PoolId) -> (PoolKind, Option<u32>)) -> Vec<SegmentInfo> {
        let mut stretches: Vec<SegmentInfo> = Vec::new();
        let mut joined = false;
        for id in std::iter::successors(Some(segment.first), |&id| self[id].next) {
            let block = &self[id];
            let (address, size) = (DevicePtr(block.address), Bytes(block.size));
            if block.mapped && !joined {
                let (pool, private_pool) = describe_pool(block.pool);
                let (stream, expandable) = (block.stream, segment.expandable);
                stretches.push(SegmentInfo { address, size: Bytes::ZERO, stream, pool, private_pool, expandable, blocks: Vec::new() });
            }
            joined = block.mapped;
            if let Some(stretch) = stretches.last_mut().filter(|_| joined) {
                stretch.size += size;
                stretch.blocks.push(BlockInfo { address, size, requested: Bytes(block.requested), state: block.state });
            }
        }
        stretches
    }
}
