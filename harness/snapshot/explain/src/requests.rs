//! Explains programs without recorded addresses: plain traces and RMM logs. They contain only
//! requests, so a replay with PyTorch's allocator on the simulated device assigns them. The replay
//! is recorded and explained like any snapshot.
//!
//! There are no call stacks. The site is the trace line or its comment; in logs, the thread and
//! stream.

use std::collections::{BTreeMap, BTreeSet};

use harness_allocator::allocator::{AllocatorSpec, caching::Config};
use harness_allocator::{device::StreamId, units::Bytes};
use harness_trace::program::{Placement, ProgramError, RecordedProgram, ReplaySetup};
use harness_trace::snapshot::{Action, Event, ExtraId, Frame, Snapshot, StackId, Value};
use harness_trace::trace::TraceEvent;

use crate::sites::is_of_program;

/// The requests of a program and the site of each operation.
#[derive(Clone, Debug)]
pub struct Requests {
    events: Vec<TraceEvent>,
    places: Vec<Frame>,
    refused: BTreeSet<usize>,
    notes: Vec<String>,
}

impl Requests {
    /// Converts a trace. The site of each operation is its line, counted from 1, or its comment.
    pub fn of_trace<'t>(
        name: &str,
        operations: impl IntoIterator<Item = (TraceEvent, u32, Option<&'t str>)>,
    ) -> Self {
        let notes = vec![
            "A trace contains only requests. A replay on the simulated device \
             assigned the addresses."
                .to_owned(),
        ];
        let place = |(event, line, comment): (TraceEvent, u32, Option<&str>)| {
            (
                event,
                comment
                    .and_then(place_of)
                    .unwrap_or_else(|| frame(name, line, event.to_string())),
            )
        };
        let (events, places) = operations.into_iter().map(place).unzip();
        Self {
            events,
            places,
            refused: BTreeSet::new(),
            notes,
        }
    }

    /// Converts an RMM log that was read as a [`Snapshot`].
    pub fn of_log(name: &str, log: &Snapshot) -> Self {
        let events = log.traces.first().map_or(&[][..], Vec::as_slice);
        let streams: BTreeSet<u64> = events.iter().map(|event| event.stream).chain([0]).collect();
        let streams: BTreeMap<u64, StreamId> =
            streams.into_iter().zip((0..).map(StreamId)).collect();
        let mut notes = log.notes.clone();
        notes.push(
            "A replay with PyTorch's allocator on the simulated device assigned the \
             addresses, not RMM's pool."
                .to_owned(),
        );
        let mut requests = Self {
            events: Vec::new(),
            places: Vec::new(),
            refused: BTreeSet::new(),
            notes,
        };
        let mut live: BTreeMap<u64, u64> = BTreeMap::new();
        for (event, id) in events.iter().zip(0..) {
            let thread = log
                .extras
                .value(event.extra, "thread")
                .and_then(Value::as_text)
                .unwrap_or("unknown");
            let place = frame(
                name,
                0,
                format!("thread {thread}, stream {:#x}", event.stream),
            );
            let index = requests.events.len();
            let mut add = |operation| {
                requests.places.push(place.clone());
                requests.events.push(operation);
            };
            let request = TraceEvent::Allocate {
                id,
                size: event.size,
                stream: streams[&event.stream],
            };
            match event.action {
                Action::Alloc => {
                    live.insert(event.address, id);
                    add(request);
                }
                Action::Oom => {
                    requests.refused.insert(index);
                    add(request);
                    // The program continued without the block, so a replay frees it immediately.
                    add(TraceEvent::Free { id });
                }
                // Other blocks were allocated before the log starts.
                Action::FreeRequested => {
                    _ = live
                        .remove(&event.address)
                        .map(|id| add(TraceEvent::Free { id }))
                }
                _ => {}
            }
        }
        requests
    }

    /// Replays the requests with `memory` up to the first failed request, and returns the snapshot
    /// that PyTorch would write.
    pub fn record(&self, memory: Bytes) -> Result<Snapshot, ProgramError> {
        let program = self.program()?;
        let setup = ReplaySetup {
            allocator: AllocatorSpec::caching(Config::default()),
            memory,
            placement: Placement::InOrder(program.address_order()),
        };
        let place = |operation: usize| {
            program
                .origin
                .get(operation)
                .map(|&event| self.places[event as usize].clone())
        };
        let mut snapshot = program.prepare()?.record(&setup, place)?;
        snapshot.notes.clone_from(&self.notes);
        Ok(snapshot)
    }

    /// Returns the program with PyTorch's default settings, and a snapshot with the sites: event N
    /// belongs to operation N.
    pub fn program_with_places(&self) -> Result<(RecordedProgram, Snapshot), ProgramError> {
        let mut program = self.program()?;
        let mut snapshot = Snapshot {
            notes: self.notes.clone(),
            ..Snapshot::default()
        };
        let mut stack_of = |place: &Frame| {
            let frame = snapshot.stacks.intern_frame(place.clone());
            snapshot.stacks.intern(&[frame])
        };
        let stacks: Vec<StackId> = self.places.iter().map(&mut stack_of).collect();
        for (operation, &event) in program.operations.iter().zip(&program.origin) {
            if let TraceEvent::Allocate { id, .. } = *operation {
                program.allocations[id as usize].stack = stacks[event as usize];
            }
        }
        snapshot.traces = vec![
            self.events
                .iter()
                .zip(stacks)
                .map(|(event, stack)| told(event, stack))
                .collect(),
        ];
        Ok((program, snapshot))
    }

    fn program(&self) -> Result<RecordedProgram, ProgramError> {
        let mut program = RecordedProgram::from_trace(&self.events, Config::default())?;
        for (operation, &event) in program.operations.iter().zip(&program.origin) {
            if let (TraceEvent::Allocate { id, .. }, true) =
                (*operation, self.refused.contains(&(event as usize)))
            {
                program.allocations[id as usize].refused = true;
            }
        }
        Ok(program)
    }
}

fn told(event: &TraceEvent, stack: StackId) -> Event {
    let (action, size) = match *event {
        TraceEvent::Allocate { size, .. } => (Action::Alloc, size),
        TraceEvent::Free { .. } => (Action::FreeRequested, Bytes::ZERO),
        _ => (Action::Snapshot, Bytes::ZERO),
    };
    Event {
        stack,
        ..Event::new(action, 0, size, 0)
    }
}

/// A frame in a file. Unknown file types are put in angle brackets, as Python does for code without
/// a file.
fn frame(file: &str, line: u32, name: String) -> Frame {
    let mut frame = Frame {
        name,
        file: file.to_owned(),
        line,
        extra: ExtraId::NONE,
    };
    if !is_of_program(&frame) {
        frame.file = format!("<{file}>");
    }
    frame
}

/// Parses a site from a comment of an imported trace: `model.py:41 forward` or `model.py:41`.
fn place_of(comment: &str) -> Option<Frame> {
    let (place, name) = comment.split_once(' ').unwrap_or((comment, ""));
    let (file, line) = place.rsplit_once(':')?;
    let frame = Frame {
        name: name.to_owned(),
        file: file.to_owned(),
        line: line.parse().ok()?,
        extra: ExtraId::NONE,
    };
    is_of_program(&frame).then_some(frame)
}
