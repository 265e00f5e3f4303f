//! [`Recorder`]: an allocator that writes down what is asked of it, as an allocation trace.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use harness_allocator::allocator::{Allocation, Allocator, AllocatorError, MemoryFraction, PrivatePools, Request};
use harness_allocator::device::{Device, DeviceError, DevicePtr, PoolId, StreamId};
use harness_allocator::stats::{MemoryStats, SegmentInfo};
use harness_allocator::units::Bytes;
use harness_trace::trace::TraceEvent;

/// See the module.
pub(super) struct Recorder {
    inner: Box<dyn Allocator>,
    shared: Arc<Mutex<Notes>>,
    /// Numbers of what is live, by address.
    live: BTreeMap<DevicePtr, u64>,
    /// Streams in the order of their first use: a trace numbers them without gaps.
    streams: Vec<StreamId>,
    allocations: u64,
}

/// What a [`Recorder`] wrote, for who made it.
pub(super) struct Recording(Arc<Mutex<Notes>>);

#[derive(Default)]
struct Notes {
    events: Vec<TraceEvent>,
    /// Where among the events the requests are that were served with memory.
    served: Vec<usize>,
    refused: u64,
    /// What was done that allocations and frees do not tell.
    beyond: Option<&'static str>,
}

impl Recorder {
    pub(super) fn new(inner: Box<dyn Allocator>) -> (Self, Recording) {
        let shared = Arc::<Mutex<Notes>>::default();
        let recording = Recording(Arc::clone(&shared));
        (Self { inner, shared, live: BTreeMap::new(), streams: vec![StreamId::DEFAULT], allocations: 0 }, recording)
    }

    fn notes(&self) -> MutexGuard<'_, Notes> {
        notes(&self.shared)
    }

    fn number(&mut self, stream: StreamId) -> StreamId {
        let known = self.streams.iter().position(|known| *known == stream);
        let number = known.unwrap_or_else(|| {
            self.streams.push(stream);
            self.streams.len() - 1
        });
        StreamId(u32::try_from(number).unwrap_or(u32::MAX))
    }

    fn beyond(&self, what: &'static str) {
        self.notes().beyond.get_or_insert(what);
    }
}

impl Recording {
    /// The trace up to so many requests that were served, as lines of a file, and how many were refused.
    ///
    /// # Errors
    /// What was done that a trace of allocations and frees does not tell.
    pub(super) fn first(self, served: u64) -> Result<(Vec<String>, u64), String> {
        let mut notes = notes(&self.0);
        if let Some(beyond) = notes.beyond {
            return Err(format!("it {beyond}, which a trace of its requests does not tell"));
        }
        if let Some(end) = usize::try_from(served).ok().and_then(|served| notes.served.get(served).copied()) {
            notes.events.truncate(end);
        }
        Ok((notes.events.iter().map(ToString::to_string).collect(), notes.refused))
    }
}

fn notes(shared: &Mutex<Notes>) -> MutexGuard<'_, Notes> {
    shared.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Allocator for Recorder {
    fn name(&self) -> &'static str {
        self.inner.name()
    }

    fn reserve_unit(&self, device: &dyn Device) -> Bytes {
        self.inner.reserve_unit(device)
    }

    fn largest_request(&self, device: &dyn Device, free: Bytes) -> Bytes {
        self.inner.largest_request(device, free)
    }

    fn allocate(&mut self, device: &mut dyn Device, request: Request) -> Result<Allocation, AllocatorError> {
        let (id, stream) = (self.allocations, self.number(request.stream));
        self.allocations += 1;
        let served = self.inner.allocate(device, request);
        let mut notes = notes(&self.shared);
        let place = notes.events.len();
        notes.events.push(TraceEvent::Allocate { id, size: request.size, stream });
        match &served {
            // Nothing that could be freed.
            Ok(allocation) if allocation.is_null() => {}
            Ok(allocation) => {
                notes.served.push(place);
                self.live.insert(allocation.ptr(), id);
            }
            Err(_) => notes.refused += 1,
        }
        served
    }

    fn free(&mut self, device: &mut dyn Device, allocation: Allocation) -> Result<(), DeviceError> {
        if let Some(id) = self.live.remove(&allocation.ptr()) {
            self.notes().events.push(TraceEvent::Free { id });
        }
        self.inner.free(device, allocation)
    }

    fn record_stream(&mut self, allocation: &Allocation, stream: StreamId) -> Result<(), DeviceError> {
        self.beyond("lets other streams use its memory");
        self.inner.record_stream(allocation, stream)
    }

    fn release_stream(&mut self, device: &mut dyn Device, stream: StreamId) -> Result<(), DeviceError> {
        self.inner.release_stream(device, stream)
    }

    fn empty_cache(&mut self, device: &mut dyn Device) -> Result<(), DeviceError> {
        self.notes().events.push(TraceEvent::EmptyCache);
        self.inner.empty_cache(device)
    }

    fn set_memory_fraction(&mut self, device: &dyn Device, fraction: MemoryFraction) {
        // One is no limit; every run begins with that.
        if fraction.get() < 1.0 {
            self.beyond("limits the allocator to a share of the device");
        }
        self.inner.set_memory_fraction(device, fraction);
    }

    fn reset_peaks(&mut self) {
        self.inner.reset_peaks();
    }

    fn stats(&self) -> MemoryStats {
        self.inner.stats()
    }

    fn snapshot(&self) -> Vec<SegmentInfo> {
        self.inner.snapshot()
    }

    fn segment_at(&self, address: DevicePtr) -> Option<SegmentInfo> {
        self.inner.segment_at(address)
    }

    fn driver_pool(&self) -> Option<PoolId> {
        self.inner.driver_pool()
    }

    fn private_pools(&mut self) -> Option<&mut dyn PrivatePools> {
        self.beyond("uses private pools");
        self.inner.private_pools()
    }

    fn close(&mut self, device: &mut dyn Device) -> Result<(), DeviceError> {
        self.inner.close(device)
    }
}
