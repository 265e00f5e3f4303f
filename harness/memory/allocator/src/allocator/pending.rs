//! Pending frees: a block used by several streams is free after an event on each of them is
//! complete.
//!
//! All allocators that order reuse by events share this module. It handles the difficult cases:
//!
//! * A destroyed stream needs no event, because destroying it has waited for its work
//!   ([`Device::destroy_stream`]).
//! * If an event cannot be recorded, the events of this free are removed, and the free is retried
//!   at the next call.
//! * If the device fails between two events, finished frees are done and the others stay pending.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use crate::device::{Device, DeviceError, EventId, StreamId};

/// Unused events. They are kept because making one costs a driver call.
#[derive(Clone, Debug, Default)]
pub(super) struct Events {
    idle: Vec<EventId>,
}

impl Events {
    /// An event whose earlier records mean nothing any more.
    pub(super) fn take(&mut self, device: &mut dyn Device) -> Result<EventId, DeviceError> {
        match self.idle.pop() {
            Some(event) => Ok(event),
            None => device.create_event(),
        }
    }

    /// Records an event after all work of the stream so far, or returns `None` if the stream was
    /// destroyed.
    pub(super) fn record(
        &mut self,
        device: &mut dyn Device,
        stream: StreamId,
    ) -> Result<Option<EventId>, DeviceError> {
        let event = self.take(device)?;
        let recorded = if_exists(device.record_event(event, stream));
        if !matches!(recorded, Ok(Some(()))) {
            self.idle.push(event);
        }
        Ok(recorded?.map(|()| event))
    }

    /// Makes the stream wait for the other streams' work on memory that is freed on it.
    pub(super) fn order_behind(
        &mut self,
        device: &mut dyn Device,
        stream: StreamId,
        users: &BTreeSet<StreamId>,
    ) -> Result<(), DeviceError> {
        for &user in users {
            let Some(event) = self.record(device, user)? else {
                continue;
            };
            let waits = match if_exists(device.wait_event(stream, event)) {
                Ok(Some(())) => Ok(()),
                // The stream is destroyed, so only the host can wait.
                Ok(None) => device.synchronize_event(event),
                Err(error) => Err(error),
            };
            self.give_back(event);
            waits?;
        }
        Ok(())
    }

    /// Keeps an event for reuse. Queued waits for it stay valid.
    pub(super) fn give_back(&mut self, event: EventId) {
        self.idle.push(event);
    }

    pub(super) fn close(&mut self, device: &mut dyn Device) -> Result<(), DeviceError> {
        while let Some(&event) = self.idle.last() {
            device.destroy_event(event)?;
            self.idle.pop();
        }
        Ok(())
    }
}

/// Turns the error of a destroyed stream into `None`.
pub(super) fn if_exists<T>(result: Result<T, DeviceError>) -> Result<Option<T>, DeviceError> {
    match result {
        Ok(value) => Ok(Some(value)),
        Err(DeviceError::UnknownHandle { kind: "stream", .. }) => Ok(None),
        Err(error) => Err(error),
    }
}

/// The pending frees. `B` names a block in its allocator.
#[derive(Clone, Debug)]
pub(super) struct PendingFrees<B> {
    /// Blocks whose events are still to be recorded, with the streams that use them.
    postponed: VecDeque<(B, BTreeSet<StreamId>)>,
    /// Recorded events by stream, in the order of recording.
    queues: BTreeMap<StreamId, VecDeque<(EventId, B)>>,
    /// The number of incomplete events of each queued block.
    events_left: BTreeMap<B, usize>,
    events: Events,
}

impl<B> Default for PendingFrees<B> {
    fn default() -> Self {
        Self {
            postponed: VecDeque::new(),
            queues: BTreeMap::new(),
            events_left: BTreeMap::new(),
            events: Events::default(),
        }
    }
}

impl<B: Copy + Ord> PendingFrees<B> {
    #[inline]
    pub(super) fn is_empty(&self) -> bool {
        self.queues.is_empty() && self.postponed.is_empty()
    }

    /// Adds a free whose events are recorded at the next call.
    pub(super) fn postpone(&mut self, block: B, streams: BTreeSet<StreamId>) {
        self.postponed.push_back((block, streams));
    }

    /// Adds a free that waits for all work so far of these streams. Returns whether it has to wait:
    /// not if all streams are destroyed. Fails with [`DeviceError`] if an event cannot be recorded.
    /// The free is then retried at the next call.
    pub(super) fn add(
        &mut self,
        device: &mut dyn Device,
        block: B,
        streams: BTreeSet<StreamId>,
    ) -> Result<bool, DeviceError> {
        let waits = self.record(device, block, &streams);
        if waits.is_err() {
            self.postpone(block, streams);
        }
        waits
    }

    /// Records the events of postponed frees, without waiting. Returns the blocks that need no
    /// wait. These are done even if the device fails afterwards.
    pub(super) fn record_postponed(
        &mut self,
        device: &mut dyn Device,
    ) -> (Vec<B>, Result<(), DeviceError>) {
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

    /// Returns the blocks whose last event is complete, without waiting. Polls the events of each
    /// stream in order, up to the first incomplete one. The returned blocks are done even if the
    /// device fails afterwards.
    pub(super) fn poll(&mut self, device: &mut dyn Device) -> (Vec<B>, Result<(), DeviceError>) {
        let (mut done, recorded) = self.record_postponed(device);
        let mut is_emptied = false;
        let Self {
            queues,
            events_left,
            events,
            ..
        } = self;
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

    /// Waits for the events of all blocks that `wanted` selects, and returns the finished blocks.
    /// These are done even if the device fails afterwards.
    pub(super) fn wait_for(
        &mut self,
        device: &mut dyn Device,
        wanted: impl Fn(B) -> bool,
    ) -> (Vec<B>, Result<(), DeviceError>) {
        let (mut done, recorded) = self.record_postponed(device);
        let waited = recorded.and_then(|()| {
            let streams: Vec<StreamId> = self.queues.keys().copied().collect();
            streams.into_iter().try_for_each(|stream| {
                let mut passed = 0;
                while let Some(&(event, block)) =
                    self.queues.get(&stream).and_then(|queue| queue.get(passed))
                {
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

    /// Returns all events to the device and forgets pending frees.
    pub(super) fn close(&mut self, device: &mut dyn Device) -> Result<(), DeviceError> {
        let queued = std::mem::take(&mut self.queues).into_values().flatten();
        queued.for_each(|(event, _)| self.events.give_back(event));
        self.events_left.clear();
        self.postponed.clear();
        self.events.close(device)
    }

    /// Records an event on each stream, or on none if one fails.
    fn record(
        &mut self,
        device: &mut dyn Device,
        block: B,
        streams: &BTreeSet<StreamId>,
    ) -> Result<bool, DeviceError> {
        let mut recorded = Vec::with_capacity(streams.len());
        for &stream in streams {
            match self.events.record(device, stream) {
                Ok(event) => recorded.extend(event.map(|event| (stream, event))),
                Err(error) => {
                    recorded
                        .into_iter()
                        .for_each(|(_, event)| self.events.give_back(event));
                    return Err(error);
                }
            }
        }
        if recorded.is_empty() {
            return Ok(false);
        }
        self.events_left.insert(block, recorded.len());
        for (stream, event) in recorded {
            self.queues
                .entry(stream)
                .or_default()
                .push_back((event, block));
        }
        Ok(true)
    }

    /// Notes a complete event of a stream. Returns its block if that has no other incomplete event.
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

/// Counts a complete event of a block. Returns the block if it has no other incomplete event.
fn without_one<B: Copy + Ord>(events_left: &mut BTreeMap<B, usize>, block: B) -> Option<B> {
    let left = events_left.get_mut(&block)?;
    *left -= 1;
    if *left > 0 {
        return None;
    }
    events_left.remove(&block);
    Some(block)
}
