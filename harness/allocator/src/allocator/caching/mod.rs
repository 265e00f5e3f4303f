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
mod counters;
mod deferred;
mod expandable;
mod free_index;
mod ids;
mod others;
mod pools;
mod reclaim;
mod unaided;

pub use conf::{ConfError, Excerpt, Setting};
pub use config::{Config, Quirks};
pub(super) use others::{Others, Side};
pub(super) use unaided::Freed;

use self::blocks::{Block, Blocks};
use self::counters::Counters;
use self::deferred::DeferredFrees;
use self::free_index::Free;
use self::ids::{BlockId, LaneId};
use self::others::Alone;
use self::pools::{PoolId, Pools};
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
    counters: Counters,
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
            counters: Counters::default(),
        }
    }

    /// Hands out memory where others of the same kind hold memory of the same device.
    #[inline]
    pub(super) fn allocate_among(
        &mut self,
        device: &mut dyn Device,
        request: Request,
        others: &mut dyn Others,
    ) -> Result<Allocation, AllocatorError> {
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
        let lane = self.pools.lane(pool, request.stream);
        let block = match self.take_cached(pool, lane, size) {
            Some(block) => block,
            None => self.take_from_driver(device, lane, request, size, others)?,
        };
        Ok(self.hand_out(block, request, size))
    }

    /// A free block from the cache, taken out of its pool.
    #[inline]
    fn take_cached(&mut self, pool: PoolId, lane: LaneId, size: u64) -> Option<BlockId> {
        if self.config.garbage_collection_threshold.is_some() && self.fraction < MemoryFraction::ALL {
            self.pools[pool].lookups += 1;
        }
        let best = self.pools.free.best_fit(lane, size)?;
        // Without unmapped addresses behind it a block is worth its size, and no later one is worth less.
        if self.config.expandable_segments && self.worth(best) != best.size {
            return self.take_growing(lane, best, size);
        }
        if !self.config.accepts(size, best.size) {
            return None;
        }
        self.pools.free.remove(lane, best.id);
        Some(best.id)
    }

    /// The block to take where segments are expandable, given a best fit that lies in front of unmapped addresses. Such a block is worth what
    /// it could grow to, so it is passed over as long as the next larger one is worth strictly less.
    fn take_growing(&mut self, lane: LaneId, mut best: Free, size: u64) -> Option<BlockId> {
        let mut passed = Vec::new();
        self.pools.free.remove(lane, best.id);
        // The next in order is the best fit once this one is away.
        while let Some(next) = self.pools.free.best_fit(lane, best.size).filter(|&next| self.worth(next) < self.worth(best)) {
            passed.push(best);
            self.pools.free.remove(lane, next.id);
            best = next;
        }
        let refused = !self.config.accepts(size, best.size);
        for free in passed.into_iter().chain(refused.then_some(best)) {
            self.pools.free.insert(lane, free);
        }
        (!refused).then_some(best.id)
    }

    /// What a block could grow to.
    #[inline]
    fn worth(&self, free: Free) -> u64 {
        let behind = self.blocks[free.id].next.get().map(|next| &self.blocks[next]).filter(|next| !next.mapped);
        free.size + behind.map_or(0, |unmapped| unmapped.size)
    }

    /// A free block from the driver, giving cached memory back where that is what it takes.
    #[cold]
    fn take_from_driver(
        &mut self,
        device: &mut dyn Device,
        lane: LaneId,
        request: Request,
        size: u64,
        others: &mut dyn Others,
    ) -> Result<BlockId, AllocatorError> {
        let too_large = || AllocatorError::TooLarge { requested: request.size, total: device.info().total };
        let segment = self.config.segment_size(size).ok_or_else(too_large)?;
        self.collect_garbage(device)?;
        if let Some(block) = self.try_segment(device, lane, size, segment, others)? {
            return Ok(block);
        }
        if self.release_available(device, lane, size)?
            && let Some(block) = self.try_segment(device, lane, size, segment, others)?
        {
            return Ok(block);
        }
        if !self.pools.context_is_open() {
            self.release_all_cached(device, others)?;
            self.counters.num_alloc_retries += 1;
            if let Some(block) = self.try_segment(device, lane, size, segment, others)? {
                return Ok(block);
            }
        }
        Err(self.out_of_memory(device, lane, request, segment, others))
    }

    /// A block of at least `size` from a new segment, or from new pages of an expandable one; `None` where the limit or the driver says no.
    fn try_segment(
        &mut self,
        device: &mut dyn Device,
        lane: LaneId,
        size: u64,
        segment: u64,
        others: &dyn Others,
    ) -> Result<Option<BlockId>, DeviceError> {
        if self.exceeded_limit(device, segment, others).is_some() {
            return Ok(None);
        }
        if self.config.expandable_segments {
            return self.try_expand(device, lane, size);
        }
        let address = match device.malloc(Bytes(segment)) {
            Ok(address) => address,
            Err(error) if error.is_out_of_memory() => return Ok(None),
            Err(error) => return Err(error),
        };
        let pool = self.pools.owner(lane).pool;
        let kind = self.pools[pool].kind;
        self.counters.reserved_bytes.increase(kind, segment);
        self.counters.segments.increase(kind, 1);
        self.counters.num_device_alloc += 1;
        self.pools.segment_added(pool);
        Ok(Some(self.blocks.add_segment(MemoryRange::new(address, Bytes(segment)), lane, kind, false)))
    }

    /// The limit in force, where that much more would exceed it.
    fn exceeded_limit(&self, device: &dyn Device, size: u64, others: &dyn Others) -> Option<Bytes> {
        let limit = self.fraction.limit(device.info().total)?;
        let reserved = self.counters.reserved_bytes.current() + others.reserved();
        reserved.checked_add(size).is_none_or(|total| total > limit.0).then_some(limit)
    }

    fn out_of_memory(
        &mut self,
        device: &mut dyn Device,
        lane: LaneId,
        request: Request,
        segment: u64,
        others: &dyn Others,
    ) -> AllocatorError {
        self.counters.num_ooms += 1;
        let cause = match self.exceeded_limit(device, segment, others) {
            Some(limit) => OomCause::Fraction { limit },
            None => match device.memory() {
                Ok(memory) => OomCause::Device { free: memory.free },
                Err(error) => return error.into(),
            },
        };
        AllocatorError::OutOfMemory(Box::new(OutOfMemory {
            requested: request.size,
            segment: Bytes(segment),
            cause,
            allocated: Bytes(self.counters.allocated_bytes() + others.allocated()),
            reserved: Bytes(self.counters.reserved_bytes.current() + others.reserved()),
            largest_free_block: Bytes(self.pools.free.largest(lane)),
            total: device.info().total,
        }))
    }

    /// Cuts a free block to size where that is worth it, and hands it out.
    #[inline]
    fn hand_out(&mut self, found: BlockId, request: Request, size: u64) -> Allocation {
        let Block { kind, size: available, address, expandable, .. } = self.blocks[found];
        let was_split = self.blocks[found].is_split();
        // Nothing in an expandable segment is counted as inactive split: its free pages can go back.
        let taken = if self.config.splits(kind, size, available - size) {
            let front = self.blocks.split_front(found, size);
            self.put_into_pool(found);
            if expandable {
            } else if was_split {
                self.counters.inactive_split_bytes.decrease(kind, size);
            } else {
                self.counters.inactive_split_bytes.increase(kind, available - size);
                self.counters.inactive_splits.increase(kind, 1);
            }
            front
        } else {
            if was_split && !expandable {
                self.counters.inactive_split_bytes.decrease(kind, available);
                self.counters.inactive_splits.decrease(kind, 1);
            }
            found
        };
        let block = &mut self.blocks[taken];
        block.state = BlockState::Allocated;
        block.requested = request.size.0;
        let range = MemoryRange::new(DevicePtr(address), Bytes(block.size));
        self.counters.handed_out(kind, range.len.0, request.size.0);
        Allocation::new(range, request, Handle(taken.0))
    }

    /// Merges a block that nobody uses any more with its free neighbours and keeps it for reuse.
    #[inline]
    fn make_reusable(&mut self, id: BlockId) {
        let block = &mut self.blocks[id];
        block.state = BlockState::Inactive;
        let Block { lane, kind, expandable, .. } = *block;
        let (mut merged_blocks, mut merged_bytes) = (0, 0);
        let (previous, next) = self.blocks.mergeable(id);
        if let Some(previous) = previous {
            merged_blocks += 1;
            merged_bytes += self.blocks[previous].size;
            self.pools.free.remove(lane, previous);
            self.blocks.absorb_previous(id, previous);
        }
        if let Some(next) = next {
            merged_blocks += 1;
            merged_bytes += self.blocks[next].size;
            self.pools.free.remove(lane, next);
            self.blocks.absorb_next(id, next);
        }
        self.put_into_pool(id);
        if !expandable {
            let block = &self.blocks[id];
            let (added_blocks, added_bytes) = if block.is_split() { (1, block.size) } else { (0, 0) };
            self.counters.inactive_splits.change(kind, merged_blocks, added_blocks);
            self.counters.inactive_split_bytes.change(kind, merged_bytes, added_bytes);
        }
    }

    #[inline]
    fn put_into_pool(&mut self, id: BlockId) {
        let block = &mut self.blocks[id];
        if self.config.garbage_collection_threshold.is_some() {
            block.free_since = self.pools[self.pools.owner(block.lane).pool].lookups;
        }
        self.pools.free.insert(block.lane, Free { id, size: block.size, address: block.address });
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
            self.finish_wait(id);
        }
    }

    fn event_seen(&mut self, id: BlockId) {
        let block = &mut self.blocks[id];
        block.pending_events -= 1;
        if block.pending_events == 0 {
            self.finish_wait(id);
        }
    }

    fn finish_wait(&mut self, id: BlockId) {
        let Block { kind, size, requested, .. } = self.blocks[id];
        self.counters.waited(kind, size, requested);
        self.make_reusable(id);
    }
}

impl Allocator for CachingAllocator {
    fn name(&self) -> &'static str {
        if self.config.expandable_segments { "expandable" } else { "caching" }
    }

    fn reserve_unit(&self, device: &dyn Device) -> Bytes {
        if self.config.expandable_segments { Bytes(self.config.page(PoolKind::Large)) } else { device.info().granularity }
    }

    fn largest_request(&self, device: &dyn Device, free: Bytes) -> Bytes {
        Bytes(self.config.round_down(free.0 - free.0 % self.reserve_unit(device).0))
    }

    fn allocate(&mut self, device: &mut dyn Device, request: Request) -> Result<Allocation, AllocatorError> {
        self.allocate_among(device, request, &mut Alone)
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
        let Block { kind, size, requested, shared, .. } = *block;
        if !shared {
            self.counters.freed(kind, size, requested);
            self.make_reusable(id);
            return Ok(());
        }
        block.state = BlockState::PendingFree;
        self.counters.put_to_wait(kind, size);
        if self.pools.context_is_open() {
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
        self.release_all_cached(device, &mut Alone)
    }

    fn set_memory_fraction(&mut self, _device: &dyn Device, fraction: MemoryFraction) {
        self.fraction = fraction;
    }

    fn reset_peaks(&mut self) {
        self.counters.reset_peaks();
    }

    fn stats(&self) -> MemoryStats {
        self.counters.stats()
    }

    fn snapshot(&self) -> Vec<SegmentInfo> {
        self.blocks.snapshot(|lane| self.pools.place(lane))
    }

    fn segment_at(&self, address: DevicePtr) -> Option<SegmentInfo> {
        self.blocks.describe_at(address, |lane| self.pools.place(lane))
    }

    fn private_pools(&mut self) -> Option<&mut dyn PrivatePools> {
        Some(self)
    }

    fn close(&mut self, device: &mut dyn Device) -> Result<(), DeviceError> {
        self.deferred.close(device)?;
        for first in self.blocks.first_blocks() {
            if self.blocks[first].expandable {
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
