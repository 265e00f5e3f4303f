//! [`Streams`]: streams, events, and when work counts as done.
//!
//! Work takes no time. An event completes by a clock of submitted work, the model in [`Events`], and the waits of the host.

use harness_allocator::units::Nanos;
use harness_gpu_settings::settings::Events;

use crate::code::Code;
use crate::handles::Handles;

/// This many queries without new work advance the clock. Otherwise a program that polls would wait forever.
const IDLE_QUERIES: u32 = 1_000;
const STREAMS: Handles = Handles::starting_at(0x5_0000_0000);
const EVENTS: Handles = Handles::starting_at(0x6_0000_0000);
/// `cudaStreamLegacy` and `cudaStreamPerThread`.
const LEGACY: usize = 1;
const PER_THREAD: usize = 2;

/// All streams and events of a process.
#[derive(Debug)]
pub(crate) struct Streams {
    /// The default streams of the devices, then other streams. Numbers are not reused.
    streams: Vec<Option<Stream>>,
    devices: usize,
    events: Vec<Option<Event>>,
    unused_events: Vec<usize>,
    captures: u64,
    idle: Idle,
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct Stream {
    pub(crate) device: usize,
    pub(crate) priority: i32,
    pub(crate) flags: u32,
    /// The host has waited for all work before this time.
    waited: u64,
    /// The number of an active capture.
    pub(crate) capture: Option<u64>,
}

/// An event with its last record: the stream's number and the time.
#[derive(Clone, Copy, Debug, Default)]
struct Event {
    record: Option<(usize, u64)>,
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
        let default = |device| Some(Stream { device, priority: 0, flags: 0, waited: 0, capture: None });
        Self {
            streams: (0..devices).map(default).collect(),
            devices,
            events: Vec::new(),
            unused_events: Vec::new(),
            captures: 0,
            idle: Idle::default(),
        }
    }

    pub(crate) fn create(&mut self, device: usize, priority: i32, flags: u32) -> usize {
        self.streams.push(Some(Stream { device, priority, flags, waited: 0, capture: None }));
        STREAMS.handle(self.streams.len() - 1)
    }

    pub(crate) fn destroy(&mut self, handle: usize) -> Result<(), Code> {
        let number = self.number(handle, 0)?;
        if number < self.devices {
            return Err(Code::InvalidHandle);
        }
        self.streams[number] = None;
        Ok(())
    }

    /// The stream of a handle. Null, `cudaStreamLegacy` and `cudaStreamPerThread` are the default stream of the current device.
    pub(crate) fn stream(&mut self, handle: usize, current: usize) -> Result<&mut Stream, Code> {
        let number = self.number(handle, current)?;
        self.streams[number].as_mut().ok_or(Code::InvalidHandle)
    }

    fn number(&self, handle: usize, current: usize) -> Result<usize, Code> {
        let number = match handle {
            0 | LEGACY | PER_THREAD => current,
            _ => STREAMS.number(handle)?,
        };
        self.streams.get(number).is_some_and(Option::is_some).then_some(number).ok_or(Code::InvalidHandle)
    }

    pub(crate) fn wait_for(&mut self, handle: usize, current: usize, now: u64) -> Result<(), Code> {
        self.stream(handle, current)?.waited = now;
        Ok(())
    }

    pub(crate) fn wait_for_device(&mut self, device: usize, now: u64) {
        for stream in self.streams.iter_mut().flatten().filter(|stream| stream.device == device) {
            stream.waited = now;
        }
    }

    pub(crate) fn is_idle(&mut self, handle: usize, current: usize, model: Events) -> Result<bool, Code> {
        let _ = self.stream(handle, current)?;
        Ok(model == Events::Instant)
    }

    pub(crate) fn begin_capture(&mut self, handle: usize, current: usize) -> Result<(), Code> {
        self.captures += 1;
        let capture = self.captures;
        self.stream(handle, current)?.capture = Some(capture);
        Ok(())
    }

    pub(crate) fn create_event(&mut self) -> usize {
        let number = self.unused_events.pop().unwrap_or_else(|| {
            self.events.push(None);
            self.events.len() - 1
        });
        self.events[number] = Some(Event::default());
        EVENTS.handle(number)
    }

    pub(crate) fn destroy_event(&mut self, handle: usize) -> Result<(), Code> {
        let number = self.event_number(handle)?;
        self.events[number] = None;
        self.unused_events.push(number);
        Ok(())
    }

    fn event_number(&self, handle: usize) -> Result<usize, Code> {
        let number = EVENTS.number(handle)?;
        self.events.get(number).is_some_and(Option::is_some).then_some(number).ok_or(Code::InvalidHandle)
    }

    fn event(&mut self, handle: usize) -> Result<&mut Event, Code> {
        let number = self.event_number(handle)?;
        self.events[number].as_mut().ok_or(Code::InvalidHandle)
    }

    pub(crate) fn record(&mut self, event: usize, stream: usize, current: usize, (now, late_by): (u64, Nanos)) -> Result<(), Code> {
        let number = self.number(stream, current)?;
        *self.event(event)? = Event { record: Some((number, now)), late_by, waited: false };
        Ok(())
    }

    /// The host waits for an event and for the earlier work of its stream.
    pub(crate) fn wait_for_event(&mut self, event: usize) -> Result<(), Code> {
        let event = self.event(event)?;
        event.waited = true;
        if let Some((number, at)) = event.record
            && let Some(stream) = &mut self.streams[number]
        {
            stream.waited = stream.waited.max(at);
        }
        Ok(())
    }

    /// The time of an event's record, and the sum of the injected latencies before it.
    pub(crate) fn recorded_at(&mut self, event: usize) -> Result<Option<(u64, Nanos)>, Code> {
        let event = self.event(event)?;
        Ok(event.record.map(|(_, at)| (at, event.late_by)))
    }

    /// Returns [`Code::NotReady`] if an event is not complete.
    pub(crate) fn query(&mut self, event: usize, model: Events, now: u64) -> Result<(), Code> {
        let &mut Event { record, waited, .. } = self.event(event)?;
        let Some((number, at)) = record else { return Ok(()) };
        // The work of a destroyed stream is done.
        let stream_waited = self.streams[number].is_none_or(|stream| stream.waited >= at);
        let by_model = match model {
            Events::Instant => true,
            Events::Synchronize => false,
            Events::Lag(work) => now >= at.saturating_add(work),
        };
        if waited || stream_waited || by_model { Ok(()) } else { Err(Code::NotReady) }
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

#[cfg(test)]
mod tests;
