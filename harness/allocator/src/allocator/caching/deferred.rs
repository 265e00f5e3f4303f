//! Frees that wait: blocks used by other streams too, until an event of each such stream is seen complete.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use super::config::Quirks;
use super::ids::BlockId;
use crate::device::{Device, DeviceError, EventId, StreamId};

/// The other streams of a block.
#[derive(Debug, Default)]
struct SharedUse {
    streams: BTreeSet<StreamId>,
    /// Those of them that were recorded while a private pool's context was open.
    in_context: BTreeSet<StreamId>,
}

/// What waits for what.
#[derive(Debug, Default)]
pub(super) struct DeferredFrees {
    uses: BTreeMap<BlockId, SharedUse>,
    /// Freed while a pool context was open: their events are still to be recorded.
    unfiled: Vec<BlockId>,
    /// Recorded events in the order of recording, by stream.
    queues: BTreeMap<StreamId, VecDeque<(EventId, BlockId)>>,
    /// Events for the next use: making one costs a driver call.
    idle: Vec<EventId>,
}

impl DeferredFrees {
    /// Whether there is nothing to look after: the one question a cache hit asks.
    #[inline]
    pub(super) fn is_empty(&self) -> bool {
        self.queues.is_empty() && self.unfiled.is_empty()
    }

    /// Notes that a stream uses a block.
    pub(super) fn record_use(&mut self, block: BlockId, stream: StreamId, context_is_open: bool) {
        let uses = self.uses.entry(block).or_default();
        uses.streams.insert(stream);
        if context_is_open {
            uses.in_context.insert(stream);
        }
    }

    /// Puts a free off until all pool contexts are closed.
    pub(super) fn put_off(&mut self, block: BlockId) {
        self.unfiled.push(block);
    }

    /// Records an event on every other stream of a freed block and returns how many there are.
    pub(super) fn file(&mut self, device: &mut dyn Device, block: BlockId) -> Result<u32, DeviceError> {
        let streams = self.uses.get(&block).map(|uses| uses.streams.clone()).unwrap_or_default();
        self.file_streams(device, block, streams)
    }

    /// Records the events of the frees that were put off. Returns each such block with the number of its events.
    pub(super) fn file_put_off(&mut self, device: &mut dyn Device, quirks: Quirks) -> Result<Vec<(BlockId, u32)>, DeviceError> {
        let mut filed = Vec::new();
        while let Some(&block) = self.unfiled.first() {
            let mut streams = self.uses.get(&block).map(|uses| uses.streams.clone()).unwrap_or_default();
            match quirks {
                Quirks::Safe => {}
                Quirks::Torch211 => {
                    // PyTorch takes these streams to belong to a graph capture that is over by now, and forgets them.
                    streams = self.uses.get(&block).map(|uses| &streams - &uses.in_context).unwrap_or_default();
                }
            }
            let events = self.file_streams(device, block, streams)?;
            self.unfiled.remove(0);
            filed.push((block, events));
        }
        Ok(filed)
    }

    /// The next block whose oldest event on some stream is complete; its event goes back to the idle ones.
    pub(super) fn next_complete(&mut self, device: &mut dyn Device, from: StreamId) -> Result<Option<(StreamId, BlockId)>, DeviceError> {
        for (&stream, queue) in self.queues.range(from..) {
            if let Some(&(event, block)) = queue.front()
                && device.event_done(event)?
            {
                self.pop(stream);
                return Ok(Some((stream, block)));
            }
        }
        Ok(None)
    }

    /// Waits for the events of all blocks that `of_interest` names and returns those blocks, once per event; where the device fails on
    /// the way, those whose events were seen before that. The others wait on.
    pub(super) fn wait_for(
        &mut self,
        device: &mut dyn Device,
        of_interest: impl Fn(BlockId) -> bool,
    ) -> (Vec<BlockId>, Result<(), DeviceError>) {
        let mut done = Vec::new();
        let waited = self.queues.values_mut().try_for_each(|queue| {
            let mut kept = VecDeque::new();
            let mut waited = Ok(());
            while let Some(&(event, block)) = queue.front() {
                if of_interest(block) {
                    waited = device.synchronize_event(event);
                    if waited.is_err() {
                        break;
                    }
                    self.idle.push(event);
                    done.push(block);
                } else {
                    kept.push_back((event, block));
                }
                queue.pop_front();
            }
            kept.append(queue);
            *queue = kept;
            waited
        });
        self.queues.retain(|_, queue| !queue.is_empty());
        (done, waited)
    }

    /// Gives all events back to the device. What still waits is forgotten.
    pub(super) fn close(&mut self, device: &mut dyn Device) -> Result<(), DeviceError> {
        let queued = std::mem::take(&mut self.queues).into_values().flatten().map(|(event, _)| event);
        let events: Vec<EventId> = queued.chain(std::mem::take(&mut self.idle)).collect();
        self.uses.clear();
        self.unfiled.clear();
        events.into_iter().try_for_each(|event| device.destroy_event(event))
    }

    fn file_streams(&mut self, device: &mut dyn Device, block: BlockId, streams: BTreeSet<StreamId>) -> Result<u32, DeviceError> {
        // All events first: if one cannot be had, nothing has been filed and the caller may come back.
        let mut events = Vec::with_capacity(streams.len());
        for &stream in &streams {
            match self.record(device, stream) {
                Ok(event) => events.push(event),
                Err(error) => {
                    self.idle.extend(events);
                    return Err(error);
                }
            }
        }
        let count = events.len() as u32;
        for (stream, event) in streams.into_iter().zip(events) {
            self.queues.entry(stream).or_default().push_back((event, block));
        }
        self.uses.remove(&block);
        Ok(count)
    }

    fn record(&mut self, device: &mut dyn Device, stream: StreamId) -> Result<EventId, DeviceError> {
        let event = match self.idle.pop() {
            Some(event) => event,
            None => device.create_event()?,
        };
        let recorded = device.record_event(event, stream);
        if recorded.is_err() {
            self.idle.push(event);
        }
        recorded.map(|()| event)
    }

    fn pop(&mut self, stream: StreamId) {
        let queue = self.queues.get_mut(&stream).expect("the caller has just looked at this queue");
        if let Some((event, _)) = queue.pop_front() {
            self.idle.push(event);
        }
        if queue.is_empty() {
            self.queues.remove(&stream);
        }
    }
}
