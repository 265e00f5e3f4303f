//! CuPy's memory pool: each miss allocates exactly the request from the driver, and freed memory is
//! reused by the same stream only.
//!
//! It models `SingleDeviceMemoryPool` on top of `cudaMalloc`
//! (<https://docs.cupy.dev/en/stable/user_guide/memory.html>). Its decisions equal those recorded
//! from CuPy 14.2.
//!
//! * Sizes are multiples of 512 B. The best fit of the stream's own free chunks is cut exactly to
//!   the request; the rest stays free for that stream.
//! * If no chunk fits, the pool allocates a region of the request's size. There is no larger unit,
//!   so small requests are small driver allocations.
//! * A freed chunk belongs to the stream of its request and merges with its free neighbors. Other
//!   streams never get it.
//! * If the limit or the driver refuses, the pool releases the free regions of all streams and
//!   tries again. CuPy then also collects Python's garbage. So the driver is asked three times
//!   before a request fails. A request above the limit fails without a release.
//! * Of free chunks of one size, CuPy takes the one whose Python object has the lowest address in
//!   the memory of the host. So two runs of a program can get different addresses. Here it is the
//!   chunk with the lowest address on the device, unless [`CupyPool::choose`] names another.
//!
//! Deliberate differences:
//!
//! * Regions are released in the order of their addresses. CuPy's order is that of their sizes.
//! * The memory fraction is a limit too, as with `set_limit(fraction=…)`.
//! * CuPy has no [`Allocator::record_stream`]. Here the chunk stays pending until events that
//!   follow the other streams' work are complete. The host waits for them only if the request would
//!   otherwise fail.
//! * CuPy keeps the free chunks of destroyed streams. Here the default stream gets them.

use serde::Deserialize;

use super::ids::BlockId;
use super::pending::PendingFrees;
use super::regions::{self, Regions};
use super::{Allocation, Allocator, AllocatorError, Request, answered_by};
use crate::device::{Device, DeviceError, DevicePtr, StreamId};
use crate::units::Bytes;

/// The unit of chunk sizes: CuPy's `ALLOCATION_UNIT_SIZE`.
const UNIT: Bytes = Bytes(512);

#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CupyPoolConfig {
    /// The limit of `set_limit` or `CUPY_GPU_MEMORY_LIMIT`. By default there is none.
    pub limit: Option<Bytes>,
}

#[derive(Debug, Default)]
pub struct CupyPool {
    config: CupyPoolConfig,
    regions: Regions,
    /// The chunk that the next request takes if it is one of the best fits.
    chosen: Option<DevicePtr>,
    /// Chunks that were freed while other streams used them.
    pending: PendingFrees<BlockId>,
}

impl CupyPool {
    pub fn new(config: CupyPoolConfig) -> Self {
        Self {
            config,
            ..Self::default()
        }
    }

    /// Chooses among free chunks of one size, as the addresses of Python objects do in CuPy. The
    /// next request takes the chunk at this address if it is one of the best fits.
    pub fn choose(&mut self, chunk: DevicePtr) {
        self.chosen = Some(chunk);
    }

    /// Takes a chunk from the driver, if necessary after a release of free regions.
    fn find(
        &mut self,
        device: &mut dyn Device,
        request: Request,
        size: u64,
    ) -> Result<BlockId, AllocatorError> {
        if self.limit().is_some_and(|limit| limit < size) {
            return Err(self.out_of_memory(device, request, size));
        }
        if !self.allows(size)
            && let Some(chunk) = self.make_room(device, request.stream, size)?
        {
            return Ok(chunk);
        }
        if !self.allows(size) {
            return Err(self.out_of_memory(device, request, size));
        }
        for attempt in 0..3 {
            if attempt > 0
                && let Some(chunk) = self.make_room(device, request.stream, size)?
            {
                return Ok(chunk);
            }
            if let Some(chunk) = self.regions.add(device, size, request.stream)? {
                return Ok(chunk);
            }
        }
        Err(self.out_of_memory(device, request, size))
    }

    fn out_of_memory(
        &mut self,
        device: &mut dyn Device,
        request: Request,
        size: u64,
    ) -> AllocatorError {
        self.regions
            .out_of_memory(device, request, size, self.config.limit)
    }

    fn limit(&self) -> Option<u64> {
        let limits = self.config.limit.into_iter().chain(self.regions.limit);
        limits.min().map(|limit| limit.0)
    }

    /// Whether the limit allows a region of this size.
    fn allows(&self, size: u64) -> bool {
        self.limit()
            .is_none_or(|limit| self.regions.reserved() + size <= limit)
    }

    /// Releases the free regions. Waits for pending frees before, and returns a chunk that fits
    /// after one of them.
    fn make_room(
        &mut self,
        device: &mut dyn Device,
        stream: StreamId,
        size: u64,
    ) -> Result<Option<BlockId>, DeviceError> {
        self.regions.counters.num_alloc_retries += 1;
        if !self.pending.is_empty() {
            self.regions.wait_for(&mut self.pending, device)?;
            if let Some(chunk) = self.regions.fit(stream, size) {
                return Ok(Some(chunk));
            }
        }
        self.regions.release(device, 0)?;
        Ok(None)
    }
}

impl Allocator for CupyPool {
    fn name(&self) -> &'static str {
        "cupy_pool"
    }

    fn allocate(
        &mut self,
        device: &mut dyn Device,
        request: Request,
    ) -> Result<Allocation, AllocatorError> {
        let chosen = self.chosen.take();
        if request.size == Bytes::ZERO {
            return Ok(Allocation::null(request));
        }
        let size = regions::rounded(device, request, UNIT)?;
        if !self.pending.is_empty() {
            self.regions.poll(&mut self.pending, device)?;
        }
        let chunk = match self.regions.fit(request.stream, size) {
            Some(best) => chosen
                .and_then(|address| self.regions.equal_fit(best, address))
                .unwrap_or(best),
            None => self.find(device, request, size)?,
        };
        Ok(self.regions.hand_out(chunk, request, size))
    }

    fn free(&mut self, device: &mut dyn Device, allocation: Allocation) -> Result<(), DeviceError> {
        self.regions.free(&mut self.pending, device, allocation)
    }

    fn release_stream(
        &mut self,
        device: &mut dyn Device,
        stream: StreamId,
    ) -> Result<(), DeviceError> {
        self.regions
            .release_stream(&mut self.pending, device, stream)
    }

    /// Releases all free regions, as `free_all_blocks` does, after pending frees.
    fn empty_cache(&mut self, device: &mut dyn Device) -> Result<(), DeviceError> {
        if !self.pending.is_empty() {
            self.regions.wait_for(&mut self.pending, device)?;
        }
        self.regions.release(device, 0).map(drop)
    }

    answered_by!(regions);

    fn close(&mut self, device: &mut dyn Device) -> Result<(), DeviceError> {
        self.pending.close(device)?;
        self.regions.close(device)?;
        *self = Self::new(self.config.clone());
        Ok(())
    }
}
