//! What a trace runs on: [`Target`], and the two ways in which programs use an allocator.

use harness_allocator::allocator::shared::SharedAllocator;
use harness_allocator::allocator::{Allocation, Allocator, AllocatorError, MemoryFraction, PrivatePoolError, PrivatePoolId, Request};
use harness_allocator::device::{DeviceError, DevicePtr, StreamId, TestDevice};
use harness_allocator::stats::{MemoryStats, SegmentInfo};

/// An allocator on a device.
pub trait Target {
    /// What an allocation is freed by.
    type Live;

    /// Allocates. The error is in a box, so that what is returned fits registers.
    ///
    /// # Errors
    /// [`AllocatorError`].
    fn allocate(&mut self, request: Request) -> Result<Self::Live, Box<AllocatorError>>;

    /// Frees.
    ///
    /// # Errors
    /// [`DeviceError`] of a broken device.
    fn free(&mut self, live: Self::Live) -> Result<(), DeviceError>;

    /// Tells of a use by another stream.
    ///
    /// # Errors
    /// [`DeviceError`] of a broken device.
    fn record_stream(&mut self, live: &Self::Live, stream: StreamId) -> Result<(), DeviceError>;

    /// Gives cached memory back to the driver.
    ///
    /// # Errors
    /// [`DeviceError`] of a broken device.
    fn empty_cache(&mut self) -> Result<(), DeviceError>;

    /// Limits the allocator to a share of the device.
    fn set_memory_fraction(&mut self, fraction: MemoryFraction);

    /// Makes the present values the high-water marks.
    fn reset_peaks(&mut self);

    /// Opens a private pool's context. Does nothing where the allocator has no private pools.
    ///
    /// # Errors
    /// [`PrivatePoolError`].
    fn begin_pool(&mut self, pool: PrivatePoolId) -> Result<(), PrivatePoolError>;

    /// Closes a private pool's context. Does nothing where the allocator has no private pools.
    ///
    /// # Errors
    /// [`PrivatePoolError`].
    fn end_pool(&mut self, pool: PrivatePoolId) -> Result<(), PrivatePoolError>;

    /// Releases a private pool. Does nothing where the allocator has no private pools.
    ///
    /// # Errors
    /// [`PrivatePoolError`].
    fn release_pool(&mut self, pool: PrivatePoolId) -> Result<(), PrivatePoolError>;

    /// The running counters.
    fn stats(&self) -> MemoryStats;

    /// The structure: all segments in address order.
    fn snapshot(&self) -> Vec<SegmentInfo>;

    /// Calls the device. `call` must not use the allocator.
    fn with_device<R>(&mut self, call: impl FnOnce(&mut dyn TestDevice) -> R) -> R;
}

/// A plain allocator: the device is passed in, and an allocation is freed by the handle in it.
#[allow(missing_docs, reason = "the names say what they are")]
pub struct ByHandle<'a, A: ?Sized> {
    pub device: &'a mut dyn TestDevice,
    pub allocator: &'a mut A,
}

impl<A: Allocator + ?Sized> Target for ByHandle<'_, A> {
    type Live = Allocation;

    #[inline(always)]
    fn allocate(&mut self, request: Request) -> Result<Allocation, Box<AllocatorError>> {
        self.allocator.allocate(self.device, request).map_err(Box::new)
    }

    #[inline(always)]
    fn free(&mut self, live: Allocation) -> Result<(), DeviceError> {
        self.allocator.free(self.device, live)
    }

    fn record_stream(&mut self, live: &Allocation, stream: StreamId) -> Result<(), DeviceError> {
        self.allocator.record_stream(live, stream)
    }

    fn empty_cache(&mut self) -> Result<(), DeviceError> {
        self.allocator.empty_cache(self.device)
    }

    fn set_memory_fraction(&mut self, fraction: MemoryFraction) {
        self.allocator.set_memory_fraction(self.device, fraction);
    }

    fn reset_peaks(&mut self) {
        self.allocator.reset_peaks();
    }

    fn begin_pool(&mut self, pool: PrivatePoolId) -> Result<(), PrivatePoolError> {
        self.allocator.private_pools().map_or(Ok(()), |pools| pools.begin(pool))
    }

    fn end_pool(&mut self, pool: PrivatePoolId) -> Result<(), PrivatePoolError> {
        self.allocator.private_pools().map_or(Ok(()), |pools| pools.end(pool))
    }

    fn release_pool(&mut self, pool: PrivatePoolId) -> Result<(), PrivatePoolError> {
        self.allocator.private_pools().map_or(Ok(()), |pools| pools.release(self.device, pool))
    }

    fn stats(&self) -> MemoryStats {
        self.allocator.stats()
    }

    fn snapshot(&self) -> Vec<SegmentInfo> {
        self.allocator.snapshot()
    }

    fn with_device<R>(&mut self, call: impl FnOnce(&mut dyn TestDevice) -> R) -> R {
        call(self.device)
    }
}

/// The shared front: every operation locked, every free by address.
#[derive(Debug)]
pub struct ByPointer<'a, D: TestDevice>(pub &'a SharedAllocator<D>);

impl<D: TestDevice> Target for ByPointer<'_, D> {
    type Live = DevicePtr;

    #[inline(always)]
    fn allocate(&mut self, request: Request) -> Result<DevicePtr, Box<AllocatorError>> {
        self.0.allocate(request).map(|allocation| allocation.ptr()).map_err(Box::new)
    }

    #[inline(always)]
    fn free(&mut self, live: DevicePtr) -> Result<(), DeviceError> {
        self.0.free(live)
    }

    fn record_stream(&mut self, live: &DevicePtr, stream: StreamId) -> Result<(), DeviceError> {
        self.0.record_stream(*live, stream)
    }

    fn empty_cache(&mut self) -> Result<(), DeviceError> {
        self.0.empty_cache()
    }

    fn set_memory_fraction(&mut self, fraction: MemoryFraction) {
        self.0.set_memory_fraction(fraction);
    }

    fn reset_peaks(&mut self) {
        self.0.reset_peaks();
    }

    fn begin_pool(&mut self, pool: PrivatePoolId) -> Result<(), PrivatePoolError> {
        self.0.begin_pool(pool)
    }

    fn end_pool(&mut self, pool: PrivatePoolId) -> Result<(), PrivatePoolError> {
        self.0.end_pool(pool)
    }

    fn release_pool(&mut self, pool: PrivatePoolId) -> Result<(), PrivatePoolError> {
        self.0.release_pool(pool)
    }

    fn stats(&self) -> MemoryStats {
        self.0.stats()
    }

    fn snapshot(&self) -> Vec<SegmentInfo> {
        self.0.snapshot()
    }

    fn with_device<R>(&mut self, call: impl FnOnce(&mut dyn TestDevice) -> R) -> R {
        call(&mut *self.0.device())
    }
}
