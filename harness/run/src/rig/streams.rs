//! Streams and events, and the work that is queued on them.

use std::collections::{BTreeMap, BTreeSet};

use harness_allocator::device::{EventId, StreamId};
use harness_allocator::units::Nanos;

use super::{Rig, Stop};
use crate::control::Call;

/// What is queued on streams and was not waited for, as far as the rig has to know.
#[derive(Debug, Default)]
pub(super) struct Queued {
    /// Streams with queued `work` that nobody has waited for, or that wait for such a stream.
    working: BTreeSet<StreamId>,
    /// Events that stand behind such work, by the stream that they were recorded on.
    behind_work: BTreeMap<EventId, StreamId>,
    /// Streams with reads whose contents were not compared yet.
    reading: BTreeSet<StreamId>,
}

impl Queued {
    /// Whether the stream has `work` that nobody has waited for.
    pub(super) fn is_working(&self, stream: StreamId) -> bool {
        self.working.contains(&stream)
    }

    /// A read was queued on the stream.
    pub(super) fn reads(&mut self, stream: StreamId) {
        self.reading.insert(stream);
    }
}

impl Rig {
    /// Keeps a stream busy.
    ///
    /// # Errors
    /// [`Stop`].
    pub fn work(&mut self, stream: StreamId, duration: Nanos) -> Result<(), Stop> {
        self.queued.working.insert(stream);
        self.control.calls(Call::Work);
        self.begin_launch();
        Ok(self.device.busy(stream, duration)?)
    }

    /// Lets time pass.
    ///
    /// # Errors
    /// [`Stop::Interrupted`].
    pub fn sleep(&mut self, duration: Nanos) -> Result<(), Stop> {
        self.device.sleep(duration);
        if self.is_interrupted() { Err(Stop::Interrupted) } else { Ok(()) }
    }

    /// Makes a stream.
    ///
    /// # Errors
    /// [`Stop`].
    pub fn create_stream(&mut self) -> Result<StreamId, Stop> {
        Ok(self.device.create_stream()?)
    }

    /// Makes an event.
    ///
    /// # Errors
    /// [`Stop`].
    pub fn create_event(&mut self) -> Result<EventId, Stop> {
        Ok(self.device.create_event()?)
    }

    /// Queues an event behind the stream's work.
    ///
    /// # Errors
    /// [`Stop`].
    pub fn record(&mut self, event: EventId, stream: StreamId) -> Result<(), Stop> {
        let Queued { working, behind_work, .. } = &mut self.queued;
        match working.contains(&stream) {
            true => drop(behind_work.insert(event, stream)),
            false => drop(behind_work.remove(&event)),
        }
        self.control.calls(Call::Event);
        Ok(self.device.record_event(event, stream)?)
    }

    /// Makes a stream wait for an event.
    ///
    /// # Errors
    /// [`Stop`].
    pub fn wait(&mut self, stream: StreamId, event: EventId) -> Result<(), Stop> {
        let Queued { working, behind_work, .. } = &mut self.queued;
        if behind_work.get(&event).is_some_and(|worker| working.contains(worker)) {
            working.insert(stream);
        }
        self.control.calls(Call::Event);
        Ok(self.device.wait_event(stream, event)?)
    }

    /// Waits for an event.
    ///
    /// # Errors
    /// [`Stop`].
    pub fn synchronize_event(&mut self, event: EventId) -> Result<(), Stop> {
        self.control.calls(Call::Synchronize);
        Ok(self.device.synchronize_event(event)?)
    }

    /// Waits for a stream, and compares what was read on it.
    ///
    /// # Errors
    /// [`Stop`].
    pub fn synchronize_stream(&mut self, stream: StreamId) -> Result<(), Stop> {
        self.control.calls(Call::Synchronize);
        self.device.synchronize_stream(stream)?;
        self.stream_is_done(stream)
    }

    /// Waits for everything, and compares what was read.
    ///
    /// # Errors
    /// [`Stop`].
    pub fn synchronize(&mut self) -> Result<(), Stop> {
        self.control.calls(Call::Synchronize);
        self.device.synchronize()?;
        self.queued.working.clear();
        let reading = std::mem::take(&mut self.queued.reading);
        reading.into_iter().try_for_each(|stream| self.compare_reads(stream))
    }

    /// The host has waited for the stream.
    pub(super) fn stream_is_done(&mut self, stream: StreamId) -> Result<(), Stop> {
        self.queued.working.remove(&stream);
        if self.queued.reading.remove(&stream) { self.compare_reads(stream) } else { Ok(()) }
    }

    fn compare_reads(&mut self, stream: StreamId) -> Result<(), Stop> {
        self.control.calls(Call::Verify);
        Ok(self.device.finish_verifications(stream)?)
    }
}
