//! Events for allocators that order the reuse of memory: kept for the next use, since making one costs a driver call.

use crate::device::{Device, DeviceError, EventId, StreamId};

/// Events that nobody waits for at the moment.
#[derive(Debug, Default)]
pub(super) struct Events {
    idle: Vec<EventId>,
}

impl Events {
    /// An event behind all work of the stream so far; `None` where the stream is no more: it was waited for when it was destroyed.
    pub(super) fn record(&mut self, device: &mut dyn Device, stream: StreamId) -> Result<Option<EventId>, DeviceError> {
        let event = match self.idle.pop() {
            Some(event) => event,
            None => device.create_event()?,
        };
        let recorded = existing(device.record_event(event, stream));
        if !matches!(recorded, Ok(Some(()))) {
            self.idle.push(event);
        }
        Ok(recorded?.map(|()| event))
    }

    /// Takes an event back. Waits for it that are queued already keep their meaning.
    pub(super) fn give_back(&mut self, event: EventId) {
        self.idle.push(event);
    }

    /// Destroys those that are idle.
    pub(super) fn close(&mut self, device: &mut dyn Device) -> Result<(), DeviceError> {
        while let Some(event) = self.idle.pop() {
            device.destroy_event(event)?;
        }
        Ok(())
    }
}

/// What a call about a stream says; `None` where the device does not have the stream any more.
pub(super) fn existing<T>(result: Result<T, DeviceError>) -> Result<Option<T>, DeviceError> {
    match result {
        Ok(value) => Ok(Some(value)),
        Err(DeviceError::UnknownHandle { kind: "stream", .. }) => Ok(None),
        Err(error) => Err(error),
    }
}
