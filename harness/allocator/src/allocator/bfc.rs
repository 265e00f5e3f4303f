//! TensorFlow's best-fit-with-coalescing allocator: few, ever larger regions that are kept, chunks cut from them where the rest is worth
//! it, free neighbours merged.
//!
//! Models `BFCAllocator` as its header documents it (`tensorflow/core/common_runtime/bfc_allocator.h`, today
//! `third_party/xla/xla/tsl/framework/bfc_allocator.h`, in <https://github.com/tensorflow/tensorflow>; the options of the GPU process are
//! documented in <https://www.tensorflow.org/guide/gpu#limiting_gpu_memory_growth>):
//!
//! * Sizes are multiples of 256 B. Free chunks are sorted into 21 bins by size, bin i from 256 B · 2^i on, each ordered by size, then address;
//!   a search goes from the bin of the request upwards. As bins divide the sizes in order, that finds the smallest chunk that fits, at the
//!   lowest address: here one ordered index does, in one search.
//! * A chunk is cut if it is at least twice the request, or if 128 MiB or more would be wasted otherwise; else it is handed out whole.
//! * A region is asked for where nothing fits: 2 MiB first, doubled until the request fits, doubled again for the next region, at most
//!   what the memory limit leaves. Where the device has less, the first extension that fails tries 0.9 of the size again and again.
//! * Regions are kept for good. With garbage collection, which a GPU process has by default (`TF_ENABLE_GPU_GARBAGE_COLLECTION`), a request
//!   that would fail gives wholly free regions back, if their bytes and what the limit leaves come to its size, and extends once more.
//!
//! Where it differs, deliberately:
//!
//! * Streams. TensorFlow computes on one stream: what is freed may be handed out at once, as work on the stream runs in order. Memory
//!   that other streams may still use is held out by a count that a safe frontier has to pass. Here a chunk is free for the stream of its
//!   last use, which gets it back at once as in TensorFlow, and bears the count of its free. Another stream gets it when an event
//!   recorded behind the work of the former has been seen complete: that event is the frontier. Events are recorded and asked for where the stream's
//!   own chunks do not do, so that neither a hit nor a free of unshared memory calls the device; the host waits for them only where the
//!   request would fail. Memory that nobody has used yet is free for all.
//! * [`Allocator::record_stream`]: such a chunk is pending until events behind the other streams' work have been seen complete.
//! * TensorFlow has no public way to empty its cache. [`Allocator::empty_cache`] collects garbage without need: all wholly free regions go.
//!   The size of the next region stays what it is, as there.
//! * After its first failing extension TensorFlow never tries less than the full region again, and never less than 0.9 of it at a time, so that it
//!   can fail while the device still has the memory. Here the last attempt is the request itself, so that an out-of-memory always says that
//!   the device, or the limit, refused it.
//! * TensorFlow waits up to ten seconds for another thread to free memory. Here one thread makes all calls, and nothing is waited for.

use std::collections::BTreeMap;

use super::pending::{Events, PendingFrees, if_exists};
use super::regions::{self, CHUNK_UNIT, ChunkId, Regions};
use super::{Allocation, Allocator, AllocatorError, Request, answered_by};
use crate::device::{Device, DeviceError, EventId, StreamId};
use crate::units::Bytes;

/// What can be set, by TensorFlow's names.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BfcConfig {
    /// Whether regions are asked for as they are needed. If not, the first one takes the whole memory limit. `true`, as in the allocator's
    /// own options; a TensorFlow process has `false`, and a harness that ran so would measure nothing but its own limit.
    pub allow_growth: bool,
    /// What regions may come to. All of the device by default.
    pub memory_limit: Option<Bytes>,
    /// Whether wholly free regions are given back before a request fails. `true`, as in a TensorFlow process.
    pub garbage_collection: bool,
}

impl BfcConfig {
    /// The first region of an allocator that grows.
    pub const FIRST_REGION: Bytes = Bytes::mib(2);
    /// A chunk is cut if this or more would be wasted.
    pub const MAX_INTERNAL_FRAGMENTATION: Bytes = Bytes::mib(128);

    /// How much of a chunk is handed out for a request of `size`: that, or all of it.
    const fn cut(size: u64, chunk: u64) -> u64 {
        let rest = chunk - size;
        if rest >= size || rest >= Self::MAX_INTERNAL_FRAGMENTATION.0 { size } else { chunk }
    }
}

impl Default for BfcConfig {
    fn default() -> Self {
        Self { allow_growth: true, memory_limit: None, garbage_collection: true }
    }
}

/// TensorFlow's allocator. The module says what it models, and where it differs.
#[derive(Debug, Default)]
pub struct BfcAllocator {
    config: BfcConfig,
    regions: Regions,
    /// The size of the next region, unless the request is larger; `None` before the first one.
    next_region: Option<u64>,
    /// Whether the driver has refused a region of the full size before (`started_backpedal_`).
    has_backed_off: bool,
    /// Chunks that were freed while other streams used them.
    pending: PendingFrees<ChunkId>,
    frontiers: BTreeMap<StreamId, Frontier>,
    events: Events,
}

/// An event behind all work that a stream had when it was recorded.
#[derive(Clone, Copy, Debug)]
struct Frontier {
    event: EventId,
    /// The frees that it is behind.
    covers: u64,
}

impl BfcAllocator {
    /// An empty allocator with these settings.
    #[must_use]
    pub fn new(config: BfcConfig) -> Self {
        Self { config, ..Self::default() }
    }

    /// A chunk that is not among the stream's own: from another stream, from the driver, or for giving something back.
    fn find(&mut self, device: &mut dyn Device, request: Request, size: u64) -> Result<ChunkId, AllocatorError> {
        if let Some(chunk) = self.take_from_other_streams(device, request.stream, size)? {
            return Ok(chunk);
        }
        if let Some(chunk) = self.extend(device, request.stream, size)? {
            return Ok(chunk);
        }
        self.regions.stats.num_alloc_retries += 1;
        self.wait_for_all(device, request.stream)?;
        if let Some(chunk) = self.regions.best_fit(request.stream, size) {
            return Ok(chunk);
        }
        if self.collect_garbage(device, size)?
            && let Some(chunk) = self.extend(device, request.stream, size)?
        {
            return Ok(chunk);
        }
        Err(self.regions.out_of_memory(device, request, size, self.config.memory_limit))
    }

    /// A chunk of another stream that is known to be done with it: what nobody used yet, then what an event has been seen complete for.
    fn take_from_other_streams(&mut self, device: &mut dyn Device, stream: StreamId, size: u64) -> Result<Option<ChunkId>, DeviceError> {
        let others = self.regions.other_streams(stream);
        for &other in &others {
            self.regions.take_over(other, stream, 0);
            if let Some(chunk) = self.regions.best_fit(stream, size) {
                return Ok(Some(chunk));
            }
        }
        for &other in &others {
            // Once for an event recorded earlier, once for all that was freed since.
            while self.regions.has_free(other)
                && let Some(covers) = self.frontier_passed(device, other)?
            {
                self.regions.take_over(other, stream, covers);
                if let Some(chunk) = self.regions.best_fit(stream, size) {
                    return Ok(Some(chunk));
                }
            }
        }
        Ok(None)
    }

    /// The frees of a stream that all of its work is now known to be behind, if that is news.
    fn frontier_passed(&mut self, device: &mut dyn Device, stream: StreamId) -> Result<Option<u64>, DeviceError> {
        let frontier = match self.frontiers.get(&stream) {
            Some(&frontier) => frontier,
            None => {
                let covers = self.regions.frees();
                let Some(event) = self.events.record(device, stream)? else { return Ok(Some(covers)) };
                *self.frontiers.entry(stream).or_insert(Frontier { event, covers })
            }
        };
        if !device.event_done(frontier.event)? {
            return Ok(None);
        }
        self.frontiers.remove(&stream);
        self.events.give_back(frontier.event);
        Ok(Some(frontier.covers))
    }

    /// A new region that the request fits; `None` where the limit or the driver says no.
    fn extend(&mut self, device: &mut dyn Device, stream: StreamId, size: u64) -> Result<Option<ChunkId>, DeviceError> {
        let limit = self.limit(device).0;
        let available = limit.saturating_sub(self.regions.reserved()) / CHUNK_UNIT.0 * CHUNK_UNIT.0;
        if size > available {
            return Ok(None);
        }
        let first = if self.config.allow_growth { limit.min(BfcConfig::FIRST_REGION.0) } else { limit };
        let before = self.next_region.unwrap_or(first.next_multiple_of(CHUNK_UNIT.0)).max(CHUNK_UNIT.0);
        let mut region = before;
        while region < size {
            region = region.saturating_mul(2);
        }
        self.next_region = Some(region);
        let mut bytes = region.min(available);
        let backed_off_before = self.has_backed_off;
        loop {
            if let Some(chunk) = self.regions.add(device, bytes, stream)? {
                if region == before {
                    self.next_region = Some(region.saturating_mul(2));
                }
                return Ok(Some(chunk));
            }
            if bytes == size {
                self.has_backed_off = true;
                return Ok(None);
            }
            bytes =
                if backed_off_before { size } else { (bytes / 10 * 9).next_multiple_of(CHUNK_UNIT.0).min(bytes - CHUNK_UNIT.0).max(size) };
            self.has_backed_off = true;
        }
    }

    /// Waits for everything that would make free memory usable for the stream, if there is anything.
    fn wait_for_all(&mut self, device: &mut dyn Device, stream: StreamId) -> Result<(), DeviceError> {
        let others = self.regions.other_streams(stream);
        if others.is_empty() && self.pending.is_empty() {
            return Ok(());
        }
        self.regions.stats.num_sync_all_streams += 1;
        self.wait_for_pending(device)?;
        // Chunks that were pending may be of other streams too.
        for other in self.regions.other_streams(stream) {
            let covers = self.regions.frees();
            if let Some(event) = self.events.record(device, other)? {
                let waited = device.synchronize_event(event);
                self.events.give_back(event);
                waited?;
            }
            self.regions.take_over(other, stream, covers);
        }
        Ok(())
    }

    /// Waits for the events of pending frees and finishes those frees.
    fn wait_for_pending(&mut self, device: &mut dyn Device) -> Result<(), DeviceError> {
        let (done, waited) = self.pending.wait_for(device, |_| true);
        done.into_iter().for_each(|chunk| self.regions.complete_free(chunk));
        waited
    }

    /// Gives wholly free regions back where that can make room for the request. Says whether it did.
    fn collect_garbage(&mut self, device: &mut dyn Device, size: u64) -> Result<bool, DeviceError> {
        let left = self.limit(device).0.saturating_sub(self.regions.reserved());
        let can_help = || left.saturating_add(self.regions.wholly_free()) >= size;
        if self.config.garbage_collection && can_help() { self.regions.release(device, 0) } else { Ok(false) }
    }

    /// What regions may come to.
    fn limit(&self, device: &dyn Device) -> Bytes {
        self.regions.limit(device, self.config.memory_limit)
    }

    /// Finishes the frees whose events are complete by now.
    fn poll(&mut self, device: &mut dyn Device) -> Result<(), DeviceError> {
        let (done, polled) = self.pending.poll(device);
        done.into_iter().for_each(|chunk| self.regions.complete_free(chunk));
        polled
    }
}

impl Allocator for BfcAllocator {
    fn name(&self) -> &'static str {
        "bfc"
    }

    fn allocate(&mut self, device: &mut dyn Device, request: Request) -> Result<Allocation, AllocatorError> {
        if request.size == Bytes::ZERO {
            return Ok(Allocation::null(request));
        }
        let size = regions::rounded(device, request)?;
        if !self.pending.is_empty() {
            self.poll(device)?;
        }
        let chunk = match self.regions.best_fit(request.stream, size) {
            Some(chunk) => chunk,
            None => self.find(device, request, size)?,
        };
        let taken = BfcConfig::cut(size, self.regions[chunk].size);
        Ok(self.regions.hand_out(chunk, request, taken))
    }

    fn free(&mut self, device: &mut dyn Device, allocation: Allocation) -> Result<(), DeviceError> {
        if allocation.is_null() {
            return Ok(());
        }
        let chunk = self.regions.chunk_of(&allocation)?;
        let streams = self.regions.begin_free(chunk);
        if streams.is_empty() || !self.pending.add(device, chunk, streams)? {
            self.regions.complete_free(chunk);
        }
        Ok(())
    }

    fn record_stream(&mut self, allocation: &Allocation, stream: StreamId) -> Result<(), DeviceError> {
        self.regions.record_use(allocation, stream)
    }

    /// What is free for the stream is free for all afterwards.
    fn release_stream(&mut self, device: &mut dyn Device, stream: StreamId) -> Result<(), DeviceError> {
        if stream == StreamId::DEFAULT {
            return Ok(());
        }
        if_exists(device.synchronize_stream(stream))?;
        self.poll(device)?;
        if let Some(frontier) = self.frontiers.remove(&stream) {
            self.events.give_back(frontier.event);
        }
        self.regions.take_over(stream, StreamId::DEFAULT, u64::MAX);
        Ok(())
    }

    /// Waits for pending frees, then gives back all regions in which nothing is live.
    fn empty_cache(&mut self, device: &mut dyn Device) -> Result<(), DeviceError> {
        if !self.pending.is_empty() {
            self.regions.stats.num_sync_all_streams += 1;
            self.wait_for_pending(device)?;
        }
        self.regions.release(device, 0).map(drop)
    }

    answered_by!(regions);

    fn close(&mut self, device: &mut dyn Device) -> Result<(), DeviceError> {
        self.pending.close(device)?;
        std::mem::take(&mut self.frontiers).into_values().for_each(|frontier| self.events.give_back(frontier.event));
        self.events.close(device)?;
        self.regions.close(device)?;
        *self = Self::new(self.config.clone());
        Ok(())
    }
}
