//! RMM's pool: one large pool taken at the start, cut to the byte, a free list for each stream, memory taken from other streams' lists by
//! way of events on the device, the pool grown when nothing else helps.
//!
//! Models `rmm::mr::pool_memory_resource` on top of `cuda_memory_resource`; the name is what its users call it (RMM's
//! `arena_memory_resource` is another allocator). Sources, in <https://github.com/rapidsai/rmm>: the README's "Stream-ordered Memory Allocation" and
//! "Available Resources", and the documentation in `pool_memory_resource.hpp`, `detail/stream_ordered_memory_resource.hpp` and
//! `detail/coalescing_free_list.hpp`; <https://docs.rapids.ai/api/rmm/stable/>.
//!
//! * Sizes are multiples of 256 B. The best fit of the stream's own list is cut to the request, whatever is left; the rest stays in that list.
//! * A freed block joins the list of the stream that it is freed on, merged with its free neighbours there, and the stream's one event is recorded
//!   again: a free costs a driver call, and never waits.
//! * A miss looks at the other streams' lists. The stream waits, on the device, for the event of the first of them that has a block that fits,
//!   and gets that block. If none has, it takes the lists over one after the other, waiting for the event of each, until merging
//!   has made a block that fits.
//! * Then the pool grows: by half of what is left to its maximum, or by the request if that is more. If the driver refuses, half of that is tried,
//!   and so on down to the request itself. If the maximum is in the way, blocks that are wholly free go back until it is not.
//!
//! Where it differs, deliberately:
//!
//! * The initial pool is taken at the first request, not when the allocator is made, because the device is passed in with each call. As in
//!   RMM's Python interface, it is half of what is free by default; where the maximum or the driver refuses that, there is none.
//! * The maximum is the whole device by default. RMM without any maximum doubles its pool instead of going half-way, and never gives anything back.
//! * Wholly free blocks also go back if it is the device that has no room, not only the maximum: pressure by others is what we test.
//! * RMM cannot give its cache back before it is destroyed. [`Allocator::empty_cache`] gives all wholly free blocks back to the driver.
//! * [`Allocator::record_stream`]: RMM leaves it to the caller to free on a stream that is ordered behind every use. Here that is done on his behalf: at the free, the
//!   block's own stream waits on the device for the others. Nothing is ever pending, and the stream's later work waits longer instead.
//! * A stream that takes lists over has its own event recorded again behind that wait, so that a third stream that takes such a block
//!   from it is ordered behind the first one too.

use std::collections::{BTreeMap, BTreeSet};

use super::pending::{Events, if_exists};
use super::regions::{self, CHUNK_UNIT, ChunkId, Regions};
use super::{Allocation, Allocator, AllocatorError, Request, answered_by};
use crate::device::{Device, DeviceError, EventId, StreamId};
use crate::units::Bytes;

/// What can be set, by RMM's names.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RmmPoolConfig {
    /// What is taken from the driver at the first request. Half of what is free then, by default.
    pub initial_pool_size: Option<Bytes>,
    /// What the pool may come to. All of the device by default.
    pub maximum_pool_size: Option<Bytes>,
}

/// The pool memory resource of RMM. The module says what it models, and where it differs.
#[derive(Debug, Default)]
pub struct RmmPool {
    config: RmmPoolConfig,
    regions: Regions,
    /// Whether the initial pool has been asked for.
    started: bool,
    /// One event for each stream that freed something, recorded behind its last free.
    freed: BTreeMap<StreamId, EventId>,
    /// Chunks that were freed, with the streams that use them, where the device failed before it was done.
    unfinished: Vec<(ChunkId, BTreeSet<StreamId>)>,
    events: Events,
}

impl RmmPool {
    /// An empty pool with these settings.
    #[must_use]
    pub fn new(config: RmmPoolConfig) -> Self {
        Self { config, ..Self::default() }
    }

    /// A chunk that is not among the stream's own: from another stream or from the driver.
    fn find(&mut self, device: &mut dyn Device, request: Request, size: u64) -> Result<ChunkId, AllocatorError> {
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
        Err(self.regions.out_of_memory(device, request, size, self.config.maximum_pool_size))
    }

    /// Takes the initial pool for the default stream.
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

    /// A chunk from other streams' lists, behind their events: one that fits, or one that fits after merging.
    fn take_from_other_streams(&mut self, device: &mut dyn Device, stream: StreamId, size: u64) -> Result<Option<ChunkId>, DeviceError> {
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
                // Before anything moves: where the record fails, all stays as it was.
                self.record_freed(device, stream)?;
            }
            self.regions.take_over(other, stream, u64::MAX);
            if let Some(chunk) = self.regions.best_fit(stream, size) {
                return Ok(Some(chunk));
            }
        }
        Ok(None)
    }

    /// Makes the stream's later work wait for the last free on another one. Says whether there was any.
    fn wait_for(&mut self, device: &mut dyn Device, stream: StreamId, other: StreamId) -> Result<bool, DeviceError> {
        match self.freed.get(&other) {
            Some(&event) => device.wait_event(stream, event).map(|()| true),
            None => Ok(false),
        }
    }

    /// Records the stream's event behind all of its work. A stream that is no more has nothing behind its last record.
    fn record_freed(&mut self, device: &mut dyn Device, stream: StreamId) -> Result<(), DeviceError> {
        if let Some(&event) = self.freed.get(&stream) {
            return if_exists(device.record_event(event, stream)).map(drop);
        }
        if let Some(event) = self.events.record(device, stream)? {
            self.freed.insert(stream, event);
        }
        Ok(())
    }

    /// A new region that the request fits; `None` where the maximum or the driver says no.
    fn grow(&mut self, device: &mut dyn Device, stream: StreamId, size: u64, maximum: Bytes) -> Result<Option<ChunkId>, DeviceError> {
        let left = maximum.0.saturating_sub(self.regions.reserved());
        if size > left {
            return Ok(None);
        }
        let mut bytes = (left / 2).next_multiple_of(CHUNK_UNIT.0).min(left / CHUNK_UNIT.0 * CHUNK_UNIT.0).max(size);
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

    /// Gives wholly free regions back: until the maximum leaves room for the request, or all of them where the device refused it. Says
    /// whether that was any.
    fn make_room(&mut self, device: &mut dyn Device, size: u64, maximum: Bytes) -> Result<bool, DeviceError> {
        let below_maximum = maximum.0.saturating_sub(size);
        let the_device_refused = self.regions.reserved() <= below_maximum;
        self.regions.release(device, if the_device_refused { 0 } else { below_maximum })
    }

    /// Puts a chunk that its caller has freed into its stream's list, behind the work of all streams that use it. Where the device fails,
    /// the chunk waits for [`Self::retry_frees`].
    fn finish_free(&mut self, device: &mut dyn Device, chunk: ChunkId, users: BTreeSet<StreamId>) -> Result<(), DeviceError> {
        let stream = self.regions[chunk].stream;
        let ordered = self.order_behind(device, stream, &users).and_then(|()| self.record_freed(device, stream));
        match ordered {
            Ok(()) => self.regions.complete_free(chunk),
            Err(_) => self.unfinished.push((chunk, users)),
        }
        ordered
    }

    /// Finishes the frees that the device failed in before.
    fn retry_frees(&mut self, device: &mut dyn Device) -> Result<(), DeviceError> {
        while let Some((chunk, users)) = self.unfinished.pop() {
            self.finish_free(device, chunk, users)?;
        }
        Ok(())
    }

    /// Makes the stream wait for what other streams still do with memory that is freed on it.
    fn order_behind(&mut self, device: &mut dyn Device, stream: StreamId, users: &BTreeSet<StreamId>) -> Result<(), DeviceError> {
        for &user in users {
            let Some(event) = self.events.record(device, user)? else { continue };
            let waits = match if_exists(device.wait_event(stream, event)) {
                Ok(Some(())) => Ok(()),
                // The stream is no more, so that only the host can wait.
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

    fn allocate(&mut self, device: &mut dyn Device, request: Request) -> Result<Allocation, AllocatorError> {
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

    fn record_stream(&mut self, allocation: &Allocation, stream: StreamId) -> Result<(), DeviceError> {
        self.regions.record_use(allocation, stream)
    }

    /// What is free for the stream goes to the default stream's list.
    fn release_stream(&mut self, device: &mut dyn Device, stream: StreamId) -> Result<(), DeviceError> {
        if stream == StreamId::DEFAULT {
            return Ok(());
        }
        self.retry_frees(device)?;
        if_exists(device.synchronize_stream(stream))?;
        // The event may be behind waits for other streams' work, which the stream was made to wait for: all of that is done by now.
        if let Some(event) = self.freed.remove(&stream) {
            self.events.give_back(event);
        }
        self.regions.take_over(stream, StreamId::DEFAULT, u64::MAX);
        Ok(())
    }

    /// Gives back all regions in which nothing is live.
    fn empty_cache(&mut self, device: &mut dyn Device) -> Result<(), DeviceError> {
        self.retry_frees(device)?;
        self.regions.release(device, 0).map(drop)
    }

    answered_by!(regions);

    fn close(&mut self, device: &mut dyn Device) -> Result<(), DeviceError> {
        self.unfinished.clear();
        std::mem::take(&mut self.freed).into_values().for_each(|event| self.events.give_back(event));
        self.events.close(device)?;
        self.regions.close(device)?;
        *self = Self::new(self.config.clone());
        Ok(())
    }
}
