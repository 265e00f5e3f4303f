//! Checks whether a replay with the recorded settings matches the recording: [`check`]. Every
//! allocation must have its recorded address. Every segment must be reserved and released at its
//! recorded moment with its recorded size. The final segments and blocks must match the snapshot.
//! Predictions for other settings rely on this check.

use std::collections::{HashMap, VecDeque};
use std::{fmt, ops::ControlFlow};

use harness_allocator::device::{DevicePtr, MemoryRange};
use harness_allocator::stats::{BlockState, SegmentInfo};
use harness_allocator::units::Bytes;
use harness_trace::program::{
    DriverCall, PreparedReplay, ProgramError, RecordedProgram, ReplayStep,
};
use harness_trace::snapshot::{Action, Block, Event, MempoolId, Segment, Snapshot};
use harness_trace::{execute::OperationOutcome, trace::TraceEvent};
use serde::Serialize;

#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Fidelity {
    pub allocations: u64,
    pub at_recorded_address: u64,
    /// Segments that the recording reserved; for expandable segments, mapped ranges.
    pub segments: u64,
    /// Segments that the replay reserved at the same moment with the same size.
    pub segments_as_recorded: u64,
    /// Requests that the recording shows as refused.
    pub refused: u64,
    /// Requests that the replay refused as well.
    pub refused_as_recorded: u64,
    /// True if the whole replay matches, including failed requests, released memory and the final
    /// state.
    pub faithful: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub first_divergence: Option<Divergence>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Divergence {
    /// The index of the event in the snapshot. `None` if only the final state differs.
    pub event: Option<u32>,
    pub recorded: String,
    pub replayed: String,
}

impl fmt::Display for Fidelity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let parts = [
            (
                self.at_recorded_address,
                self.allocations,
                "allocations at the recorded address",
            ),
            (
                self.segments_as_recorded,
                self.segments,
                "segments as recorded",
            ),
            (
                self.refused_as_recorded,
                self.refused,
                "refused requests as recorded",
            ),
        ];
        let told = parts
            .iter()
            .filter(|(_, all, _)| *all > 0)
            .map(|(same, all, what)| format!("{same} of {all} {what}"));
        f.write_str(&told.collect::<Vec<_>>().join(", "))
    }
}

impl fmt::Display for Divergence {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.event {
            Some(event) => write!(f, "at event {event}")?,
            None => f.write_str("at the end")?,
        }
        write!(
            f,
            "\n  recorded: {}\n  replayed: {}",
            self.recorded, self.replayed
        )
    }
}

/// Replays a program with its recorded settings and compares it with its snapshot. Fails if the
/// program cannot be replayed.
pub fn check(prepared: &PreparedReplay<'_>, snapshot: &Snapshot) -> Result<Fidelity, ProgramError> {
    let program = prepared.program();
    let events = snapshot.events_of(program.device);
    let mut check = Check::new(program, events);
    let mut last = None;
    prepared.watch(&program.recorded_setup(), |step| {
        check.step(step);
        if step.operation + 1 == program.operations.len() {
            last = Some(step.allocator.snapshot());
        }
        ControlFlow::Continue(())
    })?;
    let last = last.unwrap_or_else(|| {
        if program.operations.is_empty() {
            program.start_for_allocator()
        } else {
            Vec::new()
        }
    });
    check.compare_end(snapshot, &last);
    Ok(check.finish())
}

/// Recovers the program of one device and checks it. Uses the device memory `memory` only if a
/// replay with it matches. Fails if the recording contains no request.
pub fn recover(
    snapshot: &Snapshot,
    device: u32,
    memory: Option<Bytes>,
) -> Result<(RecordedProgram, Fidelity), ProgramError> {
    let recover = |memory: Option<Bytes>| {
        let program = RecordedProgram::recover_with(snapshot, device, memory)?;
        if !program
            .operations
            .iter()
            .any(|operation| matches!(operation, TraceEvent::Allocate { .. }))
        {
            return Err(ProgramError::NoRequests { device });
        }
        let fidelity = check(&program.prepare()?, snapshot)?;
        Ok((program, fidelity))
    };
    let with_memory = memory
        .and_then(|memory| recover(Some(memory)).ok())
        .filter(|(_, fidelity)| fidelity.faithful);
    with_memory.map_or_else(|| recover(None), Ok)
}

struct Check<'a> {
    program: &'a RecordedProgram,
    /// Recorded driver calls that the replay has not made.
    taken: VecDeque<(u32, DriverCall)>,
    given_back: VecDeque<(u32, DriverCall)>,
    segments: u64,
    at_recorded_address: u64,
    segments_as_recorded: u64,
    refused_as_recorded: u64,
    first: Option<Divergence>,
}

impl<'a> Check<'a> {
    fn new(program: &'a RecordedProgram, events: &[Event]) -> Self {
        let calls = events
            .iter()
            .zip(0..)
            .filter_map(|(event, index)| Some((index, DriverCall::of(event)?)));
        let (taken, given_back): (VecDeque<_>, _) =
            calls.partition(|(_, call)| call.action.reserves());
        let segments = taken.len() as u64;
        Self {
            program,
            taken,
            given_back,
            segments,
            at_recorded_address: 0,
            segments_as_recorded: 0,
            refused_as_recorded: 0,
            first: None,
        }
    }

    fn step(&mut self, step: &ReplayStep<'_>) {
        let event = self.program.origin[step.operation];
        for &call in step.driver {
            self.driver_call(event, call);
        }
        let TraceEvent::Allocate { id, size, .. } = self.program.operations[step.operation] else {
            return;
        };
        let recorded = self.program.allocations[id as usize].address;
        let replayed = step.address.map(|address| address.0);
        if replayed == recorded && step.outcome != OperationOutcome::Ignored {
            self.at_recorded_address += u64::from(recorded.is_some());
            self.refused_as_recorded += u64::from(recorded.is_none());
        } else {
            let at = |address: Option<u64>| {
                address.map_or("refused".to_owned(), |address| format!("at {address:#x}"))
            };
            let side = |address| {
                format!("{size} allocated {}", at(address)).replace("allocated refused", "refused")
            };
            self.diverge(Some(event), side(recorded), side(replayed));
        }
        if let Some(&(taken, call)) = self.taken.front().filter(|&&(taken, _)| taken < event) {
            self.diverge(Some(taken), describe(call), "no driver call".to_owned());
        }
    }

    fn driver_call(&mut self, event: u32, call: DriverCall) {
        let takes = call.action.reserves();
        let recorded = if takes {
            &mut self.taken
        } else {
            &mut self.given_back
        };
        match recorded.pop_front() {
            // A group of several events can release memory together.
            Some((at, same)) if same == call && (at < event || !takes) => {
                self.segments_as_recorded += u64::from(takes)
            }
            Some((at, other)) => self.diverge(Some(at.min(event)), describe(other), describe(call)),
            None => self.diverge(Some(event), "no driver call".to_owned(), describe(call)),
        }
    }

    fn compare_end(&mut self, snapshot: &Snapshot, last: &[SegmentInfo]) {
        if let Some(&(event, call)) = self.given_back.front() {
            self.diverge(Some(event), describe(call), "nothing given back".to_owned());
        }
        let mut recorded: Vec<&Segment> = snapshot.segments_of(self.program.device).collect();
        recorded.sort_by_key(|segment| segment.address);
        let recorded: Vec<String> = recorded.into_iter().flat_map(lines).collect();
        let replayed: Vec<String> = last
            .iter()
            .flat_map(|segment| lines(&self.program.for_snapshot(segment, &HashMap::new())))
            .collect();
        let line = |side: &[String], index: usize| {
            side.get(index)
                .cloned()
                .unwrap_or_else(|| "no further segment".to_owned())
        };
        let different = (0..recorded.len().max(replayed.len()))
            .find(|&index| recorded.get(index) != replayed.get(index));
        if let Some(index) = different {
            self.diverge(None, line(&recorded, index), line(&replayed, index));
        }
    }

    fn diverge(&mut self, event: Option<u32>, recorded: String, replayed: String) {
        self.first.get_or_insert(Divergence {
            event,
            recorded,
            replayed,
        });
    }

    fn finish(self) -> Fidelity {
        let start = self.program.live_at_start() as usize;
        let requests = &self.program.allocations[start..];
        let allocations = requests
            .iter()
            .filter(|allocation| allocation.address.is_some())
            .count() as u64;
        let refused = requests.len() as u64 - allocations;
        Fidelity {
            allocations,
            at_recorded_address: self.at_recorded_address,
            segments: self.segments,
            segments_as_recorded: self.segments_as_recorded,
            refused,
            refused_as_recorded: self.refused_as_recorded,
            faithful: self.first.is_none()
                && self.at_recorded_address == allocations
                && self.segments_as_recorded == self.segments,
            first_divergence: self.first,
        }
    }
}

fn describe(DriverCall { action, range }: DriverCall) -> String {
    let MemoryRange { start, len } = range;
    match action {
        Action::SegmentAlloc => format!("a segment of {len} reserved at {start}"),
        Action::SegmentMap => format!("{len} mapped at {start}"),
        Action::SegmentUnmap => format!("{len} unmapped at {start}"),
        _ => format!("the segment of {len} at {start} released"),
    }
}

fn lines(segment: &Segment) -> Vec<String> {
    let MempoolId(first, second) = segment.private_pool;
    let pool = if segment.private_pool == MempoolId::DEFAULT {
        String::new()
    } else {
        format!(" in the private pool ({first}, {second})")
    };
    let range = MemoryRange::new(DevicePtr(segment.address), segment.size);
    let whole = format!("a segment at {range} of stream {}{pool}", segment.stream);
    std::iter::once(whole)
        .chain(segment.blocks.iter().map(line))
        .collect()
}

fn line(block: &Block) -> String {
    let Block {
        size,
        requested,
        state,
        ..
    } = *block;
    let address = DevicePtr(block.address);
    match state {
        BlockState::Inactive => format!("a free block of {} bytes at {address}", size.0),
        BlockState::PendingFree => format!(
            "a block of {} bytes at {address} that waits for an event",
            size.0
        ),
        BlockState::Allocated => format!(
            "an allocated block of {} bytes at {address}, for {}",
            size.0, requested.0
        ),
    }
}
