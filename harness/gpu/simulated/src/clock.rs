//! [`Streams`]: streams, events, and when work counts as done.
//!
//! Work takes no time. The host knows that work has ended if it has waited for it, or for other
//! work that came after it. The model in [`Events`] decides whether other work has ended. `work`
//! counts the work of each stream, and `captures` has the captures of streams.

pub(crate) mod captures;
pub(crate) mod deferred;
pub(crate) mod work;

use std::collections::BTreeMap;
use std::sync::Arc;

use harness_allocator::units::Nanos;
use harness_gpu_settings::settings::Events;

use self::captures::{Capture, Place};
use self::deferred::{Deferred, Free};
use self::work::{Submitted, Work};
use crate::code::Code;
use crate::torch_allocator;

/// This many queries without new work advance the clock. Otherwise a program that polls would wait
/// forever.
const IDLE_QUERIES: u32 = 1_000;
/// The first handle of streams, that of events, and the difference of two handles. Real handles are
/// aligned addresses too.
const HANDLES: usize = 0x5_0000_0000;
const EVENTS: usize = 0x6_0000_0000;
const STEP: usize = 16;
/// `cudaStreamLegacy` and `cudaStreamPerThread`.
const LEGACY: usize = 1;
const PER_THREAD: usize = 2;
const PER_THREAD_STREAMS: usize = 1 << 32;

/// All streams and events of a process, by handle. Handles are not reused.
#[derive(Debug)]
pub(crate) struct Streams {
    /// The default streams of a device have numbers in place of handles: the device's, and for
    /// `cudaStreamPerThread` one above [`PER_THREAD_STREAMS`].
    streams: BTreeMap<usize, Stream>,
    events: BTreeMap<usize, Event>,
    next_handle: usize,
    next_event: usize,
    submitted: Arc<Submitted>,
    /// Active captures by number.
    captures: BTreeMap<u64, Capture>,
    /// The number of captures so far.
    captured: u64,
    /// New graphs of captures that failed.
    failed: Vec<usize>,
    idle: Idle,
    deferred: Deferred,
}

#[derive(Debug)]
pub(crate) struct Stream {
    pub(crate) device: usize,
    pub(crate) priority: i32,
    pub(crate) flags: u32,
    /// The pieces of its work for which the host has waited.
    waited: u64,
    /// The work of other streams that must end before its next piece of work.
    after: Work,
    /// Its place in an active capture.
    capture: Option<Place>,
}

/// An event with its last record.
#[derive(Debug, Default)]
struct Event {
    record: Option<Record>,
    /// The place of the record, if a capturing stream recorded it last.
    capture: Option<Place>,
}

#[derive(Debug)]
struct Record {
    at: u64,
    /// The sum of the injected latencies before the record.
    late_by: Nanos,
    /// The work that must end first.
    work: Work,
    /// The free for which PyTorch's allocator recorded it.
    free: Option<Free>,
}

/// Queries since the clock advanced.
#[derive(Clone, Copy, Debug, Default)]
struct Idle {
    now: u64,
    queries: u32,
}

impl Streams {
    pub(crate) fn new(devices: usize) -> Self {
        let default = |device, key| {
            (
                key,
                Stream {
                    device,
                    priority: 0,
                    flags: 0,
                    waited: 0,
                    after: Work::new(),
                    capture: None,
                },
            )
        };
        let streams = (0..devices)
            .flat_map(|device| {
                [
                    default(device, device),
                    default(device, PER_THREAD_STREAMS + device),
                ]
            })
            .collect();
        let (events, captures) = (BTreeMap::new(), BTreeMap::new());
        Self {
            streams,
            events,
            next_handle: HANDLES,
            next_event: EVENTS,
            submitted: Arc::default(),
            captures,
            captured: 0,
            failed: Vec::new(),
            idle: Idle::default(),
            deferred: Deferred::default(),
        }
    }

    pub(crate) fn is_capturing(&self) -> bool {
        self.streams.values().any(|stream| stream.capture.is_some())
    }

    /// Returns whether the program has created no streams and events, and captured nothing.
    pub(crate) const fn is_unused(&self) -> bool {
        self.next_handle == HANDLES && self.next_event == EVENTS && self.captured == 0
    }

    /// The counts of submitted work, which need no lock.
    pub(crate) fn submitted(&self) -> Arc<Submitted> {
        Arc::clone(&self.submitted)
    }

    pub(crate) fn create(&mut self, device: usize, priority: i32, flags: u32) -> usize {
        self.next_handle += STEP;
        let handle = self.next_handle;
        self.streams.insert(
            handle,
            Stream {
                device,
                priority,
                flags,
                waited: 0,
                after: Work::new(),
                capture: None,
            },
        );
        handle
    }

    pub(crate) fn destroy(&mut self, handle: usize) -> Result<(), Code> {
        let destroyed = if handle >= HANDLES {
            self.streams.remove(&handle)
        } else {
            None
        };
        self.drop_capture(handle);
        self.end_for_host(handle, u64::MAX);
        destroyed.map(drop).ok_or(Code::InvalidHandle)
    }

    /// Destroys the streams of a device, except its default ones, and ends its captures.
    pub(crate) fn reset(&mut self, device: usize) {
        let of_device = self
            .streams
            .iter()
            .filter(|(_, stream)| stream.device == device);
        for key in of_device.map(|(key, _)| *key).collect::<Vec<_>>() {
            self.drop_capture(key);
            if key >= HANDLES {
                self.streams.remove(&key);
                self.end_for_host(key, u64::MAX);
            }
        }
    }

    /// The stream of a handle. Null and `cudaStreamLegacy` are the default stream of the current
    /// device. Its `cudaStreamPerThread` is one for all threads.
    pub(crate) fn stream(&mut self, handle: usize, current: usize) -> Result<&mut Stream, Code> {
        self.streams
            .get_mut(&key(handle, current))
            .ok_or(Code::InvalidHandle)
    }

    pub(crate) fn wait_for(&mut self, handle: usize, current: usize) -> Result<(), Code> {
        self.allow_wait(handle, current)?;
        self.stream(handle, current)?;
        self.end(self.work_of(key(handle, current)));
        Ok(())
    }

    pub(crate) fn wait_for_device(&mut self, device: usize) -> Result<(), Code> {
        self.allow_wait_for_device(device)?;
        self.end(self.before_idle_device(device));
        Ok(())
    }

    /// Returns whether the host knows that a stream has no work left. If not, the model decides.
    pub(crate) fn is_idle(&mut self, handle: usize, current: usize) -> Result<bool, Code> {
        self.stream(handle, current)?;
        self.allow_wait(handle, current)?;
        Ok(self.work_of(key(handle, current)).is_empty())
    }

    pub(crate) fn create_event(&mut self) -> usize {
        self.next_event += STEP;
        self.events.insert(self.next_event, Event::default());
        self.next_event
    }

    pub(crate) fn destroy_event(&mut self, handle: usize) -> Result<(), Code> {
        self.events
            .remove(&handle)
            .map(drop)
            .ok_or(Code::InvalidHandle)
    }

    fn event(&mut self, handle: usize) -> Result<&mut Event, Code> {
        self.events.get_mut(&handle).ok_or(Code::InvalidHandle)
    }

    pub(crate) fn record(
        &mut self,
        event: usize,
        stream: usize,
        current: usize,
        flags: u32,
        (now, late_by): (u64, Nanos),
    ) -> Result<(), Code> {
        self.stream(stream, current)?;
        if !self.record_captured(event, stream, current, flags)? {
            let record = Record {
                at: now,
                late_by,
                work: self.work_before_next(key(stream, current)),
                free: None,
            };
            *self.event(event)? = Event {
                record: Some(record),
                capture: None,
            };
        }
        Ok(())
    }

    pub(crate) fn wait_for_event(&mut self, event: usize) -> Result<(), Code> {
        self.allow_event(event)?;
        self.event(event)?;
        self.end(self.before_event(event));
        Ok(())
    }

    pub(crate) fn recorded_at(&mut self, event: usize) -> Result<Option<(u64, Nanos)>, Code> {
        self.allow_event(event)?;
        let record = self.event(event)?.record.as_ref();
        Ok(record.map(|record| (record.at, record.late_by)))
    }

    /// Returns [`Code::NotReady`] if an event is not complete.
    pub(crate) fn query(&mut self, event: usize, model: Events, now: u64) -> Result<(), Code> {
        self.allow_event(event)?;
        let Some(at) = self.pending_since(event)? else {
            return Ok(());
        };
        let has_ended = match model {
            Events::Instant => true,
            Events::Synchronize => false,
            Events::Lag(work) => now >= at.saturating_add(work),
        };
        if has_ended {
            Ok(())
        } else {
            Err(Code::NotReady)
        }
    }

    /// The time of an event, if the host does not know that its work has ended: then the model
    /// decides.
    pub(crate) fn pending_since(&self, event: usize) -> Result<Option<u64>, Code> {
        let event = self.events.get(&event).ok_or(Code::InvalidHandle)?;
        let mut records = event.record.iter();
        let pending = records.find(|record| record.work.iter().any(|work| self.is_pending(work)));
        Ok(pending.map(|record| record.at))
    }

    /// Notes that PyTorch's allocator recorded an event for the last free of the current device.
    pub(crate) fn note_free(&mut self, event: usize, device: usize) {
        let record = self.event(event).ok().and_then(|of| of.record.as_mut());
        if let Some(record) = record {
            let number = torch_allocator::counts(device).map(|[_, frees]| (device, frees));
            record.free = number;
        }
    }

    /// Notes that the allocator found that the work of a free has ended, which the host does not
    /// know.
    pub(crate) fn defer(&mut self, event: usize) {
        let record = self.event(event).ok().and_then(|of| of.record.as_ref());
        if let Some((free, work)) = record.map(|record| (record.free, record.work.clone())) {
            let free = free.filter(|_| self.captured == 0);
            let work = work.into_iter();
            let work = work.filter(|(stream, number)| self.is_pending((stream, number)));
            let work = work.collect();
            self.deferred.add(free, work);
        }
    }

    /// Notes that the program has asked, and seen that the work before an event has ended.
    pub(crate) fn see_event(&mut self, event: usize) {
        self.deferred.see(self.before_event(event), allocations);
    }

    /// Likewise for the work of a stream.
    pub(crate) fn see_stream(&mut self, handle: usize, current: usize) {
        let work = self.work_of(key(handle, current));
        self.deferred.see(work, allocations);
    }

    pub(crate) const fn deferred(&self) -> &Deferred {
        &self.deferred
    }

    /// Ends work of a stream for the blocks that wait for it.
    fn end_for_host(&mut self, stream: usize, number: u64) {
        self.deferred.end(stream, number, allocations);
    }

    /// Ends all work that was submitted.
    pub(crate) fn end_work(&mut self) {
        self.end(self.all_work());
    }

    /// Counts a query that found pending work. Returns whether the clock must advance.
    pub(crate) fn has_polled(&mut self, now: u64) -> bool {
        if self.idle.now != now {
            self.idle = Idle { now, queries: 0 };
        }
        self.idle.queries += 1;
        self.idle.queries.is_multiple_of(IDLE_QUERIES)
    }
}

/// The allocations of PyTorch on a device so far.
fn allocations(device: usize) -> u64 {
    torch_allocator::counts(device).map_or(0, |[allocations, _]| allocations)
}

const fn key(handle: usize, current: usize) -> usize {
    match handle {
        0 | LEGACY => current,
        PER_THREAD => PER_THREAD_STREAMS + current,
        // No stream has this key.
        _ if handle < HANDLES => HANDLES,
        _ => handle,
    }
}

#[cfg(test)]
mod tests;
