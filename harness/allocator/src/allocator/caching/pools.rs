//! Pools: the free blocks of one size class and one owner, ordered for best fit; and the private pools of callers.

use std::collections::BTreeSet;

use super::blocks::BlockId;
use crate::allocator::{PrivatePoolError, PrivatePoolId};
use crate::device::StreamId;
use crate::stats::PoolKind;

/// A pool's place in the table of pools.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct PoolId(u32);

/// Free blocks, ordered by stream, then size, then address: the first block of a stream that is large enough is the best fit, and among
/// equals the one at the lowest address.
#[derive(Debug, Default)]
pub(super) struct FreeIndex(BTreeSet<FreeBlock>);

/// A free block as the index orders it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct FreeBlock {
    pub(super) stream: StreamId,
    pub(super) size: u64,
    pub(super) address: u64,
    pub(super) id: BlockId,
}

impl FreeIndex {
    /// Adds a block. Logarithmic in free blocks.
    pub(super) fn insert(&mut self, block: FreeBlock) {
        let new = self.0.insert(block);
        debug_assert!(new, "a block becomes free once");
    }

    /// Removes a block. Logarithmic in free blocks.
    pub(super) fn remove(&mut self, block: &FreeBlock) {
        let was_there = self.0.remove(block);
        debug_assert!(was_there, "a block that is not free cannot be taken");
    }

    /// The blocks of the stream with at least that size, the best fit first. Logarithmic in free blocks for the first.
    pub(super) fn fitting(&self, stream: StreamId, size: u64) -> impl Iterator<Item = FreeBlock> {
        let from = FreeBlock { stream, size, address: 0, id: BlockId(0) };
        self.0.range(from..).take_while(move |block| block.stream == stream).copied()
    }

    /// The stream's blocks from the largest down.
    pub(super) fn largest_first(&self, stream: StreamId) -> impl Iterator<Item = FreeBlock> {
        let from = FreeBlock { stream, size: 0, address: 0, id: BlockId(0) };
        let to = FreeBlock { stream, size: u64::MAX, address: u64::MAX, id: BlockId(u32::MAX) };
        self.0.range(from..=to).rev().copied()
    }

    /// All blocks in order.
    pub(super) fn iter(&self) -> impl Iterator<Item = FreeBlock> {
        self.0.iter().copied()
    }
}

/// One size class of one owner.
#[derive(Debug)]
pub(super) struct Pool {
    pub(super) kind: PoolKind,
    pub(super) owner: Option<PrivatePoolId>,
    pub(super) free: FreeIndex,
    /// Unmapped blocks of expandable segments, by stream and address.
    pub(super) unmapped: BTreeSet<(StreamId, u64, BlockId)>,
    /// Look-ups so far, hit or miss: the clock of garbage collection.
    pub(super) lookups: u64,
}

/// All pools, the default ones always first, and the private ones by owner.
#[derive(Debug)]
pub(super) struct Pools {
    pools: Vec<Pool>,
    /// Indices of pairs that a released owner left behind.
    vacant: Vec<u32>,
    private: Vec<PrivatePool>,
    /// Open contexts, the innermost last.
    open: Vec<PrivatePoolId>,
}

/// A caller's own pools.
#[derive(Clone, Copy, Debug)]
struct PrivatePool {
    id: PrivatePoolId,
    small: PoolId,
    large: PoolId,
    /// Segments held from the driver.
    segments: u64,
    /// Whether its owner has let go.
    released: bool,
}

impl Default for Pools {
    fn default() -> Self {
        let mut pools = Self { pools: Vec::new(), vacant: Vec::new(), private: Vec::new(), open: Vec::new() };
        pools.add_pair(None);
        pools
    }
}

impl std::ops::Index<PoolId> for Pools {
    type Output = Pool;
    fn index(&self, id: PoolId) -> &Pool {
        &self.pools[id.0 as usize]
    }
}

impl std::ops::IndexMut<PoolId> for Pools {
    fn index_mut(&mut self, id: PoolId) -> &mut Pool {
        &mut self.pools[id.0 as usize]
    }
}

impl Pools {
    /// The default pool of small blocks.
    pub(super) const SMALL: PoolId = PoolId(0);
    /// The default pool of large blocks.
    pub(super) const LARGE: PoolId = PoolId(1);

    /// Where a request of that rounded size goes: to the innermost open private pool, else to the default one.
    pub(super) fn route(&self, kind: PoolKind) -> PoolId {
        let (small, large) = match self.open.last() {
            None => (Self::SMALL, Self::LARGE),
            Some(&id) => {
                let private = self.private.iter().find(|private| private.id == id).expect("an open pool exists");
                (private.small, private.large)
            }
        };
        match kind {
            PoolKind::Small => small,
            PoolKind::Large => large,
        }
    }

    /// Whether any private pool's context is open.
    pub(super) fn context_is_open(&self) -> bool {
        !self.open.is_empty()
    }

    /// Opens a context, making the pool on first use.
    pub(super) fn begin(&mut self, id: PrivatePoolId) -> Result<(), PrivatePoolError> {
        if self.open.contains(&id) {
            return Err(PrivatePoolError::AlreadyOpen(id));
        }
        match self.private.iter().find(|private| private.id == id) {
            Some(private) if private.released => return Err(PrivatePoolError::Unknown(id)),
            Some(_) => {}
            None => {
                let (small, large) = self.add_pair(Some(id));
                self.private.push(PrivatePool { id, small, large, segments: 0, released: false });
            }
        }
        self.open.push(id);
        Ok(())
    }

    /// Closes a context.
    pub(super) fn end(&mut self, id: PrivatePoolId) -> Result<(), PrivatePoolError> {
        let position = self.open.iter().rposition(|&open| open == id).ok_or(PrivatePoolError::NotOpen(id))?;
        self.open.remove(position);
        Ok(())
    }

    /// Marks a pool as given up by its owner.
    pub(super) fn release(&mut self, id: PrivatePoolId) -> Result<(), PrivatePoolError> {
        if self.context_is_open() {
            return Err(PrivatePoolError::ContextOpen(id));
        }
        let private = self.private.iter_mut().find(|private| private.id == id && !private.released);
        private.ok_or(PrivatePoolError::Unknown(id))?.released = true;
        Ok(())
    }

    /// The pools whose owners have let go, each with its small and large pool.
    pub(super) fn released(&self) -> Vec<(PrivatePoolId, [PoolId; 2])> {
        self.private.iter().filter(|private| private.released).map(|private| (private.id, [private.small, private.large])).collect()
    }

    /// Forgets released pools that hold nothing any more.
    pub(super) fn forget_empty(&mut self) {
        let gone = |private: &PrivatePool| private.released && private.segments == 0;
        self.vacant.extend(self.private.iter().filter(|private| gone(private)).map(|private| private.small.0));
        self.private.retain(|private| !gone(private));
    }

    /// Counts a segment that a pool got from the driver.
    pub(super) fn segment_added(&mut self, pool: PoolId) {
        if let Some(private) = self.owner_mut(pool) {
            private.segments += 1;
        }
    }

    /// Counts a segment that a pool gave back.
    pub(super) fn segment_removed(&mut self, pool: PoolId) {
        if let Some(private) = self.owner_mut(pool) {
            private.segments -= 1;
        }
    }

    /// What a snapshot says of a pool.
    pub(super) fn describe(&self, pool: PoolId) -> (PoolKind, Option<u32>) {
        (self[pool].kind, self[pool].owner.map(|owner| owner.0))
    }

    fn owner_mut(&mut self, pool: PoolId) -> Option<&mut PrivatePool> {
        let owner = self[pool].owner?;
        // The pools of a released owner may coexist with none of the same number: numbers are not reused.
        self.private.iter_mut().find(|private| private.id == owner)
    }

    fn add_pair(&mut self, owner: Option<PrivatePoolId>) -> (PoolId, PoolId) {
        let make = |kind| Pool { kind, owner, free: FreeIndex::default(), unmapped: BTreeSet::new(), lookups: 0 };
        let small = self.vacant.pop().unwrap_or(self.pools.len() as u32);
        if small as usize == self.pools.len() {
            self.pools.push(make(PoolKind::Small));
            self.pools.push(make(PoolKind::Large));
        } else {
            self.pools[small as usize] = make(PoolKind::Small);
            self.pools[small as usize + 1] = make(PoolKind::Large);
        }
        (PoolId(small), PoolId(small + 1))
    }
}
