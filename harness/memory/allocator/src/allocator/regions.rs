//! Regions of device memory that are cut into chunks, for all allocators that model other libraries
//! than PyTorch. Each of them decides when to cut, when to take from another stream and when to
//! call the driver. This module has the structure and its counters.
//!
//! A *region* is one driver allocation, a chain of *chunks* without gaps: the segments and blocks
//! of [`super::blocks`]. Free chunks are in lists ([`super::lists`]), most of them in one list for
//! each stream. There the best fit is the smallest chunk that is large enough, and of equal ones
//! the lowest or the highest ([`Placement`]). Neighbors in the same list are always merged.
//! Neighbors in different lists stay separate until one list takes over the other's chunks.
//!
//! A region serves requests of all sizes and streams, so all regions count in the large pool.

use std::collections::{BTreeMap, BTreeSet};

use super::blocks::{Block, Blocks, State, StreamPoolLabel, TieOrder};
use super::counters::Counters;
use super::ids::{BlockId, StreamPoolId};
use super::lists::{FreeList, Lists};
use super::live::out_of_memory;
use super::pending::{PendingFrees, if_exists};
use super::{Allocation, AllocatorError, Handle, OomCause, Request};
use crate::device::{CallSite, Device, DeviceError, DevicePtr, MemoryRange, StreamId};
use crate::stats::{MemoryStats, PoolKind, SegmentInfo};
use crate::units::Bytes;

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

#[derive(Debug)]
pub(super) struct Regions {
    placement: Placement,
    blocks: Blocks,
    lists: Lists,
    /// The other streams that use a chunk.
    uses: BTreeMap<BlockId, BTreeSet<StreamId>>,
    /// The number of chunks that became free so far: the clock of [`Blocks::free_since`]. That is 0
    /// for a chunk that was never used, or not since another stream took it over.
    frees: u64,
    pub(super) counters: Counters,
    /// The limit of the memory fraction.
    pub(super) limit: Option<Bytes>,
}

impl Default for Regions {
    fn default() -> Self {
        Self::with_placement(Placement::default())
    }
}

impl std::ops::Index<BlockId> for Regions {
    type Output = Block;
    #[inline]
    fn index(&self, id: BlockId) -> &Block {
        &self.blocks[id]
    }
}

impl Regions {
    pub(super) fn with_placement(placement: Placement) -> Self {
        Self {
            placement,
            blocks: Blocks::new(TieOrder::Address),
            lists: Lists::default(),
            uses: BTreeMap::new(),
            frees: 0,
            counters: Counters::default(),
            limit: None,
        }
    }

    /// The list that a chunk is in, or that it joins when it becomes free.
    pub(super) fn list(&self, id: BlockId) -> FreeList {
        self.lists.key(self.blocks[id].stream_pool)
    }

    /// Changes the list of a chunk that is not free.
    pub(super) fn set_list(&mut self, id: BlockId, list: FreeList) {
        self.blocks[id].stream_pool = self.lists.get(list);
    }

    /// The first free chunk of at least `size` bytes (not zero) in the order of the list. For a
    /// stream that is the best fit by the rules of [`Placement`].
    #[inline(always)]
    pub(super) fn fit(&mut self, list: impl Into<FreeList>, size: u64) -> Option<BlockId> {
        let list = self.lists.find(list.into())?;
        let first = self.lists.fit(list, &self.blocks, size)?;
        match self.placement {
            Placement::Low => Some(first),
            Placement::High => Some(self.fit_above_gap(first, size)),
        }
    }

    /// The first chunk from `first` on that has a chunk below it in its region, or else `first`.
    /// Linear in regions.
    fn fit_above_gap(&mut self, first: BlockId, size: u64) -> BlockId {
        let (mut found, mut gaps) = (Some(first), Vec::new());
        while let Some(gap) = found
            && self.blocks[gap].previous.is_none()
        {
            gaps.push(gap);
            self.lists.take(&mut self.blocks, gap);
            let list = self.blocks[gap].stream_pool;
            found = self.lists.fit(list, &self.blocks, size);
        }
        for gap in gaps {
            self.lists.insert(&mut self.blocks, gap);
        }
        found.unwrap_or(first)
    }

    /// Whether the first free chunk of the list has this size.
    pub(super) fn starts_with(&mut self, list: FreeList, size: u64) -> bool {
        self.fit(list, 1)
            .is_some_and(|first| self.blocks[first].size == size)
    }

    /// The free chunk at an address, if it fits as well as the best one: same list and size.
    /// Linear in the chunks of its region.
    pub(super) fn equal_fit(&self, best: BlockId, address: DevicePtr) -> Option<BlockId> {
        let kind = |id: BlockId| {
            let block = &self.blocks[id];
            (block.state, block.stream_pool, block.size)
        };
        let found = self.blocks.at(address.0)?;
        (kind(found) == kind(best)).then_some(found)
    }

    /// Allocates a free chunk, cut to `size`. The rest stays in the chunk's list.
    #[inline(always)]
    pub(super) fn hand_out(&mut self, id: BlockId, request: Request, size: u64) -> Allocation {
        self.lists.take(&mut self.blocks, id);
        let Block {
            size: whole,
            stream_pool,
            ..
        } = self.blocks[id];
        let was_piece = self.blocks[id].is_split();
        let id = if size == whole {
            if was_piece {
                self.counters.pieces_are_gone(POOL, 1, whole);
            }
            id
        } else {
            self.counters
                .piece_was_cut(POOL, was_piece, size, whole - size);
            let (taken, rest) = match self.placement {
                Placement::Low => (id, self.cut(id, size)),
                Placement::High => (self.cut(id, whole - size), id),
            };
            self.insert(rest);
            taken
        };
        let list = self.lists.key(stream_pool).of(request.stream);
        let stream_pool = self.lists.get(list);
        let block = &mut self.blocks[id];
        block.state = State::Allocated;
        block.requested = request.size.0;
        block.stream_pool = stream_pool;
        let range = MemoryRange::new(DevicePtr(block.address), Bytes(size));
        self.counters.handed_out(POOL, size, request.size.0);
        Allocation::new(range, request, Handle::new(id.0))
    }

    /// Fails with [`DeviceError::InvalidFree`] for a foreign allocation.
    #[inline(always)]
    pub(super) fn chunk_of(&self, allocation: &Allocation) -> Result<BlockId, DeviceError> {
        let slot = allocation.handle().slot();
        let is_ours =
            |block: &&Block| block.address == allocation.ptr().0 && block.state == State::Allocated;
        match self.blocks.get(slot as usize).filter(is_ours) {
            Some(_) => Ok(BlockId(slot)),
            None => Err(DeviceError::InvalidFree {
                ptr: allocation.ptr(),
                place: CallSite::default(),
            }),
        }
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
            self.blocks[chunk].shared = true;
            self.uses.entry(chunk).or_default().insert(stream);
        }
        Ok(())
    }

    /// Begins the free of a chunk and returns the other streams that use it.
    /// [`Regions::complete_free`] or [`Regions::postpone_free`] follows.
    #[inline]
    pub(super) fn begin_free(&mut self, id: BlockId) -> BTreeSet<StreamId> {
        match std::mem::take(&mut self.blocks[id].shared) {
            true => self.uses.remove(&id).unwrap_or_default(),
            false => BTreeSet::new(),
        }
    }

    /// Marks a chunk as freed that stays active until [`Regions::complete_free`].
    pub(super) fn postpone_free(&mut self, id: BlockId) {
        let block = &mut self.blocks[id];
        if block.state == State::Allocated {
            block.state = State::PendingFree;
            self.counters.free_is_pending(POOL, block.size);
        }
    }

    /// Completes the free of a chunk that only work in flight on its own stream may still use.
    /// Returns the free chunk, which it may have merged with its neighbors.
    #[inline(always)]
    pub(super) fn complete_free(&mut self, id: BlockId) -> BlockId {
        let Block {
            size,
            requested,
            state,
            ..
        } = self.blocks[id];
        if state == State::PendingFree {
            self.counters.pending_free_is_done(POOL, size, requested);
        } else {
            self.counters.freed(POOL, size, requested);
        }
        self.frees += 1;
        self.blocks.set_free_since(id, self.frees);
        self.merge(id)
    }

    /// Frees an allocation, or adds it to the pending frees if other streams use it. Ignores the
    /// null allocation. Fails like [`Regions::chunk_of`].
    #[inline]
    pub(super) fn free(
        &mut self,
        pending: &mut PendingFrees<BlockId>,
        device: &mut dyn Device,
        allocation: Allocation,
    ) -> Result<(), DeviceError> {
        if allocation.is_null() {
            return Ok(());
        }
        let chunk = self.chunk_of(&allocation)?;
        if self.blocks[chunk].shared {
            let streams = self.begin_free(chunk);
            self.postpone_free(chunk);
            if pending.add(device, chunk, streams)? {
                return Ok(());
            }
        }
        self.complete_free(chunk);
        Ok(())
    }

    /// Finishes the frees whose events are complete.
    pub(super) fn poll(
        &mut self,
        pending: &mut PendingFrees<BlockId>,
        device: &mut dyn Device,
    ) -> Result<(), DeviceError> {
        let (done, polled) = pending.poll(device);
        for chunk in done {
            self.complete_free(chunk);
        }
        polled
    }

    /// Waits for the events of all pending frees and finishes those frees.
    pub(super) fn wait_for(
        &mut self,
        pending: &mut PendingFrees<BlockId>,
        device: &mut dyn Device,
    ) -> Result<(), DeviceError> {
        self.counters.num_sync_all_streams += 1;
        let (done, waited) = pending.wait_for(device, |_| true);
        for chunk in done {
            self.complete_free(chunk);
        }
        waited
    }

    pub(super) fn has_free(&mut self, stream: StreamId) -> bool {
        self.fit(stream, 1).is_some()
    }

    pub(super) const fn frees(&self) -> u64 {
        self.frees
    }

    /// The streams with free chunks, except one.
    pub(super) fn other_streams(&self, than: StreamId) -> Vec<StreamId> {
        let is_other = |&stream: &StreamId| stream != than;
        self.lists.streams().filter(is_other).collect()
    }

    /// Moves the free chunks of a stream to the default stream, after the work of the stream.
    pub(super) fn release_stream(
        &mut self,
        pending: &mut PendingFrees<BlockId>,
        device: &mut dyn Device,
        stream: StreamId,
    ) -> Result<(), DeviceError> {
        if stream == StreamId::DEFAULT {
            return Ok(());
        }
        if_exists(device.synchronize_stream(stream))?;
        self.poll(pending, device)?;
        self.inherit(stream, StreamId::DEFAULT);
        Ok(())
    }

    /// Moves the chunks of another list that were freed up to a time to this list. The caller has
    /// ordered the streams of both. Sorts the chunks of the other list.
    pub(super) fn take_over(
        &mut self,
        from: impl Into<FreeList>,
        to: impl Into<FreeList>,
        freed_by: u64,
    ) {
        let Some(from) = self.lists.find(from.into()) else {
            return;
        };
        let mut moving = self.lists.in_order(from, &self.blocks);
        moving.retain(|&id| self.blocks.free_since(id) <= freed_by);
        let to = self.lists.get(to.into());
        // None of them merges before its turn: neighbors in the same list were merged when they
        // became free.
        for id in moving {
            self.take_out(id);
            self.blocks[id].stream_pool = to;
            self.blocks.set_free_since(id, 0);
            self.merge(id);
        }
    }

    /// Moves all chunks of a destroyed stream's list to this list.
    pub(super) fn inherit(&mut self, from: impl Into<FreeList>, to: impl Into<FreeList>) {
        let from = from.into();
        self.take_over(from, to, u64::MAX);
        self.lists.shrink(from);
    }

    /// Gives a superblock to another arena.
    pub(super) fn rename(&mut self, from: FreeList, to: FreeList) {
        self.lists.rename(from, to);
    }

    /// Merges a free superblock with the free one below it.
    pub(super) fn join(&mut self, from: FreeList, to: FreeList) {
        self.take_over(from, to, u64::MAX);
        self.remove_list(from);
    }

    /// Removes an empty list, to which no chunk belongs.
    pub(super) fn remove_list(&mut self, list: FreeList) {
        self.lists.remove(list);
    }

    /// Cuts a free chunk after `size` bytes and moves the rest to a list.
    pub(super) fn split_off(&mut self, id: BlockId, size: u64, list: FreeList) -> BlockId {
        self.take_out(id);
        let rest = self.cut(id, size);
        self.put_in(id);
        self.set_list(rest, list);
        self.put_in(rest);
        rest
    }

    /// Moves the first `size` bytes of a free chunk to a list, in blocks of `block` bytes.
    pub(super) fn divide(&mut self, id: BlockId, size: u64, block: u64, list: FreeList) {
        if size < self.blocks[id].size {
            let whole = self.list(id);
            self.split_off(id, size, whole);
        }
        self.take_out(id);
        let mut last = id;
        loop {
            self.set_list(last, list);
            self.blocks.set_free_since(last, 0);
            if self.blocks[last].size == block {
                break;
            }
            let rest = self.cut(last, block);
            self.put_in(last);
            last = rest;
        }
        self.put_in(last);
    }

    /// The size of the largest free chunk in the list. It sorts them, so it is for rare use.
    pub(super) fn largest(&mut self, list: FreeList) -> u64 {
        let Some(list) = self.lists.find(list) else {
            return 0;
        };
        let sizes =
            (self.lists.in_order(list, &self.blocks).into_iter()).map(|id| self.blocks[id].size);
        sizes.max().unwrap_or(0)
    }

    /// Allocates a new region as one free chunk for the stream, or returns `None` if the driver
    /// refuses.
    pub(super) fn add(
        &mut self,
        device: &mut dyn Device,
        size: u64,
        stream: StreamId,
    ) -> Result<Option<BlockId>, DeviceError> {
        let address = match device.malloc(Bytes(size)) {
            Ok(address) => address,
            Err(error) if error.is_out_of_memory() => return Ok(None),
            Err(error) => return Err(error),
        };
        let range = MemoryRange::new(address, Bytes(size));
        let list = self.lists.get(stream.into());
        let id = self.blocks.add_segment(range, list, POOL, false);
        self.blocks.set_free_since(id, 0);
        self.put_in(id);
        self.counters.reserved_bytes.increase(POOL, size);
        self.counters.segments.increase(POOL, 1);
        self.counters.num_device_alloc += 1;
        Ok(Some(id))
    }

    pub(super) fn reserved(&self) -> u64 {
        self.counters.reserved_bytes.current()
    }

    /// Bytes of regions without active chunks. Linear in chunks.
    pub(super) fn wholly_free(&self) -> u64 {
        let free = self
            .blocks
            .segments()
            .filter(|&(first, _)| self.is_free(first));
        free.map(|(_, size)| size).sum()
    }

    /// Releases regions without active chunks in address order, until at most `down_to` bytes are
    /// reserved. The driver waits for work in flight on them. Returns whether any was released.
    /// Linear in chunks.
    pub(super) fn release(
        &mut self,
        device: &mut dyn Device,
        down_to: u64,
    ) -> Result<bool, DeviceError> {
        self.release_except(device, down_to, |_, _| false)
    }

    /// As [`Self::release`], but keeps the regions with such a chunk.
    pub(super) fn release_except(
        &mut self,
        device: &mut dyn Device,
        down_to: u64,
        kept: impl Fn(&Block, FreeList) -> bool,
    ) -> Result<bool, DeviceError> {
        let is_kept = |first: BlockId| {
            (self.blocks.chain(first)).any(|id| kept(&self.blocks[id], self.list(id)))
        };
        let free: Vec<(BlockId, u64)> = (self.blocks.segments())
            .filter(|&(first, _)| self.is_free(first) && !is_kept(first))
            .collect();
        let mut any = false;
        for (first, size) in free {
            if self.reserved() <= down_to {
                break;
            }
            device.free(DevicePtr(self.blocks[first].address))?;
            for id in self.blocks.chain(first).collect::<Vec<_>>() {
                self.take_out(id);
            }
            self.blocks.remove_segment(first);
            self.counters.reserved_bytes.decrease(POOL, size);
            self.counters.segments.decrease(POOL, 1);
            self.counters.num_device_free += 1;
            any = true;
        }
        Ok(any)
    }

    pub(super) fn close(&mut self, device: &mut dyn Device) -> Result<(), DeviceError> {
        while let Some(first) = self.blocks.first_segment() {
            device.free(DevicePtr(self.blocks[first].address))?;
            self.blocks.forget_segment(first);
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
                    self.counters.num_ooms += 1;
                    return error.into();
                }
            },
        };
        self.counters.num_ooms += 1;
        let sizes = [request.size, Bytes(size)];
        out_of_memory(
            &mut self.stats(),
            device,
            sizes,
            cause,
            Some(Bytes(largest)),
        )
    }

    pub(super) fn stats(&self) -> MemoryStats {
        self.counters.stats()
    }

    pub(super) fn reset_peaks(&mut self) {
        self.counters.reset_peaks();
    }

    /// All regions in address order. Linear in chunks.
    pub(super) fn snapshot(&self) -> Vec<SegmentInfo> {
        let mut regions = self.blocks.snapshot(|list| self.label(list));
        regions.iter_mut().for_each(|region| region.stream = None);
        regions
    }

    /// The region that contains an address. Linear in its chunks.
    pub(super) fn segment_at(&self, address: DevicePtr) -> Option<SegmentInfo> {
        let region = self.blocks.describe_at(address, |list| self.label(list))?;
        Some(SegmentInfo {
            stream: None,
            ..region
        })
    }

    fn label(&self, list: StreamPoolId) -> StreamPoolLabel {
        (self.lists.key(list).stream(), None)
    }

    fn is_free(&self, first: BlockId) -> bool {
        self.blocks
            .chain(first)
            .all(|id| self.blocks[id].state == State::Free)
    }

    /// Adds a free chunk to its list.
    #[inline(always)]
    fn insert(&mut self, id: BlockId) {
        let block = &mut self.blocks[id];
        block.rank = match self.placement {
            Placement::Low => block.address,
            Placement::High => !block.address,
        };
        self.lists.insert(&mut self.blocks, id);
    }

    /// As [`Self::insert`], and counts the chunk.
    fn put_in(&mut self, id: BlockId) {
        self.insert(id);
        if self.blocks[id].is_split() {
            self.counters.piece_was_there(POOL, self.blocks[id].size);
        }
    }

    /// Removes a free chunk from its list. Call it before its neighbors change.
    fn take_out(&mut self, id: BlockId) {
        self.lists.take(&mut self.blocks, id);
        if self.blocks[id].is_split() {
            self.counters.pieces_are_gone(POOL, 1, self.blocks[id].size);
        }
    }

    /// Marks a chunk as free, merges it with its neighbors in the same list, adds the result to the
    /// list, and returns it.
    #[inline(always)]
    fn merge(&mut self, id: BlockId) -> BlockId {
        let block = &mut self.blocks[id];
        block.state = State::Free;
        let Block {
            size,
            previous,
            next,
            stream_pool,
            ..
        } = *block;
        let (mut merged, mut neighbors, mut bytes) = (id, 0, 0);
        if self.lists.key(stream_pool).merges() {
            let merges =
                |block: &Block| block.state == State::Free && block.stream_pool == stream_pool;
            if merges(&self.blocks[next]) {
                neighbors += 1;
                bytes += self.blocks[next].size;
                self.lists.take(&mut self.blocks, next);
                self.absorb_next(id, next);
            }
            if merges(&self.blocks[previous]) {
                neighbors += 1;
                bytes += self.blocks[previous].size;
                self.lists.take(&mut self.blocks, previous);
                self.absorb_next(previous, id);
                merged = previous;
            }
        }
        if self.blocks[merged].is_split() {
            self.counters.piece_was_freed(POOL, neighbors, size);
        } else {
            self.counters.pieces_are_gone(POOL, neighbors, bytes);
        }
        self.insert(merged);
        merged
    }

    /// Cuts a chunk that is not in a list after `size` bytes and returns the rest.
    #[inline(always)]
    fn cut(&mut self, id: BlockId, size: u64) -> BlockId {
        let rest = self.blocks.split(id, size);
        let since = self.blocks.free_since(id);
        self.blocks.set_free_since(rest, since);
        rest
    }

    /// Merges a chunk with its next neighbor. Neither is in a list.
    #[inline(always)]
    fn absorb_next(&mut self, id: BlockId, next: BlockId) {
        let since = (self.blocks.free_since(id)).max(self.blocks.free_since(next));
        self.blocks.set_free_since(id, since);
        self.blocks.absorb_next(id);
    }
}
