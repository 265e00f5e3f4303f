//! Frees that wait: memory that several streams use is free when an event behind the work of each of them has been seen complete.
//!
//! Every allocator that orders the reuse of memory by events uses this module, so the difficult cases are handled once:
//!
//! * A stream that was destroyed needs no event: destroying it has waited for its work ([`Device::destroy_stream`]).
//! * Where an event cannot be recorded, no event of this free stays queued. The free is postponed, and tried again at the next call.
//! * Where the device fails between two events, the frees that finished before are done and all others still wait.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use crate::device::{Device, DeviceError, EventId, StreamId};

/// Events that nobody waits for at the moment. They are kept because making one costs a driver call.
#[derive(Clone, Debug, Default)]
pub(super) struct Events {
    idle: Vec<EventId>,
}

impl Events {
    /// Records an event behind all work of the stream so far. `None` where the stream was destroyed: its work is done.
    pub(super) fn record(&mut self, device: &mut dyn Device, stream: StreamId) -> Result<Option<EventId>, DeviceError> {
        let event = match self.idle.pop() {
            Some(event) => event,
            None => device.create_event()?,
        };
        let recorded = if_exists(device.record_event(event, stream));
        if !matches!(recorded, Ok(Some(()))) {
            self.idle.push(event);
        }
        Ok(recorded?.map(|()| event))
    }

    /// Takes an event back for the next use. Waits for it that are queued already keep their meaning.
    pub(super) fn give_back(&mut self, event: EventId) {
        self.idle.push(event);
    }

    /// Destroys the events that are idle.
    pub(super) fn close(&mut self, device: &mut dyn Device) -> Result<(), DeviceError> {
        while let Some(&event) = self.idle.last() {
            device.destroy_event(event)?;
            self.idle.pop();
        }
        Ok(())
    }
}

/// The answer to a call about a stream; `None` where the stream was destroyed.
pub(super) fn if_exists<T>(result: Result<T, DeviceError>) -> Result<Option<T>, DeviceError> {
    match result {
        Ok(value) => Ok(Some(value)),
        Err(DeviceError::UnknownHandle { kind: "stream", .. }) => Ok(None),
        Err(error) => Err(error),
    }
}

/// The frees that wait. `B` names a block in its allocator.
#[derive(Clone, Debug)]
pub(super) struct PendingFrees<B> {
    /// Blocks whose events are still to be recorded, each with the streams that use it.
    postponed: VecDeque<(B, BTreeSet<StreamId>)>,
    /// Recorded events by stream, in the order of recording.
    queues: BTreeMap<StreamId, VecDeque<(EventId, B)>>,
    /// How many events each block in the queues still waits for.
    events_left: BTreeMap<B, usize>,
    events: Events,
}

impl<B> Default for PendingFrees<B> {
    fn default() -> Self {
        Self { postponed: VecDeque::new(), queues: BTreeMap::new(), events_left: BTreeMap::new(), events: Events::default() }
    }
}

impl<B: Copy + Ord> PendingFrees<B> {
    /// Whether nothing waits.
    #[inline]
    pub(super) fn is_empty(&self) -> bool {
        self.queues.is_empty() && self.postponed.is_empty()
    }

    /// Adds a free whose events are recorded at the next call.
    pub(super) fn postpone(&mut self, block: B, streams: BTreeSet<StreamId>) {
        self.postponed.push_back((block, streams));
    }

    /// Adds a free that waits for all work so far of these streams. Says whether it has to wait: not if no such stream exists.
    ///
    /// # Errors
    /// [`DeviceError`] where an event cannot be recorded. The free is postponed then.
    pub(super) fn add(&mut self, device: &mut dyn Device, block: B, streams: BTreeSet<StreamId>) -> Result<bool, DeviceError> {
        let waits = self.record(device, block, &streams);
        if waits.is_err() {
            self.postpone(block, streams);
        }
        waits
    }

    /// Records the events of the frees that were postponed, without waiting. Returns the blocks that need no wait; those are done even where
    /// the device fails on the way.
    pub(super) fn record_postponed(&mut self, device: &mut dyn Device) -> (Vec<B>, Result<(), DeviceError>) {
        let mut done = Vec::new();
        while let Some((block, streams)) = self.postponed.pop_front() {
            match self.record(device, block, &streams) {
                Ok(true) => {}
                Ok(false) => done.push(block),
                Err(error) => {
                    self.postponed.push_front((block, streams));
                    return (done, Err(error));
                }
            }
        }
        (done, Ok(()))
    }

    /// The blocks whose last event is complete by now, without waiting. Looks at the events of each stream in their order, up to the first
    /// that is not complete. The blocks returned are done even where the device fails on the way.
    pub(super) fn poll(&mut self, device: &mut dyn Device) -> (Vec<B>, Result<(), DeviceError>) {
        let (mut done, recorded) = self.record_postponed(device);
        let mut is_emptied = false;
        let Self { queues, events_left, events, .. } = self;
        let polled = recorded.and_then(|()| {
            queues.values_mut().try_for_each(|queue| {
                while let Some(&(event, block)) = queue.front()
                    && device.event_done(event)?
                {
                    queue.pop_front();
                    is_emptied |= queue.is_empty();
                    events.give_back(event);
                    done.extend(without_one(events_left, block));
                }
                Ok(())
            })
        });
        if is_emptied {
            queues.retain(|_, queue| !queue.is_empty());
        }
        (done, polled)
    }

    /// Waits for the events of all blocks that `wanted` names and returns the blocks that wait for nothing more. Those are done even where
    /// the device fails on the way.
    pub(super) fn wait_for(&mut self, device: &mut dyn Device, wanted: impl Fn(B) -> bool) -> (Vec<B>, Result<(), DeviceError>) {
        let (mut done, recorded) = self.record_postponed(device);
        let waited = recorded.and_then(|()| {
            let streams: Vec<StreamId> = self.queues.keys().copied().collect();
            streams.into_iter().try_for_each(|stream| {
                let mut passed = 0;
                while let Some(&(event, block)) = self.queues.get(&stream).and_then(|queue| queue.get(passed)) {
                    if wanted(block) {
                        device.synchronize_event(event)?;
                        done.extend(self.pop(stream, passed));
                    } else {
                        passed += 1;
                    }
                }
                Ok(())
            })
        });
        (done, waited)
    }

    /// Gives all events back to the device. What still waits is forgotten.
    pub(super) fn close(&mut self, device: &mut dyn Device) -> Result<(), DeviceError> {
        let queued = std::mem::take(&mut self.queues).into_values().flatten();
        queued.for_each(|(event, _)| self.events.give_back(event));
        self.events_left.clear();
        self.postponed.clear();
        self.events.close(device)
    }

    /// Records an event on each stream, or on none where one fails.
    fn record(&mut self, device: &mut dyn Device, block: B, streams: &BTreeSet<StreamId>) -> Result<bool, DeviceError> {
        let mut recorded = Vec::with_capacity(streams.len());
        for &stream in streams {
            match self.events.record(device, stream) {
                Ok(event) => recorded.extend(event.map(|event| (stream, event))),
                Err(error) => {
                    recorded.into_iter().for_each(|(_, event)| self.events.give_back(event));
                    return Err(error);
                }
            }
        }
        if recorded.is_empty() {
            return Ok(false);
        }
        self.events_left.insert(block, recorded.len());
        for (stream, event) in recorded {
            self.queues.entry(stream).or_default().push_back((event, block));
        }
        Ok(true)
    }

    /// An event in the queue of a stream was seen complete: returns its block if that waits for nothing more.
    fn pop(&mut self, stream: StreamId, position: usize) -> Option<B> {
        let queue = self.queues.get_mut(&stream)?;
        let (event, block) = queue.remove(position)?;
        if queue.is_empty() {
            self.queues.remove(&stream);
        }
        self.events.give_back(event);
        without_one(&mut self.events_left, block)
    }
}

/// Counts an event of a block as seen. Returns the block if it waits for no other.
fn without_one<B: Copy + Ord>(events_left: &mut BTreeMap<B, usize>, block: B) -> Option<B> {
    let left = events_left.get_mut(&block)?;
    *left -= 1;
    if *left > 0 {
        return None;
    }
    events_left.remove(&block);
    Some(block)
}
