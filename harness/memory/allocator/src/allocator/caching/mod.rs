//! PyTorch's caching allocator. It takes segments from the driver, allocates blocks from them, and
//! caches freed blocks. It returns memory to the driver only on request or if a request would
//! otherwise fail.
//!
//! A *segment* is one driver allocation, a chain of *blocks*. A *pool* (`pools`) has the free
//! blocks of one size class, by stream. `uses` tracks the streams of a block, and a block used by
//! several streams is freed after events on them. `reclaim` returns memory to the driver.
//! `expandable` has the segments that grow and shrink by pages. `config` computes sizes, and `conf`
//! parses PyTorch's settings.
//!
//! It behaves byte for byte like PyTorch 2.4 to 2.15 (`c10/cuda/CUDACachingAllocator.cpp` in
//! <https://github.com/pytorch/pytorch>), as [`TorchVersion`] says; tests replay recordings of
//! PyTorch. The one deliberate difference, [`Quirks`], makes this allocator safe where PyTorch's is
//! not.
//!
//! A cache hit calls no device and recomputes no statistic. It costs one search in an ordered
//! index, logarithmic in the free blocks of the pool. A free uses a handle. It costs at most one
//! search for each neighbor that it merges with, and one insertion.

mod conf;
mod config;
mod expandable;
mod pools;
mod reclaim;
mod released;
mod restore;
mod rules;
mod torch;
mod uses;

/// The free blocks of one pool and one stream.
type FreeBlocks = super::free_index::FreeBlocks<BLOCK_UNIT>;

pub use super::blocks::TieOrder;
pub use conf::{ConfError, ConfExcerpt, Setting};
pub use config::{Config, Quirks, SegmentReserve};
pub use restore::RestoreError;
pub use torch::{TorchVersion, TorchVersionError};

use self::pools::{PoolId, Pools};
use self::{released::ReleasedStreams, rules::Rules, uses::Uses};
use super::blocks::{BLOCK_UNIT, Block, Blocks, State};
use super::ids::{BlockId, StreamPoolId};
use super::{
    Allocation, Allocator, AllocatorError, Handle, MemoryFraction, OomCause, OutOfMemory,
    PrivatePoolError, PrivatePoolId, PrivatePools, Request, counters::Counters,
    pending::PendingFrees,
};
use crate::device::{CallSite, Device, DeviceError, DevicePtr, MemoryRange, StreamId};
use crate::stats::{MemoryStats, PoolKind, SegmentInfo};
use crate::units::Bytes;

/// PyTorch's caching allocator, for one host thread at a time. [`super::shared::SharedAllocator`]
/// is for several.
#[derive(Clone, Debug)]
pub struct CachingAllocator {
    config: Config,
    rules: Rules,
    blocks: Blocks,
    pools: Pools,
    uses: Uses,
    /// Blocks that were freed while other streams used them.
    pending: PendingFrees<BlockId>,
    released_streams: ReleasedStreams,
    counters: Counters,
    /// The limit on reserved memory, as a fraction, so the setting needs no device. The limit in
    /// bytes is computed for each new segment, but not for a cache hit.
    fraction: Option<MemoryFraction>,
}

/// A freed block after merging.
struct Merged {
    block: BlockId,
    /// The number of free neighbors merged into it.
    neighbours: u64,
    bytes: u64,
}

impl Default for CachingAllocator {
    fn default() -> Self {
        Self::new(Config::default())
    }
}

impl CachingAllocator {
    pub fn new(config: Config) -> Self {
        Self {
            fraction: Some(config.memory_fraction)
                .filter(|&fraction| fraction < MemoryFraction::ALL),
            rules: Rules::new(&config),
            blocks: Blocks::new(config.torch.ties()),
            pools: Pools::new(config.torch),
            config,
            uses: Uses::default(),
            pending: PendingFrees::default(),
            released_streams: ReleasedStreams::default(),
            counters: Counters::default(),
        }
    }

    /// Allocates a block for a request. A request for zero bytes gets slot 0, at the null address.
    #[inline(never)]
    fn serve(
        &mut self,
        device: &mut dyn Device,
        request: Request,
    ) -> Result<BlockId, Box<AllocatorError>> {
        if request.size == Bytes::ZERO {
            return Ok(BlockId::NONE);
        }
        if !self.pending.is_empty() && !self.pools.is_capturing() {
            self.poll_pending(device)
                .map_err(|error| Box::new(error.into()))?;
        }
        let Some(size) = self.rules.round(&self.config, request.size.0) else {
            return Err(Box::new(too_large(device, request)));
        };
        let pool = self.pools.route(PoolKind::of_block(Bytes(size)));
        let stream_pool = self.pools.stream_pool(pool, request.stream);
        let block = match self.take_cached(pool, stream_pool, size) {
            Some(block) => block,
            None => self
                .take_from_driver(device, stream_pool, request, size)
                .map_err(Box::new)?,
        };
        self.hand_out(block, stream_pool, request.size.0, size);
        Ok(block)
    }

    #[inline]
    fn allocation(&self, id: BlockId, request: Request) -> Allocation {
        let block = &self.blocks[id];
        Allocation::new(
            MemoryRange::new(DevicePtr(block.address), Bytes(block.size)),
            request,
            Handle::new(id.0),
        )
    }

    #[inline(always)]
    fn take_cached(
        &mut self,
        pool: PoolId,
        stream_pool: StreamPoolId,
        size: u64,
    ) -> Option<BlockId> {
        if self.rules.ages && self.fraction.is_some() {
            self.pools[pool].lookups += 1;
        }
        let free = self.pools.free_mut(stream_pool);
        let best = free.best_fit(&self.blocks, size)?;
        // Take a best fit that cannot grow: all later ones are as large or larger.
        if self.rules.expandable && self.blocks[self.blocks[best].next].state == State::Unmapped {
            return self.take_expandable(stream_pool, best, size);
        }
        if !self.config.accepts(size, self.blocks[best].size) {
            return None;
        }
        free.remove(&mut self.blocks, best);
        Some(best)
    }

    /// Chooses the block if segments are expandable and the best fit is followed by unmapped
    /// addresses. Such a block counts with its possible growth, so it is skipped while the next
    /// larger one counts as strictly smaller.
    fn take_expandable(
        &mut self,
        stream_pool: StreamPoolId,
        mut best: BlockId,
        size: u64,
    ) -> Option<BlockId> {
        let mut passed = Vec::new();
        self.pools
            .free_mut(stream_pool)
            .remove(&mut self.blocks, best);
        // After this removal the best fit is the next block in order.
        while let Some(next) = self
            .pools
            .free(stream_pool)
            .best_fit(&self.blocks, self.blocks[best].size)
            && self.size_with_growth(next) < self.size_with_growth(best)
        {
            passed.push(best);
            self.pools
                .free_mut(stream_pool)
                .remove(&mut self.blocks, next);
            best = next;
        }
        let refused = !self.config.accepts(size, self.blocks[best].size);
        for free in passed.into_iter().chain(refused.then_some(best)) {
            self.pools
                .free_mut(stream_pool)
                .insert(&mut self.blocks, free);
        }
        (!refused).then_some(best)
    }

    /// The size of a free block plus the unmapped addresses after it, into which it can grow.
    fn size_with_growth(&self, free: BlockId) -> u64 {
        let Block { size, next, .. } = self.blocks[free];
        let behind = &self.blocks[next];
        if behind.state == State::Unmapped {
            size + behind.size
        } else {
            size
        }
    }

    /// Gets a free block from the driver. Releases cached memory if necessary.
    #[cold]
    fn take_from_driver(
        &mut self,
        device: &mut dyn Device,
        stream_pool: StreamPoolId,
        request: Request,
        size: u64,
    ) -> Result<BlockId, AllocatorError> {
        let segment = self
            .config
            .segment_size(size)
            .ok_or_else(|| too_large(device, request))?;
        self.collect_garbage(device)?;
        if let Some(block) = self.try_segment(device, stream_pool, request, size, segment)? {
            return Ok(block);
        }
        if self.release_available(device, stream_pool, size)?
            && let Some(block) = self.try_segment(device, stream_pool, request, size, segment)?
        {
            return Ok(block);
        }
        if !self.pools.is_capturing() {
            self.release_all_cached(device)?;
            self.counters.num_alloc_retries += 1;
            if let Some(block) = self.try_segment(device, stream_pool, request, size, segment)? {
                return Ok(block);
            }
        }
        self.counters.num_ooms += 1;
        let limit = self
            .limit(device)
            .filter(|&limit| self.exceeds(Some(limit), segment));
        Err(self.out_of_memory(device, stream_pool, request, size, segment, limit))
    }

    /// Gets a block of at least `size` from a new segment or from new pages of an expandable one.
    /// Returns `None` if the limit or the driver refuses.
    fn try_segment(
        &mut self,
        device: &mut dyn Device,
        stream_pool: StreamPoolId,
        request: Request,
        size: u64,
        segment: u64,
    ) -> Result<Option<BlockId>, AllocatorError> {
        if self.exceeds(self.limit(device), segment) {
            return Ok(None);
        }
        if self.config.throw_on_malloc_oom {
            let limit = self.config.memory_fraction.of(device.info().total);
            if self.exceeds(Some(limit), segment) {
                return Err(self.out_of_memory(
                    device,
                    stream_pool,
                    request,
                    size,
                    segment,
                    Some(limit),
                ));
            }
        }
        if self.config.expandable_segments && self.pools.may_expand(stream_pool)? {
            return Ok(self.try_expand(device, stream_pool, size)?);
        }
        let address = match device.malloc(Bytes(segment)) {
            Ok(address) => address,
            Err(error) if error.is_out_of_memory() => return Ok(None),
            Err(error) => return Err(error.into()),
        };
        let pool = self.pools.owner(stream_pool).pool;
        let kind = self.pools[pool].kind;
        self.counters.reserved_bytes.increase(kind, segment);
        self.counters.segments.increase(kind, 1);
        self.counters.num_device_alloc += 1;
        self.pools.segment_added(stream_pool);
        Ok(Some(self.blocks.add_segment(
            MemoryRange::new(address, Bytes(segment)),
            stream_pool,
            kind,
            false,
        )))
    }

    fn limit(&self, device: &dyn Device) -> Option<Bytes> {
        self.fraction
            .map(|fraction| fraction.of(device.info().total))
    }

    /// Returns true if `size` more bytes would exceed a limit on reserved memory.
    fn exceeds(&self, limit: Option<Bytes>, size: u64) -> bool {
        let total = self.counters.reserved_bytes.current().checked_add(size);
        limit.is_some_and(|limit| total.is_none_or(|total| total > limit.0))
    }

    /// Kept out of the code for successful requests. `limit` is the limit that the segment would
    /// exceed.
    #[cold]
    #[inline(never)]
    fn out_of_memory(
        &self,
        device: &mut dyn Device,
        stream_pool: StreamPoolId,
        request: Request,
        size: u64,
        segment: u64,
        limit: Option<Bytes>,
    ) -> AllocatorError {
        let cause = match limit {
            Some(limit) => OomCause::Fraction { limit },
            None => match device.free_memory() {
                Ok(free) => OomCause::Device { free },
                Err(error) => return error.into(),
            },
        };
        let (missing, asked) = if self.config.expandable_segments {
            self.missing_pages(stream_pool, size)
        } else {
            (request.size.0, segment)
        };
        AllocatorError::OutOfMemory(Box::new(OutOfMemory {
            requested: request.size,
            missing: Bytes(missing),
            segment: Bytes(asked),
            cause,
            allocated: Bytes(self.counters.allocated_bytes()),
            reserved: Bytes(self.counters.reserved_bytes.current()),
            largest_free_block: Some(Bytes(self.pools.free(stream_pool).largest(&self.blocks))),
            total: device.info().total,
        }))
    }

    /// Splits a free block if the settings say so, and allocates it.
    #[inline(always)]
    fn hand_out(&mut self, id: BlockId, stream_pool: StreamPoolId, requested: u64, size: u64) {
        let block = &self.blocks[id];
        let (kind, available) = (block.kind, block.size);
        let (was_piece, counts_pieces) = (block.is_split(), !block.expandable);
        let rest = available - size;
        let charged = if self.rules.splits(kind, size, rest) {
            let id = self.blocks.split(id, size);
            self.put_into_pool(stream_pool, id);
            if counts_pieces {
                self.counters.piece_was_cut(kind, was_piece, size, rest);
            }
            size
        } else {
            if counts_pieces && was_piece {
                self.counters.pieces_are_gone(kind, 1, available);
            }
            available
        };
        let block = &mut self.blocks[id];
        block.state = State::Allocated;
        block.requested = requested;
        self.counters.handed_out(kind, charged, requested);
    }

    /// Merges an unused block with its free neighbors and caches it.
    #[inline(always)]
    fn make_reusable(&mut self, id: BlockId) {
        let Self {
            blocks,
            pools,
            counters,
            rules,
            ..
        } = self;
        let Block {
            size: own_size,
            stream_pool,
            ..
        } = blocks[id];
        let now = if rules.ages {
            pools[pools.owner(stream_pool).pool].lookups
        } else {
            0
        };
        let free = pools.free_mut(stream_pool);
        let Merged {
            block: id,
            neighbours,
            bytes,
        } = merge_free(blocks, free, id);
        let block = &blocks[id];
        if !block.expandable {
            if block.is_split() {
                counters.piece_was_freed(block.kind, neighbours, own_size);
            } else {
                counters.pieces_are_gone(block.kind, neighbours, bytes);
            }
        }
        if rules.ages {
            blocks.set_free_since(id, now);
        }
        free.insert(blocks, id);
    }

    #[inline(always)]
    fn put_into_pool(&mut self, stream_pool: StreamPoolId, id: BlockId) {
        if self.rules.ages {
            self.blocks
                .set_free_since(id, self.pools[self.pools.owner(stream_pool).pool].lookups);
        }
        self.pools
            .free_mut(stream_pool)
            .insert(&mut self.blocks, id);
    }

    /// Finishes the frees whose events are complete.
    fn poll_pending(&mut self, device: &mut dyn Device) -> Result<(), DeviceError> {
        let (done, polled) = self.pending.poll(device);
        done.into_iter().for_each(|block| self.finish_wait(block));
        polled
    }

    /// Frees a block that other streams use too. It waits for an event on each.
    #[cold]
    fn free_shared(&mut self, device: &mut dyn Device, id: BlockId) -> Result<(), DeviceError> {
        let context_is_open = self.pools.is_capturing();
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
        let Block {
            kind,
            size,
            requested,
            ..
        } = self.blocks[id];
        self.counters.pending_free_is_done(kind, size, requested);
        self.make_reusable(id);
    }
}

/// Marks a block as free and merges it with its free neighbors, which leave the index.
#[inline(always)]
fn merge_free(blocks: &mut Blocks, free: &mut FreeBlocks, id: BlockId) -> Merged {
    let block = &mut blocks[id];
    block.state = State::Free;
    let (previous, next) = (block.previous, block.next);
    let mut merged = Merged {
        block: id,
        neighbours: 0,
        bytes: 0,
    };
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
    AllocatorError::TooLarge {
        requested: request.size,
        total: device.info().total,
    }
}

/// The result of a call with an unknown allocation: an error, unless it is the null allocation.
#[cold]
fn not_live(allocation: &Allocation) -> Result<(), DeviceError> {
    if allocation.is_null() {
        return Ok(());
    }
    Err(DeviceError::InvalidFree {
        ptr: allocation.ptr(),
        place: CallSite::default(),
    })
}

impl Allocator for CachingAllocator {
    fn name(&self) -> &'static str {
        if self.config.expandable_segments {
            "expandable"
        } else {
            "caching"
        }
    }

    fn reserve_unit(&self, device: &dyn Device) -> Bytes {
        if self.config.expandable_segments {
            Bytes(self.config.page(PoolKind::Large))
        } else {
            device.info().granularity
        }
    }

    fn largest_request(&self, device: &dyn Device, free: Bytes) -> Bytes {
        let whole = match free.0 - free.0 % self.reserve_unit(device).0 {
            0 => None,
            units => Some(self.config.round_down(units)),
        };
        // Blocks below 10 MiB come in segments larger than themselves, unless the segments grow by
        // pages.
        let grows = |size| {
            self.config.expandable_segments && PoolKind::of_block(Bytes(size)) == PoolKind::Large
        };
        let fits = |size: &u64| {
            grows(*size)
                || self
                    .config
                    .segment_size(*size)
                    .is_some_and(|segment| segment <= free.0)
        };
        Bytes(
            whole
                .into_iter()
                .chain([PoolKind::LARGEST_SMALL.0])
                .find(fits)
                .unwrap_or(0),
        )
    }

    fn check_device(&self, device: &mut dyn Device) -> Result<(), DeviceError> {
        if self.config.expandable_segments {
            self.check_pages(device)
        } else {
            Ok(())
        }
    }

    #[inline]
    fn allocate(
        &mut self,
        device: &mut dyn Device,
        request: Request,
    ) -> Result<Allocation, AllocatorError> {
        // The data between these functions fits registers, and the allocation is built where the
        // caller needs it. Copying it would cost as much as finding the block, because loads that
        // span recent stores wait for them.
        let id = self.serve(device, request).map_err(|error| *error)?;
        Ok(self.allocation(id, request))
    }

    #[inline]
    fn free(&mut self, device: &mut dyn Device, allocation: Allocation) -> Result<(), DeviceError> {
        let id = BlockId(allocation.handle().slot());
        let ours = |block: &&mut Block| {
            block.address == allocation.ptr().0 && block.state == State::Allocated
        };
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

    fn record_stream(
        &mut self,
        allocation: &Allocation,
        stream: StreamId,
    ) -> Result<(), DeviceError> {
        let id = BlockId(allocation.handle().slot());
        let ours = |block: &&mut Block| {
            block.address == allocation.ptr().0 && block.state == State::Allocated
        };
        let Some(block) = self.blocks.get_mut(id).filter(ours) else {
            return not_live(allocation);
        };
        if stream != allocation.stream() {
            block.shared = true;
            self.uses.record(id, stream, self.pools.is_capturing());
        }
        Ok(())
    }

    fn release_stream(
        &mut self,
        device: &mut dyn Device,
        stream: StreamId,
    ) -> Result<(), DeviceError> {
        self.release_stream_pools_of(device, stream)
    }

    fn empty_cache(&mut self, device: &mut dyn Device) -> Result<(), DeviceError> {
        let torch = self.config.torch;
        if self.pools.is_capturing() {
            if torch.asserts_on_empty_cache_in_context() {
                return Err(torch::unsupported(
                    torch,
                    "empty_cache in the context of a private pool",
                    "fails in an assertion",
                ));
            }
            if torch.keeps_all_in_context() {
                return Ok(());
            }
        }
        self.release_all_cached(device)
    }

    fn set_memory_fraction(&mut self, _device: &dyn Device, fraction: MemoryFraction) {
        self.fraction = Some(fraction).filter(|&fraction| {
            fraction < MemoryFraction::ALL || self.config.torch.whole_fraction_limits()
        });
    }

    fn reset_peaks(&mut self) {
        self.counters.reset_peaks();
    }

    fn stats(&self) -> MemoryStats {
        self.counters.stats()
    }

    fn snapshot(&self) -> Vec<SegmentInfo> {
        self.blocks
            .snapshot(|stream_pool| self.pools.label(stream_pool))
    }

    fn segment_at(&self, address: DevicePtr) -> Option<SegmentInfo> {
        self.blocks
            .describe_at(address, |stream_pool| self.pools.label(stream_pool))
    }

    fn private_pools(&mut self) -> Option<&mut dyn PrivatePools> {
        Some(self)
    }

    fn close(&mut self, device: &mut dyn Device) -> Result<(), DeviceError> {
        self.pending.close(device)?;
        self.uses.clear();
        if self.config.expandable_segments {
            // Unlike a device free, an unmap does not wait.
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

    fn release(
        &mut self,
        device: &mut dyn Device,
        pool: PrivatePoolId,
    ) -> Result<(), PrivatePoolError> {
        if self.config.torch.keeps_released_pools() {
            return Ok(());
        }
        self.pools.release(pool)?;
        Ok(self.release_private(device, pool)?)
    }
}
