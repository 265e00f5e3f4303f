//! A limit on what is handed out.

use std::sync::atomic::{AtomicU64, Ordering};

use super::pass_on;
use crate::allocator::resource::MemoryResource;
use crate::allocator::{Allocation, AllocatorError, MemoryFraction, OomCause, OutOfMemory, Request};
use crate::device::{DeviceError, StreamId};
use crate::stats::{MemoryStats, SegmentInfo};
use crate::units::Bytes;

/// Refuses a request that would bring the requested bytes of all live allocations made through it above a limit. The resource below is not
/// asked then.
#[derive(Debug)]
pub struct Limited<R> {
    inner: R,
    limit: Bytes,
    /// Requested bytes of live allocations.
    live: AtomicU64,
}

impl<R: MemoryResource> Limited<R> {
    /// At most `limit` bytes of this resource at a time.
    #[must_use]
    pub const fn new(inner: R, limit: Bytes) -> Self {
        Self { inner, limit, live: AtomicU64::new(0) }
    }

    /// Bytes that may still be requested.
    #[must_use]
    pub fn remaining(&self) -> Bytes {
        self.limit.saturating_sub(Bytes(self.live.load(Ordering::Relaxed)))
    }

    fn refuse(&self, request: Request) -> AllocatorError {
        let stats = self.inner.stats();
        AllocatorError::OutOfMemory(Box::new(OutOfMemory {
            requested: request.size,
            lacking: request.size,
            segment: request.size,
            cause: OomCause::Limit { limit: self.limit },
            allocated: Bytes(stats.allocated_bytes.all.current),
            reserved: Bytes(stats.reserved_bytes.all.current),
            largest_free_block: None,
            total: self.limit,
        }))
    }
}

impl<R: MemoryResource> MemoryResource for Limited<R> {
    fn allocate(&self, request: Request) -> Result<Allocation, AllocatorError> {
        let more = |live: u64| live.checked_add(request.size.0).filter(|&live| live <= self.limit.0);
        // Counted before the request is made, so that threads at the same time do not exceed the limit together.
        if self.live.fetch_update(Ordering::Relaxed, Ordering::Relaxed, more).is_err() {
            return Err(self.refuse(request));
        }
        let allocated = self.inner.allocate(request);
        if allocated.is_err() {
            self.live.fetch_sub(request.size.0, Ordering::Relaxed);
        }
        allocated
    }

    fn free(&self, allocation: Allocation) -> Result<(), DeviceError> {
        let requested = allocation.requested().0;
        let freed = self.inner.free(allocation);
        if !matches!(freed, Err(DeviceError::InvalidFree { .. })) {
            self.live.fetch_sub(requested, Ordering::Relaxed);
        }
        freed
    }

    fn close(&self) -> Result<(), DeviceError> {
        self.live.store(0, Ordering::Relaxed);
        self.inner.close()
    }

    pass_on!(record_stream, release_stream, empty_cache, set_memory_fraction, stats, snapshot);
}
