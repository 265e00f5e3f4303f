//! TensorFlow's best-fit-with-coalescing allocator: a few regions of growing size that are kept,
//! chunks cut from them, and merged free neighbors.
//!
//! ONNX Runtime's arena is the same with other rules of growth: [`super::ort_arena`]. XLA's
//! allocator is the same with another placement: [`super::xla_bfc`].
//!
//! It models `BFCAllocator` (`third_party/xla/xla/tsl/framework/bfc_allocator.h` in
//! <https://github.com/tensorflow/tensorflow>). Its decisions on one stream equal those recorded
//! from TensorFlow 2.21. <https://www.tensorflow.org/guide/gpu#limiting_gpu_memory_growth>
//! documents the options of the GPU process.
//!
//! * Sizes are multiples of 256 B. TensorFlow sorts free chunks into 21 bins by size, bin i from
//!   256 B · 2^i, each ordered by size, then address. A search starts at the bin of the request
//!   and goes upward. It finds the smallest chunk that fits, at the lowest address. One ordered
//!   index gives the same result here.
//! * A chunk is cut if it is at least twice the request, or if 128 MiB or more would be wasted.
//!   Otherwise the whole chunk is allocated.
//! * If no chunk fits, the allocator adds a region. Its size is 2 MiB at first and doubles until
//!   the request fits; it doubles again for the next region, up to the memory limit. If the device
//!   has less, the allocator tries 0.9 of the size, in single precision and rounded up to 256 B,
//!   again and again until that is less than the request. So a request can fail although the device
//!   has enough memory for it, but less than 0.9⁻¹ times as much.
//! * Regions are kept. With garbage collection, the default of a GPU process
//!   (`TF_ENABLE_GPU_GARBAGE_COLLECTION`), a failing request releases free regions if they make
//!   enough room, and extends once more.
//!
//! Deliberate differences:
//!
//! * Streams. TensorFlow computes on one stream, so freed memory can be reused immediately. A safe
//!   frontier holds back memory that other streams may still use. Here a chunk is free for the
//!   stream of its last use, which reuses it immediately, and has the count of its free. Another
//!   stream gets it after an event that follows the first stream's work is complete: that event is
//!   the frontier. Events are recorded and polled only if the stream's own chunks do not fit. So
//!   neither a hit nor a free of unshared memory calls the device. The host waits for events only
//!   if the request would otherwise fail. Never used memory is free for all streams.
//! * [`Allocator::record_stream`]: the chunk stays pending until events that follow the other
//!   streams' work are complete.
//! * TensorFlow has no public way to empty its cache. [`Allocator::empty_cache`] releases all free
//!   regions. The size of the next region stays the same, as in TensorFlow.
//! * The attempts end if 0.9 of a size rounds up to the same size.
//! * TensorFlow waits up to ten seconds for another thread to free memory. Here one thread makes
//!   all calls, so there is no wait.

use std::collections::BTreeMap;

use serde::Deserialize;

use super::bfc_growth::Growth;
use super::blocks::CHUNK_UNIT;
use super::ids::BlockId;
use super::ort_arena::OrtArenaConfig;
use super::pending::{Events, PendingFrees};
use super::regions::{self, Placement, Regions};
use super::xla_bfc::XlaBfcConfig;
use super::{Allocation, Allocator, AllocatorError, Request, answered_by};
use crate::device::{Device, DeviceError, DevicePtr, EventId, StreamId};
use crate::units::Bytes;

#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct BfcConfig {
    /// True if regions are allocated as needed. Otherwise the first region takes the whole memory
    /// limit. The default is `true`, as in the allocator's own options. A TensorFlow process uses
    /// `false`, but then a harness would measure only its own limit.
    pub allow_growth: bool,
    /// The limit on all regions together. The default is the whole device.
    // With this function, a recording without the field is an error.
    #[serde(deserialize_with = "Option::deserialize")]
    pub memory_limit: Option<Bytes>,
    /// True if free regions are released before a request fails. The default is `true`, as in a
    /// TensorFlow process.
    pub garbage_collection: bool,
}

impl BfcConfig {
    /// The size of the first region of a growing allocator.
    pub const FIRST_REGION: Bytes = Bytes::mib(2);
    /// A chunk is cut if at least this much would be wasted.
    pub const MAX_INTERNAL_FRAGMENTATION: Bytes = Bytes::mib(128);

    /// The next size to try after the driver refused `bytes`: 0.9 of it, computed in single
    /// precision as in TensorFlow.
    fn after_refusal(bytes: u64) -> u64 {
        ((bytes as f32 * 0.9) as u64).next_multiple_of(CHUNK_UNIT.0)
    }

    /// The next region for a request of `size`. `planned` is its size if the request is no larger.
    fn growth(&self, planned: Option<u64>, limit: u64, size: u64) -> Growth {
        let first = if self.allow_growth {
            limit.min(Self::FIRST_REGION.0)
        } else {
            limit
        };
        let before = planned.unwrap_or(first.next_multiple_of(CHUNK_UNIT.0));
        let region = Growth::doubled(before, size);
        Growth {
            region,
            after_refusal: region,
            after_success: if region == before {
                region.saturating_mul(2)
            } else {
                region
            },
        }
    }
}

/// The library whose rules the allocator follows.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Library {
    TensorFlow(BfcConfig),
    OnnxRuntime(OrtArenaConfig),
    Xla(XlaBfcConfig),
}

impl Default for Library {
    fn default() -> Self {
        Self::TensorFlow(BfcConfig::default())
    }
}

impl Library {
    const fn collects_garbage(&self) -> bool {
        match self {
            Self::TensorFlow(config) => config.garbage_collection,
            Self::OnnxRuntime(_) | Self::Xla(_) => false,
        }
    }

    /// The least size that is tried after the driver refused a larger one.
    const fn least_after_refusal(&self) -> u64 {
        match self {
            Self::TensorFlow(_) | Self::Xla(_) => 0,
            Self::OnnxRuntime(_) => OrtArenaConfig::LEAST_AFTER_REFUSAL,
        }
    }

    const fn placement(&self) -> Placement {
        match self {
            Self::Xla(XlaBfcConfig {
                preallocate: true, ..
            }) => Placement::High,
            Self::TensorFlow(_) | Self::OnnxRuntime(_) | Self::Xla(_) => Placement::Low,
        }
    }

    /// Whether the first region is never released.
    const fn keeps_first_region(&self) -> bool {
        match self {
            Self::TensorFlow(_) | Self::Xla(_) => false,
            Self::OnnxRuntime(config) => config.shrinkage_keeps_first_region,
        }
    }

    /// The bytes of a chunk to allocate for a request of `size`: exactly that, or the whole chunk.
    const fn cut(&self, size: u64, chunk: u64) -> u64 {
        let waste = match self {
            Self::TensorFlow(_) | Self::Xla(_) => BfcConfig::MAX_INTERNAL_FRAGMENTATION.0,
            Self::OnnxRuntime(config) => config.max_dead_bytes_per_chunk.0,
        };
        let rest = chunk - size;
        if rest >= size || rest >= waste {
            size
        } else {
            chunk
        }
    }

    fn growth(&self, planned: Option<u64>, limit: u64, size: u64) -> Growth {
        match self {
            Self::TensorFlow(config) => config.growth(planned, limit, size),
            Self::OnnxRuntime(config) => config.growth(planned, limit, size),
            Self::Xla(config) => BfcConfig {
                allow_growth: !config.preallocate,
                ..BfcConfig::default()
            }
            .growth(planned, limit, size),
        }
    }
}

impl Default for BfcConfig {
    fn default() -> Self {
        Self {
            allow_growth: true,
            memory_limit: None,
            garbage_collection: true,
        }
    }
}

#[derive(Debug, Default)]
pub struct BfcAllocator {
    rules: Library,
    regions: Regions,
    /// The size of the next region, unless the request is larger, or `None` before the first one.
    next_region: Option<u64>,
    /// The region that [`Allocator::empty_cache`] keeps.
    kept: Option<DevicePtr>,
    /// Chunks that were freed while other streams used them.
    pending: PendingFrees<BlockId>,
    frontiers: BTreeMap<StreamId, Frontier>,
    events: Events,
}

/// An event after all work of a stream at the time of its record.
#[derive(Clone, Copy, Debug)]
struct Frontier {
    event: EventId,
    /// The number of frees that it is ordered after.
    covers: u64,
}

impl BfcAllocator {
    pub fn new(config: BfcConfig) -> Self {
        Self::of(Library::TensorFlow(config))
    }

    pub fn onnx_runtime(config: OrtArenaConfig) -> Self {
        Self::of(Library::OnnxRuntime(config))
    }

    /// XLA's allocator.
    pub fn xla(config: XlaBfcConfig) -> Self {
        Self::of(Library::Xla(config))
    }

    fn of(rules: Library) -> Self {
        Self {
            regions: Regions::with_placement(rules.placement()),
            rules,
            ..Self::default()
        }
    }

    /// Takes a chunk from another stream, else from the driver, else after a release.
    fn find(
        &mut self,
        device: &mut dyn Device,
        request: Request,
        size: u64,
    ) -> Result<BlockId, AllocatorError> {
        if let Some(chunk) = self.take_from_other_streams(device, request.stream, size)? {
            return Ok(chunk);
        }
        let mut refused = match self.extend(device, request.stream, size)? {
            Ok(chunk) => return Ok(chunk),
            Err(refused) => refused,
        };
        self.regions.counters.num_alloc_retries += 1;
        self.wait_for_all(device, request.stream)?;
        if let Some(chunk) = self.regions.fit(request.stream, size) {
            return Ok(chunk);
        }
        if self.collect_garbage(device, size)? {
            refused = match self.extend(device, request.stream, size)? {
                Ok(chunk) => return Ok(chunk),
                Err(refused) => refused,
            };
        }
        let limit = self.own_limit(device);
        Err(self.regions.out_of_memory(device, request, refused, limit))
    }

    /// Finds a finished chunk of another stream: a never used one, or one whose event is complete.
    fn take_from_other_streams(
        &mut self,
        device: &mut dyn Device,
        stream: StreamId,
        size: u64,
    ) -> Result<Option<BlockId>, DeviceError> {
        let others = self.regions.other_streams(stream);
        for &other in &others {
            self.regions.take_over(other, stream, 0);
            if let Some(chunk) = self.regions.fit(stream, size) {
                return Ok(Some(chunk));
            }
        }
        for &other in &others {
            // First for earlier events, then for everything freed since.
            while self.regions.has_free(other)
                && let Some(covers) = self.frontier_passed(device, other)?
            {
                self.regions.take_over(other, stream, covers);
                if let Some(chunk) = self.regions.fit(stream, size) {
                    return Ok(Some(chunk));
                }
            }
        }
        Ok(None)
    }

    /// The number of frees that all complete work of a stream covers, if it has grown.
    fn frontier_passed(
        &mut self,
        device: &mut dyn Device,
        stream: StreamId,
    ) -> Result<Option<u64>, DeviceError> {
        let frontier = match self.frontiers.get(&stream) {
            Some(&frontier) => frontier,
            None => {
                let covers = self.regions.frees();
                let Some(event) = self.events.record(device, stream)? else {
                    return Ok(Some(covers));
                };
                *self
                    .frontiers
                    .entry(stream)
                    .or_insert(Frontier { event, covers })
            }
        };
        if !device.event_done(frontier.event)? {
            return Ok(None);
        }
        self.frontiers.remove(&stream);
        self.events.give_back(frontier.event);
        Ok(Some(frontier.covers))
    }

    /// Allocates a region for the request, or returns the smallest size that the limit or the
    /// driver refused.
    fn extend(
        &mut self,
        device: &mut dyn Device,
        stream: StreamId,
        size: u64,
    ) -> Result<Result<BlockId, u64>, DeviceError> {
        let limit = self.limit(device).0;
        let available = limit.saturating_sub(self.regions.reserved()) / CHUNK_UNIT.0 * CHUNK_UNIT.0;
        if size > available {
            return Ok(Err(size));
        }
        let growth = self.rules.growth(self.next_region, limit, size);
        self.next_region = Some(growth.after_refusal);
        let mut bytes = growth.region.min(available);
        loop {
            if let Some(chunk) = self.regions.add(device, bytes, stream)? {
                self.next_region = Some(growth.after_success);
                if self.kept.is_none() && self.rules.keeps_first_region() {
                    self.kept = Some(DevicePtr(self.regions[chunk].address));
                }
                return Ok(Ok(chunk));
            }
            let less = BfcConfig::after_refusal(bytes);
            if less < size.max(self.rules.least_after_refusal()) || less == bytes {
                return Ok(Err(bytes));
            }
            bytes = less;
        }
    }

    /// Waits for all work that keeps free memory from the stream, if there is any.
    fn wait_for_all(
        &mut self,
        device: &mut dyn Device,
        stream: StreamId,
    ) -> Result<(), DeviceError> {
        let others = self.regions.other_streams(stream);
        if others.is_empty() && self.pending.is_empty() {
            return Ok(());
        }
        self.regions.wait_for(&mut self.pending, device)?;
        // Chunks that were pending may belong to other streams too.
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

    /// Releases free regions if that makes room for the request. Returns whether it did.
    fn collect_garbage(&mut self, device: &mut dyn Device, size: u64) -> Result<bool, DeviceError> {
        let left = self.limit(device).0.saturating_sub(self.regions.reserved());
        let can_help = || left.saturating_add(self.regions.wholly_free()) >= size;
        if self.rules.collects_garbage() && can_help() {
            self.regions.release(device, 0)
        } else {
            Ok(false)
        }
    }

    /// The allocator's own limit, if it has one.
    fn own_limit(&self, device: &dyn Device) -> Option<Bytes> {
        match &self.rules {
            Library::TensorFlow(config) => config.memory_limit,
            Library::OnnxRuntime(config) => config.max_mem,
            Library::Xla(config) => Some(config.limit(device.info().total)),
        }
    }

    fn limit(&self, device: &dyn Device) -> Bytes {
        let own = self.own_limit(device);
        match self.rules {
            Library::TensorFlow(_) | Library::Xla(_) => self.regions.limit(device, own),
            // The arena does not know the device.
            Library::OnnxRuntime(_) => own
                .into_iter()
                .chain(self.regions.limit)
                .fold(Bytes(u64::MAX), Bytes::min),
        }
    }
}

impl Allocator for BfcAllocator {
    fn name(&self) -> &'static str {
        match self.rules {
            Library::TensorFlow(_) => "bfc",
            Library::OnnxRuntime(_) => "ort_arena",
            Library::Xla(_) => "xla_bfc",
        }
    }

    fn releases_before_failure(&self) -> bool {
        self.rules.collects_garbage()
    }

    /// One of the sizes that it tries is above 0.9 of the free pages, less a millionth for single
    /// precision.
    fn largest_request(&self, device: &dyn Device, free: Bytes) -> Bytes {
        let pages = free.0 - free.0 % self.reserve_unit(device).0;
        let sure = (pages - pages / 10 - pages / 1_000_000).min(self.limit(device).0);
        Bytes(sure - sure % CHUNK_UNIT.0)
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
        if !self.pending.is_empty() {
            self.regions.poll(&mut self.pending, device)?;
        }
        let chunk = match self.regions.fit(request.stream, size) {
            Some(chunk) => chunk,
            None => self.find(device, request, size)?,
        };
        let taken = self.rules.cut(size, self.regions[chunk].size);
        Ok(self.regions.hand_out(chunk, request, taken))
    }

    fn free(&mut self, device: &mut dyn Device, allocation: Allocation) -> Result<(), DeviceError> {
        self.regions.free(&mut self.pending, device, allocation)
    }

    /// Makes the stream's free chunks available to all streams.
    fn release_stream(
        &mut self,
        device: &mut dyn Device,
        stream: StreamId,
    ) -> Result<(), DeviceError> {
        self.regions
            .release_stream(&mut self.pending, device, stream)?;
        if stream != StreamId::DEFAULT
            && let Some(frontier) = self.frontiers.remove(&stream)
        {
            self.events.give_back(frontier.event);
        }
        Ok(())
    }

    /// Waits for pending frees, then releases the regions without live chunks.
    fn empty_cache(&mut self, device: &mut dyn Device) -> Result<(), DeviceError> {
        if !self.pending.is_empty() {
            self.regions.wait_for(&mut self.pending, device)?;
        }
        let kept = self.kept;
        (self.regions)
            .release_except(device, 0, |chunk, _| kept == Some(DevicePtr(chunk.address)))?;
        if let Library::OnnxRuntime(config) = &self.rules {
            self.next_region = Some(config.initial_growth_chunk_size_bytes.0);
        }
        Ok(())
    }

    answered_by!(regions);

    fn close(&mut self, device: &mut dyn Device) -> Result<(), DeviceError> {
        self.pending.close(device)?;
        std::mem::take(&mut self.frontiers)
            .into_values()
            .for_each(|frontier| self.events.give_back(frontier.event));
        self.events.close(device)?;
        self.regions.close(device)?;
        *self = Self::of(self.rules.clone());
        Ok(())
    }
}
