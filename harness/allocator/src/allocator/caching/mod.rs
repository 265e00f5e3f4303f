//! PyTorch's caching allocator: memory is taken from the driver in segments, handed out in blocks, kept when it is freed, and given back
//! only when somebody asks or a request would fail otherwise.
//!
//! Words: a *segment* is one driver allocation, a chain of *blocks*; a *pool* (`pools`) keeps the free blocks of one size class; a block
//! used by several streams is freed by way of events (`deferred`); memory goes back in `reclaim`; segments that grow and shrink
//! by pages are in `expandable`; sizes are computed in `config`;
//! `conf` reads the settings as PyTorch writes them.
//!
//! Behaves byte for byte like PyTorch 2.11 (`c10/cuda/CUDACachingAllocator.cpp` in <https://github.com/pytorch/pytorch>), which recorded
//! runs of it prove. The one deliberate difference, [`Quirks`], makes ours safe where PyTorch's is not.
//!
//! A cache hit touches no device and recomputes no statistic; it costs one search in an ordered index, logarithmic in the free blocks of
//! the pool. A free goes by handle and costs at most one search for each neighbour it merges with and one insertion.

mod blocks;
mod conf;
mod config;
mod deferred;
mod expandable;
mod pools;
mod reclaim;

pub use conf::{ConfError, Excerpt};
pub use config::{Config, Quirks};

use self::blocks::{BlockId, Blocks};
use self::deferred::DeferredFrees;
use self::pools::{FreeBlock, PoolId, Pools};
use super::{
    Allocation, Allocator, AllocatorError, Handle, MemoryFraction, OomCause, OutOfMemory, PrivatePoolError, PrivatePoolId, PrivatePools,
    Request,
};
use crate::device::{Device, DeviceError, DevicePtr, MemoryRange, Place, StreamId};
use crate::stats::{BlockState, MemoryStats, PoolKind, SegmentInfo};
use crate::units::Bytes;

/// See the module.
#[derive(Debug)]
pub struct CachingAllocator {
    config: Config,
    blocks: Blocks,
    pools: Pools,
    deferred: DeferredFrees,
    stats: MemoryStats,
    /// What may be held from the driver at most. Kept as a share, so that the setting needs no device: the limit itself is computed where
    /// a segment is asked for, which no cache hit does.
    fraction: MemoryFraction,
}

impl Default for CachingAllocator {
    /// An empty allocator with PyTorch's own settings.
    fn default() -> Self {
        Self::new(Config::default())
    }
}

impl CachingAllocator {
    /// An empty allocator with these settings.
    #[must_use]
    pub fn new(config: Config) -> Self {
        Self {
            fraction: config.memory_fraction,
            config,
            blocks: Blocks::default(),
            pools: Pools::default(),
            deferred: DeferredFrees::default(),
            stats: MemoryStats::default(),
        }
    }

    /// A free block from the cache, taken out of its pool.
    fn take_cached(&mut self, pool: PoolId, stream: StreamId, size: u64) -> Option<BlockId> {
        let garbage_collection = self.fraction < MemoryFraction::ALL && self.config.garbage_collection_threshold.is_some();
        let pool = &mut self.pools[pool];
        if garbage_collection {
            pool.lookups += 1;
        }
        let found = if self.config.expandable_segments {
            best_to_expand(pool.free.fitting(stream, size), &self.blocks)?
        } else {
            pool.free.fitting(stream, size).next()?
        };
        if !self.config.accepts(size, found.size) {
            return None;
        }
        pool.free.remove(&found);
        Some(found.id)
    }

    /// A free block from the driver, giving cached memory back where that is what it takes.
    fn take_from_driver(&mut self, device: &mut dyn Device, pool: PoolId, request: Request, size: u64) -> Result<BlockId, AllocatorError> {
        let too_large = || AllocatorError::TooLarge { requested: request.size, total: device.info().total };
        let segment = self.config.segment_size(size).ok_or_else(too_large)?;
        self.collect_garbage(device)?;
        if let Some(block) = self.try_segment(device, pool, request.stream, size, segment)? {
            return Ok(block);
        }
        if self.release_available(device, pool, request.stream, size)?
            && let Some(block) = self.try_segment(device, pool, request.stream, size, segment)?
        {
            return Ok(block);
        }
        if !self.pools.context_is_open() {
            self.release_all_cached(device)?;
            self.stats.num_alloc_retries += 1;
            if let Some(block) = self.try_segment(device, pool, request.stream, size, segment)? {
                return Ok(block);
            }
        }
        Err(self.out_of_memory(device, pool, request, segment))
    }

    /// A block of at least `size` from a new segment, or from new pages of an expandable one; `None` where the limit or the driver says no.
    fn try_segment(
        &mut self,
        device: &mut dyn Device,
        pool: PoolId,
        stream: StreamId,
        size: u64,
        segment: u64,
    ) -> Result<Option<BlockId>, DeviceError> {
        if self.exceeded_limit(device, segment).is_some() {
            return Ok(None);
        }
        if self.config.expandable_segments {
            return self.try_expand(device, pool, stream, size);
        }
        let address = match device.malloc(Bytes(segment)) {
            Ok(address) => address,
            Err(error) if error.is_out_of_memory() => return Ok(None),
            Err(error) => return Err(error),
        };
        let kind = self.pools[pool].kind;
        self.stats.reserved_bytes.increase(kind, segment);
        self.stats.segment.increase(kind, 1);
        self.stats.num_device_alloc += 1;
        self.pools.segment_added(pool);
        Ok(Some(self.blocks.add_segment(MemoryRange::new(address, Bytes(segment)), pool, stream)))
    }

    /// The limit in force, where that much more would exceed it.
    fn exceeded_limit(&self, device: &dyn Device, size: u64) -> Option<Bytes> {
        let reserved = self.stats.reserved_bytes.all.current;
        let limit = self.fraction.limit(device.info().total)?;
        reserved.checked_add(size).is_none_or(|total| total > limit.0).then_some(limit)
    }

    fn out_of_memory(&mut self, device: &mut dyn Device, pool: PoolId, request: Request, segment: u64) -> AllocatorError {
        self.stats.num_ooms += 1;
        let cause = match self.exceeded_limit(device, segment) {
            Some(limit) => OomCause::Fraction { limit },
            None => match device.memory() {
                Ok(memory) => OomCause::Device { free: memory.free },
                Err(error) => return error.into(),
            },
        };
        let largest = self.pools[pool].free.largest_first(request.stream).next();
        AllocatorError::OutOfMemory(Box::new(OutOfMemory {
            requested: request.size,
            segment: Bytes(segment),
            cause,
            allocated: Bytes(self.stats.allocated_bytes.all.current),
            reserved: Bytes(self.stats.reserved_bytes.all.current),
            largest_free_block: Bytes(largest.map_or(0, |block| block.size)),
            total: device.info().total,
        }))
    }

    /// Cuts a free block to size where that is worth it, and hands it out.
    fn hand_out(&mut self, found: BlockId, request: Request, size: u64) -> Allocation {
        let block = &self.blocks[found];
        let (pool, available, was_split) = (block.pool, block.size, block.is_split());
        // Nothing in an expandable segment is counted as inactive split: its free pages can go back.
        let counts = !self.blocks.is_expandable(found);
        let kind = self.pools[pool].kind;
        let taken = if self.config.splits(kind, size, available - size) {
            let front = self.blocks.split_front(found, size);
            self.put_into_pool(found);
            match (counts, was_split) {
                (false, _) => {}
                (true, true) => self.stats.inactive_split_bytes.decrease(kind, size),
                (true, false) => {
                    self.stats.inactive_split_bytes.increase(kind, available - size);
                    self.stats.inactive_split.increase(kind, 1);
                }
            }
            front
        } else {
            if counts && was_split {
                self.stats.inactive_split_bytes.decrease(kind, available);
                self.stats.inactive_split.decrease(kind, 1);
            }
            found
        };
        let block = &mut self.blocks[taken];
        block.state = BlockState::Allocated;
        block.requested = request.size.0;
        let range = MemoryRange::new(DevicePtr(block.address), Bytes(block.size));
        self.stats.allocation.increase(kind, 1);
        self.stats.allocated_bytes.increase(kind, range.len.0);
        self.stats.active.increase(kind, 1);
        self.stats.active_bytes.increase(kind, range.len.0);
        self.stats.requested_bytes.increase(kind, request.size.0);
        Allocation::new(range, request, Handle(taken.0))
    }

    /// Merges a block that nobody uses any more with its free neighbours and keeps it for reuse.
    fn make_reusable(&mut self, id: BlockId) {
        let block = &mut self.blocks[id];
        block.state = BlockState::Inactive;
        let (pool, size, requested) = (block.pool, block.size, block.requested);
        let kind = self.pools[pool].kind;
        let (mut merged_blocks, mut merged_bytes) = (0, 0);
        let (previous, next) = self.blocks.mergeable(id);
        if let Some(previous) = previous {
            merged_blocks += 1;
            merged_bytes += self.take_out_of_pool(previous);
            self.blocks.absorb_previous(id, previous);
        }
        if let Some(next) = next {
            merged_blocks += 1;
            merged_bytes += self.take_out_of_pool(next);
            self.blocks.absorb_next(id, next);
        }
        self.put_into_pool(id);
        if !self.blocks.is_expandable(id) {
            let block = &self.blocks[id];
            let (added_blocks, added_bytes) = if block.is_split() { (1, block.size) } else { (0, 0) };
            // One net change each, as PyTorch counts it: the sums of increases and decreases depend on that.
            change(&mut self.stats.inactive_split, kind, merged_blocks, added_blocks);
            change(&mut self.stats.inactive_split_bytes, kind, merged_bytes, added_bytes);
        }
        self.stats.active.decrease(kind, 1);
        self.stats.active_bytes.decrease(kind, size);
        self.stats.requested_bytes.decrease(kind, requested);
    }

    fn put_into_pool(&mut self, id: BlockId) {
        let block = &mut self.blocks[id];
        let pool = &mut self.pools[block.pool];
        block.free_since = pool.lookups;
        pool.free.insert(FreeBlock { stream: block.stream, size: block.size, address: block.address, id });
    }

    fn take_out_of_pool(&mut self, id: BlockId) -> u64 {
        let block = &self.blocks[id];
        let (pool, stream, size, address) = (block.pool, block.stream, block.size, block.address);
        self.pools[pool].free.remove(&FreeBlock { stream, size, address, id });
        size
    }

    /// Finishes the frees whose events are complete by now.
    fn poll_deferred(&mut self, device: &mut dyn Device) -> Result<(), DeviceError> {
        self.file_put_off(device)?;
        let mut stream = StreamId::DEFAULT;
        while let Some((polled, block)) = self.deferred.next_complete(device, stream)? {
            self.event_seen(block);
            stream = polled;
        }
        Ok(())
    }

    /// Records the events of frees that were put off while a pool context was open.
    fn file_put_off(&mut self, device: &mut dyn Device) -> Result<(), DeviceError> {
        for (id, events) in self.deferred.file_put_off(device, self.config.quirks)? {
            self.wait_for_events(id, events);
        }
        Ok(())
    }

    fn wait_for_events(&mut self, id: BlockId, events: u32) {
        self.blocks[id].shared = false;
        self.blocks[id].pending_events = events;
        if events == 0 {
            self.make_reusable(id);
        }
    }

    fn event_seen(&mut self, id: BlockId) {
        let block = &mut self.blocks[id];
        block.pending_events -= 1;
        if block.pending_events == 0 {
            self.make_reusable(id);
        }
    }
}

impl Allocator for CachingAllocator {
    fn name(&self) -> &'static str {
        "caching"
    }

    fn allocate(&mut self, device: &mut dyn Device, request: Request) -> Result<Allocation, AllocatorError> {
        if request.size == Bytes::ZERO {
            return Ok(Allocation::null(request));
        }
        if !self.deferred.is_empty() && !self.pools.context_is_open() {
            self.poll_deferred(device)?;
        }
        let Some(size) = self.config.round(request.size.0) else {
            return Err(AllocatorError::TooLarge { requested: request.size, total: device.info().total });
        };
        let pool = self.pools.route(PoolKind::of_block(Bytes(size)));
        let block = match self.take_cached(pool, request.stream, size) {
            Some(block) => block,
            None => self.take_from_driver(device, pool, request, size)?,
        };
        Ok(self.hand_out(block, request, size))
    }

    fn free(&mut self, device: &mut dyn Device, allocation: Allocation) -> Result<(), DeviceError> {
        if allocation.is_null() {
            return Ok(());
        }
        let id = BlockId(allocation.handle().0);
        let ours = |address, state| address == allocation.ptr().0 && state == BlockState::Allocated;
        if !self.blocks.get(id).is_some_and(|block| ours(block.address, block.state)) {
            return Err(DeviceError::InvalidFree { ptr: allocation.ptr(), place: Place::default() });
        }
        let block = &mut self.blocks[id];
        block.state = BlockState::PendingFree;
        let (kind, size, shared) = (self.pools[block.pool].kind, block.size, block.shared);
        self.stats.allocation.decrease(kind, 1);
        self.stats.allocated_bytes.decrease(kind, size);
        if !shared {
            self.make_reusable(id);
        } else if self.pools.context_is_open() {
            self.deferred.put_off(id);
        } else {
            match self.deferred.file(device, id) {
                Ok(events) => self.wait_for_events(id, events),
                Err(error) => {
                    // The next allocation tries again; until then nobody gets the block.
                    self.deferred.put_off(id);
                    return Err(error);
                }
            }
        }
        Ok(())
    }

    fn record_stream(&mut self, allocation: &Allocation, stream: StreamId) {
        if allocation.is_null() || stream == allocation.stream() {
            return;
        }
        let id = BlockId(allocation.handle().0);
        self.blocks[id].shared = true;
        self.deferred.record_use(id, stream, self.pools.context_is_open());
    }

    fn empty_cache(&mut self, device: &mut dyn Device) -> Result<(), DeviceError> {
        self.release_all_cached(device)
    }

    fn set_memory_fraction(&mut self, _device: &dyn Device, fraction: MemoryFraction) {
        self.fraction = fraction;
    }

    fn reset_peaks(&mut self) {
        self.stats.reset_peaks();
    }

    fn stats(&self) -> MemoryStats {
        self.stats
    }

    fn snapshot(&self) -> Vec<SegmentInfo> {
        self.blocks.snapshot(|pool| self.pools.describe(pool))
    }

    fn segment_at(&self, address: DevicePtr) -> Option<SegmentInfo> {
        self.blocks.describe_at(address, |pool| self.pools.describe(pool))
    }

    fn private_pools(&mut self) -> Option<&mut dyn PrivatePools> {
        Some(self)
    }

    fn close(&mut self, device: &mut dyn Device) -> Result<(), DeviceError> {
        self.deferred.close(device)?;
        for first in self.blocks.first_blocks() {
            if self.blocks.is_expandable(first) {
                self.close_reservation(device, first)?;
            } else {
                device.free(DevicePtr(self.blocks[first].address))?;
            }
        }
        *self = Self::new(self.config.clone());
        Ok(())
    }
}

impl PrivatePools for CachingAllocator {
    fn begin(&mut self, pool: PrivatePoolId) -> Result<(), PrivatePoolError> {
        self.pools.begin(pool)
    }

    fn end(&mut self, pool: PrivatePoolId) -> Result<(), PrivatePoolError> {
        self.pools.end(pool)
    }

    fn release(&mut self, device: &mut dyn Device, pool: PrivatePoolId) -> Result<(), PrivatePoolError> {
        self.pools.release(pool)?;
        Ok(self.release_private(device, pool)?)
    }
}

/// The block to take where segments are expandable. A block in front of unmapped addresses is worth what it could grow to, so it is passed
/// over as long as the next larger one is worth strictly less.
fn best_to_expand(mut fitting: impl Iterator<Item = FreeBlock>, blocks: &Blocks) -> Option<FreeBlock> {
    let worth = |block: &FreeBlock| {
        let behind = blocks[block.id].next.map(|next| &blocks[next]).filter(|next| !next.mapped);
        block.size + behind.map_or(0, |unmapped| unmapped.size)
    };
    let mut best = fitting.next()?;
    for next in fitting {
        if worth(&next) >= worth(&best) {
            break;
        }
        best = next;
    }
    Some(best)
}

/// One net change of a quantity from `before` to `after`.
fn change(stat: &mut crate::stats::PooledStat, pool: PoolKind, before: u64, after: u64) {
    match after.cmp(&before) {
        std::cmp::Ordering::Greater => stat.increase(pool, after - before),
        std::cmp::Ordering::Less => stat.decrease(pool, before - after),
        std::cmp::Ordering::Equal => {}
    }
}
