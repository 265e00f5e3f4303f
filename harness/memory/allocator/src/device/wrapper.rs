//! Devices that wrap a device: [`DeviceWrapper`], and [`TestDeviceWrapper`] if the inner one is a
//! [`TestDevice`]. A wrapper overrides the methods that it changes. All others call the inner
//! device.
//!
//! ```
//! use harness_allocator::device::sim::{SimConfig, SimDevice};
//! use harness_allocator::device::{Device, DeviceError, DevicePtr, wrapper};
//! use harness_allocator::units::Bytes;
//!
//! /// Counts the requested bytes.
//! struct Counting<D> {
//!     inner: D,
//!     requested: Bytes,
//! }
//!
//! impl<D: Device> wrapper::DeviceWrapper for Counting<D> {
//!     type Inner = D;
//!     fn inner(&self) -> &D {
//!         &self.inner
//!     }
//!     fn inner_mut(&mut self) -> &mut D {
//!         &mut self.inner
//!     }
//!     fn malloc(&mut self, size: Bytes) -> Result<DevicePtr, DeviceError> {
//!         self.requested += size;
//!         self.inner.malloc(size)
//!     }
//! }
//!
//! let mut device = Counting { inner: SimDevice::new(SimConfig::default()), requested: Bytes::ZERO
//! }; let ptr = device.malloc(Bytes::mib(2))?; device.free(ptr)?; assert_eq!(device.requested,
//! Bytes::mib(2));
//! # Ok::<(), DeviceError>(())
//! ```
//!
//! A wrapper has each method twice, from these traits and from [`Device`] and [`TestDevice`]. So
//! has a boxed device. If both traits are in scope, the call is ambiguous. So import the module
//! instead of `DeviceWrapper`, as above, and call a boxed device by `self.inner()` and
//! `self.inner_mut()`.

use super::{
    CallSite, CostFigure, Device, DeviceCalls, DeviceError, DeviceInfo, DeviceMemory, DevicePtr,
    EventId, HostId, HostMemory, Leaks, MappedDevice, MemoryRange, PooledDevice, StreamId, Tag,
    TestDevice,
};
use crate::units::{Bytes, Nanos};
use crate::wrap::wrapper;

wrapper! {
    trait DeviceWrapper: Send => Device {
        type Inner: Device + ?Sized;

        fn inner(&self) -> &Self::Inner;

        fn inner_mut(&mut self) -> &mut Self::Inner;
    }
    &self:
        fn info() -> &DeviceInfo;
    &mut self:
        fn free_memory() -> Result<Bytes, DeviceError>;
        fn malloc(size: Bytes) -> Result<DevicePtr, DeviceError>;
        fn free(ptr: DevicePtr) -> Result<(), DeviceError>;
        fn create_stream() -> Result<StreamId, DeviceError>;
        fn destroy_stream(stream: StreamId) -> Result<(), DeviceError>;
        fn release_stream(stream: StreamId) -> Result<(), DeviceError>;
        fn create_event() -> Result<EventId, DeviceError>;
        fn destroy_event(event: EventId) -> Result<(), DeviceError>;
        fn record_event(event: EventId, stream: StreamId) -> Result<(), DeviceError>;
        fn event_done(event: EventId) -> Result<bool, DeviceError>;
        fn wait_event(stream: StreamId, event: EventId) -> Result<(), DeviceError>;
        fn synchronize_event(event: EventId) -> Result<(), DeviceError>;
        fn synchronize_stream(stream: StreamId) -> Result<(), DeviceError>;
        fn synchronize() -> Result<(), DeviceError>;
        fn mapped() -> Option<&mut dyn MappedDevice>;
        fn pooled() -> Option<&mut dyn PooledDevice>;
}

wrapper! {
    trait TestDeviceWrapper: DeviceWrapper<Inner: TestDevice> => TestDevice {}
    &self:
        fn own_context() -> Result<Bytes, DeviceError>;
        fn ordinal() -> Option<u32>;
        fn calls() -> DeviceCalls;
        fn leaks() -> Leaks;
        fn cost_figures() -> Vec<CostFigure>;
    &mut self:
        fn memory() -> Result<DeviceMemory, DeviceError>;
        fn now() -> Nanos;
        fn set_call_site(place: CallSite);
        fn create_timed_event() -> Result<EventId, DeviceError>;
        fn elapsed(start: EventId, end: EventId) -> Result<Nanos, DeviceError>;
        fn fill(stream: StreamId, range: MemoryRange, tag: Tag) -> Result<(), DeviceError>;
        fn verify(stream: StreamId, range: MemoryRange, tag: Tag) -> Result<(), DeviceError>;
        fn verify_later(stream: StreamId, range: MemoryRange, tag: Tag) -> Result<(), DeviceError>;
        fn finish_verifications(stream: StreamId) -> Result<(), DeviceError>;
        fn busy(stream: StreamId, duration: Nanos) -> Result<(), DeviceError>;
        fn sleep(duration: Nanos);
        fn set_external_memory(held: Bytes) -> Result<Bytes, DeviceError>;
        fn host_alloc(size: Bytes, memory: &HostMemory) -> Result<HostId, DeviceError>;
        fn host_free(host: HostId) -> Result<(), DeviceError>;
        fn copy_to_host(stream: StreamId, from: MemoryRange, to: HostId) -> Result<(), DeviceError>;
        fn copy_to_device(
            stream: StreamId, from: HostId, to: MemoryRange
        ) -> Result<(), DeviceError>;
}

impl<D: Device + ?Sized> DeviceWrapper for Box<D> {
    type Inner = D;

    fn inner(&self) -> &D {
        self
    }

    fn inner_mut(&mut self) -> &mut D {
        self
    }
}

impl<D: TestDevice + ?Sized> TestDeviceWrapper for Box<D> {}

impl<D: Device + ?Sized> DeviceWrapper for &mut D {
    type Inner = D;

    fn inner(&self) -> &D {
        self
    }

    fn inner_mut(&mut self) -> &mut D {
        self
    }
}

impl<D: TestDevice + ?Sized> TestDeviceWrapper for &mut D {}

#[cfg(test)]
mod tests;
