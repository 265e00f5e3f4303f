//! Observes each operation of a replay: [`ReplayStep`].

use std::collections::BTreeMap;

use harness_allocator::allocator::{Allocation, Allocator, AllocatorError, Request};
use harness_allocator::device::wrapper::{DeviceWrapper, TestDeviceWrapper};
use harness_allocator::device::{
    Device, DeviceError, DevicePtr, MappedDevice, MemoryRange, StreamId, TestDevice, sim::SimDevice,
};
use harness_allocator::{stats::SegmentInfo, units::Bytes};

use crate::execute::{OperationOutcome, Target};
use crate::snapshot::{Action, Event};

pub struct ReplayStep<'a> {
    pub operation: usize,
    pub outcome: OperationOutcome,
    pub address: Option<DevicePtr>,
    /// Driver calls of the operation, in order.
    pub driver: &'a [DriverCall],
    pub allocator: &'a dyn Allocator,
}

/// A driver call that changes the reserved memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DriverCall {
    pub action: Action,
    pub range: MemoryRange,
}

impl DriverCall {
    pub fn of(event: &Event) -> Option<Self> {
        let action = event.action;
        (action.reserves() || action.releases()).then(|| Self {
            action,
            range: MemoryRange::new(DevicePtr(event.address), event.size),
        })
    }
}

#[derive(Clone, Debug)]
pub(super) struct Logged<D> {
    inner: D,
    log: Vec<DriverCall>,
    sizes: BTreeMap<DevicePtr, Bytes>,
    held: Bytes,
    /// The memory that would be reserved if the first failed call since the last reset had
    /// succeeded.
    pub(super) refused: Option<Bytes>,
    /// The start addresses of reservations, in order.
    pub(super) reserved: Vec<DevicePtr>,
}

impl<D: Device> Logged<D> {
    /// Wraps a device that already holds these segments.
    pub(super) fn new(inner: D, held: &[SegmentInfo]) -> Self {
        let sizes = held
            .iter()
            .map(|segment| (segment.address, segment.size))
            .collect();
        let held = held.iter().map(|segment| segment.size).sum();
        Self {
            inner,
            log: Vec::new(),
            sizes,
            held,
            refused: None,
            reserved: Vec::new(),
        }
    }

    pub(super) fn take_log(&mut self) -> Vec<DriverCall> {
        std::mem::take(&mut self.log)
    }

    fn note(&mut self, action: Action, range: MemoryRange) {
        self.held = if action.reserves() {
            self.held + range.len
        } else {
            self.held.saturating_sub(range.len)
        };
        self.log.push(DriverCall { action, range });
    }

    fn note_refusal<T>(
        &mut self,
        answer: Result<T, DeviceError>,
        size: Bytes,
    ) -> Result<T, DeviceError> {
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
        self.note(Action::SegmentAlloc, MemoryRange::new(at, size));
        Ok(at)
    }

    fn free(&mut self, ptr: DevicePtr) -> Result<(), DeviceError> {
        self.inner.free(ptr)?;
        let size = self.sizes.remove(&ptr).unwrap_or_default();
        self.note(Action::SegmentFree, MemoryRange::new(ptr, size));
        Ok(())
    }

    fn mapped(&mut self) -> Option<&mut dyn MappedDevice> {
        self.inner.mapped().is_some().then_some(self as _)
    }
}

impl<D: TestDevice> TestDeviceWrapper for Logged<D> {}

impl<D: Device> MappedDevice for Logged<D> {
    fn reserve(&mut self, size: Bytes) -> Result<DevicePtr, DeviceError> {
        let start = self.inner.required_mapped()?.reserve(size)?;
        self.reserved.push(start);
        Ok(start)
    }

    fn unreserve(&mut self, start: DevicePtr) -> Result<(), DeviceError> {
        self.inner.required_mapped()?.unreserve(start)
    }

    fn map(&mut self, range: MemoryRange, page: Bytes) -> Result<(), DeviceError> {
        let answer = self.inner.required_mapped()?.map(range, page);
        self.note_refusal(answer, range.len)?;
        self.note(Action::SegmentMap, range);
        Ok(())
    }

    fn unmap(&mut self, range: MemoryRange) -> Result<(), DeviceError> {
        self.inner.required_mapped()?.unmap(range)?;
        self.note(Action::SegmentUnmap, range);
        Ok(())
    }
}

pub(super) struct Watched {
    pub(super) device: Logged<SimDevice>,
    pub(super) allocator: Box<dyn Allocator>,
    pub(super) address: Option<DevicePtr>,
}

impl Target for Watched {
    type Live = Allocation;
    type Allocator = dyn Allocator;

    fn allocate(&mut self, request: Request) -> Result<Allocation, Box<AllocatorError>> {
        let allocation = self
            .allocator
            .allocate(&mut self.device, request)
            .map_err(Box::new)?;
        self.address = Some(allocation.ptr());
        Ok(allocation)
    }

    fn free(&mut self, live: Allocation) -> Result<(), DeviceError> {
        self.allocator.free(&mut self.device, live)
    }

    fn record_stream(&mut self, live: &Allocation, stream: StreamId) -> Result<(), DeviceError> {
        self.allocator.record_stream(live, stream)
    }

    fn with<R>(
        &mut self,
        call: impl FnOnce(&mut (dyn Allocator + 'static), &mut dyn TestDevice) -> R,
    ) -> R {
        call(&mut *self.allocator, &mut self.device)
    }
}
