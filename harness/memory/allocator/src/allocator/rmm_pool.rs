//! RMM's pool: one large initial pool, cut exactly to size, with a free list per stream. A stream
//! takes memory from other streams' lists after a device-side wait for their events. The pool grows
//! if nothing fits.
//!
//! It models `rmm::mr::pool_memory_resource` on top of `cuda_memory_resource`
//! (<https://github.com/rapidsai/rmm>). Its decisions, waits and records equal those recorded from
//! RMM 26.10. RMM's `arena_memory_resource` is another allocator.
//!
//! * Sizes are multiples of 256 B. The best fit of the stream's own list is cut exactly to the
//!   request; the rest stays in that list.
//! * A freed block joins the list of its stream and merges with free neighbors there. The stream's
//!   one event is recorded again. So a free costs a driver call and never waits.
//! * A miss searches the other streams' lists, in the order in which the streams were first used.
//!   The stream waits, on the device, for the event of the first stream with a fitting block and
//!   takes the block. If there is none, it takes over the lists one by one, also empty ones, until
//!   merging gives a fitting block: it waits for each event and records its own again. So a third
//!   stream that takes such a block is ordered after the first one too.
//! * Then the pool grows: by half of the distance to its maximum, or by the request if that is
//!   more. Without a maximum it doubles. If the driver refuses, it tries half of that, down to the
//!   request itself. The half is not rounded, so regions can end between two units of 256 B.
//! * If the maximum is too low, it first releases free blocks that are whole regions. RMM rounds
//!   the distance up to 256 B, so the pool can exceed its maximum by less than that; it then
//!   releases nothing any more. If the device has no room, RMM releases nothing.
//!
//! Deliberate differences:
//!
//! * The initial pool is allocated at the first request, because each call passes the device in. As
//!   in RMM's Python interface, it is half of the free memory by default. If the maximum or the
//!   driver refuses it, there is no initial pool. It is released if that first request fails, and
//!   allocated at the next one.
//! * The memory fraction is a maximum too, and the pool never exceeds it.
//! * RMM cannot release its cache before it is destroyed. [`Allocator::empty_cache`] releases all
//!   whole free regions.
//! * [`Allocator::record_stream`]: RMM's caller must free on a stream that is ordered after every
//!   use. Here the free makes the block's own stream wait, on the device, for the others. So no
//!   free is ever pending, but the stream's later work waits longer.

use std::collections::BTreeSet;

use serde::Deserialize;

use super::blocks::CHUNK_UNIT;
use super::ids::BlockId;
use super::lists::FreeList;
use super::pending::{Events, if_exists};
use super::regions::{self, Regions};
use super::{Allocation, Allocator, AllocatorError, Request, answered_by};
use crate::device::{Device, DeviceError, EventId, StreamId};
use crate::units::Bytes;

/// The settings, with RMM's names.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RmmPoolConfig {
    /// The size of the pool at the first request. The default is half of the free memory.
    // With this function, a recording without the field is an error.
    #[serde(deserialize_with = "Option::deserialize")]
    pub initial_pool_size: Option<Bytes>,
    /// The limit on the pool. By default there is none.
    pub maximum_pool_size: Option<Bytes>,
}

/// What the pool, or a bin of [`super::rmm_binning`], knows of a stream.
#[derive(Debug)]
struct StreamList {
    list: FreeList,
    /// Recorded after the last free of the stream, if there was any.
    event: EventId,
    /// False until the stream needs its list, and after another stream took it over.
    exists: bool,
}

#[derive(Debug, Default)]
pub struct RmmPool {
    config: RmmPoolConfig,
    pub(super) regions: Regions,
    started: bool,
    /// In the order of the streams' first use.
    lists: Vec<StreamList>,
    /// Freed chunks, with the streams that use them, whose free the device failed to finish.
    unfinished: Vec<(BlockId, BTreeSet<StreamId>)>,
    events: Events,
}

impl RmmPool {
    pub fn new(config: RmmPoolConfig) -> Self {
        Self {
            config,
            ..Self::default()
        }
    }

    /// Finds a chunk of at least `size` bytes for the request.
    pub(super) fn chunk(
        &mut self,
        device: &mut dyn Device,
        request: Request,
        size: u64,
    ) -> Result<BlockId, AllocatorError> {
        match self.regions.fit(request.stream, size) {
            Some(chunk) => Ok(chunk),
            None => self.find(device, request, size),
        }
    }

    /// Finds a chunk outside the stream's own ones: from another stream or from the driver.
    fn find(
        &mut self,
        device: &mut dyn Device,
        request: Request,
        size: u64,
    ) -> Result<BlockId, AllocatorError> {
        self.retry_frees(device)?;
        let first = !self.started;
        if first {
            if self.is_above_limit(size) {
                return Err(self.out_of_memory(device, request, size));
            }
            self.start(device)?;
        }
        if let Some(chunk) = self.find_in_lists(device, request.stream.into(), size)? {
            return Ok(chunk);
        }
        if self.left().is_some_and(|left| left < size) {
            self.regions.counters.num_alloc_retries += 1;
            self.make_room(device, size)?;
        }
        match self.grow(device, request.stream, size)? {
            Some(chunk) => Ok(chunk),
            None => {
                let error = self.out_of_memory(device, request, size);
                if first {
                    self.regions.release(device, 0)?;
                    self.started = false;
                }
                Err(error)
            }
        }
    }

    /// Takes a chunk from the list, or from other streams' lists of the pool or the same bin.
    pub(super) fn find_in_lists(
        &mut self,
        device: &mut dyn Device,
        list: FreeList,
        size: u64,
    ) -> Result<Option<BlockId>, DeviceError> {
        let own = self.open_list(device, list)?;
        self.take_from_other_streams(device, own, size)
    }

    /// The position of the list, which exists from now on.
    pub(super) fn open_list(
        &mut self,
        device: &mut dyn Device,
        list: FreeList,
    ) -> Result<usize, DeviceError> {
        let position = self.list_of(device, list)?;
        self.lists[position].exists = true;
        Ok(position)
    }

    /// Whether the maximum refuses this much memory.
    pub(super) fn is_above_limit(&self, size: u64) -> bool {
        self.left().is_some_and(|left| left < size)
    }

    pub(super) fn out_of_memory(
        &mut self,
        device: &mut dyn Device,
        request: Request,
        size: u64,
    ) -> AllocatorError {
        let maximum = self.config.maximum_pool_size;
        self.regions.out_of_memory(device, request, size, maximum)
    }

    /// Allocates the initial pool for the default stream.
    pub(super) fn start(&mut self, device: &mut dyn Device) -> Result<(), DeviceError> {
        if self.started {
            return Ok(());
        }
        let free = device.free_memory()?;
        let size = self.initial_size(free);
        if size > 0 {
            self.open_list(device, StreamId::DEFAULT.into())?;
            self.regions.add(device, size, StreamId::DEFAULT)?;
        }
        self.started = true;
        Ok(())
    }

    /// The size of the initial pool on a device with this much free memory.
    pub(super) fn initial_size(&self, free: Bytes) -> u64 {
        let wanted = (self.config.initial_pool_size).map_or(free.0 / 2, |size| size.0);
        wanted.min(self.left().unwrap_or(u64::MAX)) / CHUNK_UNIT.0 * CHUNK_UNIT.0
    }

    /// The position of the stream's list. Makes it at the stream's first use. Linear in streams.
    fn list_of(&mut self, device: &mut dyn Device, of: FreeList) -> Result<usize, DeviceError> {
        if let Some(list) = self.lists.iter().position(|list| list.list == of) {
            return Ok(list);
        }
        let event = self.events.take(device)?;
        self.lists.push(StreamList {
            list: of,
            event,
            exists: false,
        });
        Ok(self.lists.len() - 1)
    }

    /// Takes a chunk from other streams' lists after their events: one that fits, or one that fits
    /// after merging.
    fn take_from_other_streams(
        &mut self,
        device: &mut dyn Device,
        own: usize,
        size: u64,
    ) -> Result<Option<BlockId>, DeviceError> {
        let to = self.lists[own].list;
        let stream = to.stream();
        if let Some(chunk) = self.regions.fit(to, size) {
            return Ok(Some(chunk));
        }
        let is_other =
            |list: &StreamList| list.exists && list.list != to && list.list.of(stream) == to;
        for list in self.lists.iter().filter(|list| is_other(list)) {
            if let Some(chunk) = self.regions.fit(list.list, size) {
                device.wait_event(stream, list.event)?;
                return Ok(Some(chunk));
            }
        }
        let own_event = self.lists[own].event;
        for list in self.lists.iter_mut().filter(|list| is_other(list)) {
            device.wait_event(stream, list.event)?;
            // Record first: if that fails, nothing has moved.
            device.record_event(own_event, stream)?;
            self.regions.take_over(list.list, to, u64::MAX);
            list.exists = false;
            if let Some(chunk) = self.regions.fit(to, size) {
                return Ok(Some(chunk));
            }
        }
        Ok(None)
    }

    /// How much the pool may grow, if it has a maximum.
    fn left(&self) -> Option<u64> {
        let left = |maximum: Bytes| maximum.0.saturating_sub(self.regions.reserved());
        let of_maximum = self.config.maximum_pool_size.map(left);
        let of_fraction = self.regions.limit.map(left);
        of_maximum
            .map(|left| left.next_multiple_of(CHUNK_UNIT.0))
            .into_iter()
            .chain(of_fraction)
            .min()
    }

    /// Allocates a region for the request, or returns `None` if the maximum or the driver refuses.
    fn grow(
        &mut self,
        device: &mut dyn Device,
        stream: StreamId,
        size: u64,
    ) -> Result<Option<BlockId>, DeviceError> {
        let mut bytes = match self.left() {
            Some(left) if size > left => return Ok(None),
            Some(left) => size.max(left / 2),
            None => size.max(self.regions.reserved()),
        };
        loop {
            if let Some(chunk) = self.regions.add(device, bytes, stream)? {
                return Ok(Some(chunk));
            }
            if bytes == size {
                return Ok(None);
            }
            bytes = size.max(bytes / 2);
        }
    }

    /// Releases free regions until the maximum leaves room for the request. As in RMM, a pool that
    /// exceeds its maximum releases nothing.
    fn make_room(&mut self, device: &mut dyn Device, size: u64) -> Result<(), DeviceError> {
        let at_least = size.max(self.regions.reserved());
        if (self.config.maximum_pool_size).is_some_and(|maximum| maximum.0 < at_least) {
            return Ok(());
        }
        let maximum = self.regions.limit(device, self.config.maximum_pool_size);
        self.regions
            .release_except(device, maximum.0.saturating_sub(size), |_, list| {
                !list.merges()
            })
            .map(drop)
    }

    /// Adds a freed chunk to its stream's list, after the work of all streams that use it. If the
    /// device fails, the chunk waits for [`Self::retry_frees`].
    fn finish_free(
        &mut self,
        device: &mut dyn Device,
        chunk: BlockId,
        users: BTreeSet<StreamId>,
    ) -> Result<(), DeviceError> {
        let list = self.regions.list(chunk);
        let stream = list.stream();
        let ordered = (self.events.order_behind(device, stream, &users)).and_then(|()| {
            let list = self.list_of(device, list)?;
            // A destroyed stream has no work after its last record.
            if_exists(device.record_event(self.lists[list].event, stream))?;
            Ok(list)
        });
        match ordered {
            Ok(list) => {
                self.lists[list].exists = true;
                self.regions.complete_free(chunk);
            }
            Err(_) => {
                self.regions.postpone_free(chunk);
                self.unfinished.push((chunk, users));
            }
        }
        ordered.map(drop)
    }

    /// Finishes the frees in which the device failed before.
    pub(super) fn retry_frees(&mut self, device: &mut dyn Device) -> Result<(), DeviceError> {
        while let Some((chunk, users)) = self.unfinished.pop() {
            self.finish_free(device, chunk, users)?;
        }
        Ok(())
    }

    /// Releases all memory of a pool without live chunks. The next request makes the initial pool.
    pub(super) fn restart(&mut self, device: &mut dyn Device) -> Result<(), DeviceError> {
        self.regions.release(device, 0)?;
        self.started = false;
        for list in self.lists.drain(..) {
            self.events.give_back(list.event);
        }
        Ok(())
    }
}

impl Allocator for RmmPool {
    fn name(&self) -> &'static str {
        "rmm_pool"
    }

    /// It releases only what its maximum requires.
    fn releases_before_failure(&self) -> bool {
        false
    }

    /// The first request can get the initial pool, or what that leaves.
    fn largest_request(&self, device: &dyn Device, free: Bytes) -> Bytes {
        let initial = match self.started {
            true => 0,
            false => self.initial_size(free).min(free.0),
        };
        let rest = free.0 - initial;
        Bytes(initial.max(rest - rest % self.reserve_unit(device).0))
    }

    fn allocate(
        &mut self,
        device: &mut dyn Device,
        request: Request,
    ) -> Result<Allocation, AllocatorError> {
        if request.size == Bytes::ZERO {
            return Ok(Allocation::null(request));
        }
        let size = regions::rounded(device, request, CHUNK_UNIT)?;
        let chunk = self.chunk(device, request, size)?;
        Ok(self.regions.hand_out(chunk, request, size))
    }

    fn free(&mut self, device: &mut dyn Device, allocation: Allocation) -> Result<(), DeviceError> {
        if allocation.is_null() {
            return Ok(());
        }
        let chunk = self.regions.chunk_of(&allocation)?;
        let users = self.regions.begin_free(chunk);
        self.finish_free(device, chunk, users)
    }

    /// Moves the stream's free chunks to the default stream's lists.
    fn release_stream(
        &mut self,
        device: &mut dyn Device,
        stream: StreamId,
    ) -> Result<(), DeviceError> {
        if stream == StreamId::DEFAULT {
            return Ok(());
        }
        self.retry_frees(device)?;
        if_exists(device.synchronize_stream(stream))?;
        // The event may be ordered after waits for other streams' work. All of that is complete
        // now.
        let is_of_stream = |list: &StreamList| list.list.stream() == stream;
        while let Some(position) = self.lists.iter().position(is_of_stream) {
            let from = self.lists[position].list;
            let to = from.of(StreamId::DEFAULT);
            self.open_list(device, to)?;
            self.events.give_back(self.lists.remove(position).event);
            self.regions.inherit(from, to);
        }
        Ok(())
    }

    /// Releases all regions without live chunks.
    fn empty_cache(&mut self, device: &mut dyn Device) -> Result<(), DeviceError> {
        self.retry_frees(device)?;
        self.regions.release(device, 0).map(drop)
    }

    answered_by!(regions);

    fn close(&mut self, device: &mut dyn Device) -> Result<(), DeviceError> {
        self.unfinished.clear();
        std::mem::take(&mut self.lists)
            .into_iter()
            .for_each(|list| self.events.give_back(list.event));
        self.events.close(device)?;
        self.regions.close(device)?;
        *self = Self::new(self.config.clone());
        Ok(())
    }
}
