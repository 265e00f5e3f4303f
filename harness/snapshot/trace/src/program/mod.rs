//! The requests that one program made to its allocator on one device: [`RecordedProgram`]. It is
//! recovered from a memory snapshot and consists of the state before the recording and the
//! operations since. Replays show how the same program behaves with other settings and other
//! memory.
//!
//! A snapshot does not record when deferred frees completed, when the program emptied the cache, or
//! which requests used a private pool. These are inferred from PyTorch's rules; ARCHITECTURE.md
//! explains how.

mod captures;
mod from_trace;
mod later;
mod pending;
mod record;
mod recover;
mod replay;
mod reservations;
mod scaled;
mod shadow;
mod start;
mod to_snapshot;
mod watch;

use harness_allocator::allocator::caching::{ConfError, Config, RestoreError};
use harness_allocator::device::{DeviceError, MemoryRange, StreamId};
use harness_allocator::{stats::BlockState, units::Bytes};
use harness_base::words::count;

pub use self::replay::{Placement, PreparedReplay, RefusedReplay, ReplaySetup, Replayed};
pub use self::scaled::Scaled;
pub use self::start::{EarlierSegments, LARGEST_REMAINDER, UnmappedPools};
pub use self::watch::{DriverCall, ReplayStep};
use crate::snapshot::{Block, MempoolId, Segment, StackId};
use crate::{execute::PrepareError, trace::TraceEvent};

/// The requests of one program on one device. Stack ids refer to the snapshot.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct RecordedProgram {
    pub device: u32,
    /// The segments and blocks reserved before the recording, in address order. Their live blocks
    /// have the ids from 0.
    pub start: Vec<Segment>,
    /// The program's operations in order. New allocations continue the ids of `start`; no id is
    /// reused.
    pub operations: Vec<TraceEvent>,
    /// For each operation, the index of the snapshot event that it comes from.
    pub origin: Vec<u32>,
    pub allocations: Vec<RecordedAllocation>,
    /// Driver allocations of the recording in order: segments, and mapped ranges of expandable
    /// segments.
    pub driver: Vec<DriverRange>,
    /// The reserved addresses of the expandable segments in `start`, in address order.
    pub reserved_at_start: Vec<MemoryRange>,
    /// The start addresses of later reservations for expandable segments, in order.
    pub reservations: Vec<u64>,
    /// The handles of the streams, indexed by the stream numbers in `operations`. The first is 0,
    /// the default stream. Larger stream numbers are synthetic: see
    /// [`RecordedProgram::is_synthetic`].
    pub streams: Vec<u64>,
    pub pools: Vec<MempoolId>,
    pub config: Config,
    /// The memory available to the program: its reserved memory plus the device's free memory.
    /// Known from an OOM, from the caller, or inferred ([`Note::MemoryInferred`]).
    pub memory: Option<Bytes>,
    /// If `memory` is unknown: an upper bound from the reserved addresses, if they give one.
    pub memory_at_most: Option<Bytes>,
    pub ended: RecordedEnd,
    pub notes: Vec<Note>,
}

impl RecordedProgram {
    /// Returns true if the program does not have this stream. A synthetic stream stands for the
    /// events that a pending free waits for: `r ID STREAM` precedes the free, and `s STREAM` marks
    /// its completion.
    pub fn is_synthetic(&self, stream: StreamId) -> bool {
        stream.0 as usize >= self.streams.len()
    }

    /// The number of blocks that were live before the recording. Their ids are smaller than this.
    pub fn live_at_start(&self) -> u64 {
        let live = |block: &&Block| block.state == BlockState::Allocated;
        self.start
            .iter()
            .flat_map(|segment| &segment.blocks)
            .filter(live)
            .count() as u64
    }

    /// The device memory for a replay with the recorded settings: the program's memory, or an upper
    /// bound if it is unknown.
    pub fn device_memory(&self) -> Bytes {
        self.memory
            .or(self.memory_at_most)
            .unwrap_or(UNKNOWN_MEMORY)
    }

    pub fn reserved_at_start(&self) -> Bytes {
        self.start.iter().map(|segment| segment.size).sum()
    }
}

/// The assumed memory of an unknown device: more than any device has.
const UNKNOWN_MEMORY: Bytes = Bytes::gib(1024);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RecordedAllocation {
    /// The recorded address. `None` if the request failed or the address is unknown.
    pub address: Option<u64>,
    pub refused: bool,
    pub requested: Bytes,
    pub stream: StreamId,
    pub stack: StackId,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DriverRange {
    pub address: u64,
    pub size: Bytes,
    pub event: u32,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum RecordedEnd {
    /// Every request succeeded, or the program continued after the last OOM.
    #[default]
    Well,
    /// `requested` is rounded with the recorded settings.
    Oom {
        operation: usize,
        event: u32,
        requested: Bytes,
        device_free: Bytes,
    },
}

#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, thiserror::Error)]
pub enum Note {
    #[error(
        "the recording starts late, with {} in {} already allocated",
        count(*blocks, "block"),
        count(*segments, "segment"),
    )]
    StartsLate { segments: usize, blocks: usize },
    #[error("nothing was recorded, so only the final segments are known")]
    NothingRecorded,
    #[error("event {event} frees {address:#x}, which is in no segment; ignored")]
    UnknownFree { event: u32, address: u64 },
    #[error(
        "event {event} allocates at {address:#x}, where a block is live, so the recording lacks \
         events"
    )]
    Overlap { event: u32, address: u64 },
    #[error(
        "the cache was emptied {} before the allocator reserved more memory. The device's memory \
         is unknown, so this counts as empty_cache",
        count(*times, "time")
    )]
    TakenForEmptyCache { times: usize },
    #[error(
        "the device's memory is not recorded. Requests that first emptied the cache show that it \
         was between {at_least} and {at_most}; {at_most} is assumed"
    )]
    MemoryInferred { at_least: Bytes, at_most: Bytes },
    #[error(
        "the reserved addresses of expandable segments are not recorded: {segments} of them are \
         assumed to start with their first mapped page"
    )]
    ReservationsUnknown { segments: usize },
    #[error(
        "the age of free memory before the recording is unknown, so garbage collection may choose \
         other segments in a replay"
    )]
    AgesUnknown,
    #[error("event {event} releases a segment, which the allocator's rules do not explain")]
    UnexplainedFree { event: u32 },
    #[error(
        "before 2.12, PyTorch does not record which requests belong to a CUDA graph: what their \
         stacks and streams show does not explain this recording; record with PyTorch 2.12 or newer"
    )]
    CapturesUnknown,
}

#[derive(Debug, thiserror::Error)]
pub enum ProgramError {
    #[error("the snapshot contains no data of device {device}, only {}", devices(.known))]
    NoSuchDevice { device: u32, known: Vec<u32> },
    /// A replay without requests confirms nothing.
    #[error(
        "the recording of device {device} contains no request for memory, so there is nothing to \
         replay"
    )]
    NoRequests { device: u32 },
    /// The file is damaged, or its version is unknown.
    #[error("segment {address:#x}: {why}")]
    Inconsistent { address: u64, why: &'static str },
    #[error(
        "the device memory of {memory} is less than the {held} that the program had reserved \
         before the recording"
    )]
    TooLittleMemory { memory: Bytes, held: Bytes },
    #[error(
        "the blocks that were live before the recording do not fit in {memory} with this allocator"
    )]
    DoNotFit { memory: Bytes },
    /// The library that the allocator models could not be constructed.
    #[error("{why}")]
    NotConstructed { why: String },
    /// The snapshot describes a state that the allocator cannot reach.
    #[error("the state before the recording: {0}")]
    Start(#[from] RestoreError),
    #[error(transparent)]
    Prepare(#[from] PrepareError),
    /// The device or the allocator failed: a bug in this program.
    #[error("operation {operation}: {source}")]
    Replay {
        operation: usize,
        source: DeviceError,
    },
    #[error("the snapshot's settings `{conf}`: {source}")]
    Settings { conf: String, source: ConfError },
}

fn devices(known: &[u32]) -> String {
    match known {
        [] => "no segments and no events".to_owned(),
        known => known
            .iter()
            .map(|device| format!("device {device}"))
            .collect::<Vec<_>>()
            .join(", "),
    }
}
