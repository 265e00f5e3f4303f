//! Blocks and segments: slots with neighbour links. A segment is a chain of blocks without gaps, in address order.

use std::collections::BTreeMap;

use super::ids::{BlockId, LaneId};
use crate::allocator::slab::Slab;
use crate::device::{DevicePtr, MemoryRange, StreamId};
use crate::stats::{BlockInfo, BlockState, PoolKind, SegmentInfo};
use crate::units::Bytes;

/// A block, or none, in four bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Link(u32);

impl Link {
    /// No block.
    pub(super) const NONE: Self = Self(u32::MAX);

    /// The block, if there is one.
    #[inline]
    pub(super) fn get(self) -> Option<BlockId> {
        (self != Self::NONE).then_some(BlockId(self.0))
    }
}

impl From<BlockId> for Link {
    fn from(id: BlockId) -> Self {
        Self(id.0)
    }
}

/// A segment's slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct SegmentId(u32);

/// A slice of a segment: one cache line.
#[derive(Clone, Copy, Debug)]
pub(super) struct Block {
    pub(super) address: u64,
    pub(super) size: u64,
    /// What its owner asked for; a free block keeps the figure of its last owner.
    pub(super) requested: u64,
    /// Look-ups in its pool when it went into the free set: its birth, as garbage collection counts age.
    pub(super) free_since: u64,
    pub(super) previous: Link,
    pub(super) next: Link,
    pub(super) segment: SegmentId,
    /// Its pool and stream.
    pub(super) lane: LaneId,
    /// Events that have to be seen complete before it is free.
    pub(super) pending_events: u32,
    pub(super) kind: PoolKind,
    pub(super) state: BlockState,
    /// Whether there is memory behind it: not always in an expandable segment.
    pub(super) mapped: bool,
    /// Whether its segment is expandable.
    pub(super) expandable: bool,
    /// Whether other streams use it: then the deferred frees know which.
    pub(super) shared: bool,
}

impl Block {
    /// Whether it is a part of its segment and not the whole.
    #[inline]
    pub(super) fn is_split(&self) -> bool {
        self.previous != Link::NONE || self.next != Link::NONE
    }

    /// Whether a neighbour may swallow it: nobody uses it, and it is as mapped as the neighbour.
    #[inline]
    fn joins(&self, mapped: bool) -> bool {
        self.state == BlockState::Inactive && self.mapped == mapped
    }
}

/// What a block is part of, as a snapshot tells it: its stream and its private pool.
pub(super) type Place = (StreamId, Option<u32>);

#[derive(Clone, Debug)]
struct Segment {
    first: BlockId,
    size: u64,
}

/// All blocks and segments of an allocator.
#[derive(Debug, Default)]
pub(super) struct Blocks {
    /// By slot. An empty slot's block has an address that no allocation has.
    blocks: Vec<Block>,
    vacant: Vec<BlockId>,
    segments: Slab<Segment>,
    /// Segments by their first address. Touched at driver calls only.
    by_address: BTreeMap<u64, SegmentId>,
}

impl std::ops::Index<BlockId> for Blocks {
    type Output = Block;
    #[inline]
    fn index(&self, id: BlockId) -> &Block {
        &self.blocks[id.0 as usize]
    }
}

impl std::ops::IndexMut<BlockId> for Blocks {
    #[inline]
    fn index_mut(&mut self, id: BlockId) -> &mut Block {
        &mut self.blocks[id.0 as usize]
    }
}

impl Blocks {
    /// The block in a slot, if the slot was ever used.
    #[inline]
    pub(super) fn get(&self, id: BlockId) -> Option<&Block> {
        self.blocks.get(id.0 as usize)
    }

    #[inline]
    fn insert(&mut self, block: Block) -> BlockId {
        if let Some(id) = self.vacant.pop() {
            self[id] = block;
            return id;
        }
        // 4 billion blocks of at least 512 B exceed any device.
        let id = BlockId(self.blocks.len() as u32);
        self.blocks.push(block);
        id
    }

    #[inline]
    fn take(&mut self, id: BlockId) -> Block {
        self.vacant.push(id);
        let block = self[id];
        self[id].address = u64::MAX;
        block
    }

    /// A new segment that is one block: free, or unmapped where the segment is expandable.
    pub(super) fn add_segment(&mut self, range: MemoryRange, lane: LaneId, kind: PoolKind, expandable: bool) -> BlockId {
        let (address, size) = (range.start.0, range.len.0);
        let segment = SegmentId(self.segments.insert(Segment { first: BlockId(0), size }));
        let first = self.insert(Block {
            address,
            size,
            requested: 0,
            free_since: 0,
            previous: Link::NONE,
            next: Link::NONE,
            segment,
            lane,
            pending_events: 0,
            kind,
            state: BlockState::Inactive,
            mapped: !expandable,
            expandable,
            shared: false,
        });
        self.segments[segment.0].first = first;
        self.by_address.insert(address, segment);
        first
    }

    /// The addresses of the segment that the block lies in.
    pub(super) fn reservation(&self, block: BlockId) -> MemoryRange {
        let segment = &self.segments[self[block].segment.0];
        MemoryRange::new(DevicePtr(self[segment.first].address), Bytes(segment.size))
    }

    /// The mapped stretches of the segment that begins with a block.
    pub(super) fn mapped_stretches(&self, first: BlockId) -> Vec<MemoryRange> {
        let segment = &self.segments[self[first].segment.0];
        let stretches = self.stretches(segment, &|_| (StreamId::DEFAULT, None));
        stretches.into_iter().map(|stretch| MemoryRange::new(stretch.address, stretch.size)).collect()
    }

    /// The neighbours that the block would swallow if it became free: previous, next.
    #[inline]
    pub(super) fn mergeable(&self, block: BlockId) -> (Option<BlockId>, Option<BlockId>) {
        let block = &self[block];
        let joins = |neighbour: &BlockId| self[*neighbour].joins(block.mapped);
        (block.previous.get().filter(joins), block.next.get().filter(joins))
    }

    /// Forgets a segment, given as the one block that it is.
    pub(super) fn remove_segment(&mut self, whole: BlockId) {
        let block = self.take(whole);
        debug_assert!(!block.is_split(), "a segment goes back whole");
        self.segments.remove(block.segment.0);
        self.by_address.remove(&block.address);
    }

    /// Cuts the first `size` bytes off a free block and returns them as a new block; the old one becomes the rest.
    #[inline]
    pub(super) fn split_front(&mut self, rest: BlockId, size: u64) -> BlockId {
        let old = self[rest];
        debug_assert!(size < old.size, "both parts have bytes");
        let front = self.insert(Block { size, requested: 0, next: rest.into(), ..old });
        match old.previous.get() {
            Some(previous) => self[previous].next = front.into(),
            None => self.segments[old.segment.0].first = front,
        }
        let rest = &mut self[rest];
        rest.previous = front.into();
        rest.address = old.address + size;
        rest.size = old.size - size;
        front
    }

    /// Cuts all but the first `size` bytes off a free block and returns them as a new block; the old one stays in front.
    pub(super) fn split_back(&mut self, front: BlockId, size: u64) -> BlockId {
        let old = self[front];
        debug_assert!(size < old.size, "both parts have bytes");
        let (address, rest) = (old.address + size, old.size - size);
        let back = self.insert(Block { address, size: rest, requested: 0, previous: front.into(), ..old });
        if let Some(next) = old.next.get() {
            self[next].previous = back.into();
        }
        let front = &mut self[front];
        front.next = back.into();
        front.size = size;
        back
    }

    /// Makes `block` swallow its previous neighbour.
    #[inline]
    pub(super) fn absorb_previous(&mut self, block: BlockId, previous: BlockId) {
        let swallowed = self.take(previous);
        match swallowed.previous.get() {
            Some(before) => self[before].next = block.into(),
            None => self.segments[swallowed.segment.0].first = block,
        }
        let block = &mut self[block];
        block.address = swallowed.address;
        block.size += swallowed.size;
        block.previous = swallowed.previous;
    }

    /// Makes `block` swallow its next neighbour.
    #[inline]
    pub(super) fn absorb_next(&mut self, block: BlockId, next: BlockId) {
        let swallowed = self.take(next);
        if let Some(after) = swallowed.next.get() {
            self[after].previous = block.into();
        }
        let block = &mut self[block];
        block.size += swallowed.size;
        block.next = swallowed.next;
    }

    /// The segment that an address lies in, described: of an expandable one the mapped stretch around it. Linear in its blocks.
    pub(super) fn describe_at(&self, address: DevicePtr, place: impl Fn(LaneId) -> Place) -> Option<SegmentInfo> {
        let (_, segment) = self.by_address.range(..=address.0).next_back()?;
        let around = |stretch: &SegmentInfo| stretch.address <= address && address < stretch.address.offset(stretch.size);
        self.stretches(&self.segments[segment.0], &place).into_iter().find(around)
    }

    /// All segments in address order: of an expandable one each mapped stretch for itself, as PyTorch's snapshots have it.
    pub(super) fn snapshot(&self, place: impl Fn(LaneId) -> Place) -> Vec<SegmentInfo> {
        self.by_address.values().flat_map(|segment| self.stretches(&self.segments[segment.0], &place)).collect()
    }

    /// The first block of every segment.
    pub(super) fn first_blocks(&self) -> Vec<BlockId> {
        self.by_address.values().map(|segment| self.segments[segment.0].first).collect()
    }

    fn stretches(&self, segment: &Segment, place: &impl Fn(LaneId) -> Place) -> Vec<SegmentInfo> {
        let mut stretches: Vec<SegmentInfo> = Vec::new();
        let mut joined = false;
        for id in std::iter::successors(Some(segment.first), |&id| self[id].next.get()) {
            let block = &self[id];
            let (address, size) = (DevicePtr(block.address), Bytes(block.size));
            let (stream, private_pool) = place(block.lane);
            if block.mapped && !joined {
                let (pool, expandable, whole) = (block.kind, block.expandable, Some(stream));
                let blocks = Vec::new();
                stretches.push(SegmentInfo { address, size: Bytes::ZERO, stream: whole, pool, private_pool, expandable, blocks });
            }
            joined = block.mapped;
            if let Some(stretch) = stretches.last_mut().filter(|_| joined) {
                stretch.size += size;
                stretch.blocks.push(BlockInfo { address, size, stream, requested: Bytes(block.requested), state: block.state });
            }
        }
        stretches
    }
}
