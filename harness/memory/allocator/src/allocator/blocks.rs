//! Blocks and segments, for all allocators that cut driver allocations: slots with links to their
//! neighbors. A segment is a chain of blocks without gaps, in address order.
//!
//! A block fits one cache line, including its links in the free index. Slot 0 means "no neighbor",
//! so links can be followed and written without a check. Invariants: a block's address never
//! changes; when two blocks merge, the lower one remains; slot 0 and all vacant slots have the
//! state [`State::Vacant`].

use std::collections::BTreeMap;

use super::bins::Bin;
use super::ids::{BlockId, StreamPoolId};
use crate::device::{DevicePtr, MemoryRange, StreamId};
use crate::stats::{BlockInfo, BlockState, PoolKind, SegmentInfo};
use crate::units::Bytes;

/// The smallest block of PyTorch and the unit of its sizes: `kMinBlockSize`.
pub(super) const BLOCK_UNIT: u64 = 512;

/// The unit of chunk sizes and addresses: CUDA's guaranteed alignment, and that of most modeled
/// allocators (`kMinAllocationSize` of TensorFlow, `CUDA_ALLOCATION_ALIGNMENT` of RMM).
pub(super) const CHUNK_UNIT: Bytes = Bytes(256);

/// The order of free blocks of one size.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum TieOrder {
    #[default]
    Address,
    /// By number. Every new block gets the next number. A split makes a new block of the front
    /// part; merged blocks get the number of the block that is freed.
    Block,
    /// By the number of the segment, then by address. Every new segment gets the next number.
    Segment,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum State {
    Vacant,
    /// Addresses of an expandable segment without mapped memory.
    Unmapped,
    Free,
    PendingFree,
    Allocated,
}

/// A part of a segment. It fits one cache line.
#[derive(Clone, Copy, Debug)]
#[repr(align(64))]
pub(super) struct Block {
    pub(super) address: u64,
    pub(super) size: u64,
    /// Its position among free blocks of its size, by [`TieOrder`].
    pub(super) rank: u64,
    /// The requested bytes. A free block keeps those of its last request.
    pub(super) requested: u64,
    pub(super) previous: BlockId,
    pub(super) next: BlockId,
    /// Its links in the free index.
    pub(super) heap: HeapLinks,
    /// Its pool and stream. It is not next to `next`, which is copied with it: one load of both
    /// would wait for an earlier store of one.
    pub(super) stream_pool: StreamPoolId,
    pub(super) kind: PoolKind,
    pub(super) state: State,
    pub(super) expandable: bool,
    /// True if other streams use it. [`super::caching`] knows the streams.
    pub(super) shared: bool,
}

/// The position of a free block in a heap. Only the free index uses it.
#[derive(Clone, Copy, Debug)]
pub(super) struct HeapLinks {
    pub(super) child: BlockId,
    /// For a root, the root of the next larger size in the same bin.
    pub(super) sibling: BlockId,
    /// The parent of a first child, the left sibling of another child, and nothing for a root.
    pub(super) previous: BlockId,
    pub(super) bin: Bin,
}

impl HeapLinks {
    /// A heap with one block.
    pub(super) const ALONE: Self = Self {
        child: BlockId::NONE,
        sibling: BlockId::NONE,
        previous: BlockId::NONE,
        bin: Bin::NONE,
    };
}

impl Block {
    const VACANT: Self = Self {
        address: 0,
        size: 0,
        rank: 0,
        requested: 0,
        previous: BlockId::NONE,
        next: BlockId::NONE,
        stream_pool: StreamPoolId(0),
        heap: HeapLinks::ALONE,
        kind: PoolKind::Small,
        state: State::Vacant,
        expandable: false,
        shared: false,
    };

    /// Returns true if it is only a part of its segment.
    #[inline]
    pub(super) fn is_split(&self) -> bool {
        self.previous.0 | self.next.0 != 0
    }
}

/// The stream and the private pool in a snapshot.
pub(super) type StreamPoolLabel = (StreamId, Option<u32>);

#[derive(Clone, Copy, Debug)]
struct Segment {
    first: BlockId,
    size: u64,
}

#[derive(Clone, Debug)]
pub(super) struct Blocks {
    blocks: Vec<Block>,
    /// The last vacated slot; [`Block::next`] links to the one before it.
    vacant: BlockId,
    /// Segments by their first address. Used at driver calls only.
    segments: BTreeMap<u64, Segment>,
    /// If ages matter: the pool's look-up count when each block became free, by slot. Garbage
    /// collection measures age in look-ups.
    free_since: Vec<u64>,
    ties: TieOrder,
    /// The last assigned number of a segment or block, whichever `ties` numbers.
    numbered: u64,
}

/// The low bits of a rank, if segments are numbered: the offset in the segment in units of
/// [`BLOCK_UNIT`]. The high bits are the segment's number.
const OFFSET_BITS: u32 = 36;

/// The slots. Code that changes several blocks borrows them once: through `&mut Blocks` the
/// compiler must reload their address after each store.
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
    pub(super) fn new(ties: TieOrder) -> Self {
        let blocks = vec![Block::VACANT];
        Self {
            blocks,
            vacant: BlockId::NONE,
            segments: BTreeMap::new(),
            free_since: Vec::new(),
            ties,
            numbered: 0,
        }
    }

    #[inline]
    pub(super) fn get_mut(&mut self, id: BlockId) -> Option<&mut Block> {
        self.blocks.get_mut(id.0 as usize)
    }

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

    /// Adds a segment of one block: free, or unmapped if the segment is expandable.
    pub(super) fn add_segment(
        &mut self,
        range: MemoryRange,
        stream_pool: StreamPoolId,
        kind: PoolKind,
        expandable: bool,
    ) -> BlockId {
        let (address, size) = (range.start.0, range.len.0);
        let first = self.slot();
        let state = if expandable {
            State::Unmapped
        } else {
            State::Free
        };
        let rank = match self.ties {
            TieOrder::Address => address / BLOCK_UNIT,
            TieOrder::Block => self.next_number(),
            TieOrder::Segment => self.next_number() << OFFSET_BITS,
        };
        self[first] = Block {
            address,
            size,
            rank,
            stream_pool,
            kind,
            state,
            expandable,
            ..Block::VACANT
        };
        self.segments.insert(address, Segment { first, size });
        first
    }

    #[cold]
    fn next_number(&mut self) -> u64 {
        self.numbered += 1;
        self.numbered
    }

    fn segment(&self, address: u64) -> Option<Segment> {
        self.segments
            .range(..=address)
            .next_back()
            .map(|(_, &segment)| segment)
    }

    pub(super) fn reservation(&self, block: BlockId) -> MemoryRange {
        let segment = self
            .segment(self[block].address)
            .expect("every block is in a segment");
        MemoryRange::new(DevicePtr(self[segment.first].address), Bytes(segment.size))
    }

    /// The mapped ranges of a segment, given its first block.
    pub(super) fn mapped_stretches(&self, first: BlockId) -> Vec<MemoryRange> {
        let stretches = self.stretches(first, &|_| (StreamId::DEFAULT, None));
        stretches
            .into_iter()
            .map(|stretch| MemoryRange::new(stretch.address, stretch.size))
            .collect()
    }

    /// Marks a range of a segment as unmapped. For `close` only: it does not check for live blocks.
    pub(super) fn note_unmapped(&mut self, first: BlockId, stretch: MemoryRange) {
        let within: Vec<BlockId> = self
            .chain(first)
            .filter(|&id| (stretch.start.0..stretch.end().0).contains(&self[id].address))
            .collect();
        within
            .into_iter()
            .for_each(|id| self[id].state = State::Unmapped);
    }

    /// Removes a segment with all its blocks, given the first one.
    pub(super) fn remove_segment(&mut self, first: BlockId) {
        self.forget_segment(first);
        let mut block = first;
        while !block.is_none() {
            let next = self[block].next;
            self.vacate(block);
            block = next;
        }
    }

    /// Splits an unused block after `size` bytes and returns the rest. Both parts keep the state
    /// and the requested bytes. If blocks are numbered, the front part gets a new number.
    #[inline(always)]
    pub(super) fn split(&mut self, front: BlockId, size: u64) -> BlockId {
        let rest = self.slot();
        let blocks = &mut self.blocks[..];
        let block = &mut blocks[front];
        debug_assert!(size < block.size, "both parts have bytes");
        let Block {
            address,
            rank,
            requested,
            stream_pool,
            kind,
            state,
            expandable,
            ..
        } = *block;
        let bytes = block.size - size;
        block.size = size;
        let next = std::mem::replace(&mut block.next, rest);
        blocks[next].previous = rest;
        let block = &mut blocks[rest];
        block.address = address + size;
        block.size = bytes;
        block.rank = rank + size / BLOCK_UNIT;
        block.requested = requested;
        block.previous = front;
        block.next = next;
        block.stream_pool = stream_pool;
        block.kind = kind;
        block.state = state;
        block.expandable = expandable;
        block.shared = false;
        if self.ties == TieOrder::Block {
            self[rest].rank = rank;
            let number = self.next_number();
            self[front].rank = number;
        }
        rest
    }

    /// As [`Self::split`], but if blocks are numbered, the rest gets the new number.
    pub(super) fn split_off(&mut self, front: BlockId, size: u64) -> BlockId {
        let rest = self.split(front, size);
        if self.ties == TieOrder::Block {
            let (newest, older) = (self[front].rank, self[rest].rank);
            self[front].rank = older;
            self[rest].rank = newest;
        }
        rest
    }

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

    /// Merges a block with its previous neighbor in the same state. The result has the requested
    /// bytes of `block`, and its number if blocks are numbered.
    #[inline(always)]
    pub(super) fn absorb_into_previous(&mut self, block: BlockId) -> BlockId {
        let Block {
            previous,
            requested,
            rank,
            ..
        } = self[block];
        self.absorb_next(previous);
        self[previous].requested = requested;
        if self.ties == TieOrder::Block {
            self[previous].rank = rank;
        }
        previous
    }

    pub(super) fn free_since(&self, id: BlockId) -> u64 {
        self.free_since
            .get(id.0 as usize)
            .copied()
            .unwrap_or_default()
    }

    pub(super) fn set_free_since(&mut self, id: BlockId, lookups: u64) {
        let slot = id.0 as usize;
        if slot >= self.free_since.len() {
            self.free_since.resize(slot + 1, 0);
        }
        self.free_since[slot] = lookups;
    }

    /// Describes the segment that contains an address; for an expandable one, the mapped range
    /// around it. Linear in its blocks.
    pub(super) fn describe_at(
        &self,
        address: DevicePtr,
        label: impl Fn(StreamPoolId) -> StreamPoolLabel,
    ) -> Option<SegmentInfo> {
        let segment = self.segment(address.0)?;
        let around = |stretch: &SegmentInfo| {
            stretch.address <= address && address < stretch.address.offset(stretch.size)
        };
        self.stretches(segment.first, &label)
            .into_iter()
            .find(around)
    }

    /// Describes all segments in address order; for an expandable one, each mapped range
    /// separately, as in PyTorch's snapshots.
    pub(super) fn snapshot(
        &self,
        label: impl Fn(StreamPoolId) -> StreamPoolLabel,
    ) -> Vec<SegmentInfo> {
        let mut stretches = Vec::with_capacity(self.segments.len());
        self.segments
            .values()
            .for_each(|segment| self.add_stretches(segment.first, &label, &mut stretches));
        stretches
    }

    pub(super) fn reservations(&self) -> Vec<MemoryRange> {
        let expandable = self
            .segments
            .values()
            .filter(|segment| self[segment.first].expandable);
        expandable
            .map(|segment| {
                MemoryRange::new(DevicePtr(self[segment.first].address), Bytes(segment.size))
            })
            .collect()
    }

    /// The first block and the size of each segment, in address order.
    pub(super) fn segments(&self) -> impl Iterator<Item = (BlockId, u64)> {
        (self.segments.values()).map(|segment| (segment.first, segment.size))
    }

    /// The block that begins at an address. Linear in the blocks of its segment.
    pub(super) fn at(&self, address: u64) -> Option<BlockId> {
        self.chain(self.segment(address)?.first)
            .find(|&id| self[id].address == address)
    }

    pub(super) fn first_segment(&self) -> Option<BlockId> {
        self.segments
            .first_key_value()
            .map(|(_, segment)| segment.first)
    }

    /// Removes a segment with all its blocks, whose slots are not reused.
    pub(super) fn forget_segment(&mut self, first: BlockId) {
        let address = self[first].address;
        self.segments.remove(&address);
    }

    /// A block and the later ones of its segment.
    pub(super) fn chain(&self, from: BlockId) -> impl Iterator<Item = BlockId> {
        std::iter::successors(Some(from), |&id| Some(self[id].next)).take_while(|id| !id.is_none())
    }

    fn stretches(
        &self,
        first: BlockId,
        label: &impl Fn(StreamPoolId) -> StreamPoolLabel,
    ) -> Vec<SegmentInfo> {
        let mut stretches = Vec::new();
        self.add_stretches(first, label, &mut stretches);
        stretches
    }

    fn add_stretches(
        &self,
        first: BlockId,
        label: &impl Fn(StreamPoolId) -> StreamPoolLabel,
        stretches: &mut Vec<SegmentInfo>,
    ) {
        // Most segments are one range.
        let mut most = self.chain(first).count();
        let mut joined = false;
        // Adjacent blocks usually belong to one stream and pool.
        let mut labelled = (self[first].stream_pool, label(self[first].stream_pool));
        for id in self.chain(first) {
            let block = &self[id];
            let (address, size) = (DevicePtr(block.address), Bytes(block.size));
            if block.stream_pool != labelled.0 {
                labelled = (block.stream_pool, label(block.stream_pool));
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
                stretches.push(SegmentInfo {
                    address,
                    size: Bytes::ZERO,
                    stream: whole,
                    pool,
                    private_pool,
                    expandable,
                    blocks,
                });
            }
            joined = state.is_some();
            if let (Some(stretch), Some(state)) = (stretches.last_mut(), state) {
                stretch.size += size;
                stretch.blocks.push(BlockInfo {
                    address,
                    size,
                    stream,
                    requested: Bytes(block.requested),
                    state,
                });
            }
        }
    }
}
