//! Pools: the free blocks of one size class and one owner, in a stream pool per stream. Private
//! pools belong to the caller.

use std::collections::{BTreeMap, BTreeSet};

use super::FreeBlocks;
use super::torch::{TorchVersion, unsupported};
use crate::allocator::blocks::{Blocks, StreamPoolLabel};
use crate::allocator::ids::{BlockId, StreamPoolId};
use crate::allocator::{PrivatePoolError, PrivatePoolId};
use crate::device::{DeviceError, StreamId};
use crate::stats::PoolKind;

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct PoolId(u32);

/// Stream pools of streams below this number are in a list indexed by that number. Devices number
/// streams from 0, so larger numbers are rare.
const LISTED_STREAMS: usize = 1 << 16;

/// One size class of one owner.
#[derive(Clone, Debug)]
pub(super) struct Pool {
    pub(super) kind: PoolKind,
    pub(super) owner: Option<PrivatePoolId>,
    /// Unmapped blocks of expandable segments, by stream and address.
    pub(super) unmapped: BTreeSet<(StreamId, u64, BlockId)>,
    /// The number of look-ups, hits and misses: the clock of garbage collection.
    pub(super) lookups: u64,
    /// The stream pools of streams below [`LISTED_STREAMS`], by stream number.
    by_number: Vec<Option<StreamPoolId>>,
    stream_pools: BTreeMap<StreamId, StreamPoolId>,
}

#[derive(Clone, Copy, Debug)]
pub(super) struct StreamPool {
    pub(super) pool: PoolId,
    pub(super) stream: StreamId,
    segments: u32,
}

/// The number of stream pools ever made, and of those in use.
#[cfg(test)]
#[derive(Debug)]
pub(super) struct StreamPoolCounts {
    pub(super) made: usize,
    pub(super) in_use: usize,
}

/// All pools. The default ones come first.
#[derive(Clone, Debug, Default)]
pub(super) struct Pools {
    torch: TorchVersion,
    pools: Vec<Pool>,
    /// Indices of small pools, each with its large pool, of released private pools.
    vacant: Vec<u32>,
    free: Vec<FreeBlocks>,
    owners: Vec<StreamPool>,
    vacant_stream_pools: Vec<StreamPoolId>,
    private: Vec<PrivatePool>,
    /// Open contexts, the innermost last.
    open: Vec<PrivatePoolId>,
    /// The target of requests by kind: the open private pool that serves requests, or else the
    /// default one.
    route: [PoolId; 2],
}

#[derive(Clone, Copy, Debug)]
struct PrivatePool {
    id: PrivatePoolId,
    small: PoolId,
    large: PoolId,
    segments: u64,
    released: bool,
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
    pub(super) const SMALL: PoolId = PoolId(0);
    pub(super) const LARGE: PoolId = PoolId(1);

    pub(super) fn new(torch: TorchVersion) -> Self {
        let mut pools = Self {
            torch,
            route: [Self::SMALL, Self::LARGE],
            ..Self::default()
        };
        pools.add_pair(None);
        pools
    }

    #[inline]
    pub(super) fn route(&self, kind: PoolKind) -> PoolId {
        self.route[kind as usize]
    }

    /// Updates the route after a context was opened or closed.
    fn reroute(&mut self) {
        let serving = if self.torch.first_context_serves() {
            self.open.first()
        } else {
            self.open.last()
        };
        let private = serving.map(|&id| {
            self.private
                .iter()
                .find(|private| private.id == id)
                .expect("an open pool exists")
        });
        self.route = private.map_or([Self::SMALL, Self::LARGE], |private| {
            [private.small, private.large]
        });
    }

    /// The stream pool of a pool and a stream. It is made on first use.
    #[inline]
    pub(super) fn stream_pool(&mut self, pool: PoolId, stream: StreamId) -> StreamPoolId {
        let stream_pool = self[pool]
            .by_number
            .get(stream.0 as usize)
            .copied()
            .flatten();
        stream_pool.unwrap_or_else(|| self.find_stream_pool(pool, stream))
    }

    #[cold]
    fn find_stream_pool(&mut self, pool: PoolId, stream: StreamId) -> StreamPoolId {
        if let Some(&stream_pool) = self[pool].stream_pools.get(&stream) {
            return stream_pool;
        }
        let owner = StreamPool {
            pool,
            stream,
            segments: 0,
        };
        let stream_pool = match self.vacant_stream_pools.pop() {
            Some(stream_pool) => {
                self.owners[stream_pool.0 as usize] = owner;
                stream_pool
            }
            None => {
                self.owners.push(owner);
                self.free.push(FreeBlocks::default());
                StreamPoolId(self.free.len() as u32 - 1)
            }
        };
        let pool = &mut self[pool];
        pool.stream_pools.insert(stream, stream_pool);
        let number = stream.0 as usize;
        if number < LISTED_STREAMS {
            pool.by_number
                .resize(pool.by_number.len().max(number + 1), None);
            pool.by_number[number] = Some(stream_pool);
        }
        stream_pool
    }

    #[inline]
    pub(super) fn free(&self, stream_pool: StreamPoolId) -> &FreeBlocks {
        &self.free[stream_pool.0 as usize]
    }

    #[inline]
    pub(super) fn free_mut(&mut self, stream_pool: StreamPoolId) -> &mut FreeBlocks {
        &mut self.free[stream_pool.0 as usize]
    }

    #[inline]
    pub(super) fn owner(&self, stream_pool: StreamPoolId) -> StreamPool {
        self.owners[stream_pool.0 as usize]
    }

    /// The free blocks of a pool by stream, size and address. It sorts them, so it is for rare use.
    pub(super) fn free_blocks(&self, blocks: &Blocks, pool: PoolId) -> Vec<BlockId> {
        self[pool]
            .stream_pools
            .values()
            .flat_map(|&stream_pool| self.free(stream_pool).in_order(blocks))
            .collect()
    }

    /// Returns true if the context of a private pool is open and counts as a graph capture.
    #[inline]
    pub(super) fn is_capturing(&self) -> bool {
        !self.open.is_empty() && self.torch.contexts_are_captures()
    }

    /// Returns true if new segments of a stream pool may be expandable.
    /// Fails with [`DeviceError::Unavailable`] if this version of PyTorch refuses them.
    pub(super) fn may_expand(&self, stream_pool: StreamPoolId) -> Result<bool, DeviceError> {
        match self[self.owner(stream_pool).pool].owner {
            Some(_) if self.torch.refuses_expandable_pools() => Err(unsupported(
                self.torch,
                "expandable segments in a private pool",
                "refuses them",
            )),
            Some(_) => Ok(!self.torch.expands_only_default_pools()),
            None => Ok(true),
        }
    }

    /// One of the pools of a private pool, made on first use.
    pub(super) fn private(&mut self, id: PrivatePoolId, kind: PoolKind) -> PoolId {
        let known = self
            .private
            .iter()
            .find(|private| private.id == id)
            .copied();
        let PrivatePool { small, large, .. } = known.unwrap_or_else(|| {
            let (small, large) = self.add_pair(Some(id));
            let made = PrivatePool {
                id,
                small,
                large,
                segments: 0,
                released: false,
            };
            self.private.push(made);
            made
        });
        [small, large][kind as usize]
    }

    /// Opens a context. Makes the pool on first use.
    pub(super) fn begin(&mut self, id: PrivatePoolId) -> Result<(), PrivatePoolError> {
        if self.open.contains(&id) {
            return Err(PrivatePoolError::AlreadyOpen(id));
        }
        if self
            .private
            .iter()
            .any(|private| private.id == id && private.released)
        {
            return Err(PrivatePoolError::Unknown(id));
        }
        self.private(id, PoolKind::Small);
        self.open.push(id);
        self.reroute();
        Ok(())
    }

    pub(super) fn end(&mut self, id: PrivatePoolId) -> Result<(), PrivatePoolError> {
        let position = self
            .open
            .iter()
            .rposition(|&open| open == id)
            .ok_or(PrivatePoolError::NotOpen(id))?;
        self.open.remove(position);
        self.reroute();
        Ok(())
    }

    pub(super) fn release(&mut self, id: PrivatePoolId) -> Result<(), PrivatePoolError> {
        if self.is_capturing() || self.open.contains(&id) {
            return Err(PrivatePoolError::ContextOpen(id));
        }
        let private = self
            .private
            .iter_mut()
            .find(|private| private.id == id && !private.released);
        private.ok_or(PrivatePoolError::Unknown(id))?.released = true;
        Ok(())
    }

    /// The released private pools, each with its small and large pool.
    pub(super) fn released(&self) -> Vec<(PrivatePoolId, [PoolId; 2])> {
        self.private
            .iter()
            .filter(|private| private.released)
            .map(|private| (private.id, [private.small, private.large]))
            .collect()
    }

    /// Removes released pools without segments.
    pub(super) fn forget_empty(&mut self) {
        let gone = |private: &PrivatePool| private.released && private.segments == 0;
        for private in self.private.iter().filter(|private| gone(private)) {
            self.vacant.push(private.small.0);
            for pool in [private.small, private.large] {
                let stream_pools = std::mem::take(&mut self.pools[pool.0 as usize].stream_pools);
                self.vacant_stream_pools.extend(stream_pools.into_values());
            }
        }
        self.private.retain(|private| !gone(private));
    }

    pub(super) fn segment_added(&mut self, stream_pool: StreamPoolId) {
        self.owners[stream_pool.0 as usize].segments += 1;
        if let Some(private) = self.owner_mut(self.owner(stream_pool).pool) {
            private.segments += 1;
        }
    }

    pub(super) fn segment_removed(&mut self, stream_pool: StreamPoolId) {
        self.owners[stream_pool.0 as usize].segments -= 1;
        if let Some(private) = self.owner_mut(self.owner(stream_pool).pool) {
            private.segments -= 1;
        }
    }

    pub(super) fn stream_pools_of(&self, stream: StreamId) -> Vec<StreamPoolId> {
        self.pools
            .iter()
            .filter_map(|pool| pool.stream_pools.get(&stream).copied())
            .collect()
    }

    /// Removes a stream's stream pools without segments, for reuse by other streams. Returns
    /// whether that was all of them.
    pub(super) fn remove_empty_stream_pools(&mut self, stream: StreamId) -> bool {
        let mut all = true;
        for stream_pool in self.stream_pools_of(stream) {
            let StreamPool { pool, segments, .. } = self.owner(stream_pool);
            if segments > 0 {
                all = false;
                continue;
            }
            let pool = &mut self[pool];
            pool.stream_pools.remove(&stream);
            if let Some(entry) = pool.by_number.get_mut(stream.0 as usize) {
                *entry = None;
            }
            self.vacant_stream_pools.push(stream_pool);
        }
        all
    }

    #[cfg(test)]
    pub(super) fn stream_pools(&self) -> StreamPoolCounts {
        StreamPoolCounts {
            made: self.free.len(),
            in_use: self.free.len() - self.vacant_stream_pools.len(),
        }
    }

    pub(super) fn label(&self, stream_pool: StreamPoolId) -> StreamPoolLabel {
        let StreamPool { pool, stream, .. } = self.owner(stream_pool);
        (stream, self[pool].owner.map(|owner| owner.0))
    }

    fn owner_mut(&mut self, pool: PoolId) -> Option<&mut PrivatePool> {
        let owner = self[pool].owner?;
        // The number is unique, because callers never reuse numbers.
        self.private.iter_mut().find(|private| private.id == owner)
    }

    fn add_pair(&mut self, owner: Option<PrivatePoolId>) -> (PoolId, PoolId) {
        let make = |kind| {
            let (by_number, stream_pools) = (Vec::new(), BTreeMap::new());
            Pool {
                kind,
                owner,
                unmapped: BTreeSet::new(),
                lookups: 0,
                by_number,
                stream_pools,
            }
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
