//! A function that is asked for room where there is no memory.

use super::pass_on;
use crate::allocator::resource::MemoryResource;
use crate::allocator::{Allocation, AllocatorError, MemoryFraction, OutOfMemory, Request};
use crate::device::{DeviceError, StreamId};
use crate::stats::{MemoryStats, SegmentInfo};

/// Calls a function where a request finds no memory, and tries again as long as it answers `true`. The function is given the error and the
/// number of calls for this request, from 1; it may free memory of this resource. It must answer `false` at some time.
#[derive(Debug)]
pub struct OnOutOfMemory<R, F> {
    inner: R,
    make_room: F,
}

impl<R: MemoryResource, F: Fn(&OutOfMemory, u32) -> bool + Send + Sync> OnOutOfMemory<R, F> {
    /// A resource that asks `make_room` before a request fails.
    #[must_use]
    pub const fn new(inner: R, make_room: F) -> Self {
        Self { inner, make_room }
    }
}

impl<R: MemoryResource, F: Fn(&OutOfMemory, u32) -> bool + Send + Sync> MemoryResource for OnOutOfMemory<R, F> {
    fn allocate(&self, request: Request) -> Result<Allocation, AllocatorError> {
        let mut calls = 0;
        loop {
            match self.inner.allocate(request) {
                Err(AllocatorError::OutOfMemory(why)) => {
                    calls += 1;
                    if !(self.make_room)(&why, calls) {
                        return Err(AllocatorError::OutOfMemory(why));
                    }
                }
                other => return other,
            }
        }
    }

    pass_on!(free, record_stream, release_stream, empty_cache, set_memory_fraction, stats, snapshot, close);
}
