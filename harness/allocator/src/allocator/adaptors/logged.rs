//! A function that is told each call.

use std::fmt;

use super::pass_on;
use crate::allocator::resource::MemoryResource;
use crate::allocator::{Allocation, AllocatorError, MemoryFraction, Request};
use crate::device::{DeviceError, DevicePtr, StreamId};
use crate::stats::{MemoryStats, SegmentInfo};
use crate::units::Bytes;

/// A call and how it ended. Displayed as one line.
#[derive(Clone, Debug)]
#[allow(missing_docs, reason = "the names say what they are")]
pub enum Call<'a> {
    /// [`MemoryResource::allocate`].
    Allocate {
        /// What was asked for.
        request: Request,
        /// The address, or why there is none.
        result: Result<DevicePtr, &'a AllocatorError>,
    },
    /// [`MemoryResource::free`].
    Free {
        ptr: DevicePtr,
        /// What was asked for.
        requested: Bytes,
        /// The stream it was allocated for.
        stream: StreamId,
        result: Result<(), &'a DeviceError>,
    },
    /// [`MemoryResource::empty_cache`].
    EmptyCache(Result<(), &'a DeviceError>),
}

impl fmt::Display for Call<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let end = |f: &mut fmt::Formatter<'_>, result: &Result<(), &DeviceError>| match result {
            Ok(()) => Ok(()),
            Err(error) => write!(f, ": {error}"),
        };
        match self {
            Self::Allocate { request: Request { size, stream }, result: Ok(ptr) } => {
                write!(f, "allocate {size} on stream {}: {ptr}", stream.0)
            }
            Self::Allocate { request: Request { size, stream }, result: Err(error) } => {
                write!(f, "allocate {size} on stream {}: {error}", stream.0)
            }
            Self::Free { ptr, requested, stream, result } => {
                write!(f, "free {ptr}, {requested} on stream {}", stream.0)?;
                end(f, result)
            }
            Self::EmptyCache(result) => {
                f.write_str("empty_cache")?;
                end(f, result)
            }
        }
    }
}

/// Tells a function each allocation, free and emptied cache, after the call and on the thread that made it.
#[derive(Debug)]
pub struct Logged<R, F> {
    inner: R,
    log: F,
}

impl<R: MemoryResource, F: Fn(&Call<'_>) + Send + Sync> Logged<R, F> {
    /// A resource whose calls `log` is told.
    #[must_use]
    pub const fn new(inner: R, log: F) -> Self {
        Self { inner, log }
    }
}

impl<R: MemoryResource, F: Fn(&Call<'_>) + Send + Sync> MemoryResource for Logged<R, F> {
    fn allocate(&self, request: Request) -> Result<Allocation, AllocatorError> {
        let allocated = self.inner.allocate(request);
        (self.log)(&Call::Allocate { request, result: allocated.as_ref().map(Allocation::ptr) });
        allocated
    }

    fn free(&self, allocation: Allocation) -> Result<(), DeviceError> {
        let (ptr, requested, stream) = (allocation.ptr(), allocation.requested(), allocation.stream());
        let freed = self.inner.free(allocation);
        (self.log)(&Call::Free { ptr, requested, stream, result: freed.as_ref().copied() });
        freed
    }

    fn empty_cache(&self) -> Result<(), DeviceError> {
        let emptied = self.inner.empty_cache();
        (self.log)(&Call::EmptyCache(emptied.as_ref().copied()));
        emptied
    }

    pass_on!(record_stream, release_stream, set_memory_fraction, stats, snapshot, close);
}
