//! A program as a plain trace, which begins with an empty allocator: [`plain`].

use std::collections::BTreeMap;

use harness_allocator::device::StreamId;
use harness_allocator::stats::BlockState;
use harness_trace::program::RecordedProgram;
use harness_trace::snapshot::Snapshot;
use harness_trace::trace::TraceEvent;

use crate::sites::Sites;

/// What becomes of a block that is freed while another stream still uses it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PendingFrees {
    /// It is recorded on a stream that is waited for where the recording shows that the block could be used again.
    AsRecorded,
    /// It is freed where it could be used again: for a replay in which work is done at once.
    Late,
}

/// A program as a plain trace.
#[derive(Clone, Debug, PartialEq)]
pub struct Plain {
    /// What was live before the recording is allocated first, in the order of addresses.
    pub events: Vec<TraceEvent>,
    /// Of each event the operation of the program; `None` for what was live before.
    pub operations: Vec<Option<usize>>,
}

/// The trace of a program. Free memory that the allocator held before the recording is not in it.
#[must_use]
pub fn plain(program: &RecordedProgram, pending: PendingFrees) -> Plain {
    let mut plain = Plain { events: Vec::new(), operations: Vec::new() };
    let mut add = |event, operation| {
        plain.events.push(event);
        plain.operations.push(operation);
    };
    let live = program.start.iter().flat_map(|segment| segment.blocks.iter().map(move |block| (segment, block)));
    for (id, (segment, block)) in live.filter(|(_, block)| block.state == BlockState::Allocated).enumerate() {
        add(TraceEvent::Allocate { id: id as u64, size: block.requested, stream: program.stream_number(segment.stream) }, None);
    }
    // Blocks that wait for a stream that is none of the program's, and those of them that were freed meanwhile.
    let mut waiting: BTreeMap<u64, StreamId> = BTreeMap::new();
    let mut freed: BTreeMap<StreamId, Vec<u64>> = BTreeMap::new();
    for (operation, &event) in program.operations.iter().enumerate() {
        let is_late = pending == PendingFrees::Late;
        match event {
            TraceEvent::RecordStream { id, stream } if is_late && program.is_synthetic(stream) => {
                waiting.insert(id, stream);
            }
            TraceEvent::Free { id } if waiting.contains_key(&id) => {
                if let Some(stream) = waiting.remove(&id) {
                    freed.entry(stream).or_default().push(id);
                }
            }
            TraceEvent::SynchronizeStream(stream) if is_late && program.is_synthetic(stream) => {
                for id in freed.remove(&stream).unwrap_or_default() {
                    add(TraceEvent::Free { id }, Some(operation));
                }
            }
            event => add(event, Some(operation)),
        }
    }
    plain
}

impl Plain {
    /// Where in the program an event was; `None` where that was not recorded.
    #[must_use]
    pub fn site<'s>(&self, event: usize, program: &RecordedProgram, sites: &'s Sites) -> Option<&'s str> {
        let operation = self.operations[event]?;
        let recorded = *program.origin.get(operation)?;
        matches!(self.events[event], TraceEvent::Allocate { .. }).then(|| sites.get(sites.of_event(recorded as usize)).name.as_str())
    }

    /// As a trace v1, with the site of each allocation behind it as a comment.
    #[must_use]
    pub fn text(&self, program: &RecordedProgram, snapshot: &Snapshot) -> String {
        let sites = Sites::new(snapshot, program.device);
        let mut text = String::new();
        for (index, event) in self.events.iter().enumerate() {
            text += &event.to_string();
            if let Some(site) = self.site(index, program, &sites) {
                text += " # ";
                text += site;
            }
            text.push('\n');
        }
        text
    }
}
