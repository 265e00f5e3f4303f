//! [`Streams`]: streams, events, and when work counts as done.
//!
//! Work takes no time. An event completes by a clock of submitted work, the model in [`Events`],
//! and the waits of the host. `captures` has the captures of streams.

pub(crate) mod captures;

use std::collections::BTreeMap;

use harness_allocator::units::Nanos;
use harness_gpu_settings::settings::Events;

use self::captures::{Capture, Place};
use crate::code::Code;

/// This many queries without new work advance the clock. Otherwise a program that polls would wait
/// forever.
const IDLE_QUERIES: u32 = 1_000;
/// The first handle of streams and events, and the difference of two handles. Real handles are
/// aligned addresses too.
const HANDLES: usize = 0x5_0000_0000;
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
    /// Active captures by number.
    captures: BTreeMap<u64, Capture>,
    /// The number of captures so far.
    captured: u64,
    idle: Idle,
}

#[derive(Debug)]
pub(crate) struct Stream {
    pub(crate) device: usize,
    pub(crate) priority: i32,
    pub(crate) flags: u32,
    /// The host has waited for all work before this time.
    waited: u64,
    /// Its place in an active capture.
    capture: Option<Place>,
}

/// An event with its last record: the stream and the time.
#[derive(Debug, Default)]
struct Event {
    record: Option<(usize, u64)>,
    /// The place of the record, if a capturing stream recorded it last.
    capture: Option<Place>,
    /// The sum of the injected latencies before the record.
    late_by: Nanos,
    waited: bool,
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
            captures,
            captured: 0,
            idle: Idle::default(),
        }
    }

    pub(crate) fn is_capturing(&self) -> bool {
        self.streams.values().any(|stream| stream.capture.is_some())
    }

    /// Returns whether the program has created no streams and events, and captured nothing.
    pub(crate) const fn is_unused(&self) -> bool {
        self.next_handle == HANDLES && self.captured == 0
    }

    fn new_handle(&mut self) -> usize {
        self.next_handle += STEP;
        self.next_handle
    }

    pub(crate) fn create(&mut self, device: usize, priority: i32, flags: u32) -> usize {
        let handle = self.new_handle();
        self.streams.insert(
            handle,
            Stream {
                device,
                priority,
                flags,
                waited: 0,
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

    pub(crate) fn wait_for(&mut self, handle: usize, current: usize, now: u64) -> Result<(), Code> {
        self.allow_wait(handle, current)?;
        self.stream(handle, current)?.waited = now;
        Ok(())
    }

    pub(crate) fn wait_for_device(&mut self, device: usize, now: u64) -> Result<(), Code> {
        self.allow_wait_for_device(device)?;
        for stream in self
            .streams
            .values_mut()
            .filter(|stream| stream.device == device)
        {
            stream.waited = now;
        }
        Ok(())
    }

    pub(crate) fn is_idle(
        &mut self,
        handle: usize,
        current: usize,
        model: Events,
        now: u64,
    ) -> Result<bool, Code> {
        let is_waited_for = self.is_waited_for(handle, current, now)?;
        self.allow_wait(handle, current)?;
        Ok(is_waited_for || model == Events::Instant)
    }

    /// Returns whether the host has waited for all work of a stream.
    pub(crate) fn is_waited_for(
        &mut self,
        handle: usize,
        current: usize,
        now: u64,
    ) -> Result<bool, Code> {
        Ok(self.stream(handle, current)?.waited >= now)
    }

    pub(crate) fn create_event(&mut self) -> usize {
        let handle = self.new_handle();
        self.events.insert(handle, Event::default());
        handle
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
            *self.event(event)? = Event {
                record: Some((key(stream, current), now)),
                capture: None,
                late_by,
                waited: false,
            };
        }
        Ok(())
    }

    pub(crate) fn wait_for_event(&mut self, event: usize) -> Result<(), Code> {
        self.allow_event(event)?;
        let event = self.event(event)?;
        event.waited = true;
        if let Some((stream, at)) = event.record
            && let Some(stream) = self.streams.get_mut(&stream)
        {
            stream.waited = stream.waited.max(at);
        }
        Ok(())
    }

    pub(crate) fn recorded_at(&mut self, event: usize) -> Result<Option<(u64, Nanos)>, Code> {
        self.allow_event(event)?;
        let event = self.event(event)?;
        Ok(event.record.map(|(_, at)| (at, event.late_by)))
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

    /// The time of an event's work, if the host has not waited for it: then the model decides
    /// whether it has ended.
    pub(crate) fn pending_since(&mut self, event: usize) -> Result<Option<u64>, Code> {
        let &mut Event { record, waited, .. } = self.event(event)?;
        // The work of a destroyed stream is done.
        let is_pending = |(stream, at): &(usize, u64)| {
            let stream = self.streams.get(stream);
            !waited && stream.is_some_and(|stream| stream.waited < *at)
        };
        Ok(record.filter(is_pending).map(|(_, at)| at))
    }

    /// Ends all work that was submitted before this time.
    pub(crate) fn end_work(&mut self, now: u64) {
        for stream in self.streams.values_mut() {
            stream.waited = now;
        }
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
