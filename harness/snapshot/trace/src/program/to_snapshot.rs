//! Converts a program back into a memory snapshot: [`RecordedProgram::to_snapshot`]. An unchanged
//! program gives the original recording; a changed program gives the snapshot that PyTorch would
//! write.

use std::collections::{BTreeMap, HashMap, HashSet, VecDeque};
use std::ops::ControlFlow;

use harness_allocator::device::{DevicePtr, StreamId};
use harness_allocator::stats::{BlockState, SegmentInfo};
use harness_allocator::{allocator::Allocator, units::Bytes};

use super::watch::{DriverCall, ReplayStep};
use super::{Placement, ProgramError, RecordedProgram, ReplaySetup};
use crate::snapshot::{Action, Block, Event, ExtraId, Segment, Snapshot, StackId, is_pending};
use crate::{execute::OperationOutcome, trace::TraceEvent};

impl RecordedProgram {
    /// Replays the program with its own settings and returns a snapshot. `recorded` is the original
    /// snapshot. Matching events and segments take their times, stacks and unknown keys from it;
    /// other devices are copied. Place a changed program with [`Placement::InOrder`]: its
    /// allocations have no recorded addresses.
    pub fn to_snapshot(
        &self,
        recorded: &Snapshot,
        placement: Placement,
    ) -> Result<Snapshot, ProgramError> {
        let setup = ReplaySetup {
            placement,
            ..self.recorded_setup()
        };
        let mut told = EventWriter::new(self, recorded, setup.memory);
        let mut last = None;
        self.prepare()?.watch(&setup, |step| {
            told.step(step);
            let is_last = step.operation + 1 == self.operations.len();
            if is_last || step.outcome == OperationOutcome::OutOfMemory {
                last = Some(step.allocator.snapshot());
            }
            ControlFlow::Continue(())
        })?;
        Ok(told.into_snapshot(&last.unwrap_or_else(|| self.start_for_allocator())))
    }
}

/// A live block or a segment in the form of an event.
#[derive(Clone, Copy)]
struct Range {
    address: u64,
    size: Bytes,
    stream: u64,
}

type Key = (Action, u64, Bytes, u64);

const fn key(action: Action, range: Range) -> Key {
    (action, range.address, range.size, range.stream)
}

struct EventWriter<'a> {
    program: &'a RecordedProgram,
    recorded: &'a Snapshot,
    memory: Bytes,
    /// The recorded events with their positions, by identity, in order.
    known: HashMap<Key, VecDeque<(usize, Event)>>,
    events: Vec<Event>,
    live: HashMap<u64, Range>,
    /// Addresses of blocks that are live since before the recording.
    before: HashSet<u64>,
    /// Frees that wait for other streams, oldest first.
    pending: Vec<Range>,
    /// By address: the stream and the stack of the last segment there.
    segments: BTreeMap<u64, (u64, StackId)>,
    /// By address: the stack of the last block there.
    blocks_by: HashMap<u64, StackId>,
}

impl<'a> EventWriter<'a> {
    fn new(program: &'a RecordedProgram, recorded: &'a Snapshot, memory: Bytes) -> Self {
        let mut known: HashMap<Key, VecDeque<(usize, Event)>> = HashMap::new();
        for (place, &event) in recorded.events_of(program.device).iter().enumerate() {
            known
                .entry((event.action, event.address, event.size, event.stream))
                .or_default()
                .push_back((place, event));
        }
        let mut told = Self {
            program,
            recorded,
            memory,
            known,
            events: Vec::new(),
            live: HashMap::new(),
            before: HashSet::new(),
            pending: Vec::new(),
            segments: BTreeMap::new(),
            blocks_by: HashMap::new(),
        };
        let mut id = 0;
        for segment in &program.start {
            told.segments
                .insert(segment.address, (segment.stream, segment.stack));
            for block in segment
                .blocks
                .iter()
                .filter(|block| block.state == BlockState::Allocated)
            {
                told.live.insert(
                    id,
                    Range {
                        address: block.address,
                        size: block.requested,
                        stream: segment.stream,
                    },
                );
                told.blocks_by.insert(block.address, block.stack);
                told.before.insert(block.address);
                id += 1;
            }
        }
        told
    }

    /// Adds the events of an operation in PyTorch's order: completed frees, driver calls, then the
    /// block.
    fn step(&mut self, step: &ReplayStep<'_>) {
        let freed = match self.program.operations[step.operation] {
            TraceEvent::Free { id } if step.outcome == OperationOutcome::Done => {
                self.live.remove(&id)
            }
            _ => None,
        };
        if let Some(block) = freed {
            if self.was_requested(step.operation, block) {
                self.add(Action::FreeRequested, block, None);
            }
            self.pending.push(block);
        }
        self.complete(step.allocator);
        for &call in step.driver {
            self.driver(call, step.allocator);
        }
        let TraceEvent::Allocate { id, size, stream } = self.program.operations[step.operation]
        else {
            return;
        };
        let (stream, stack) = (
            self.program
                .streams
                .get(stream.0 as usize)
                .copied()
                .unwrap_or_default(),
            self.program.allocations[id as usize].stack,
        );
        match (step.outcome, step.address) {
            (OperationOutcome::Done, Some(DevicePtr(address))) if address != 0 => {
                let block = Range {
                    address,
                    size,
                    stream,
                };
                self.add(Action::Alloc, block, Some(stack));
                self.live.insert(id, block);
                self.before.remove(&address);
                self.blocks_by.insert(address, stack);
            }
            (OperationOutcome::OutOfMemory, _) => {
                let free = self
                    .memory
                    .saturating_sub(Bytes(step.allocator.stats().reserved_bytes.all.current));
                self.add(
                    Action::Oom,
                    Range {
                        address: free.0,
                        size,
                        stream,
                    },
                    Some(stack),
                );
            }
            _ => {}
        }
    }

    /// Returns true if the recording contains the `free_requested` event of this free. It lacks
    /// those from before the recording.
    fn was_requested(&self, operation: usize, block: Range) -> bool {
        let event = self
            .recorded
            .events_of(self.program.device)
            .get(self.program.origin[operation] as usize);
        let is_older =
            |event: &Event| self.before.contains(&block.address) && event.address != block.address;
        event.is_none_or(|event| event.action == Action::FreeRequested && !is_older(event))
    }

    fn complete(&mut self, allocator: &dyn Allocator) {
        let mut complete: Vec<Range> = self
            .pending
            .extract_if(.., |block| !is_pending(allocator, block.address))
            .collect();
        // PyTorch's order depends on hashes of streams, so the recorded order is used.
        complete.sort_by_key(|block| self.place_of(Action::FreeCompleted, *block));
        for block in complete {
            self.add(Action::FreeCompleted, block, None);
        }
    }

    fn place_of(&self, action: Action, range: Range) -> Option<usize> {
        let known = self.known.get(&key(action, range))?.front();
        known.map(|&(place, _)| place)
    }

    fn driver(&mut self, call: DriverCall, allocator: &dyn Allocator) {
        let (action, size) = (call.action, call.range.len);
        let address = call.range.start.0;
        let handle = |stream: StreamId| self.program.streams.get(stream.0 as usize).copied();
        let stream = match action.reserves() {
            true => allocator
                .segment_at(DevicePtr(address))
                .and_then(|segment| handle(segment.stream?)),
            false => self
                .segments
                .range(..=address)
                .next_back()
                .map(|(_, &(stream, _))| stream),
        };
        let stream = stream.unwrap_or_default();
        let stack = self.add(
            action,
            Range {
                address,
                size,
                stream,
            },
            None,
        );
        if action.reserves() {
            self.segments.insert(address, (stream, stack));
        }
    }

    /// Adds an event with the data of the same recorded event. Returns its stack, which is `stack`
    /// if given.
    fn add(&mut self, action: Action, range: Range, stack: Option<StackId>) -> StackId {
        let known = self
            .known
            .get_mut(&key(action, range))
            .and_then(VecDeque::pop_front);
        let unknown = Event::new(action, range.address, range.size, range.stream);
        let event = known.map_or(unknown, |(_, event)| event);
        let stack = stack.unwrap_or(event.stack);
        self.events.push(Event { stack, ..event });
        stack
    }

    fn into_snapshot(self, last: &[SegmentInfo]) -> Snapshot {
        let mut snapshot = self.recorded.clone();
        let there: HashMap<u64, &Segment> = self
            .of_device()
            .map(|segment| (segment.address, segment))
            .collect();
        let blocks: HashMap<u64, &Block> = self
            .of_device()
            .flat_map(|segment| &segment.blocks)
            .map(|block| (block.address, block))
            .collect();
        let mut segments: Vec<Segment> = last
            .iter()
            .map(|segment| self.program.for_snapshot(segment, &self.blocks_by))
            .collect();
        for segment in &mut segments {
            let made_by = self
                .segments
                .get(&segment.address)
                .map(|&(_, stack)| (stack, ExtraId::NONE));
            let same = there
                .get(&segment.address)
                .filter(|known| known.size == segment.size)
                .map(|known| (known.stack, known.extra));
            (segment.stack, segment.extra) = same.or(made_by).unwrap_or_default();
            for block in &mut segment.blocks {
                let same = blocks
                    .get(&block.address)
                    .filter(|known| (known.size, known.state) == (block.size, block.state));
                if let Some(known) = same {
                    (block.extra, block.stack) = (known.extra, known.stack);
                    if block.state == BlockState::Inactive {
                        block.requested = known.requested;
                    }
                }
            }
        }
        // Keeps the order of segments in the file.
        let places: HashMap<u64, usize> = self
            .of_device()
            .map(|segment| segment.address)
            .zip(0..)
            .collect();
        segments.sort_by_key(|segment| {
            (
                places.get(&segment.address).copied().unwrap_or(usize::MAX),
                segment.address,
            )
        });
        snapshot
            .segments
            .retain(|segment| segment.device != self.program.device);
        snapshot.segments.extend(segments);
        if let Some(trace) = snapshot.traces.get_mut(self.program.device as usize) {
            *trace = with_moments(self.events, trace);
        }
        snapshot
    }

    fn of_device(&self) -> impl Iterator<Item = &'a Segment> + use<'a> {
        self.recorded.segments_of(self.program.device)
    }
}

/// Inserts the recorded `snapshot` events, which a replay does not produce, after the same number
/// of other events.
fn with_moments(mut events: Vec<Event>, recorded: &[Event]) -> Vec<Event> {
    if events.iter().any(|event| event.time_us.is_none()) {
        // Times are only comparable if all events have one.
        events.iter_mut().for_each(|event| event.time_us = None);
    }
    let mut told = Vec::with_capacity(recorded.len());
    let mut events = events.into_iter();
    for event in recorded {
        match event.action {
            Action::Snapshot => told.push(*event),
            _ => told.extend(events.next()),
        }
    }
    told.extend(events);
    told
}
