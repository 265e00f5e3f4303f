//! What a driver that is made of the simulated device needs beyond the traits: time that passes on the host, when work will be done, and accesses
//! of work that the device does not do itself.

use super::{SimDevice, unknown_event};
use crate::device::{AccessKind, DeviceError, EventId, MemoryRange, StreamId};
use crate::units::Nanos;

/// The last record of an event.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EventTime {
    /// When the work in front of the record is done; `None` where there was no record.
    pub done_at: Option<Nanos>,
    /// Whether the event was made to keep the time.
    pub timed: bool,
}

impl SimDevice {
    /// Moves the virtual clock to this time, unless it is there already.
    pub fn pass_time(&mut self, to: Nanos) {
        self.wait_until(to);
    }

    /// When all work of a stream so far is done: now, or later.
    ///
    /// # Errors
    /// [`DeviceError::UnknownHandle`].
    pub fn stream_done_at(&mut self, stream: StreamId) -> Result<Nanos, DeviceError> {
        Ok(self.stream(stream)?.ready.max(self.now))
    }

    /// When all work of all streams so far is done: now, or later.
    #[must_use]
    pub fn all_done_at(&self) -> Nanos {
        self.streams.values().map(|stream| stream.ready).fold(self.now.max(self.released_ready), Nanos::max)
    }

    /// When an event is done.
    ///
    /// # Errors
    /// [`DeviceError::UnknownHandle`].
    pub fn event_time(&self, event: EventId) -> Result<EventTime, DeviceError> {
        let known = self.events.get(&event.0).ok_or(unknown_event(event))?;
        Ok(EventTime { done_at: known.record.map(|record| record.at), timed: known.timed })
    }

    /// Queues work that reads or writes a range, without changing what the device holds to be in it.
    ///
    /// # Errors
    /// [`DeviceError::InvalidAccess`], [`DeviceError::Race`].
    pub fn queue_access(&mut self, stream: StreamId, range: MemoryRange, kind: AccessKind) -> Result<(), DeviceError> {
        self.access(stream, range, kind)
    }
}
