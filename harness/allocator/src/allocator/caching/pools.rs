//! Pools: the free blocks of one size class and one owner, in lanes by stream; and the private pools of callers.

use std::collections::{BTreeMap, BTreeSet};

use super::blocks::{Blocks, LaneLabel};
use super::free_index::Lane;
use super::ids::{BlockId, LaneId};
use crate::allocator::{PrivatePoolError, PrivatePoolId};
use crate::device::StreamId;
use crate::stats::PoolKind;

/// A pool's place in the table of pools.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct PoolId(u32);

/// The lanes of streams with a smaller number stand in a list by that number. Devices number streams from 0, so larger numbers are rare.
const LISTED_STREAMS: usize = 1 << 16;

/// One size class of one owner.
#[derive(Clone, Debug)]
pub(super) struct Pool {
    pub(super) kind: PoolKind,
    pub(super) owner: Option<PrivatePoolId>,
    /// Unmapped blocks of expandable segments, by stream and address.
    pub(super) unmapped: BTreeSet<(StreamId, u64, BlockId)>,
    /// Look-ups so far, hit or miss: the clock of garbage collection.
    pub(super) lookups: u64,
    /// The lanes of streams below [`LISTED_STREAMS`], by stream number; as long as the highest number seen.
    by_number: Vec<Option<LaneId>>,
    lanes: BTreeMap<StreamId, LaneId>,
}

/// What a lane belongs to.
#[derive(Clone, Copy, Debug)]
pub(super) struct LaneOwner {
    pub(super) pool: PoolId,
    pub(super) stream: StreamId,
    /// Segments held from the driver.
    segments: u32,
}

/// Lanes ever made, and those that belong to a stream now.
#[cfg(test)]
#[derive(Debug)]
pub(super) struct LaneCounts {
    pub(super) made: usize,
    pub(super) in_use: usize,
}

/// All pools, the default ones always first, and the private ones by owner.
#[derive(Clone, Debug)]
pub(super) struct Pools {
    pools: Vec<Pool>,
    /// Indices of pairs that a released owner left behind.
    vacant: Vec<u32>,
    /// The free blocks, by lane.
    free: Vec<Lane>,
    owners: Vec<LaneOwner>,
    /// Empty lanes that a released owner left behind.
    vacant_lanes: Vec<LaneId>,
    private: Vec<PrivatePool>,
    /// Open contexts, the innermost last.
    open: Vec<PrivatePoolId>,
    /// Where requests go, by kind: to the innermost open private pool, else to the default one.
    route: [PoolId; 2],
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
        let mut pools = Self {
            pools: Vec::new(),
            vacant: Vec::new(),
            free: Vec::new(),
            owners: Vec::new(),
            vacant_lanes: Vec::new(),
            private: Vec::new(),
            open: Vec::new(),
            route: [Self::SMALL, Self::LARGE],
        };
        pools.add_pair(None);
        pools
    }
}

impl std::ops::Index<PoolId> for Pools {
    type Output = Pool;
    #[inline]
    fn index(&self, id: PoolId) -> &Pool {
        &self.pools[id.0 as usize]
    }
}

impl std::ops::IndexMut<PoolId> for Pools {
    #[inline]
    fn index_mut(&mut self, id: PoolId) -> &mut Pool {
        &mut self.pools[id.0 as usize]
    }
}

impl Pools {
    /// The default pool of small blocks.
    pub(super) const SMALL: PoolId = PoolId(0);
    /// The default pool of large blocks.
    pub(super) const LARGE: PoolId = PoolId(1);

    /// Where a request goes: to the innermost open private pool, else to the default one.
    #[inline]
    pub(super) fn route(&self, kind: PoolKind) -> PoolId {
        self.route[kind as usize]
    }

    /// Follows the contexts that are open now.
    fn reroute(&mut self) {
        let private = self.open.last().map(|&id| self.private.iter().find(|private| private.id == id).expect("an open pool exists"));
        self.route = private.map_or([Self::SMALL, Self::LARGE], |private| [private.small, private.large]);
    }

    /// The lane of a pool and a stream, made on first use.
    #[inline]
    pub(super) fn lane(&mut self, pool: PoolId, stream: StreamId) -> LaneId {
        let lane = self[pool].by_number.get(stream.0 as usize).copied().flatten();
        lane.unwrap_or_else(|| self.find_lane(pool, stream))
    }

    #[cold]
    fn find_lane(&mut self, pool: PoolId, stream: StreamId) -> LaneId {
        if let Some(&lane) = self[pool].lanes.get(&stream) {
            return lane;
        }
        let owner = LaneOwner { pool, stream, segments: 0 };
        let lane = match self.vacant_lanes.pop() {
            Some(lane) => {
                self.owners[lane.0 as usize] = owner;
                lane
            }
            None => {
                self.owners.push(owner);
                self.free.push(Lane::default());
                LaneId(self.free.len() as u32 - 1)
            }
        };
        let pool = &mut self[pool];
        pool.lanes.insert(stream, lane);
        let number = stream.0 as usize;
        if number < LISTED_STREAMS {
            pool.by_number.resize(pool.by_number.len().max(number + 1), None);
            pool.by_number[number] = Some(lane);
        }
        lane
    }

    /// The free blocks of a lane.
    #[inline]
    pub(super) fn free(&self, lane: LaneId) -> &Lane {
        &self.free[lane.0 as usize]
    }

    /// The free blocks of a lane, to change them.
    #[inline]
    pub(super) fn free_mut(&mut self, lane: LaneId) -> &mut Lane {
        &mut self.free[lane.0 as usize]
    }

    /// What a lane belongs to.
    #[inline]
    pub(super) fn owner(&self, lane: LaneId) -> LaneOwner {
        self.owners[lane.0 as usize]
    }

    /// The free blocks of a pool by stream, size and address. Sorts them: for rare use.
    pub(super) fn free_blocks(&self, blocks: &Blocks, pool: PoolId) -> Vec<BlockId> {
        self[pool].lanes.values().flat_map(|&lane| self.free(lane).in_order(blocks)).collect()
    }

    /// Whether any private pool's context is open.
    #[inline]
    pub(super) fn context_is_open(&self) -> bool {
        !self.open.is_empty()
    }

    /// One of the pools of a caller, made on first use.
    pub(super) fn private(&mut self, id: PrivatePoolId, kind: PoolKind) -> PoolId {
        let known = self.private.iter().find(|private| private.id == id).copied();
        let PrivatePool { small, large, .. } = known.unwrap_or_else(|| {
            let (small, large) = self.add_pair(Some(id));
            let made = PrivatePool { id, small, large, segments: 0, released: false };
            self.private.push(made);
            made
        });
        [small, large][kind as usize]
    }

    /// Opens a context, making the pool on first use.
    pub(super) fn begin(&mut self, id: PrivatePoolId) -> Result<(), PrivatePoolError> {
        if self.open.contains(&id) {
            return Err(PrivatePoolError::AlreadyOpen(id));
        }
        if self.private.iter().any(|private| private.id == id && private.released) {
            return Err(PrivatePoolError::Unknown(id));
        }
        self.private(id, PoolKind::Small);
        self.open.push(id);
        self.reroute();
        Ok(())
    }

    /// Closes a context.
    pub(super) fn end(&mut self, id: PrivatePoolId) -> Result<(), PrivatePoolError> {
        let position = self.open.iter().rposition(|&open| open == id).ok_or(PrivatePoolError::NotOpen(id))?;
        self.open.remove(position);
        self.reroute();
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
        for private in self.private.iter().filter(|private| gone(private)) {
            self.vacant.push(private.small.0);
            for pool in [private.small, private.large] {
                let lanes = std::mem::take(&mut self.pools[pool.0 as usize].lanes);
                self.vacant_lanes.extend(lanes.into_values());
            }
        }
        self.private.retain(|private| !gone(private));
    }

    /// Counts a segment that a lane got from the driver.
    pub(super) fn segment_added(&mut self, lane: LaneId) {
        self.owners[lane.0 as usize].segments += 1;
        if let Some(private) = self.owner_mut(self.owner(lane).pool) {
            private.segments += 1;
        }
    }

    /// Counts a segment that a lane gave back.
    pub(super) fn segment_removed(&mut self, lane: LaneId) {
        self.owners[lane.0 as usize].segments -= 1;
        if let Some(private) = self.owner_mut(self.owner(lane).pool) {
            private.segments -= 1;
        }
    }

    /// The lanes of a stream, in all pools.
    pub(super) fn lanes_of(&self, stream: StreamId) -> Vec<LaneId> {
        self.pools.iter().filter_map(|pool| pool.lanes.get(&stream).copied()).collect()
    }

    /// Removes the lanes of a stream that hold no segment, for other streams to use. Says whether those were all.
    pub(super) fn remove_empty_lanes(&mut self, stream: StreamId) -> bool {
        let mut all = true;
        for lane in self.lanes_of(stream) {
            let LaneOwner { pool, segments, .. } = self.owner(lane);
            if segments > 0 {
                all = false;
                continue;
            }
            let pool = &mut self[pool];
            pool.lanes.remove(&stream);
            if let Some(entry) = pool.by_number.get_mut(stream.0 as usize) {
                *entry = None;
            }
            self.vacant_lanes.push(lane);
        }
        all
    }

    /// How many lanes there are.
    #[cfg(test)]
    pub(super) fn lanes(&self) -> LaneCounts {
        LaneCounts { made: self.free.len(), in_use: self.free.len() - self.vacant_lanes.len() }
    }

    /// What a snapshot says of a lane.
    pub(super) fn label(&self, lane: LaneId) -> LaneLabel {
        let LaneOwner { pool, stream, .. } = self.owner(lane);
        (stream, self[pool].owner.map(|owner| owner.0))
    }

    fn owner_mut(&mut self, pool: PoolId) -> Option<&mut PrivatePool> {
        let owner = self[pool].owner?;
        // The pools of a released owner may coexist with none of the same number: numbers are not reused.
        self.private.iter_mut().find(|private| private.id == owner)
    }

    fn add_pair(&mut self, owner: Option<PrivatePoolId>) -> (PoolId, PoolId) {
        let make = |kind| {
            let (by_number, lanes) = (Vec::new(), BTreeMap::new());
            Pool { kind, owner, unmapped: BTreeSet::new(), lookups: 0, by_number, lanes }
        };
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
