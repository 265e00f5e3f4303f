//! Allocators that a trace can run on, through the two interfaces that programs use.

use harness_allocator::allocator::shared::{Locked, SharedAllocator};
use harness_allocator::allocator::{
    Allocation, Allocator, AllocatorError, Request, caching::CachingAllocator,
};
use harness_allocator::device::{DeviceError, DevicePtr, StreamId, TestDevice};
use harness_allocator::stats::{MemoryStats, SegmentInfo};

pub trait Target {
    type Live;
    type Allocator: Allocator + ?Sized;

    /// The error is boxed, so the result fits into registers.
    fn allocate(&mut self, request: Request) -> Result<Self::Live, Box<AllocatorError>>;

    fn free(&mut self, live: Self::Live) -> Result<(), DeviceError>;

    /// Records the use of an allocation on another stream. Fails only if the device fails.
    fn record_stream(&mut self, live: &Self::Live, stream: StreamId) -> Result<(), DeviceError>;

    /// Calls the allocator and its device. `call` must neither allocate nor free.
    fn with<R>(&mut self, call: impl FnOnce(&mut Self::Allocator, &mut dyn TestDevice) -> R) -> R;

    fn stats(&mut self) -> MemoryStats {
        self.with(|allocator, _| allocator.stats())
    }

    fn snapshot(&mut self) -> Vec<SegmentInfo> {
        self.with(|allocator, _| allocator.snapshot())
    }

    fn with_device<R>(&mut self, call: impl FnOnce(&mut dyn TestDevice) -> R) -> R {
        self.with(|_, device| call(device))
    }
}

pub struct ByHandle<'a, A: ?Sized> {
    pub device: &'a mut dyn TestDevice,
    pub allocator: &'a mut A,
}

impl<A: Allocator + ?Sized> Target for ByHandle<'_, A> {
    type Live = Allocation;
    type Allocator = A;

    #[inline(always)]
    fn allocate(&mut self, request: Request) -> Result<Allocation, Box<AllocatorError>> {
        self.allocator
            .allocate(self.device, request)
            .map_err(Box::new)
    }

    #[inline(always)]
    fn free(&mut self, live: Allocation) -> Result<(), DeviceError> {
        self.allocator.free(self.device, live)
    }

    fn record_stream(&mut self, live: &Allocation, stream: StreamId) -> Result<(), DeviceError> {
        self.allocator.record_stream(live, stream)
    }

    fn with<R>(&mut self, call: impl FnOnce(&mut A, &mut dyn TestDevice) -> R) -> R {
        call(self.allocator, self.device)
    }
}

/// The shared allocator: every operation takes a lock, and addresses free allocations.
#[derive(Debug)]
pub struct ByPointer<'a, D: TestDevice>(pub &'a SharedAllocator<D>);

impl<D: TestDevice> Target for ByPointer<'_, D> {
    type Live = DevicePtr;
    type Allocator = CachingAllocator;

    #[inline(always)]
    fn allocate(&mut self, request: Request) -> Result<DevicePtr, Box<AllocatorError>> {
        self.0
            .allocate(request)
            .map(|allocation| allocation.ptr())
            .map_err(Box::new)
    }

    #[inline(always)]
    fn free(&mut self, live: DevicePtr) -> Result<(), DeviceError> {
        self.0.free(live)
    }

    fn record_stream(&mut self, live: &DevicePtr, stream: StreamId) -> Result<(), DeviceError> {
        self.0.record_stream(*live, stream)
    }

    fn with<R>(&mut self, call: impl FnOnce(&mut CachingAllocator, &mut dyn TestDevice) -> R) -> R {
        let Locked {
            allocator, device, ..
        } = &mut *self.0.lock();
        call(allocator, device)
    }
}
