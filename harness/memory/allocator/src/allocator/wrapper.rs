//! Allocators that wrap an allocator: [`AllocatorWrapper`] overrides some methods and passes the
//! others on. Use it like [`crate::device::wrapper::DeviceWrapper`].

use super::{Allocation, Allocator, AllocatorError, MemoryFraction, PrivatePools, Request};
use crate::device::{Device, DeviceError, DevicePtr, PoolId, StreamId};
use crate::stats::{MemoryStats, SegmentInfo};
use crate::{units::Bytes, wrap::wrapper};

wrapper! {
    /// An [`Allocator`] that wraps another one.
    trait AllocatorWrapper: Send => Allocator {
        type Inner: Allocator + ?Sized;

        fn inner(&self) -> &Self::Inner;

        fn inner_mut(&mut self) -> &mut Self::Inner;
    }
    &self:
        fn name() -> &'static str;
        fn reserve_unit(device: &dyn Device) -> Bytes;
        fn largest_request(device: &dyn Device, free: Bytes) -> Bytes;
        fn releases_before_failure() -> bool;
        fn merges_free_neighbours() -> bool;
        fn check_device(device: &mut dyn Device) -> Result<(), DeviceError>;
        fn stats() -> MemoryStats;
        fn snapshot() -> Vec<SegmentInfo>;
        fn segment_at(address: DevicePtr) -> Option<SegmentInfo>;
        fn driver_pool() -> Option<PoolId>;
        fn construction_failure() -> Option<String>;
    &mut self:
        fn allocate(
            device: &mut dyn Device, request: Request
        ) -> Result<Allocation, AllocatorError>;
        fn free(device: &mut dyn Device, allocation: Allocation) -> Result<(), DeviceError>;
        fn record_stream(allocation: &Allocation, stream: StreamId) -> Result<(), DeviceError>;
        fn release_stream(device: &mut dyn Device, stream: StreamId) -> Result<(), DeviceError>;
        fn empty_cache(device: &mut dyn Device) -> Result<(), DeviceError>;
        fn set_memory_fraction(device: &dyn Device, fraction: MemoryFraction);
        fn reset_peaks();
        fn private_pools() -> Option<&mut dyn PrivatePools>;
        fn close(device: &mut dyn Device) -> Result<(), DeviceError>;
}

impl<A: Allocator + ?Sized> AllocatorWrapper for Box<A> {
    type Inner = A;

    fn inner(&self) -> &A {
        self
    }

    fn inner_mut(&mut self) -> &mut A {
        self
    }
}
