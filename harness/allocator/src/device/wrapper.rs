//! Devices around a device: [`DeviceWrapper`], and [`TestDeviceWrapper`] where the inner one has the instruments of a test rig. A wrapper
//! writes the methods that it changes; all others pass the call on.
//!
//! ```
//! use harness_allocator::device::sim::{SimConfig, SimDevice};
//! use harness_allocator::device::{Device, DeviceError, DevicePtr, wrapper};
//! use harness_allocator::units::Bytes;
//!
//! /// Counts the bytes that were asked for.
//! struct Counting<D> {
//!     inner: D,
//!     asked: Bytes,
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
//!         self.asked += size;
//!         self.inner.malloc(size)
//!     }
//! }
//!
//! let mut device = Counting { inner: SimDevice::new(SimConfig::default()), asked: Bytes::ZERO };
//! let ptr = device.malloc(Bytes::mib(2))?;
//! device.free(ptr)?;
//! assert_eq!(device.asked, Bytes::mib(2));
//! # Ok::<(), DeviceError>(())
//! ```
//!
//! A wrapper has each method twice, by these traits and by [`Device`] and [`TestDevice`], and so has a boxed device, which is a wrapper too. Where
//! both traits are in scope such a call is ambiguous. So name `DeviceWrapper` by its module, as above, and in its methods call a boxed device by
//! `self.inner()` and `self.inner_mut()`.

use super::{
    CostFigure, Device, DeviceCalls, DeviceError, DeviceInfo, DeviceMemory, DevicePtr, EventId, Leaks, MappedDevice, MemoryRange, Place,
    PooledDevice, StreamId, Tag, TestDevice,
};
use crate::units::{Bytes, Nanos};
use crate::wrap::wrapper;

wrapper! {
    /// A [`Device`] around another one.
    trait DeviceWrapper: Send => Device {
        /// What is wrapped.
        type Inner: Device + ?Sized;

        /// The wrapped device.
        fn inner(&self) -> &Self::Inner;

        /// The wrapped device, to call it.
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
    /// A [`TestDevice`] around another one.
    trait TestDeviceWrapper: DeviceWrapper<Inner: TestDevice> => TestDevice {}
    &self:
        fn own_context() -> Result<Bytes, DeviceError>;
        fn calls() -> DeviceCalls;
        fn leaks() -> Leaks;
        fn cost_figures() -> Vec<CostFigure>;
    &mut self:
        fn memory() -> Result<DeviceMemory, DeviceError>;
        fn now() -> Nanos;
        fn set_place(place: Place);
        fn create_timed_event() -> Result<EventId, DeviceError>;
        fn elapsed(start: EventId, end: EventId) -> Result<Nanos, DeviceError>;
        fn fill(stream: StreamId, range: MemoryRange, tag: Tag) -> Result<(), DeviceError>;
        fn verify(stream: StreamId, range: MemoryRange, tag: Tag) -> Result<(), DeviceError>;
        fn busy(stream: StreamId, duration: Nanos) -> Result<(), DeviceError>;
        fn set_pressure(held: Bytes) -> Result<Bytes, DeviceError>;
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
