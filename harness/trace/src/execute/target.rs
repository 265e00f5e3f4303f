//! Allocators that a trace can run on, through the two interfaces that programs use.

use harness_allocator::allocator::shared::{Locked, SharedAllocator};
use harness_allocator::allocator::{
    Allocation, Allocator, AllocatorError, MemoryFraction, PrivatePoolError, PrivatePoolId, PrivatePools, Request,
};
use harness_allocator::device::{DeviceError, DevicePtr, StreamId, TestDevice};
use harness_allocator::stats::{MemoryStats, SegmentInfo};

/// An allocator on a device.
pub trait Target {
    /// The handle that frees an allocation.
    type Live;

    /// The error is boxed, so the result fits into registers.
    fn allocate(&mut self, request: Request) -> Result<Self::Live, Box<AllocatorError>>;

    /// Fails only if the device fails.
    fn free(&mut self, live: Self::Live) -> Result<(), DeviceError>;

    /// Records the use of an allocation on another stream. Fails only if the device fails.
    fn record_stream(&mut self, live: &Self::Live, stream: StreamId) -> Result<(), DeviceError>;

    /// Returns cached memory to the driver. Fails only if the device fails.
    fn empty_cache(&mut self) -> Result<(), DeviceError>;

    /// Limits the allocator to a fraction of the device memory.
    fn set_memory_fraction(&mut self, fraction: MemoryFraction);

    /// Resets the peak statistics to the current values.
    fn reset_peaks(&mut self);

    /// Enters a private pool. Does nothing if the allocator has no private pools.
    fn begin_pool(&mut self, pool: PrivatePoolId) -> Result<(), PrivatePoolError>;

    /// Leaves a private pool. Does nothing if the allocator has no private pools.
    fn end_pool(&mut self, pool: PrivatePoolId) -> Result<(), PrivatePoolError>;

    /// Releases a private pool. Does nothing if the allocator has no private pools.
    fn release_pool(&mut self, pool: PrivatePoolId) -> Result<(), PrivatePoolError>;

    fn stats(&self) -> MemoryStats;

    /// All segments in address order.
    fn snapshot(&self) -> Vec<SegmentInfo>;

    /// Calls the device. `call` must not use the allocator.
    fn with_device<R>(&mut self, call: impl FnOnce(&mut dyn TestDevice) -> R) -> R;
}

/// A plain allocator: calls pass the device, and handles free allocations.
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

/// The shared allocator: every operation takes a lock, and addresses free allocations.
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
        let Locked { allocator, device, .. } = &mut *self.0.lock();
        allocator.set_memory_fraction(device, fraction);
    }

    fn reset_peaks(&mut self) {
        self.0.lock().allocator.reset_peaks();
    }

    fn begin_pool(&mut self, pool: PrivatePoolId) -> Result<(), PrivatePoolError> {
        self.0.lock().allocator.begin(pool)
    }

    fn end_pool(&mut self, pool: PrivatePoolId) -> Result<(), PrivatePoolError> {
        self.0.lock().allocator.end(pool)
    }

    fn release_pool(&mut self, pool: PrivatePoolId) -> Result<(), PrivatePoolError> {
        let Locked { allocator, device, .. } = &mut *self.0.lock();
        allocator.release(device, pool)
    }

    fn stats(&self) -> MemoryStats {
        self.0.stats()
    }

    fn snapshot(&self) -> Vec<SegmentInfo> {
        self.0.snapshot()
    }

    fn with_device<R>(&mut self, call: impl FnOnce(&mut dyn TestDevice) -> R) -> R {
        call(&mut self.0.lock().device)
    }
}
