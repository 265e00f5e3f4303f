//! Extra functions for a driver built on the simulated device: completion times.

use super::{SimDevice, unknown_event};
use crate::device::{DeviceError, EventId, StreamId};
use crate::units::Nanos;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EventTime {
    /// The completion time of the work before the record, or `None` if the event was never
    /// recorded.
    pub done_at: Option<Nanos>,
    pub timed: bool,
}

impl SimDevice {
    /// The time when all work of a stream so far is complete.
    pub fn stream_done_at(&mut self, stream: StreamId) -> Result<Nanos, DeviceError> {
        Ok(self.stream(stream)?.ready.max(self.now))
    }

    /// The time when all work of all streams so far is complete.
    pub fn all_done_at(&self) -> Nanos {
        self.streams
            .values()
            .map(|stream| stream.ready)
            .fold(self.now.max(self.released_ready), Nanos::max)
    }

    pub fn event_time(&self, event: EventId) -> Result<EventTime, DeviceError> {
        let known = self.events.get(&event.0).ok_or(unknown_event(event))?;
        Ok(EventTime {
            done_at: known.record.map(|record| record.at),
            timed: known.timed,
        })
    }
}
