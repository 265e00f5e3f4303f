//! PyTorch's caching allocator: memory is taken from the driver in segments, handed out in blocks, kept when it is freed, and given back
//! only when somebody asks or a request would fail otherwise.
//!
//! Words: a *segment* is one driver allocation, a chain of *blocks*; a *pool* (`pools`) keeps the free blocks of one size class; a block
//! used by several streams is freed by way of events (`uses`); memory goes back in `reclaim`; segments that grow and shrink
//! by pages are in `expandable`; sizes are computed in `config`;
//! `conf` reads the settings as PyTorch writes them.
//!
//! Behaves byte for byte like PyTorch 2.11 (`c10/cuda/CUDACachingAllocator.cpp` in <https://github.com/pytorch/pytorch>), which recorded
//! runs of it prove. The one deliberate difference, [`Quirks`], makes ours safe where PyTorch's is not.
//!
//! A cache hit touches no device and recomputes no statistic; it costs one search in an ordered index, logarithmic in the free blocks of
//! the pool. A free goes by handle and costs at most one search for each neighbour it merges with and one insertion.

mod bins;
mod blocks;
mod conf;
mod config;
mod counters;
mod expandable;
mod free_index;
mod ids;
mod pools;
mod reclaim;
mod released;
mod restore;
mod rules;
mod siblings;
mod uses;
mod without_device;

pub use conf::{ConfError, Excerpt, Setting};
pub use config::{Config, Quirks};
pub use restore::RestoreError;
pub(super) use siblings::{Siblings, StreamOrder};
pub(super) use without_device::Freed;

use self::blocks::{Block, Blocks, State};
use self::counters::Counters;
use self::free_index::Lane;
use self::ids::{BlockId, LaneId};
use self::pools::{PoolId, Pools};
use self::released::ReleasedStreams;
use self::rules::Rules;
use self::siblings::NoSiblings;
use self::uses::Uses;
use super::pending::PendingFrees;
use super::{
    Allocation, Allocator, AllocatorError, Handle, MemoryFraction, OomCause, OutOfMemory, PrivatePoolError, PrivatePoolId, PrivatePools,
    Request,
};
use crate::device::{Device, DeviceError, DevicePtr, MemoryRange, Place, StreamId};
use crate::stats::{MemoryStats, PoolKind, SegmentInfo};
use crate::units::Bytes;

/// PyTorch's caching allocator, for one host thread at a time. [`super::shared::SharedAllocator`] is for many.
#[derive(Clone, Debug)]
pub struct CachingAllocator {
    config: Config,
    rules: Rules,
    blocks: Blocks,
    pools: Pools,
    /// Which other streams use a live block.
    uses: Uses,
    /// Blocks that were freed while other streams used them.
    pending: PendingFrees<BlockId>,
    released_streams: ReleasedStreams,
    counters: Counters,
    /// What may be held from the driver at most. Kept as a share, so that the setting needs no device: the limit itself is computed where
    /// a segment is asked for, which no cache hit does.
    fraction: MemoryFraction,
}

/// What became of a block that was freed.
struct Merged {
    /// The block that it is part of now.
    block: BlockId,
    /// Free neighbours that it was merged with.
    neighbours: u64,
    bytes: u64,
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
            rules: Rules::new(&config),
            config,
            blocks: Blocks::default(),
            pools: Pools::default(),
            uses: Uses::default(),
            pending: PendingFrees::default(),
            released_streams: ReleasedStreams::default(),
            counters: Counters::default(),
        }
    }

    /// Whether nothing is held from the device.
    pub(super) fn holds_nothing(&self) -> bool {
        self.blocks.first_segment().is_none() && self.pending.is_empty()
    }

    /// Hands out a block for a request where other allocators of the same kind hold memory of the same device. A request for zero bytes gets
    /// slot 0, at the null address.
    #[inline(never)]
    fn serve(&mut self, device: &mut dyn Device, request: Request, siblings: &mut impl Siblings) -> Result<BlockId, Box<AllocatorError>> {
        if request.size == Bytes::ZERO {
            return Ok(BlockId::NONE);
        }
        if !self.pending.is_empty() && !self.pools.context_is_open() {
            self.poll_pending(device).map_err(|error| Box::new(error.into()))?;
        }
        let Some(size) = self.rules.round(&self.config, request.size.0) else {
            return Err(Box::new(too_large(device, request)));
        };
        let pool = self.pools.route(PoolKind::of_block(Bytes(size)));
        let lane = self.pools.lane(pool, request.stream);
        let block = match self.take_cached(pool, lane, size) {
            Some(block) => block,
            None => self.take_from_driver(device, lane, request, size, siblings).map_err(Box::new)?,
        };
        self.hand_out(block, lane, request.size.0, size);
        Ok(block)
    }

    /// [`Allocator::allocate`] where other allocators of the same kind hold memory of the same device.
    pub(super) fn allocate_with_siblings(
        &mut self,
        device: &mut dyn Device,
        request: Request,
        siblings: &mut impl Siblings,
    ) -> Result<Allocation, AllocatorError> {
        let id = self.serve(device, request, siblings).map_err(|error| *error)?;
        Ok(self.allocation(id, request))
    }

    /// What a request got.
    #[inline]
    fn allocation(&self, id: BlockId, request: Request) -> Allocation {
        let block = &self.blocks[id];
        Allocation::new(MemoryRange::new(DevicePtr(block.address), Bytes(block.size)), request, Handle::new(id.0))
    }

    /// A free block from the cache, taken out of its pool.
    #[inline(always)]
    fn take_cached(&mut self, pool: PoolId, lane: LaneId, size: u64) -> Option<BlockId> {
        if self.rules.ages && self.fraction < MemoryFraction::ALL {
            self.pools[pool].lookups += 1;
        }
        let free = self.pools.free_mut(lane);
        let best = free.best_fit(&self.blocks, size)?;
        // A best fit that cannot grow is the one to take: all that come later are as large or larger.
        if self.rules.expandable && self.blocks[self.blocks[best].next].state == State::Unmapped {
            return self.take_expandable(lane, best, size);
        }
        if !self.config.accepts(size, self.blocks[best].size) {
            return None;
        }
        free.remove(&mut self.blocks, best);
        Some(best)
    }

    /// The block to take where segments are expandable, given a best fit that lies in front of unmapped addresses. Such a block counts as large
    /// as it could grow, so it is passed over as long as the next larger one counts as strictly smaller.
    fn take_expandable(&mut self, lane: LaneId, mut best: BlockId, size: u64) -> Option<BlockId> {
        let mut passed = Vec::new();
        self.pools.free_mut(lane).remove(&mut self.blocks, best);
        // The next in order is the best fit once this one is away.
        while let Some(next) = self.pools.free(lane).best_fit(&self.blocks, self.blocks[best].size)
            && self.size_with_growth(next) < self.size_with_growth(best)
        {
            passed.push(best);
            self.pools.free_mut(lane).remove(&mut self.blocks, next);
            best = next;
        }
        let refused = !self.config.accepts(size, self.blocks[best].size);
        for free in passed.into_iter().chain(refused.then_some(best)) {
            self.pools.free_mut(lane).insert(&mut self.blocks, free);
        }
        (!refused).then_some(best)
    }

    /// The size of a free block with the unmapped addresses behind it, into which it can grow.
    fn size_with_growth(&self, free: BlockId) -> u64 {
        let Block { size, next, .. } = self.blocks[free];
        let behind = &self.blocks[next];
        if behind.state == State::Unmapped { size + behind.size } else { size }
    }

    /// A free block from the driver, giving cached memory back where that is what it takes.
    #[cold]
    fn take_from_driver(
        &mut self,
        device: &mut dyn Device,
        lane: LaneId,
        request: Request,
        size: u64,
        siblings: &mut dyn Siblings,
    ) -> Result<BlockId, AllocatorError> {
        let segment = self.config.segment_size(size).ok_or_else(|| too_large(device, request))?;
        self.collect_garbage(device)?;
        if let Some(block) = self.try_segment(device, lane, size, segment, siblings)? {
            return Ok(block);
        }
        if self.release_available(device, lane, size)?
            && let Some(block) = self.try_segment(device, lane, size, segment, siblings)?
        {
            return Ok(block);
        }
        if !self.pools.context_is_open() {
            self.release_all_cached(device, siblings)?;
            self.counters.num_alloc_retries += 1;
            if let Some(block) = self.try_segment(device, lane, size, segment, siblings)? {
                return Ok(block);
            }
        }
        Err(self.out_of_memory(device, lane, request, size, segment, siblings))
    }

    /// A block of at least `size` from a new segment, or from new pages of an expandable one; `None` where the limit or the driver says no.
    fn try_segment(
        &mut self,
        device: &mut dyn Device,
        lane: LaneId,
        size: u64,
        segment: u64,
        siblings: &dyn Siblings,
    ) -> Result<Option<BlockId>, DeviceError> {
        if self.exceeded_limit(device, segment, siblings).is_some() {
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
        self.pools.segment_added(lane);
        Ok(Some(self.blocks.add_segment(MemoryRange::new(address, Bytes(segment)), lane, kind, false)))
    }

    /// The limit in force, where that much more would exceed it.
    fn exceeded_limit(&self, device: &dyn Device, size: u64, siblings: &dyn Siblings) -> Option<Bytes> {
        let limit = self.fraction.limit(device.info().total)?;
        let reserved = self.counters.reserved_bytes.current() + siblings.reserved();
        reserved.checked_add(size).is_none_or(|total| total > limit.0).then_some(limit)
    }

    /// Kept out of the way of requests that are served.
    #[cold]
    #[inline(never)]
    fn out_of_memory(
        &mut self,
        device: &mut dyn Device,
        lane: LaneId,
        request: Request,
        size: u64,
        segment: u64,
        siblings: &dyn Siblings,
    ) -> AllocatorError {
        self.counters.num_ooms += 1;
        let cause = match self.exceeded_limit(device, segment, siblings) {
            Some(limit) => OomCause::Fraction { limit },
            None => match device.free_memory() {
                Ok(free) => OomCause::Device { free },
                Err(error) => return error.into(),
            },
        };
        let (lacking, asked) = if self.config.expandable_segments { self.missing_pages(lane, size) } else { (request.size.0, segment) };
        AllocatorError::OutOfMemory(Box::new(OutOfMemory {
            requested: request.size,
            lacking: Bytes(lacking),
            segment: Bytes(asked),
            cause,
            allocated: Bytes(self.counters.allocated_bytes() + siblings.allocated()),
            reserved: Bytes(self.counters.reserved_bytes.current() + siblings.reserved()),
            largest_free_block: Some(Bytes(self.pools.free(lane).largest(&self.blocks))),
            total: device.info().total,
        }))
    }

    /// Cuts a free block to size where the settings say so, and hands it out.
    #[inline(always)]
    fn hand_out(&mut self, id: BlockId, lane: LaneId, requested: u64, size: u64) {
        let block = &self.blocks[id];
        let (kind, available) = (block.kind, block.size);
        let (was_piece, counts_pieces) = (block.is_split(), !block.expandable);
        let rest = available - size;
        let charged = if self.rules.splits(kind, size, rest) {
            let id = self.blocks.split(id, size);
            self.put_into_pool(lane, id);
            if counts_pieces {
                self.counters.piece_was_cut(kind, was_piece, size, rest);
            }
            size
        } else {
            if counts_pieces && was_piece {
                self.counters.piece_was_taken(kind, available);
            }
            available
        };
        let block = &mut self.blocks[id];
        block.state = State::Allocated;
        block.requested = requested;
        self.counters.handed_out(kind, charged, requested);
    }

    /// Merges a block that nobody uses any more with its free neighbours and keeps it for reuse.
    #[inline(always)]
    fn make_reusable(&mut self, id: BlockId) {
        let Self { blocks, pools, counters, rules, .. } = self;
        let Block { size: own_size, lane, .. } = blocks[id];
        let now = if rules.ages { pools[pools.owner(lane).pool].lookups } else { 0 };
        let free = pools.free_mut(lane);
        let Merged { block: id, neighbours, bytes } = merge_free(blocks, free, id);
        let block = &blocks[id];
        if !block.expandable {
            if block.is_split() {
                counters.piece_was_freed(block.kind, neighbours, own_size);
            } else {
                counters.pieces_became_whole(block.kind, neighbours, bytes);
            }
        }
        if rules.ages {
            blocks.set_free_since(id, now);
        }
        free.insert(blocks, id);
    }

    #[inline(always)]
    fn put_into_pool(&mut self, lane: LaneId, id: BlockId) {
        if self.rules.ages {
            self.blocks.set_free_since(id, self.pools[self.pools.owner(lane).pool].lookups);
        }
        self.pools.free_mut(lane).insert(&mut self.blocks, id);
    }

    /// Finishes the frees whose events are complete by now.
    fn poll_pending(&mut self, device: &mut dyn Device) -> Result<(), DeviceError> {
        let (done, polled) = self.pending.poll(device);
        done.into_iter().for_each(|block| self.finish_wait(block));
        polled
    }

    /// Frees a block that other streams use too: it waits for an event of each.
    #[cold]
    fn free_shared(&mut self, device: &mut dyn Device, id: BlockId) -> Result<(), DeviceError> {
        let context_is_open = self.pools.context_is_open();
        let streams = self.uses.take(id, self.config.quirks, context_is_open);
        let block = &mut self.blocks[id];
        block.state = State::PendingFree;
        block.shared = false;
        self.counters.free_is_pending(block.kind, block.size);
        if context_is_open {
            self.pending.postpone(id, streams);
        } else if !self.pending.add(device, id, streams)? {
            self.finish_wait(id);
        }
        Ok(())
    }

    fn finish_wait(&mut self, id: BlockId) {
        let Block { kind, size, requested, .. } = self.blocks[id];
        self.counters.pending_free_is_done(kind, size, requested);
        self.make_reusable(id);
    }
}

/// Makes a block free, and one with its free neighbours, which leave their lane.
#[inline(always)]
fn merge_free(blocks: &mut Blocks, free: &mut Lane, id: BlockId) -> Merged {
    let block = &mut blocks[id];
    block.state = State::Free;
    let (previous, next) = (block.previous, block.next);
    let mut merged = Merged { block: id, neighbours: 0, bytes: 0 };
    if blocks[next].state == State::Free {
        merged.neighbours += 1;
        merged.bytes += blocks[next].size;
        free.remove(blocks, next);
        blocks.absorb_next(id);
    }
    if blocks[previous].state == State::Free {
        merged.neighbours += 1;
        merged.bytes += blocks[previous].size;
        free.remove(blocks, previous);
        merged.block = blocks.absorb_into_previous(id);
    }
    merged
}

#[cold]
fn too_large(device: &dyn Device, request: Request) -> AllocatorError {
    AllocatorError::TooLarge { requested: request.size, total: device.info().total }
}

/// The answer to a call about memory that is not handed out: an error, unless it is the null allocation.
#[cold]
fn not_live(allocation: &Allocation) -> Result<(), DeviceError> {
    if allocation.is_null() {
        return Ok(());
    }
    Err(DeviceError::InvalidFree { ptr: allocation.ptr(), place: Place::default() })
}

impl Allocator for CachingAllocator {
    fn name(&self) -> &'static str {
        if self.config.expandable_segments { "expandable" } else { "caching" }
    }

    fn reserve_unit(&self, device: &dyn Device) -> Bytes {
        if self.config.expandable_segments { Bytes(self.config.page(PoolKind::Large)) } else { device.info().granularity }
    }

    fn largest_request(&self, device: &dyn Device, free: Bytes) -> Bytes {
        let whole = match free.0 - free.0 % self.reserve_unit(device).0 {
            0 => None,
            units => Some(self.config.round_down(units)),
        };
        // Blocks below 10 MiB come in segments that are larger than they are, unless those grow by pages.
        let grows = |size| self.config.expandable_segments && PoolKind::of_block(Bytes(size)) == PoolKind::Large;
        let fits = |size: &u64| grows(*size) || self.config.segment_size(*size).is_some_and(|segment| segment <= free.0);
        Bytes(whole.into_iter().chain([PoolKind::LARGEST_SMALL.0]).find(fits).unwrap_or(0))
    }

    fn check_device(&self, device: &mut dyn Device) -> Result<(), DeviceError> {
        if self.config.expandable_segments { self.check_pages(device) } else { Ok(()) }
    }

    #[inline]
    fn allocate(&mut self, device: &mut dyn Device, request: Request) -> Result<Allocation, AllocatorError> {
        // What goes from one function to the other fits registers; the allocation is put together where the caller wants it. A copy of
        // it would cost as much as finding the block: loads that span recent stores wait for them.
        let id = self.serve(device, request, &mut NoSiblings).map_err(|error| *error)?;
        Ok(self.allocation(id, request))
    }

    #[inline]
    fn free(&mut self, device: &mut dyn Device, allocation: Allocation) -> Result<(), DeviceError> {
        let id = BlockId(allocation.handle().slot());
        let ours = |block: &&mut Block| block.address == allocation.ptr().0 && block.state == State::Allocated;
        let Some(block) = self.blocks.get_mut(id).filter(ours) else {
            return not_live(&allocation);
        };
        if block.shared {
            return self.free_shared(device, id);
        }
        self.counters.freed(block.kind, block.size, block.requested);
        self.make_reusable(id);
        Ok(())
    }

    fn record_stream(&mut self, allocation: &Allocation, stream: StreamId) -> Result<(), DeviceError> {
        let id = BlockId(allocation.handle().slot());
        let ours = |block: &&mut Block| block.address == allocation.ptr().0 && block.state == State::Allocated;
        let Some(block) = self.blocks.get_mut(id).filter(ours) else {
            return not_live(allocation);
        };
        if stream != allocation.stream() {
            block.shared = true;
            self.uses.record(id, stream, self.pools.context_is_open());
        }
        Ok(())
    }

    fn release_stream(&mut self, device: &mut dyn Device, stream: StreamId) -> Result<(), DeviceError> {
        self.release_lanes_of(device, stream)
    }

    fn empty_cache(&mut self, device: &mut dyn Device) -> Result<(), DeviceError> {
        self.release_all_cached(device, &mut NoSiblings)
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
        self.blocks.snapshot(|lane| self.pools.label(lane))
    }

    fn segment_at(&self, address: DevicePtr) -> Option<SegmentInfo> {
        self.blocks.describe_at(address, |lane| self.pools.label(lane))
    }

    fn private_pools(&mut self) -> Option<&mut dyn PrivatePools> {
        Some(self)
    }

    fn close(&mut self, device: &mut dyn Device) -> Result<(), DeviceError> {
        self.pending.close(device)?;
        self.uses.clear();
        if self.config.expandable_segments {
            // Unlike a device free, unmapping waits for nothing.
            device.synchronize()?;
        }
        while let Some(first) = self.blocks.first_segment() {
            if self.blocks[first].expandable {
                self.close_reservation(device, first)?;
            } else {
                device.free(DevicePtr(self.blocks[first].address))?;
            }
            self.blocks.forget_segment(first);
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
