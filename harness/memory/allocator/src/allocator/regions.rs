//! Regions of device memory that are cut into chunks, for all best-fit allocators. Each of them
//! decides when to cut, when to take from another stream and when to call the driver. This module
//! has the structure and its counters.
//!
//! A *region* is one driver allocation, a chain of *chunks* without gaps. Free chunks have one
//! order: by list, then size, then address. Most allocators have one list per stream
//! ([`FreeList`]). So the first large enough chunk of a stream is the best fit, and the lowest of
//! equal ones: one search, logarithmic in the free chunks. Neighbors in the same list are always
//! merged. Neighbors in different lists stay separate until one list takes over the other's chunks.
//!
//! A region serves requests of all sizes and streams, so all regions count in the large pool.

use std::collections::{BTreeMap, BTreeSet};

use super::{
    Allocation, AllocatorError, Handle, OomCause, Request,
    live::out_of_memory,
    pending::{PendingFrees, if_exists},
    slab::Slab,
};
use crate::device::{Device, DeviceError, DevicePtr, MemoryRange, StreamId};
use crate::stats::{BlockInfo, BlockState, MemoryStats, PoolKind, SegmentInfo};
use crate::units::Bytes;

/// The unit of chunk sizes and addresses: CUDA's guaranteed alignment, and that of most modeled
/// allocators (`kMinAllocationSize` of TensorFlow, `CUDA_ALLOCATION_ALIGNMENT` of RMM).
pub(super) const CHUNK_UNIT: Bytes = Bytes(256);

/// Rounds a request up to whole units.
/// Fails with [`AllocatorError::TooLarge`] if the result exceeds 64 bits.
pub(super) fn rounded(
    device: &dyn Device,
    request: Request,
    unit: Bytes,
) -> Result<u64, AllocatorError> {
    let too_large = || AllocatorError::TooLarge {
        requested: request.size,
        total: device.info().total,
    };
    request
        .size
        .checked_round_up(unit)
        .map(|size| size.0)
        .ok_or_else(too_large)
}

const POOL: PoolKind = PoolKind::Large;

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct ChunkId(u32);

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum FreeList {
    /// The chunks that a stream may reuse without a wait.
    Stream(StreamId),
    /// The blocks of a bin that a stream may reuse without a wait. They have one size, never merge,
    /// and leave the list in the order of their frees.
    Bin(usize, StreamId),
    /// The chunks of the superblock at this address, and the stream whose arena has it. The global
    /// arena has the others.
    Superblock(u64, Option<StreamId>),
}

impl From<StreamId> for FreeList {
    fn from(stream: StreamId) -> Self {
        Self::Stream(stream)
    }
}

impl FreeList {
    /// The stream that may reuse its chunks.
    pub(super) fn stream(self) -> StreamId {
        match self {
            Self::Stream(stream) | Self::Bin(_, stream) => stream,
            Self::Superblock(_, owner) => owner.unwrap_or(StreamId::DEFAULT),
        }
    }

    /// The list of the same kind for a chunk that this stream frees.
    pub(super) const fn of(self, stream: StreamId) -> Self {
        match self {
            Self::Stream(_) => Self::Stream(stream),
            Self::Bin(bin, _) => Self::Bin(bin, stream),
            Self::Superblock(..) => self,
        }
    }

    const fn merges(self) -> bool {
        !matches!(self, Self::Bin(..))
    }
}

#[derive(Clone, Debug)]
pub(super) struct Chunk {
    pub(super) address: u64,
    pub(super) size: u64,
    requested: u64,
    pub(super) state: BlockState,
    pub(super) stream: StreamId,
    /// The list that it is in, or that it joins when it becomes free.
    pub(super) list: FreeList,
    /// The number of frees before its own free. 0 for a chunk that was never used, or not since
    /// another stream took it over.
    freed_at: u64,
    previous: Option<ChunkId>,
    next: Option<ChunkId>,
}

impl Chunk {
    const fn is_split(&self) -> bool {
        self.previous.is_some() || self.next.is_some()
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct FreeChunk {
    list: FreeList,
    size: u64,
    /// [`Chunk::freed_at`] in a bin, else 0.
    freed_at: u64,
    address: u64,
    id: ChunkId,
}

impl FreeChunk {
    /// The first possible chunk of this size in the list.
    const fn first(list: FreeList, size: u64) -> Self {
        Self {
            list,
            size,
            freed_at: 0,
            address: 0,
            id: ChunkId(0),
        }
    }
}

#[derive(Clone, Copy, Debug)]
struct Region {
    size: u64,
    /// The slot of its first chunk, which never changes.
    first: ChunkId,
}

/// Where a request lies in the memory that is free.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Placement {
    /// The lower part of a chunk. Of chunks of one size, the one at the lowest address.
    #[default]
    Low,
    /// The upper part of a chunk. Of chunks of one size, the one at the highest address. The lowest
    /// chunk of a region is taken only if no other one fits.
    High,
}

#[derive(Debug, Default)]
pub(super) struct Regions {
    placement: Placement,
    chunks: Slab<Chunk>,
    by_address: BTreeMap<u64, Region>,
    free: BTreeSet<FreeChunk>,
    /// The other streams that use a chunk.
    uses: BTreeMap<ChunkId, BTreeSet<StreamId>>,
    /// The number of chunks that became free so far: the clock of [`Chunk::freed_at`].
    frees: u64,
    pub(super) stats: MemoryStats,
    /// The limit of the memory fraction.
    pub(super) limit: Option<Bytes>,
}

impl std::ops::Index<ChunkId> for Regions {
    type Output = Chunk;
    fn index(&self, id: ChunkId) -> &Chunk {
        &self.chunks[id.0]
    }
}

impl std::ops::IndexMut<ChunkId> for Regions {
    fn index_mut(&mut self, id: ChunkId) -> &mut Chunk {
        &mut self.chunks[id.0]
    }
}

impl Regions {
    pub(super) fn with_placement(placement: Placement) -> Self {
        Self {
            placement,
            ..Self::default()
        }
    }

    /// The smallest free chunk of at least `size` in the list, by the rules of [`Placement`].
    /// Logarithmic in free chunks; for [`Placement::High`] linear in regions too.
    pub(super) fn best_fit(&self, list: impl Into<FreeList>, size: u64) -> Option<ChunkId> {
        let list = list.into();
        match self.placement {
            Placement::Low => self.fitting(list, size).next().map(|chunk| chunk.id),
            Placement::High => self
                .best_fit_above_gaps(self.fitting(list, size))
                .or_else(|| self.fitting(list, size).next().map(|chunk| chunk.id)),
        }
    }

    /// The lowest free chunk of at least `size` in the list. Linear in the chunks of that size.
    pub(super) fn first_fit(&self, list: FreeList, size: u64) -> Option<ChunkId> {
        self.fitting(list, size)
            .min_by_key(|chunk| chunk.address)
            .map(|chunk| chunk.id)
    }

    /// The free chunks of at least `size` in the list, the smallest first.
    fn fitting(&self, list: FreeList, size: u64) -> impl Iterator<Item = &FreeChunk> {
        self.free
            .range(FreeChunk::first(list, size)..)
            .take_while(move |chunk| chunk.list == list)
    }

    /// The highest of the smallest chunks that have a chunk below them in their region.
    fn best_fit_above_gaps<'a>(
        &self,
        mut fitting: impl Iterator<Item = &'a FreeChunk>,
    ) -> Option<ChunkId> {
        let is_above = |chunk: &&FreeChunk| self[chunk.id].previous.is_some();
        let smallest = fitting.find(is_above)?;
        let last = FreeChunk {
            address: u64::MAX,
            id: ChunkId(u32::MAX),
            ..*smallest
        };
        let equal = self.free.range(*smallest..=last);
        equal.rev().find(is_above).map(|chunk| chunk.id)
    }

    /// The free chunk at an address, if it fits as well as the best one: same list and size.
    /// Logarithmic in free chunks.
    pub(super) fn equal_fit(&self, best: ChunkId, address: DevicePtr) -> Option<ChunkId> {
        let Chunk { list, size, .. } = self[best];
        let from = FreeChunk {
            address: address.0,
            ..FreeChunk::first(list, size)
        };
        let found = self.free.range(from..).next()?;
        ((found.list, found.size, found.address) == (list, size, address.0)).then_some(found.id)
    }

    /// Allocates a free chunk, cut to `size`. The rest stays in the chunk's list.
    /// Logarithmic in free chunks.
    pub(super) fn hand_out(&mut self, id: ChunkId, request: Request, size: u64) -> Allocation {
        self.take_out(id);
        let whole = self[id].size;
        let id = match self.placement {
            _ if size == whole => id,
            Placement::Low => {
                let rest = self.cut(id, size);
                self.put_in(rest);
                id
            }
            Placement::High => {
                let taken = self.cut(id, whole - size);
                self.put_in(id);
                taken
            }
        };
        let chunk = &mut self[id];
        chunk.state = BlockState::Allocated;
        chunk.requested = request.size.0;
        chunk.stream = request.stream;
        chunk.list = chunk.list.of(request.stream);
        let range = MemoryRange::new(DevicePtr(chunk.address), Bytes(chunk.size));
        self.stats.allocation.increase(POOL, 1);
        self.stats.allocated_bytes.increase(POOL, range.len.0);
        self.stats.active.increase(POOL, 1);
        self.stats.active_bytes.increase(POOL, range.len.0);
        self.stats.requested_bytes.increase(POOL, request.size.0);
        Allocation::new(range, request, Handle::new(id.0))
    }

    /// Fails with [`DeviceError::InvalidFree`] for a foreign allocation.
    pub(super) fn chunk_of(&self, allocation: &Allocation) -> Result<ChunkId, DeviceError> {
        let is_ours = |chunk: &Chunk| {
            chunk.address == allocation.ptr().0 && chunk.state == BlockState::Allocated
        };
        self.chunks.slot_of(allocation, is_ours).map(ChunkId)
    }

    /// Records that another stream uses an allocation. Ignores the null allocation.
    /// Fails like [`Regions::chunk_of`].
    pub(super) fn record_use(
        &mut self,
        allocation: &Allocation,
        stream: StreamId,
    ) -> Result<(), DeviceError> {
        if allocation.is_null() {
            return Ok(());
        }
        let chunk = self.chunk_of(allocation)?;
        if stream != allocation.stream() {
            self.uses.entry(chunk).or_default().insert(stream);
        }
        Ok(())
    }

    /// Begins the free of a chunk and returns the other streams that use it. It stays active until
    /// [`Regions::complete_free`].
    pub(super) fn begin_free(&mut self, id: ChunkId) -> BTreeSet<StreamId> {
        let chunk = &mut self[id];
        chunk.state = BlockState::PendingFree;
        let size = chunk.size;
        self.stats.allocation.decrease(POOL, 1);
        self.stats.allocated_bytes.decrease(POOL, size);
        self.uses.remove(&id).unwrap_or_default()
    }

    /// Completes the free of a chunk that only work in flight on its own stream may still use.
    /// Logarithmic in free chunks.
    pub(super) fn complete_free(&mut self, id: ChunkId) {
        self.frees += 1;
        let frees = self.frees;
        let chunk = &mut self[id];
        chunk.state = BlockState::Inactive;
        chunk.freed_at = frees;
        let (size, requested) = (chunk.size, chunk.requested);
        self.stats.active.decrease(POOL, 1);
        self.stats.active_bytes.decrease(POOL, size);
        self.stats.requested_bytes.decrease(POOL, requested);
        self.merge(id);
    }

    /// Frees an allocation, or adds it to the pending frees if other streams use it. Ignores the
    /// null allocation. Fails like [`Regions::chunk_of`].
    pub(super) fn free(
        &mut self,
        pending: &mut PendingFrees<ChunkId>,
        device: &mut dyn Device,
        allocation: Allocation,
    ) -> Result<(), DeviceError> {
        if allocation.is_null() {
            return Ok(());
        }
        let chunk = self.chunk_of(&allocation)?;
        let streams = self.begin_free(chunk);
        if streams.is_empty() || !pending.add(device, chunk, streams)? {
            self.complete_free(chunk);
        }
        Ok(())
    }

    /// Finishes the frees whose events are complete.
    pub(super) fn poll(
        &mut self,
        pending: &mut PendingFrees<ChunkId>,
        device: &mut dyn Device,
    ) -> Result<(), DeviceError> {
        let (done, polled) = pending.poll(device);
        done.into_iter().for_each(|chunk| self.complete_free(chunk));
        polled
    }

    /// Waits for the events of all pending frees and finishes those frees.
    pub(super) fn wait_for(
        &mut self,
        pending: &mut PendingFrees<ChunkId>,
        device: &mut dyn Device,
    ) -> Result<(), DeviceError> {
        self.stats.num_sync_all_streams += 1;
        let (done, waited) = pending.wait_for(device, |_| true);
        done.into_iter().for_each(|chunk| self.complete_free(chunk));
        waited
    }

    /// Returns true if the stream has free chunks. Logarithmic in free chunks.
    pub(super) fn has_free(&self, stream: StreamId) -> bool {
        self.best_fit(stream, 0).is_some()
    }

    pub(super) const fn frees(&self) -> u64 {
        self.frees
    }

    /// The streams with free chunks, except one. Logarithmic in free chunks for each.
    pub(super) fn other_streams(&self, than: StreamId) -> Vec<StreamId> {
        let mut streams = Vec::new();
        let mut from = StreamId(0);
        while let Some(chunk) = (self.free)
            .range(FreeChunk::first(FreeList::Stream(from), 0)..)
            .next()
        {
            let FreeList::Stream(stream) = chunk.list else {
                break;
            };
            if stream != than {
                streams.push(stream);
            }
            let Some(next) = stream.0.checked_add(1) else {
                break;
            };
            from = StreamId(next);
        }
        streams
    }

    /// Moves the free chunks of a stream to the default stream, after the work of the stream.
    pub(super) fn release_stream(
        &mut self,
        pending: &mut PendingFrees<ChunkId>,
        device: &mut dyn Device,
        stream: StreamId,
    ) -> Result<(), DeviceError> {
        if stream == StreamId::DEFAULT {
            return Ok(());
        }
        if_exists(device.synchronize_stream(stream))?;
        self.poll(pending, device)?;
        self.take_over(stream, StreamId::DEFAULT, u64::MAX);
        Ok(())
    }

    /// Moves the chunks of another list that were freed up to a time to this list. The caller has
    /// ordered the streams of both. Linear in the chunks of the other list, logarithmic in all
    /// chunks for each moved one.
    pub(super) fn take_over(
        &mut self,
        from: impl Into<FreeList>,
        to: impl Into<FreeList>,
        freed_by: u64,
    ) {
        let to = to.into();
        let moving: Vec<ChunkId> = self
            .fitting(from.into(), 0)
            .map(|chunk| chunk.id)
            .filter(|&id| self[id].freed_at <= freed_by)
            .collect();
        // None of them merges before its turn: neighbors in the same list were merged when they
        // became free.
        for id in moving {
            self.take_out(id);
            let chunk = &mut self[id];
            chunk.list = to;
            chunk.stream = to.stream();
            chunk.freed_at = 0;
            self.merge(id);
        }
    }

    /// Cuts a free chunk after `size` bytes and moves the rest to a list.
    pub(super) fn split_off(&mut self, id: ChunkId, size: u64, list: FreeList) -> ChunkId {
        self.take_out(id);
        let rest = self.cut(id, size);
        self.put_in(id);
        self[rest].list = list;
        self[rest].stream = list.stream();
        self.put_in(rest);
        rest
    }

    /// Moves the first `size` bytes of a free chunk to a list, in blocks of `block` bytes.
    pub(super) fn divide(&mut self, id: ChunkId, size: u64, block: u64, list: FreeList) {
        if size < self[id].size {
            let whole = self[id].list;
            self.split_off(id, size, whole);
        }
        self.take_out(id);
        let mut last = id;
        loop {
            let chunk = &mut self[last];
            chunk.list = list;
            chunk.stream = list.stream();
            chunk.freed_at = 0;
            if chunk.size == block {
                break;
            }
            let rest = self.cut(last, block);
            self.put_in(last);
            last = rest;
        }
        self.put_in(last);
    }

    /// The size of the largest free chunk in the list.
    pub(super) fn largest(&self, list: FreeList) -> u64 {
        let to = FreeChunk {
            freed_at: u64::MAX,
            address: u64::MAX,
            id: ChunkId(u32::MAX),
            ..FreeChunk::first(list, u64::MAX)
        };
        self.free
            .range(FreeChunk::first(list, 0)..=to)
            .next_back()
            .map_or(0, |chunk| chunk.size)
    }

    /// Allocates a new region as one free chunk for the stream, or returns `None` if the driver
    /// refuses.
    pub(super) fn add(
        &mut self,
        device: &mut dyn Device,
        size: u64,
        stream: StreamId,
    ) -> Result<Option<ChunkId>, DeviceError> {
        let address = match device.malloc(Bytes(size)) {
            Ok(address) => address.0,
            Err(error) if error.is_out_of_memory() => return Ok(None),
            Err(error) => return Err(error),
        };
        let state = BlockState::Inactive;
        let chunk = Chunk {
            address,
            size,
            requested: 0,
            state,
            stream,
            list: stream.into(),
            freed_at: 0,
            previous: None,
            next: None,
        };
        let id = ChunkId(self.chunks.insert(chunk));
        self.by_address.insert(address, Region { size, first: id });
        self.put_in(id);
        self.stats.reserved_bytes.increase(POOL, size);
        self.stats.segment.increase(POOL, 1);
        self.stats.num_device_alloc += 1;
        Ok(Some(id))
    }

    pub(super) const fn reserved(&self) -> u64 {
        self.stats.reserved_bytes.all.current
    }

    /// Bytes of regions without active chunks. Linear in chunks.
    pub(super) fn wholly_free(&self) -> u64 {
        self.by_address
            .values()
            .filter(|region| self.is_free(region))
            .map(|region| region.size)
            .sum()
    }

    /// Releases regions without active chunks in address order, until at most `down_to` bytes are
    /// reserved. The driver waits for work in flight on them. Returns whether any was released.
    /// Linear in chunks.
    pub(super) fn release(
        &mut self,
        device: &mut dyn Device,
        down_to: u64,
    ) -> Result<bool, DeviceError> {
        self.release_except(device, down_to, |_| false)
    }

    /// As [`Self::release`], but keeps the regions with such a chunk.
    pub(super) fn release_except(
        &mut self,
        device: &mut dyn Device,
        down_to: u64,
        kept: impl Fn(&Chunk) -> bool,
    ) -> Result<bool, DeviceError> {
        let is_kept = |region: &Region| self.chain(region.first).any(|id| kept(&self[id]));
        let free: Vec<(u64, Region)> = self
            .by_address
            .iter()
            .filter(|(_, region)| self.is_free(region) && !is_kept(region))
            .map(|(&address, &region)| (address, region))
            .collect();
        let mut any = false;
        for (address, region) in free {
            if self.reserved() <= down_to {
                break;
            }
            device.free(DevicePtr(address))?;
            for id in self.chain(region.first).collect::<Vec<_>>() {
                self.take_out(id);
                self.chunks.remove(id.0);
            }
            self.by_address.remove(&address);
            self.stats.reserved_bytes.decrease(POOL, region.size);
            self.stats.segment.decrease(POOL, 1);
            self.stats.num_device_free += 1;
            any = true;
        }
        Ok(any)
    }

    pub(super) fn close(&mut self, device: &mut dyn Device) -> Result<(), DeviceError> {
        while let Some((&address, _)) = self.by_address.first_key_value() {
            device.free(DevicePtr(address))?;
            self.by_address.remove(&address);
        }
        *self = Self::default();
        Ok(())
    }

    /// The limit on all regions together: the device, the memory fraction, and the allocator's own
    /// setting.
    pub(super) fn limit(&self, device: &dyn Device, configured: Option<Bytes>) -> Bytes {
        self.limit
            .into_iter()
            .chain(configured)
            .fold(device.info().total, Bytes::min)
    }

    /// Counts a failed request and explains it by a limit or the device. `configured` as in
    /// [`Self::limit`].
    pub(super) fn out_of_memory(
        &mut self,
        device: &mut dyn Device,
        request: Request,
        size: u64,
        configured: Option<Bytes>,
    ) -> AllocatorError {
        let largest = self.largest(request.stream.into());
        let limit = self.refusing_limit(size, configured);
        self.out_of_memory_beside(device, request, size, limit, largest)
    }

    /// The limit that refuses a region of `size`, if one does. `configured` as in [`Self::limit`].
    pub(super) fn refusing_limit(&self, size: u64, configured: Option<Bytes>) -> Option<OomCause> {
        let fraction = self
            .limit
            .map(|limit| (limit, OomCause::Fraction { limit }));
        let own = configured.map(|limit| (limit, OomCause::Allocator { limit }));
        let (limit, cause) = (fraction.into_iter().chain(own)).min_by_key(|&(limit, _)| limit)?;
        (limit.saturating_sub(Bytes(self.reserved())).0 < size).then_some(cause)
    }

    /// As [`Self::out_of_memory`], with the limit that refuses the request, if one does, and the
    /// size of the largest free chunk for it.
    pub(super) fn out_of_memory_beside(
        &mut self,
        device: &mut dyn Device,
        request: Request,
        size: u64,
        limit: Option<OomCause>,
        largest: u64,
    ) -> AllocatorError {
        let cause = match limit {
            Some(limit) => limit,
            None => match device.free_memory() {
                Ok(free) => OomCause::Device { free },
                Err(error) => {
                    self.stats.num_ooms += 1;
                    return error.into();
                }
            },
        };
        out_of_memory(
            &mut self.stats,
            device,
            [request.size, Bytes(size)],
            cause,
            Some(Bytes(largest)),
        )
    }

    /// All regions in address order. Linear in chunks.
    pub(super) fn snapshot(&self) -> Vec<SegmentInfo> {
        self.by_address
            .iter()
            .map(|(&address, region)| self.describe(address, region))
            .collect()
    }

    /// The region that contains an address. Linear in its chunks.
    pub(super) fn segment_at(&self, address: DevicePtr) -> Option<SegmentInfo> {
        let (&start, region) = self.by_address.range(..=address.0).next_back()?;
        (address.0 - start < region.size).then(|| self.describe(start, region))
    }

    fn describe(&self, address: u64, region: &Region) -> SegmentInfo {
        let blocks = self.chain(region.first).map(|id| {
            let Chunk {
                address,
                size,
                requested,
                state,
                stream,
                ..
            } = self[id];
            BlockInfo {
                address: DevicePtr(address),
                size: Bytes(size),
                stream,
                requested: Bytes(requested),
                state,
            }
        });
        SegmentInfo {
            address: DevicePtr(address),
            size: Bytes(region.size),
            stream: None,
            pool: POOL,
            private_pool: None,
            expandable: false,
            blocks: blocks.collect(),
        }
    }

    fn chain(&self, first: ChunkId) -> impl Iterator<Item = ChunkId> {
        std::iter::successors(Some(first), |&id| self[id].next)
    }

    fn is_free(&self, region: &Region) -> bool {
        self.chain(region.first)
            .all(|id| self[id].state == BlockState::Inactive)
    }

    fn free_chunk(&self, id: ChunkId) -> FreeChunk {
        let Chunk {
            address,
            size,
            list,
            freed_at,
            ..
        } = self[id];
        FreeChunk {
            list,
            size,
            freed_at: if list.merges() { 0 } else { freed_at },
            address,
            id,
        }
    }

    /// Adds a free chunk to the index.
    fn put_in(&mut self, id: ChunkId) {
        let chunk = self.free_chunk(id);
        let new = self.free.insert(chunk);
        debug_assert!(new, "the chunk is not in the index yet");
        if self[id].is_split() {
            self.stats.inactive_split.increase(POOL, 1);
            self.stats
                .inactive_split_bytes
                .increase(POOL, self[id].size);
        }
    }

    /// Removes a free chunk from the index. Call it before its neighbors change.
    fn take_out(&mut self, id: ChunkId) {
        let was_there = self.free.remove(&self.free_chunk(id));
        debug_assert!(was_there, "the chunk is in the index");
        if self[id].is_split() {
            self.stats.inactive_split.decrease(POOL, 1);
            self.stats
                .inactive_split_bytes
                .decrease(POOL, self[id].size);
        }
    }

    /// Merges a free chunk, not in the index, with its neighbors in the same list, and adds it to
    /// the index.
    fn merge(&mut self, id: ChunkId) {
        let list = self[id].list;
        let mergeable = |regions: &Self, id: &ChunkId| {
            let neighbor = &regions[*id];
            neighbor.state == BlockState::Inactive && neighbor.list == list && list.merges()
        };
        if let Some(next) = self[id].next.filter(|next| mergeable(self, next)) {
            self.take_out(next);
            self.absorb_next(id, next);
        }
        let mut merged = id;
        if let Some(previous) = self[id]
            .previous
            .filter(|previous| mergeable(self, previous))
        {
            self.take_out(previous);
            self.absorb_next(previous, id);
            merged = previous;
        }
        self.put_in(merged);
    }

    /// Cuts a chunk that is not in the index after `size` bytes and returns the rest.
    fn cut(&mut self, id: ChunkId, size: u64) -> ChunkId {
        let front = &mut self[id];
        let rest = Chunk {
            address: front.address + size,
            size: front.size - size,
            previous: Some(id),
            ..front.clone()
        };
        front.size = size;
        let after = rest.next;
        let rest = ChunkId(self.chunks.insert(rest));
        self[id].next = Some(rest);
        if let Some(after) = after {
            self[after].previous = Some(rest);
        }
        rest
    }

    /// Merges a chunk with its next neighbor. Neither is in the index.
    fn absorb_next(&mut self, id: ChunkId, next: ChunkId) {
        let swallowed = self.chunks.remove(next.0);
        if let Some(after) = swallowed.next {
            self[after].previous = Some(id);
        }
        let chunk = &mut self[id];
        chunk.size += swallowed.size;
        chunk.next = swallowed.next;
        chunk.freed_at = chunk.freed_at.max(swallowed.freed_at);
    }
}
