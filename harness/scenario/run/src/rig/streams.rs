use std::collections::{BTreeMap, BTreeSet};

use harness_allocator::device::{EventId, StreamId};
use harness_allocator::units::Nanos;

use super::{Rig, Stop};
use crate::control::BlockingCall;

/// Queued work that the host has not waited for, as far as the rig needs it.
#[derive(Debug, Default)]
pub(super) struct Queued {
    /// Streams with queued `work`, or that wait for a stream with queued `work`.
    pub(super) working: BTreeSet<StreamId>,
    /// Events recorded after such work, with their streams.
    behind_work: BTreeMap<EventId, StreamId>,
    /// Streams with reads that have not been compared yet.
    pub(super) reading: BTreeSet<StreamId>,
}

impl Rig {
    pub fn work(&mut self, stream: StreamId, duration: Nanos) -> Result<(), Stop> {
        self.queued.working.insert(stream);
        self.control.calls(BlockingCall::Work);
        self.begin_launch();
        Ok(self.device.busy(stream, duration)?)
    }

    pub fn sleep(&mut self, duration: Nanos) -> Result<(), Stop> {
        self.device.sleep(duration);
        if self.is_interrupted() {
            Err(Stop::Interrupted)
        } else {
            Ok(())
        }
    }

    pub fn create_stream(&mut self) -> Result<StreamId, Stop> {
        Ok(self.device.create_stream()?)
    }

    pub fn create_event(&mut self) -> Result<EventId, Stop> {
        Ok(self.device.create_event()?)
    }

    pub fn record(&mut self, event: EventId, stream: StreamId) -> Result<(), Stop> {
        let Queued {
            working,
            behind_work,
            ..
        } = &mut self.queued;
        match working.contains(&stream) {
            true => drop(behind_work.insert(event, stream)),
            false => drop(behind_work.remove(&event)),
        }
        self.control.calls(BlockingCall::Event);
        Ok(self.device.record_event(event, stream)?)
    }

    pub fn wait(&mut self, stream: StreamId, event: EventId) -> Result<(), Stop> {
        let Queued {
            working,
            behind_work,
            ..
        } = &mut self.queued;
        if behind_work
            .get(&event)
            .is_some_and(|worker| working.contains(worker))
        {
            working.insert(stream);
        }
        self.control.calls(BlockingCall::Event);
        Ok(self.device.wait_event(stream, event)?)
    }

    pub fn synchronize_event(&mut self, event: EventId) -> Result<(), Stop> {
        self.control.calls(BlockingCall::Synchronize);
        Ok(self.device.synchronize_event(event)?)
    }

    /// Waits for a stream and compares what was read on it.
    pub fn synchronize_stream(&mut self, stream: StreamId) -> Result<(), Stop> {
        self.control.calls(BlockingCall::Synchronize);
        self.device.synchronize_stream(stream)?;
        self.stream_is_done(stream)
    }

    pub fn synchronize(&mut self) -> Result<(), Stop> {
        self.control.calls(BlockingCall::Synchronize);
        self.device.synchronize()?;
        self.queued.working.clear();
        let reading = std::mem::take(&mut self.queued.reading);
        reading
            .into_iter()
            .try_for_each(|stream| self.compare_reads(stream))
    }

    /// Called after the host has waited for the stream.
    pub(super) fn stream_is_done(&mut self, stream: StreamId) -> Result<(), Stop> {
        self.queued.working.remove(&stream);
        if self.queued.reading.remove(&stream) {
            self.compare_reads(stream)
        } else {
            Ok(())
        }
    }

    fn compare_reads(&mut self, stream: StreamId) -> Result<(), Stop> {
        self.control.calls(BlockingCall::Verify);
        Ok(self.device.finish_verifications(stream)?)
    }
}
