//! An allocation trace made ready to be gone through again and again: ids are slots, and nothing is looked up.

use std::collections::BTreeMap;

use harness_allocator::allocator::{Allocation, Allocator, AllocatorError, Request};
use harness_allocator::device::{DeviceError, StreamId, TestDevice};
use harness_allocator::units::Bytes;
use harness_trace::trace::TraceEvent;

use harness_trace::replay::Streams;

/// See the module.
pub(super) struct Program {
    operations: Vec<Operation>,
    live: Vec<Option<Allocation>>,
    streams: Streams,
    /// What others hold now: the device would have to be asked for it, which takes time.
    pressure: Bytes,
}

enum Operation {
    Allocate { slot: usize, request: Request },
    Free { slot: usize },
    RecordStream { slot: usize, stream: StreamId },
    Other(TraceEvent),
}

/// What a pass did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Pass {
    /// Allocations, refused ones included, and frees.
    pub(super) operations: u64,
    /// Allocations.
    pub(super) requests: u64,
    /// Allocations that did not fit.
    pub(super) refused: u64,
}

impl Program {
    /// Makes the streams that the trace names.
    pub(super) fn new(events: &[TraceEvent], device: &mut dyn TestDevice) -> Result<Self, DeviceError> {
        let streams = Streams::make(events, device)?;
        let mut slots = BTreeMap::new();
        let mut slot = |id: u64| {
            let next = slots.len();
            *slots.entry(id).or_insert(next)
        };
        let operations = events.iter().map(|&event| match streams.on_device(event) {
            TraceEvent::Allocate { id, size, stream } => Operation::Allocate { slot: slot(id), request: Request { size, stream } },
            TraceEvent::Free { id } => Operation::Free { slot: slot(id) },
            TraceEvent::RecordStream { id, stream } => Operation::RecordStream { slot: slot(id), stream },
            other => Operation::Other(other),
        });
        let operations = operations.collect();
        let live = (0..slots.len()).map(|_| None).collect();
        Ok(Self { operations, live, streams, pressure: Bytes::ZERO })
    }

    /// Goes through the trace once and frees what is live at its end. `watch` is called behind each allocation.
    pub(super) fn pass(
        &mut self,
        device: &mut dyn TestDevice,
        allocator: &mut dyn Allocator,
        mut watch: impl FnMut(&dyn Allocator),
    ) -> Result<Pass, DeviceError> {
        let mut pass = Pass::default();
        for operation in &self.operations {
            match *operation {
                Operation::Allocate { slot, request } => {
                    pass.requests += 1;
                    self.live[slot] = match allocator.allocate(device, request) {
                        Ok(allocation) => Some(allocation),
                        Err(AllocatorError::Device(error)) => return Err(error),
                        Err(AllocatorError::OutOfMemory(_) | AllocatorError::TooLarge { .. }) => {
                            pass.refused += 1;
                            None
                        }
                    };
                    watch(allocator);
                }
                Operation::Free { slot } => {
                    if let Some(allocation) = self.live[slot].take() {
                        pass.operations += 1;
                        allocator.free(device, allocation)?;
                    }
                }
                Operation::RecordStream { slot, stream } => {
                    if let Some(allocation) = &self.live[slot] {
                        allocator.record_stream(allocation, stream)?;
                    }
                }
                Operation::Other(event) => other(device, allocator, &mut self.pressure, event)?,
            }
        }
        for allocation in self.live.iter_mut().filter_map(Option::take) {
            pass.operations += 1;
            allocator.free(device, allocation)?;
        }
        pass.operations += pass.requests;
        Ok(pass)
    }

    /// Gives the streams back, when the allocator has been closed.
    pub(super) fn streams(&self) -> impl Iterator<Item = StreamId> + '_ {
        self.streams.made()
    }
}

fn other(device: &mut dyn TestDevice, allocator: &mut dyn Allocator, pressure: &mut Bytes, event: TraceEvent) -> Result<(), DeviceError> {
    match event {
        TraceEvent::SynchronizeStream(stream) => device.synchronize_stream(stream)?,
        TraceEvent::Synchronize => device.synchronize()?,
        TraceEvent::EmptyCache => allocator.empty_cache(device)?,
        TraceEvent::SetFraction(fraction) => allocator.set_memory_fraction(device, fraction),
        TraceEvent::ResetPeaks => allocator.reset_peaks(),
        TraceEvent::Pressure(change) => {
            *pressure = device.set_pressure(Bytes(pressure.0.saturating_add_signed(change)))?;
        }
        // A pass must be repeatable: a pool that was released cannot be opened again, so misuse in a later pass is passed over. Allocators
        // without private pools do without.
        TraceEvent::BeginPool(pool) => drop(allocator.private_pools().map(|pools| pools.begin(pool))),
        TraceEvent::EndPool(pool) => drop(allocator.private_pools().map(|pools| pools.end(pool))),
        TraceEvent::ReleasePool(pool) => drop(allocator.private_pools().map(|pools| pools.release(device, pool))),
        // These have operations of their own.
        TraceEvent::Allocate { .. } | TraceEvent::Free { .. } | TraceEvent::RecordStream { .. } => {}
    }
    Ok(())
}
