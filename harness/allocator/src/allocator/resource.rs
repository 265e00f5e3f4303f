//! Memory for a whole program: [`MemoryResource`], one interface for allocators that many threads share, with a device of their own.
//!
//! [`SharedAllocator`] is one; [`Locked`] makes one of any [`Allocator`]. [`Buffer`] frees itself when it is dropped. The
//! [`adaptors`](super::adaptors) wrap one resource in another, as those of RMM do (<https://docs.rapids.ai/api/rmm/stable/>).

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::shared::SharedAllocator;
use super::{Allocation, Allocator, AllocatorError, MemoryFraction, Request};
use crate::device::{Device, DeviceError, DevicePtr, MemoryRange, StreamId};
use crate::stats::{MemoryStats, SegmentInfo};
use crate::units::Bytes;

/// An allocator with its device, for any number of threads. What a method does is said at the method of [`Allocator`] with the same name.
pub trait MemoryResource: Send + Sync {
    /// Hands out memory.
    ///
    /// # Errors
    /// As [`Allocator::allocate`].
    fn allocate(&self, request: Request) -> Result<Allocation, AllocatorError>;

    /// Takes memory back.
    ///
    /// # Errors
    /// As [`Allocator::free`].
    fn free(&self, allocation: Allocation) -> Result<(), DeviceError>;

    /// Tells that work on `stream` uses the memory too.
    ///
    /// # Errors
    /// As [`Allocator::record_stream`].
    fn record_stream(&self, allocation: &Allocation, stream: StreamId) -> Result<(), DeviceError>;

    /// Tells that a stream is used no more.
    ///
    /// # Errors
    /// As [`Allocator::release_stream`].
    fn release_stream(&self, stream: StreamId) -> Result<(), DeviceError>;

    /// Gives all cached memory that can be given back to the driver.
    ///
    /// # Errors
    /// As [`Allocator::empty_cache`].
    fn empty_cache(&self) -> Result<(), DeviceError>;

    /// Limits what may be held from the driver to a share of the device.
    fn set_memory_fraction(&self, fraction: MemoryFraction);

    /// The counters.
    fn stats(&self) -> MemoryStats;

    /// All segments in address order.
    fn snapshot(&self) -> Vec<SegmentInfo>;

    /// Gives everything back to the device. Allocations still live become invalid.
    ///
    /// # Errors
    /// As [`Allocator::close`].
    fn close(&self) -> Result<(), DeviceError>;
}

/// A reference to a resource is a resource.
macro_rules! delegate {
    ($($pointer:ty),*) => { $(
        impl<R: MemoryResource + ?Sized> MemoryResource for $pointer {
            fn allocate(&self, request: Request) -> Result<Allocation, AllocatorError> {
                (**self).allocate(request)
            }
            fn free(&self, allocation: Allocation) -> Result<(), DeviceError> {
                (**self).free(allocation)
            }
            fn record_stream(&self, allocation: &Allocation, stream: StreamId) -> Result<(), DeviceError> {
                (**self).record_stream(allocation, stream)
            }
            fn release_stream(&self, stream: StreamId) -> Result<(), DeviceError> {
                (**self).release_stream(stream)
            }
            fn empty_cache(&self) -> Result<(), DeviceError> {
                (**self).empty_cache()
            }
            fn set_memory_fraction(&self, fraction: MemoryFraction) {
                (**self).set_memory_fraction(fraction);
            }
            fn stats(&self) -> MemoryStats {
                (**self).stats()
            }
            fn snapshot(&self) -> Vec<SegmentInfo> {
                (**self).snapshot()
            }
            fn close(&self) -> Result<(), DeviceError> {
                (**self).close()
            }
        }
    )* };
}

delegate!(&R, Box<R>, Arc<R>);

impl<D: Device> MemoryResource for SharedAllocator<D> {
    fn allocate(&self, request: Request) -> Result<Allocation, AllocatorError> {
        self.allocate(request)
    }

    fn free(&self, allocation: Allocation) -> Result<(), DeviceError> {
        self.free_allocation(allocation)
    }

    fn record_stream(&self, allocation: &Allocation, stream: StreamId) -> Result<(), DeviceError> {
        self.record_stream(allocation.ptr(), stream)
    }

    fn release_stream(&self, stream: StreamId) -> Result<(), DeviceError> {
        self.release_stream(stream)
    }

    fn empty_cache(&self) -> Result<(), DeviceError> {
        self.empty_cache()
    }

    fn set_memory_fraction(&self, fraction: MemoryFraction) {
        self.set_memory_fraction(fraction);
    }

    fn stats(&self) -> MemoryStats {
        self.stats()
    }

    fn snapshot(&self) -> Vec<SegmentInfo> {
        self.snapshot()
    }

    fn close(&self) -> Result<(), DeviceError> {
        self.close()
    }
}

/// Any allocator and a device behind one lock. Where caching is what you want, [`SharedAllocator`] is faster: its cache hits do not wait for
/// driver calls of other threads.
#[derive(Debug)]
pub struct Locked<A, D>(Mutex<(A, D)>);

impl<A: Allocator, D: Device> Locked<A, D> {
    /// An allocator on this device.
    #[must_use]
    pub const fn new(allocator: A, device: D) -> Self {
        Self(Mutex::new((allocator, device)))
    }

    /// Calls a function with the device, as to make streams. Other threads wait meanwhile. The function must not call this resource, or it
    /// waits for ever.
    pub fn with_device<T>(&self, call: impl FnOnce(&mut D) -> T) -> T {
        call(&mut self.lock().1)
    }

    /// An allocator leaves no account half done unless it panics itself, and that is a mistake in it: `with_device` runs the caller's code.
    fn lock(&self) -> MutexGuard<'_, (A, D)> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<A: Allocator, D: Device> MemoryResource for Locked<A, D> {
    fn allocate(&self, request: Request) -> Result<Allocation, AllocatorError> {
        let (allocator, device) = &mut *self.lock();
        allocator.allocate(device, request)
    }

    fn free(&self, allocation: Allocation) -> Result<(), DeviceError> {
        let (allocator, device) = &mut *self.lock();
        allocator.free(device, allocation)
    }

    fn record_stream(&self, allocation: &Allocation, stream: StreamId) -> Result<(), DeviceError> {
        self.lock().0.record_stream(allocation, stream)
    }

    fn release_stream(&self, stream: StreamId) -> Result<(), DeviceError> {
        let (allocator, device) = &mut *self.lock();
        allocator.release_stream(device, stream)
    }

    fn empty_cache(&self) -> Result<(), DeviceError> {
        let (allocator, device) = &mut *self.lock();
        allocator.empty_cache(device)
    }

    fn set_memory_fraction(&self, fraction: MemoryFraction) {
        let (allocator, device) = &mut *self.lock();
        allocator.set_memory_fraction(device, fraction);
    }

    fn stats(&self) -> MemoryStats {
        self.lock().0.stats()
    }

    fn snapshot(&self) -> Vec<SegmentInfo> {
        self.lock().0.snapshot()
    }

    fn close(&self) -> Result<(), DeviceError> {
        let (allocator, device) = &mut *self.lock();
        allocator.close(device)
    }
}

/// Device memory that goes back to its resource when it is dropped.
///
/// `R` is how the buffer holds the resource: `&SharedAllocator` in a scope, `Arc<SharedAllocator>` anywhere.
#[derive(Debug)]
pub struct Buffer<R: MemoryResource> {
    /// `None` only while it is dropped or taken apart.
    allocation: Option<Allocation>,
    resource: R,
}

impl<R: MemoryResource> Buffer<R> {
    /// Memory for a request.
    ///
    /// # Errors
    /// As [`Allocator::allocate`].
    pub fn new(resource: R, request: Request) -> Result<Self, AllocatorError> {
        let allocation = resource.allocate(request)?;
        Ok(Self { allocation: Some(allocation), resource })
    }

    /// Its address; null for a request of zero bytes.
    #[must_use]
    pub fn ptr(&self) -> DevicePtr {
        self.allocation.as_ref().map_or(DevicePtr::NULL, Allocation::ptr)
    }

    /// The bytes that were asked for.
    #[must_use]
    pub fn size(&self) -> Bytes {
        self.allocation.as_ref().map_or(Bytes::ZERO, Allocation::requested)
    }

    /// The bytes that the caller may touch.
    #[must_use]
    pub fn range(&self) -> MemoryRange {
        MemoryRange::new(self.ptr(), self.size())
    }

    /// Tells that work on `stream` uses the memory too.
    ///
    /// # Errors
    /// As [`Allocator::record_stream`].
    pub fn record_stream(&self, stream: StreamId) -> Result<(), DeviceError> {
        self.allocation.as_ref().map_or(Ok(()), |allocation| self.resource.record_stream(allocation, stream))
    }

    /// Gives the memory back now, and says how that went: dropping the buffer cannot.
    ///
    /// # Errors
    /// As [`Allocator::free`].
    pub fn free(mut self) -> Result<(), DeviceError> {
        self.allocation.take().map_or(Ok(()), |allocation| self.resource.free(allocation))
    }
}

impl<R: MemoryResource> Drop for Buffer<R> {
    fn drop(&mut self) {
        if let Some(allocation) = self.allocation.take() {
            // A failed free is tried again by the allocator, and what stays is seen in its statistics.
            let _ = self.resource.free(allocation);
        }
    }
}
