//! What a watched replay shows of each operation: [`Step`].

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

use harness_allocator::allocator::wrapper::AllocatorWrapper;
use harness_allocator::allocator::{Allocation, Allocator, AllocatorError, Request};
use harness_allocator::device::wrapper::{DeviceWrapper, TestDeviceWrapper};
use harness_allocator::device::{Device, DeviceError, DevicePtr, MappedDevice, MemoryRange, TestDevice};
use harness_allocator::stats::SegmentInfo;
use harness_allocator::units::Bytes;

use crate::execute::Outcome;

/// One operation of a watched replay.
#[allow(missing_docs, reason = "the names say what they are")]
pub struct Step<'a> {
    /// Counted from 0.
    pub operation: usize,
    pub outcome: Outcome,
    /// Of what was allocated.
    pub address: Option<DevicePtr>,
    /// What the operation took from the driver and gave back, in order.
    pub driver: &'a [DriverCall],
    pub allocator: &'a dyn Allocator,
}

/// A call that changed what is held from the driver.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "the names say what they are")]
pub enum DriverCall {
    Malloc(MemoryRange),
    Free(MemoryRange),
    Map(MemoryRange),
    Unmap(MemoryRange),
}

/// What a [`Logged`] device was asked, to be read while the device is in use.
#[derive(Clone, Debug, Default)]
pub(super) struct Log(Arc<Mutex<Vec<DriverCall>>>);

impl Log {
    /// The calls since the last time.
    pub(super) fn take(&self) -> Vec<DriverCall> {
        std::mem::take(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }

    fn push(&self, call: DriverCall) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).push(call);
    }
}

/// A device that keeps a log of what is held from it.
#[derive(Clone, Debug)]
pub(super) struct Logged<D> {
    inner: D,
    log: Log,
    /// Allocations that live.
    sizes: BTreeMap<DevicePtr, Bytes>,
    held: Bytes,
    /// What would have been held if the first call that was refused since this was cleared had been served.
    pub(super) refused: Option<Bytes>,
    /// Where addresses were reserved, in order.
    pub(super) reserved: Vec<DevicePtr>,
}

impl<D: Device> Logged<D> {
    /// A device that holds these segments already.
    pub(super) fn new(inner: D, held: &[SegmentInfo]) -> (Self, Log) {
        let log = Log::default();
        let sizes = held.iter().map(|segment| (segment.address, segment.size)).collect();
        let held = held.iter().map(|segment| segment.size).sum();
        (Self { inner, log: log.clone(), sizes, held, refused: None, reserved: Vec::new() }, log)
    }

    fn took(&mut self, call: DriverCall, size: Bytes) {
        self.held += size;
        self.log.push(call);
    }

    fn gave_back(&mut self, call: DriverCall, size: Bytes) {
        self.held = self.held.saturating_sub(size);
        self.log.push(call);
    }

    /// Notes what a call was refused for lack of memory.
    fn note_refusal<T>(&mut self, answer: Result<T, DeviceError>, size: Bytes) -> Result<T, DeviceError> {
        if answer.as_ref().is_err_and(DeviceError::is_out_of_memory) {
            self.refused.get_or_insert(self.held + size);
        }
        answer
    }
}

impl<D: Device> DeviceWrapper for Logged<D> {
    type Inner = D;

    fn inner(&self) -> &D {
        &self.inner
    }

    fn inner_mut(&mut self) -> &mut D {
        &mut self.inner
    }

    fn malloc(&mut self, size: Bytes) -> Result<DevicePtr, DeviceError> {
        let answer = self.inner.malloc(size);
        let at = self.note_refusal(answer, size)?;
        self.sizes.insert(at, size);
        self.took(DriverCall::Malloc(MemoryRange::new(at, size)), size);
        Ok(at)
    }

    fn free(&mut self, ptr: DevicePtr) -> Result<(), DeviceError> {
        self.inner.free(ptr)?;
        let size = self.sizes.remove(&ptr).unwrap_or_default();
        self.gave_back(DriverCall::Free(MemoryRange::new(ptr, size)), size);
        Ok(())
    }

    fn mapped(&mut self) -> Option<&mut dyn MappedDevice> {
        self.inner.mapped().is_some().then_some(self as &mut dyn MappedDevice)
    }
}

impl<D: TestDevice> TestDeviceWrapper for Logged<D> {}

impl<D: Device> MappedDevice for Logged<D> {
    fn reserve(&mut self, size: Bytes) -> Result<DevicePtr, DeviceError> {
        let start = self.mapper()?.reserve(size)?;
        self.reserved.push(start);
        Ok(start)
    }

    fn unreserve(&mut self, start: DevicePtr) -> Result<(), DeviceError> {
        self.mapper()?.unreserve(start)
    }

    fn map(&mut self, range: MemoryRange, page: Bytes) -> Result<(), DeviceError> {
        let answer = self.mapper()?.map(range, page);
        self.note_refusal(answer, range.len)?;
        self.took(DriverCall::Map(range), range.len);
        Ok(())
    }

    fn unmap(&mut self, range: MemoryRange) -> Result<(), DeviceError> {
        self.mapper()?.unmap(range)?;
        self.gave_back(DriverCall::Unmap(range), range.len);
        Ok(())
    }
}

impl<D: Device> Logged<D> {
    fn mapper(&mut self) -> Result<&mut dyn MappedDevice, DeviceError> {
        let (what, why) = ("mapped memory".to_owned(), "the device maps none".to_owned());
        self.inner.mapped().ok_or(DeviceError::Unavailable { what, why })
    }
}

/// An allocator that notes where the last allocation went.
pub(super) struct AddressLog {
    inner: Box<dyn Allocator>,
    address: Option<DevicePtr>,
}

impl AddressLog {
    pub(super) const fn new(inner: Box<dyn Allocator>) -> Self {
        Self { inner, address: None }
    }

    /// Where the last allocation went, if there was one since the last time.
    pub(super) const fn take_address(&mut self) -> Option<DevicePtr> {
        self.address.take()
    }

    pub(super) fn allocator(&self) -> &dyn Allocator {
        &*self.inner
    }
}

impl AllocatorWrapper for AddressLog {
    type Inner = dyn Allocator;

    fn inner(&self) -> &(dyn Allocator + 'static) {
        &*self.inner
    }

    fn inner_mut(&mut self) -> &mut (dyn Allocator + 'static) {
        &mut *self.inner
    }

    fn allocate(&mut self, device: &mut dyn Device, request: Request) -> Result<Allocation, AllocatorError> {
        let allocation = Allocator::allocate(&mut *self.inner, device, request)?;
        self.address = Some(allocation.ptr());
        Ok(allocation)
    }
}
