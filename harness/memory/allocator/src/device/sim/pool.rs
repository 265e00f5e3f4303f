//! A model of the driver's stream-ordered pools: [`PooledDevice`] for [`SimDevice`].
//!
//! It follows the CUDA documentation on the order of streams and on reuse. A pool above its
//! threshold "will try to release memory back to the OS on the next call to stream, event or
//! context synchronize". A trim keeps at least the given bytes. Memory whose free "has not been
//! observed on the host" counts as used (`cuMemPoolSetAttribute`, `cuMemPoolTrimTo`,
//! <https://docs.nvidia.com/cuda/cuda-driver-api/group__CUDA__MALLOC__ASYNC.html>).
//!
//! The rest is assumed: a pool grows by one contiguous chunk, a multiple of [`CHUNK`]; only whole
//! chunks are released; pieces are cut best fit, in multiples of [`ALIGNMENT`]; a pool that cannot
//! grow first releases its unused chunks. The last point models that the driver can "remap unused
//! memory in the pool"
//! (<https://developer.nvidia.com/blog/using-cuda-stream-ordered-memory-allocator-part-1/>).
//!
//! An allocation is not an access: any stream may touch memory that was never used. Reused memory
//! keeps its earlier accesses, so the race detector finds unordered reuse, including bugs of the
//! pool itself.

use std::collections::BTreeMap;

use super::addresses::{AddressOrder, Addresses, POOLS};
use super::allocations::{AllocationState, SimAllocation};
use super::races::{Races, Slot};
use super::{GRANULARITY, SimDevice, pieces::Pieces, refused};
use crate::device::{
    Access, AccessKind, DeviceError, DevicePtr, MemoryRange, PoolId, PoolMemory, PooledDevice,
    StreamId,
};
use crate::units::Bytes;

/// Pools grow by multiples of this. Assumed: no documentation gives the figure.
const CHUNK: Bytes = Bytes::mib(32);
/// The sizes of pieces are multiples of this. Assumed, as for PyTorch's blocks.
const ALIGNMENT: Bytes = Bytes(512);

#[derive(Clone, Debug)]
pub(super) struct SimPools {
    pools: BTreeMap<u32, Pool>,
    next_pool: u32,
    addresses: Addresses,
}

#[derive(Clone, Debug)]
struct Pool {
    threshold: Bytes,
    /// The most reserved bytes; zero for all.
    most: Bytes,
    chunks: BTreeMap<u64, Bytes>,
    pieces: Pieces,
    memory: PoolMemory,
}

impl SimPools {
    pub(super) fn new(order: AddressOrder) -> Self {
        let addresses = Addresses::new(POOLS, GRANULARITY, order);
        Self {
            pools: BTreeMap::new(),
            next_pool: 0,
            addresses,
        }
    }

    fn get(&mut self, pool: PoolId) -> Result<&mut Pool, DeviceError> {
        self.pools
            .get_mut(&pool.0)
            .ok_or(DeviceError::unknown_handle("pool", pool.0))
    }

    pub(super) fn count(&self) -> u64 {
        self.pools.len() as u64
    }
}

impl Pool {
    fn take(&mut self, size: Bytes, slot: Slot, races: &Races) -> Option<u64> {
        let start = self.pieces.take(size, slot, races)?;
        self.memory.used += size;
        self.memory.used_high = self.memory.used_high.max(self.memory.used);
        Some(start)
    }

    /// Removes unused chunks, the newest first, while `keep` bytes stay reserved.
    fn shrink(&mut self, keep: Bytes, races: &Races) -> Vec<MemoryRange> {
        self.pieces.settle(races);
        let unused = self
            .chunks
            .iter()
            .rev()
            .filter(|&(&start, &size)| self.pieces.is_unused(start, size));
        let candidates: Vec<_> = unused.map(|(&start, &size)| (start, size)).collect();
        let mut gone = Vec::new();
        for (start, size) in candidates {
            if self.memory.reserved.saturating_sub(size) >= keep {
                self.memory.reserved -= size;
                self.chunks.remove(&start);
                self.pieces.remove(start);
                gone.push(MemoryRange::new(DevicePtr(start), size));
            }
        }
        gone
    }
}

impl SimDevice {
    pub fn set_release_threshold(
        &mut self,
        pool: PoolId,
        threshold: Bytes,
    ) -> Result<(), DeviceError> {
        self.pools.get(pool)?.threshold = threshold;
        Ok(())
    }

    /// Limits the reserved bytes of a pool to a multiple of [`GRANULARITY`]. Zero is no limit.
    pub fn limit_pool(&mut self, pool: PoolId, most: Bytes) -> Result<(), DeviceError> {
        self.pools.get(pool)?.most = most.checked_round_up(GRANULARITY).unwrap_or_default();
        Ok(())
    }

    /// Makes the highest reserved bytes the current ones.
    pub fn reset_reserved_high(&mut self, pool: PoolId) -> Result<(), DeviceError> {
        let memory = &mut self.pools.get(pool)?.memory;
        memory.reserved_high = memory.reserved;
        Ok(())
    }

    /// Makes the highest used bytes the current ones.
    pub fn reset_used_high(&mut self, pool: PoolId) -> Result<(), DeviceError> {
        let memory = &mut self.pools.get(pool)?.memory;
        memory.used_high = memory.used;
        Ok(())
    }

    /// Releases the memory above the thresholds, after a wait of the host.
    pub(super) fn pools_release(&mut self) {
        let over: Vec<_> = self
            .pools
            .pools
            .iter()
            .filter(|(_, pool)| pool.memory.reserved > pool.threshold)
            .map(|(&n, _)| n)
            .collect();
        for number in over {
            if let Some(pool) = self.pools.pools.get_mut(&number) {
                let gone = pool.shrink(pool.threshold, &self.races);
                self.give_chunks_back(&gone);
            }
        }
    }

    fn give_chunks_back(&mut self, chunks: &[MemoryRange]) {
        for chunk in chunks {
            self.pools.addresses.give_back(chunk.start.0, chunk.len);
            self.charged -= chunk.len;
            self.contents.forget(*chunk);
            self.races.forget(*chunk);
            self.spend(self.config.cost.free_time(chunk.len));
        }
    }

    /// Adds a chunk for a piece of this size. Returns `false` if the device has too little memory
    /// or address space.
    fn grow_pool(&mut self, pool: PoolId, size: Bytes) -> Result<bool, DeviceError> {
        let free = self.free_bytes();
        let known = self.pools.get(pool)?;
        let room = match known.most {
            Bytes::ZERO => free,
            most => free.min(most.saturating_sub(known.memory.reserved)),
        };
        // Near its limit, a pool grows by less.
        let unit = if room < free { GRANULARITY } else { CHUNK };
        let chunk = size.checked_round_up(CHUNK).filter(|chunk| *chunk <= room);
        let chunk = chunk.or_else(|| size.checked_round_up(unit).filter(|chunk| *chunk <= room));
        let Some(chunk) = chunk else {
            return Ok(false);
        };
        let Some(start) = self.pools.addresses.take(chunk) else {
            return Ok(false);
        };
        self.spend(self.config.cost.malloc_time(chunk));
        self.charged += chunk;
        let pool = self.pools.get(pool)?;
        pool.chunks.insert(start, chunk);
        pool.pieces.add_chunk(start, chunk);
        pool.memory.reserved += chunk;
        pool.memory.reserved_high = pool.memory.reserved_high.max(pool.memory.reserved);
        Ok(true)
    }

    /// Allocates a piece of the pool, growing it if necessary.
    fn take_from_pool(
        &mut self,
        pool: PoolId,
        size: Bytes,
        slot: Slot,
    ) -> Result<Option<u64>, DeviceError> {
        let known = self.pools.get(pool)?;
        known.pieces.settle(&self.races);
        if let Some(start) = known.take(size, slot, &self.races) {
            return Ok(Some(start));
        }
        if !self.grow_pool(pool, size)? {
            let known = self.pools.get(pool)?;
            let gone = known.shrink(Bytes::ZERO, &self.races);
            self.give_chunks_back(&gone);
            if !self.grow_pool(pool, size)? {
                return Ok(None);
            }
        }
        Ok(self.pools.get(pool)?.take(size, slot, &self.races))
    }
}

impl PooledDevice for SimDevice {
    fn create_pool(&mut self, release_threshold: Bytes) -> Result<PoolId, DeviceError> {
        let number = self.pools.next_pool;
        self.pools.next_pool = number
            .checked_add(1)
            .ok_or_else(|| refused("create_pool", "all pool numbers are used"))?;
        let (chunks, pieces, memory) = (BTreeMap::new(), Pieces::default(), PoolMemory::default());
        self.pools.pools.insert(
            number,
            Pool {
                threshold: release_threshold,
                most: Bytes::ZERO,
                chunks,
                pieces,
                memory,
            },
        );
        Ok(PoolId(number))
    }

    fn destroy_pool(&mut self, pool: PoolId) -> Result<(), DeviceError> {
        self.pools.get(pool)?;
        if self
            .allocations
            .all_live()
            .any(|live| live.pool == Some(pool))
        {
            return Err(DeviceError::unknown_handle(
                "pool without allocations",
                pool.0,
            ));
        }
        self.wait_for_all();
        self.trim_pool(pool, Bytes::ZERO)?;
        self.pools.pools.remove(&pool.0);
        Ok(())
    }

    fn malloc_async(
        &mut self,
        pool: PoolId,
        size: Bytes,
        stream: StreamId,
    ) -> Result<DevicePtr, DeviceError> {
        self.calls.malloc_async += 1;
        let slot = self.stream(stream)?.slot;
        if size == Bytes::ZERO {
            return Err(refused("malloc_async", "request at least one byte"));
        }
        self.spend(self.config.cost.pool_call.value);
        let fitting = size
            .checked_round_up(ALIGNMENT)
            .map(|rounded| self.take_from_pool(pool, rounded, slot))
            .transpose()?;
        let Some(start) = fitting.flatten() else {
            self.pools.get(pool)?;
            return Err(DeviceError::OutOfMemory {
                requested: size,
                free: self.free_bytes(),
            });
        };
        let state = AllocationState::Live { made: self.place };
        self.allocations.add(
            start,
            SimAllocation {
                size,
                charged: size,
                pool: Some(pool),
                state,
            },
        );
        self.contents
            .forget(MemoryRange::new(DevicePtr(start), size));
        Ok(DevicePtr(start))
    }

    fn free_async(&mut self, ptr: DevicePtr, stream: StreamId) -> Result<(), DeviceError> {
        self.calls.free_async += 1;
        let (slot, place) = (self.stream(stream)?.slot, self.place);
        let SimAllocation { size, pool, .. } = *self.allocations.live(ptr, true, place)?;
        let tick = self.order(
            MemoryRange::new(ptr, size),
            Access {
                kind: AccessKind::Free,
                stream,
                place,
            },
        )?;
        self.spend(self.config.cost.pool_call.value);
        self.allocations.live(ptr, true, place)?.state = AllocationState::Freed { at: place };
        let Some(pool) = pool else { return Ok(()) };
        let pool = self.pools.get(pool)?;
        if let Some(size) = pool.pieces.give_back(ptr.0, slot, tick) {
            pool.memory.used -= size;
        }
        Ok(())
    }

    fn trim_pool(&mut self, pool: PoolId, keep: Bytes) -> Result<(), DeviceError> {
        let known = self.pools.get(pool)?;
        let gone = known.shrink(keep, &self.races);
        self.spend(self.config.cost.pool_call.value);
        self.give_chunks_back(&gone);
        Ok(())
    }

    fn pool_memory(&mut self, pool: PoolId) -> Result<PoolMemory, DeviceError> {
        Ok(self.pools.get(pool)?.memory)
    }
}
