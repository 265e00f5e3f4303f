//! Converts a program to a plain trace that starts with an empty allocator: [`plain`].

use std::collections::BTreeMap;

use harness_allocator::{device::StreamId, stats::BlockState};
use harness_trace::{program::RecordedProgram, trace::TraceEvent};

use crate::sites::Sites;

/// How to convert frees of blocks that another stream still uses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PendingFrees {
    /// Records the block on a synthetic stream, which is synchronized when the recording shows the
    /// block as reusable.
    AsRecorded,
    /// Frees the block when it becomes reusable, for replays that complete work immediately.
    Late,
}

#[derive(Clone, Debug, PartialEq)]
pub struct Plain {
    /// Blocks that were live before the recording are allocated first, in address order.
    pub events: Vec<TraceEvent>,
    /// For each event, the program's operation. `None` for blocks from before the recording.
    pub operations: Vec<Option<usize>>,
}

/// Converts a program. The trace lacks free memory that the allocator held before the recording.
pub fn plain(program: &RecordedProgram, pending: PendingFrees) -> Plain {
    let mut plain = Plain {
        events: Vec::new(),
        operations: Vec::new(),
    };
    let mut add = |event, operation| {
        plain.events.push(event);
        plain.operations.push(operation);
    };
    let live = program
        .start
        .iter()
        .flat_map(|segment| segment.blocks.iter().map(move |block| (segment, block)));
    for (id, (segment, block)) in live
        .filter(|(_, block)| block.state == BlockState::Allocated)
        .enumerate()
    {
        add(
            TraceEvent::Allocate {
                id: id as u64,
                size: block.requested,
                stream: program.stream_number(segment.stream),
            },
            None,
        );
    }
    // Blocks on a synthetic stream, and the subset that was freed meanwhile.
    let mut waiting: BTreeMap<u64, StreamId> = BTreeMap::new();
    let mut freed: BTreeMap<StreamId, Vec<u64>> = BTreeMap::new();
    let is_late = |stream| pending == PendingFrees::Late && program.is_synthetic(stream);
    for (operation, &event) in program.operations.iter().enumerate() {
        match event {
            TraceEvent::RecordStream { id, stream } if is_late(stream) => {
                _ = waiting.insert(id, stream)
            }
            TraceEvent::Free { id } => match waiting.remove(&id) {
                Some(stream) => freed.entry(stream).or_default().push(id),
                None => add(event, Some(operation)),
            },
            TraceEvent::SynchronizeStream(stream) if is_late(stream) => {
                freed
                    .remove(&stream)
                    .into_iter()
                    .flatten()
                    .for_each(|id| add(TraceEvent::Free { id }, Some(operation)));
            }
            event => add(event, Some(operation)),
        }
    }
    plain
}

impl Plain {
    /// The call site of an event. `None` if it was not recorded.
    pub fn site<'s>(
        &self,
        event: usize,
        program: &RecordedProgram,
        sites: &'s Sites,
    ) -> Option<&'s str> {
        let operation = self.operations[event]?;
        let recorded = *program.origin.get(operation)?;
        matches!(self.events[event], TraceEvent::Allocate { .. })
            .then(|| sites.get(sites.of_event(recorded as usize)).name.as_str())
    }
}
