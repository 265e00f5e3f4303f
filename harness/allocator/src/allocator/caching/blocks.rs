//! Blocks and segments: slots with neighbour links. A segment is a chain of blocks without gaps, in address order.

use std::collections::BTreeMap;

use crate::device::{DevicePtr, StreamId};
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
}

#[derive(Clone, Debug)]
struct Segment {
    first: BlockId,
    size: u64,
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
    pub(super) fn add_segment(&mut self, address: u64, size: u64, pool: PoolId, stream: StreamId) -> BlockId {
        let segment = SegmentId(self.segments.insert(Segment { first: BlockId(u32::MAX), size }));
        let block = Block {
            address,
            size,
            requested: 0,
            state: BlockState::Inactive,
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

    /// The segment that an address lies in, described. Linear in its blocks.
    pub(super) fn describe_at(&self, address: DevicePtr, describe_pool: impl Fn(PoolId) -> (PoolKind, Option<u32>)) -> Option<SegmentInfo> {
        let (&start, segment) = self.by_address.range(..=address.0).next_back()?;
        let segment = &self.segments[segment.0];
        (address.0 - start < segment.size).then(|| self.describe_segment(segment, &describe_pool))
    }

    /// All segments in address order.
    pub(super) fn snapshot(&self, describe_pool: impl Fn(PoolId) -> (PoolKind, Option<u32>)) -> Vec<SegmentInfo> {
        self.by_address.values().map(|segment| self.describe_segment(&self.segments[segment.0], &describe_pool)).collect()
    }

    /// The first block of every segment.
    pub(super) fn first_blocks(&self) -> Vec<BlockId> {
        self.by_address.values().map(|segment| self.segments[segment.0].first).collect()
    }

    fn describe_segment(&self, segment: &Segment, describe_pool: &impl Fn(PoolId) -> (PoolKind, Option<u32>)) -> SegmentInfo {
        let first = &self[segment.first];
        let (pool, private_pool) = describe_pool(first.pool);
        let chain = std::iter::successors(Some(segment.first), |&id| self[id].next);
        let blocks = chain.map(|id| {
            let block = &self[id];
            let (size, requested) = (Bytes(block.size), Bytes(block.requested));
            BlockInfo { address: DevicePtr(block.address), size, stream: block.stream, requested, state: block.state }
        });
        SegmentInfo {
            address: DevicePtr(first.address),
            size: Bytes(segment.size),
            stream: Some(first.stream),
            pool,
            private_pool,
            expandable: false,
            blocks: blocks.collect(),
        }
    }
}
