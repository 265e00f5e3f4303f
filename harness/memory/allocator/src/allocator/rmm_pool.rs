//! RMM's pool: one large initial pool, cut exactly to size, with a free list per stream. A stream
//! takes memory from other streams' lists after a device-side wait for their events. The pool grows
//! if nothing fits.
//!
//! It models `rmm::mr::pool_memory_resource` on top of `cuda_memory_resource`. RMM's
//! `arena_memory_resource` is another allocator. Sources, in <https://github.com/rapidsai/rmm>: the
//! README's "Stream-ordered Memory Allocation" and "Available Resources", and the documentation in
//! `pool_memory_resource.hpp`, `detail/stream_ordered_memory_resource.hpp` and
//! `detail/coalescing_free_list.hpp`; <https://docs.rapids.ai/api/rmm/stable/>.
//!
//! * Sizes are multiples of 256 B. The best fit of the stream's own list is cut exactly to the
//!   request; the rest stays in that list.
//! * A freed block joins the list of its stream and merges with free neighbors there. The stream's
//!   one event is recorded again. So a free costs a driver call and never waits.
//! * A miss searches the other streams' lists. The stream waits, on the device, for the event of
//!   the first stream with a fitting block and takes the block. If there is none, it takes over the
//!   lists one by one, with a wait for each event, until merging gives a fitting block.
//! * Then the pool grows: by half of the distance to its maximum, or by the request if that is
//!   more. If the driver refuses, it tries half of that, down to the request itself. If the maximum
//!   is too low, it first releases free blocks that are whole regions.
//!
//! Deliberate differences:
//!
//! * The initial pool is allocated at the first request, because each call passes the device in. As
//!   in RMM's Python interface, it is half of the free memory by default. If the maximum or the
//!   driver refuses it, there is no initial pool.
//! * The maximum is the whole device by default. RMM without a maximum doubles its pool and never
//!   releases memory.
//! * Whole free regions are also released if the device has no room, because memory pressure by
//!   other programs is what we test.
//! * RMM cannot release its cache before it is destroyed. [`Allocator::empty_cache`] releases all
//!   whole free regions.
//! * [`Allocator::record_stream`]: RMM's caller must free on a stream that is ordered after every
//!   use. Here the free makes the block's own stream wait, on the device, for the others. So no
//!   free is ever pending, but the stream's later work waits longer.
//! * A stream that takes over lists records its own event again after that wait. So a third stream
//!   that takes such a block is ordered after the first one too.

use std::collections::{BTreeMap, BTreeSet};

use super::pending::{Events, if_exists};
use super::regions::{self, CHUNK_UNIT, ChunkId, Regions};
use super::{Allocation, Allocator, AllocatorError, Request, answered_by};
use crate::device::{Device, DeviceError, EventId, StreamId};
use crate::units::Bytes;

/// The settings, with RMM's names.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RmmPoolConfig {
    /// The size of the pool at the first request. The default is half of the free memory.
    pub initial_pool_size: Option<Bytes>,
    /// The limit on the pool. The default is the whole device.
    pub maximum_pool_size: Option<Bytes>,
}

#[derive(Debug, Default)]
pub struct RmmPool {
    config: RmmPoolConfig,
    regions: Regions,
    started: bool,
    /// For each stream with a free, the event after its last one.
    freed: BTreeMap<StreamId, EventId>,
    /// Freed chunks, with the streams that use them, whose free the device failed to finish.
    unfinished: Vec<(ChunkId, BTreeSet<StreamId>)>,
    events: Events,
}

impl RmmPool {
    pub fn new(config: RmmPoolConfig) -> Self {
        Self {
            config,
            ..Self::default()
        }
    }

    /// Finds a chunk outside the stream's own ones: from another stream or from the driver.
    fn find(
        &mut self,
        device: &mut dyn Device,
        request: Request,
        size: u64,
    ) -> Result<ChunkId, AllocatorError> {
        self.retry_frees(device)?;
        let maximum = self.regions.limit(device, self.config.maximum_pool_size);
        if size <= maximum.0 {
            self.start(device, maximum)?;
            if let Some(chunk) = self.take_from_other_streams(device, request.stream, size)? {
                return Ok(chunk);
            }
            if let Some(chunk) = self.grow(device, request.stream, size, maximum)? {
                return Ok(chunk);
            }
            self.regions.stats.num_alloc_retries += 1;
            if self.make_room(device, size, maximum)?
                && let Some(chunk) = self.grow(device, request.stream, size, maximum)?
            {
                return Ok(chunk);
            }
        }
        Err(self
            .regions
            .out_of_memory(device, request, size, self.config.maximum_pool_size))
    }

    /// Allocates the initial pool for the default stream.
    fn start(&mut self, device: &mut dyn Device, maximum: Bytes) -> Result<(), DeviceError> {
        if self.started {
            return Ok(());
        }
        let wanted = match self.config.initial_pool_size {
            Some(size) => size,
            None => Bytes(device.free_memory()?.0 / 2),
        };
        let size = wanted.0.min(maximum.0) / CHUNK_UNIT.0 * CHUNK_UNIT.0;
        if size > 0 {
            self.regions.add(device, size, StreamId::DEFAULT)?;
        }
        self.started = true;
        Ok(())
    }

    /// Takes a chunk from other streams' lists after their events: one that fits, or one that fits
    /// after merging.
    fn take_from_other_streams(
        &mut self,
        device: &mut dyn Device,
        stream: StreamId,
        size: u64,
    ) -> Result<Option<ChunkId>, DeviceError> {
        if let Some(chunk) = self.regions.best_fit(stream, size) {
            return Ok(Some(chunk));
        }
        let others = self.regions.other_streams(stream);
        for &other in &others {
            if let Some(chunk) = self.regions.best_fit(other, size) {
                self.wait_for(device, stream, other)?;
                return Ok(Some(chunk));
            }
        }
        for &other in &others {
            if self.wait_for(device, stream, other)? {
                // Record first: if that fails, nothing has moved.
                self.record_freed(device, stream)?;
            }
            self.regions.take_over(other, stream, u64::MAX);
            if let Some(chunk) = self.regions.best_fit(stream, size) {
                return Ok(Some(chunk));
            }
        }
        Ok(None)
    }

    /// Makes the stream's later work wait for the last free on another one. Returns whether there
    /// was any.
    fn wait_for(
        &mut self,
        device: &mut dyn Device,
        stream: StreamId,
        other: StreamId,
    ) -> Result<bool, DeviceError> {
        match self.freed.get(&other) {
            Some(&event) => device.wait_event(stream, event).map(|()| true),
            None => Ok(false),
        }
    }

    /// Records the stream's event after all of its work. A destroyed stream has no work after its
    /// last record.
    fn record_freed(
        &mut self,
        device: &mut dyn Device,
        stream: StreamId,
    ) -> Result<(), DeviceError> {
        if let Some(&event) = self.freed.get(&stream) {
            return if_exists(device.record_event(event, stream)).map(drop);
        }
        if let Some(event) = self.events.record(device, stream)? {
            self.freed.insert(stream, event);
        }
        Ok(())
    }

    /// Allocates a region for the request, or returns `None` if the maximum or the driver refuses.
    fn grow(
        &mut self,
        device: &mut dyn Device,
        stream: StreamId,
        size: u64,
        maximum: Bytes,
    ) -> Result<Option<ChunkId>, DeviceError> {
        let left = maximum.0.saturating_sub(self.regions.reserved());
        if size > left {
            return Ok(None);
        }
        let mut bytes = (left / 2)
            .next_multiple_of(CHUNK_UNIT.0)
            .min(left / CHUNK_UNIT.0 * CHUNK_UNIT.0)
            .max(size);
        loop {
            if let Some(chunk) = self.regions.add(device, bytes, stream)? {
                return Ok(Some(chunk));
            }
            if bytes == size {
                return Ok(None);
            }
            bytes = (bytes / 2).next_multiple_of(CHUNK_UNIT.0).max(size);
        }
    }

    /// Releases free regions: until the maximum leaves room for the request, or all if the device
    /// refused it. Returns whether any was released.
    fn make_room(
        &mut self,
        device: &mut dyn Device,
        size: u64,
        maximum: Bytes,
    ) -> Result<bool, DeviceError> {
        let below_maximum = maximum.0.saturating_sub(size);
        let the_device_refused = self.regions.reserved() <= below_maximum;
        self.regions
            .release(device, if the_device_refused { 0 } else { below_maximum })
    }

    /// Adds a freed chunk to its stream's list, after the work of all streams that use it. If the
    /// device fails, the chunk waits for [`Self::retry_frees`].
    fn finish_free(
        &mut self,
        device: &mut dyn Device,
        chunk: ChunkId,
        users: BTreeSet<StreamId>,
    ) -> Result<(), DeviceError> {
        let stream = self.regions[chunk].stream;
        let ordered = self
            .order_behind(device, stream, &users)
            .and_then(|()| self.record_freed(device, stream));
        match ordered {
            Ok(()) => self.regions.complete_free(chunk),
            Err(_) => self.unfinished.push((chunk, users)),
        }
        ordered
    }

    /// Finishes the frees in which the device failed before.
    fn retry_frees(&mut self, device: &mut dyn Device) -> Result<(), DeviceError> {
        while let Some((chunk, users)) = self.unfinished.pop() {
            self.finish_free(device, chunk, users)?;
        }
        Ok(())
    }

    /// Makes the stream wait for the other streams' work on memory that is freed on it.
    fn order_behind(
        &mut self,
        device: &mut dyn Device,
        stream: StreamId,
        users: &BTreeSet<StreamId>,
    ) -> Result<(), DeviceError> {
        for &user in users {
            let Some(event) = self.events.record(device, user)? else {
                continue;
            };
            let waits = match if_exists(device.wait_event(stream, event)) {
                Ok(Some(())) => Ok(()),
                // The stream is destroyed, so only the host can wait.
                Ok(None) => device.synchronize_event(event),
                Err(error) => Err(error),
            };
            self.events.give_back(event);
            waits?;
        }
        Ok(())
    }
}

impl Allocator for RmmPool {
    fn name(&self) -> &'static str {
        "rmm_pool"
    }

    fn allocate(
        &mut self,
        device: &mut dyn Device,
        request: Request,
    ) -> Result<Allocation, AllocatorError> {
        if request.size == Bytes::ZERO {
            return Ok(Allocation::null(request));
        }
        let size = regions::rounded(device, request)?;
        let chunk = match self.regions.best_fit(request.stream, size) {
            Some(chunk) => chunk,
            None => self.find(device, request, size)?,
        };
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

    fn record_stream(
        &mut self,
        allocation: &Allocation,
        stream: StreamId,
    ) -> Result<(), DeviceError> {
        self.regions.record_use(allocation, stream)
    }

    /// Moves the stream's free chunks to the default stream's list.
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
        if let Some(event) = self.freed.remove(&stream) {
            self.events.give_back(event);
        }
        self.regions.take_over(stream, StreamId::DEFAULT, u64::MAX);
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
        std::mem::take(&mut self.freed)
            .into_values()
            .for_each(|event| self.events.give_back(event));
        self.events.close(device)?;
        self.regions.close(device)?;
        *self = Self::new(self.config.clone());
        Ok(())
    }
}
