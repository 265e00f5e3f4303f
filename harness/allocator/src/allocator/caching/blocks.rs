//! Blocks and segments: slots with neighbour links. A segment is a chain of blocks without gaps, in address order.
//!
//! Everything about a block stands in one cache line, its links among the free blocks included. Slot 0 holds no block: it stands for "no
//! neighbour", so that links can be followed, and written through, without asking first. Invariants: a block's address never changes;
//! where two blocks become one the lower one stays; slot 0 and all vacant slots have the state [`State::Vacant`].

use std::collections::BTreeMap;

use super::bins::Bin;
use super::ids::{BlockId, LaneId};
use crate::device::{DevicePtr, MemoryRange, StreamId};
use crate::stats::{BlockInfo, BlockState, PoolKind, SegmentInfo};
use crate::units::Bytes;

/// What a slot's block is doing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum State {
    /// There is no block.
    Vacant,
    /// Addresses of an expandable segment without memory behind them.
    Unmapped,
    /// Ready to be handed out.
    Free,
    /// Freed by its owner, waiting for events of other streams.
    PendingFree,
    /// Handed out.
    Allocated,
}

/// A slice of a segment: one cache line.
#[derive(Clone, Copy, Debug)]
#[repr(align(64))]
pub(super) struct Block {
    pub(super) address: u64,
    pub(super) size: u64,
    /// What its owner asked for; a free block keeps the figure of its last owner.
    pub(super) requested: u64,
    pub(super) previous: BlockId,
    pub(super) next: BlockId,
    /// Its place among the free blocks.
    pub(super) heap: HeapLinks,
    /// Its pool and stream. Not beside `next`, which is copied with it: one load of both would wait for an earlier store of one.
    pub(super) lane: LaneId,
    pub(super) kind: PoolKind,
    pub(super) state: State,
    /// Whether its segment is expandable.
    pub(super) expandable: bool,
    /// Whether other streams use it: [`super::uses`] knows which.
    pub(super) shared: bool,
}

/// A free block's place in a heap of the free index, which alone reads and writes it.
#[derive(Clone, Copy, Debug)]
pub(super) struct HeapLinks {
    pub(super) child: BlockId,
    pub(super) sibling: BlockId,
    /// The parent of a first child, the left sibling of another, nothing for a root.
    pub(super) previous: BlockId,
    /// Of a root: the root of the next larger size in the same bin.
    pub(super) next_size: BlockId,
    pub(super) bin: Bin,
}

impl HeapLinks {
    /// A heap of one.
    pub(super) const ALONE: Self =
        Self { child: BlockId::NONE, sibling: BlockId::NONE, previous: BlockId::NONE, next_size: BlockId::NONE, bin: Bin::NONE };
}

impl Block {
    const VACANT: Self = Self {
        address: 0,
        size: 0,
        requested: 0,
        previous: BlockId::NONE,
        next: BlockId::NONE,
        lane: LaneId(0),
        heap: HeapLinks::ALONE,
        kind: PoolKind::Small,
        state: State::Vacant,
        expandable: false,
        shared: false,
    };

    /// Whether it is a part of its segment and not the whole.
    #[inline]
    pub(super) fn is_split(&self) -> bool {
        self.previous.0 | self.next.0 != 0
    }
}

/// What a snapshot says of a lane: its stream, and its private pool if it has one.
pub(super) type LaneLabel = (StreamId, Option<u32>);

#[derive(Clone, Copy, Debug)]
struct Segment {
    first: BlockId,
    size: u64,
}

/// All blocks and segments of an allocator.
#[derive(Clone, Debug)]
pub(super) struct Blocks {
    /// By slot.
    blocks: Vec<Block>,
    /// The slot that became vacant last; [`Block::next`] leads to the one before it.
    vacant: BlockId,
    /// Segments by their first address. Touched at driver calls only.
    segments: BTreeMap<u64, Segment>,
    /// By slot, where somebody asks for it: look-ups in the block's pool when it became free, as garbage collection counts age.
    free_since: Vec<u64>,
}

impl Default for Blocks {
    fn default() -> Self {
        Self { blocks: vec![Block::VACANT], vacant: BlockId::NONE, segments: BTreeMap::new(), free_since: Vec::new() }
    }
}

/// The slots. Who changes several blocks takes them once: through a `&mut Blocks` the compiler must look up where they are after each store.
impl std::ops::Deref for Blocks {
    type Target = [Block];
    #[inline(always)]
    fn deref(&self) -> &[Block] {
        &self.blocks
    }
}

impl std::ops::DerefMut for Blocks {
    #[inline(always)]
    fn deref_mut(&mut self) -> &mut [Block] {
        &mut self.blocks
    }
}

impl std::ops::Index<BlockId> for [Block] {
    type Output = Block;
    #[inline(always)]
    fn index(&self, id: BlockId) -> &Block {
        &self[id.0 as usize]
    }
}

impl std::ops::IndexMut<BlockId> for [Block] {
    #[inline(always)]
    fn index_mut(&mut self, id: BlockId) -> &mut Block {
        &mut self[id.0 as usize]
    }
}

impl Blocks {
    /// The block in a slot, if the slot was ever used.
    #[inline]
    pub(super) fn get(&self, id: BlockId) -> Option<&Block> {
        self.blocks.get(id.0 as usize)
    }

    /// The block in a slot, if there is such a slot.
    #[inline]
    pub(super) fn get_mut(&mut self, id: BlockId) -> Option<&mut Block> {
        self.blocks.get_mut(id.0 as usize)
    }

    /// A slot for a block.
    #[inline(always)]
    fn slot(&mut self) -> BlockId {
        let slot = self.vacant;
        if slot.is_none() {
            return self.new_slot();
        }
        self.vacant = self[slot].next;
        slot
    }

    #[cold]
    #[inline(never)]
    fn new_slot(&mut self) -> BlockId {
        // 4 billion blocks of at least 512 B exceed any device.
        let slot = BlockId(self.blocks.len() as u32);
        self.blocks.push(Block::VACANT);
        slot
    }

    fn vacate(&mut self, id: BlockId) {
        let before = std::mem::replace(&mut self.vacant, id);
        let block = &mut self[id];
        block.state = State::Vacant;
        block.next = before;
    }

    /// A new segment that is one block: free, or unmapped where the segment is expandable.
    pub(super) fn add_segment(&mut self, range: MemoryRange, lane: LaneId, kind: PoolKind, expandable: bool) -> BlockId {
        let (address, size) = (range.start.0, range.len.0);
        let first = self.slot();
        let state = if expandable { State::Unmapped } else { State::Free };
        self[first] = Block { address, size, lane, kind, state, expandable, ..Block::VACANT };
        self.segments.insert(address, Segment { first, size });
        first
    }

    /// The segment that an address lies in.
    fn segment(&self, address: u64) -> Option<Segment> {
        self.segments.range(..=address).next_back().map(|(_, &segment)| segment)
    }

    /// The addresses of the segment that the block lies in.
    pub(super) fn reservation(&self, block: BlockId) -> MemoryRange {
        let segment = self.segment(self[block].address).expect("every block lies in a segment");
        MemoryRange::new(DevicePtr(self[segment.first].address), Bytes(segment.size))
    }

    /// The mapped stretches of the segment that begins with a block.
    pub(super) fn mapped_stretches(&self, first: BlockId) -> Vec<MemoryRange> {
        let stretches = self.stretches(first, &|_| (StreamId::DEFAULT, None));
        stretches.into_iter().map(|stretch| MemoryRange::new(stretch.address, stretch.size)).collect()
    }

    /// Nothing is mapped any more in a stretch of the segment that begins with a block. For closing only: who has the blocks is not looked after.
    pub(super) fn note_unmapped(&mut self, first: BlockId, stretch: MemoryRange) {
        let within: Vec<BlockId> = self.chain(first).filter(|&id| (stretch.start.0..stretch.end().0).contains(&self[id].address)).collect();
        within.into_iter().for_each(|id| self[id].state = State::Unmapped);
    }

    /// Forgets a segment, given as the one block that it is.
    pub(super) fn remove_segment(&mut self, whole: BlockId) {
        debug_assert!(!self[whole].is_split(), "a segment goes back whole");
        let address = self[whole].address;
        self.segments.remove(&address);
        self.vacate(whole);
    }

    /// Cuts a block that nobody uses after its first `size` bytes and returns the rest, which is in the same state and keeps the figure of
    /// the last owner.
    #[inline(always)]
    pub(super) fn split(&mut self, front: BlockId, size: u64) -> BlockId {
        let rest = self.slot();
        let blocks = &mut self.blocks[..];
        let block = &mut blocks[front];
        debug_assert!(size < block.size, "both parts have bytes");
        let Block { address, requested, lane, kind, state, expandable, .. } = *block;
        let bytes = block.size - size;
        block.size = size;
        let next = std::mem::replace(&mut block.next, rest);
        blocks[next].previous = rest;
        let block = &mut blocks[rest];
        block.address = address + size;
        block.size = bytes;
        block.requested = requested;
        block.previous = front;
        block.next = next;
        block.lane = lane;
        block.kind = kind;
        block.state = state;
        block.expandable = expandable;
        block.shared = false;
        rest
    }

    /// Makes a block swallow its next neighbour.
    #[inline(always)]
    pub(super) fn absorb_next(&mut self, block: BlockId) {
        let blocks = &mut self.blocks[..];
        let swallowed = blocks[block].next;
        let vacated = &mut blocks[swallowed];
        let (size, next) = (vacated.size, vacated.next);
        vacated.state = State::Vacant;
        vacated.next = std::mem::replace(&mut self.vacant, swallowed);
        blocks[next].previous = block;
        let block = &mut blocks[block];
        block.size += size;
        block.next = next;
    }

    /// Makes one block of a block and its previous neighbour, which is in the same state. The figure of the last owner is the block's.
    #[inline(always)]
    pub(super) fn absorb_into_previous(&mut self, block: BlockId) -> BlockId {
        let Block { previous, requested, .. } = self[block];
        self.absorb_next(previous);
        self[previous].requested = requested;
        previous
    }

    /// When a free block became free: see [`Blocks::free_since`].
    pub(super) fn free_since(&self, id: BlockId) -> u64 {
        self.free_since.get(id.0 as usize).copied().unwrap_or_default()
    }

    /// Notes when a block became free.
    pub(super) fn set_free_since(&mut self, id: BlockId, lookups: u64) {
        let slot = id.0 as usize;
        if slot >= self.free_since.len() {
            self.free_since.resize(slot + 1, 0);
        }
        self.free_since[slot] = lookups;
    }

    /// The segment that an address lies in, described: of an expandable one the mapped stretch around it. Linear in its blocks.
    pub(super) fn describe_at(&self, address: DevicePtr, label: impl Fn(LaneId) -> LaneLabel) -> Option<SegmentInfo> {
        let segment = self.segment(address.0)?;
        let around = |stretch: &SegmentInfo| stretch.address <= address && address < stretch.address.offset(stretch.size);
        self.stretches(segment.first, &label).into_iter().find(around)
    }

    /// All segments in address order: of an expandable one each mapped stretch for itself, as PyTorch's snapshots have it.
    pub(super) fn snapshot(&self, label: impl Fn(LaneId) -> LaneLabel) -> Vec<SegmentInfo> {
        let mut stretches = Vec::with_capacity(self.segments.len());
        self.segments.values().for_each(|segment| self.add_stretches(segment.first, &label, &mut stretches));
        stretches
    }

    /// The addresses of all expandable segments.
    pub(super) fn reservations(&self) -> Vec<MemoryRange> {
        let expandable = self.segments.values().filter(|segment| self[segment.first].expandable);
        expandable.map(|segment| MemoryRange::new(DevicePtr(self[segment.first].address), Bytes(segment.size))).collect()
    }

    /// The first block of the segment at the lowest address.
    pub(super) fn first_segment(&self) -> Option<BlockId> {
        self.segments.first_key_value().map(|(_, segment)| segment.first)
    }

    /// Forgets the segment that begins with a block, whatever is in it. Its blocks keep their slots.
    pub(super) fn forget_segment(&mut self, first: BlockId) {
        let address = self[first].address;
        self.segments.remove(&address);
    }

    /// A block and those behind it in its segment.
    pub(super) fn chain(&self, from: BlockId) -> impl Iterator<Item = BlockId> {
        std::iter::successors(Some(from), |&id| Some(self[id].next)).take_while(|id| !id.is_none())
    }

    fn stretches(&self, first: BlockId, label: &impl Fn(LaneId) -> LaneLabel) -> Vec<SegmentInfo> {
        let mut stretches = Vec::new();
        self.add_stretches(first, label, &mut stretches);
        stretches
    }

    fn add_stretches(&self, first: BlockId, label: &impl Fn(LaneId) -> LaneLabel, stretches: &mut Vec<SegmentInfo>) {
        // Most segments are one stretch.
        let mut most = self.chain(first).count();
        let mut joined = false;
        // Blocks side by side are mostly of one lane.
        let mut labelled = (self[first].lane, label(self[first].lane));
        for id in self.chain(first) {
            let block = &self[id];
            let (address, size) = (DevicePtr(block.address), Bytes(block.size));
            if block.lane != labelled.0 {
                labelled = (block.lane, label(block.lane));
            }
            let (stream, private_pool) = labelled.1;
            let state = match block.state {
                State::Unmapped | State::Vacant => None,
                State::Free => Some(BlockState::Inactive),
                State::PendingFree => Some(BlockState::PendingFree),
                State::Allocated => Some(BlockState::Allocated),
            };
            if state.is_some() && !joined {
                let (pool, expandable, whole) = (block.kind, block.expandable, Some(stream));
                let blocks = Vec::with_capacity(std::mem::take(&mut most));
                stretches.push(SegmentInfo { address, size: Bytes::ZERO, stream: whole, pool, private_pool, expandable, blocks });
            }
            joined = state.is_some();
            if let (Some(stretch), Some(state)) = (stretches.last_mut(), state) {
                stretch.size += size;
                stretch.blocks.push(BlockInfo { address, size, stream, requested: Bytes(block.requested), state });
            }
        }
    }
}
