//! A [`RecordedProgram`]: what one program asked its allocator for on one device, as recovered from a memory snapshot: the state before the recording, and
//! the operations since. Replayed, it shows what the same program needs under other settings and with other memory.
//!
//! What a snapshot does not say is found by following PyTorch's rules: which frees were put off and until when, where the program emptied the
//! cache, and which requests went to a private pool. ARCHITECTURE.md tells how.

mod from_trace;
mod pending;
mod record;
mod recover;
mod replay;
mod reservations;
mod shadow;
mod start;
mod to_snapshot;
mod watch;

use harness_allocator::allocator::caching::{ConfError, Config, RestoreError};
use harness_allocator::device::{DeviceError, MemoryRange, StreamId};
use harness_allocator::stats::BlockState;
use harness_allocator::units::Bytes;
use harness_base::words::count;

pub use self::replay::{Placement, Prepared, Refused, Replayed, Setup};
pub use self::watch::{DriverCall, Step};
use crate::execute::PrepareError;
use crate::snapshot::{Block, PoolId, Segment, StackId};
use crate::trace::TraceEvent;

/// What one program asked its allocator for on one device. Its stacks are those of the snapshot.
#[derive(Clone, Debug, PartialEq)]
#[allow(missing_docs, reason = "the names say what they are")]
pub struct RecordedProgram {
    /// The device's index in the snapshot.
    pub device: u32,
    /// The segments held before the recording, in address order, in the blocks that they consisted of. Their live blocks are the ids from 0 on,
    /// in this order.
    pub start: Vec<Segment>,
    /// What the program did, in order. The ids of allocations follow on those of `start` and are used once.
    pub operations: Vec<TraceEvent>,
    /// For each operation the index of the snapshot's event that it was recovered from.
    pub origin: Vec<u32>,
    /// By id.
    pub allocations: Vec<Allocation>,
    /// What the recording took from the driver, in order: segments, or mapped ranges of expandable ones.
    pub driver: Vec<DriverRange>,
    /// The addresses that were reserved for the expandable segments of `start`, in address order.
    pub reserved_at_start: Vec<MemoryRange>,
    /// Where the recording reserved addresses for expandable segments, in order; without those of `start`.
    pub reservations: Vec<u64>,
    /// The handles of the streams that operations name by their place in here; 0, the default stream, is always the first.
    /// Operations may name further ones: see [`RecordedProgram::is_synthetic`].
    pub streams: Vec<u64>,
    /// The private pools that operations name by their place in here.
    pub pools: Vec<PoolId>,
    /// The settings it was recorded under.
    pub config: Config,
    /// The memory that the program could have had: what it held and what the device had free. `None` where neither an out-of-memory nor the
    /// caller told it, and nothing else does ([`Note::MemoryInferred`]).
    pub memory: Option<Bytes>,
    /// Where `memory` is not known: the most that the device can have had, if its reserved addresses tell it.
    pub memory_at_most: Option<Bytes>,
    pub ended: Ended,
    /// What is not known or was assumed.
    pub notes: Vec<Note>,
}

impl RecordedProgram {
    /// Whether a stream of the operations is none of the program's. Such a stream stands for whatever a pending free waited for: `r ID STREAM` before
    /// the free, and `s STREAM` where the recording completed it.
    #[must_use]
    pub fn is_synthetic(&self, stream: StreamId) -> bool {
        stream.0 as usize >= self.streams.len()
    }

    /// The ids that were live before the recording: those below this.
    #[must_use]
    pub fn live_at_start(&self) -> u64 {
        let live = |block: &&Block| block.state == BlockState::Allocated;
        self.start.iter().flat_map(|segment| &segment.blocks).filter(live).count() as u64
    }

    /// How much memory the device is to have in a replay under the recorded settings: what the program could have; where that is not known, no
    /// less than it can have had.
    #[must_use]
    pub fn device_memory(&self) -> Bytes {
        self.memory.or(self.memory_at_most).unwrap_or(UNKNOWN_MEMORY)
    }

    /// Held from the driver before the recording.
    #[must_use]
    pub fn reserved_at_start(&self) -> Bytes {
        self.start.iter().map(|segment| segment.size).sum()
    }
}

/// What a device is taken to have where nothing tells it: more than any has.
const UNKNOWN_MEMORY: Bytes = Bytes::gib(1024);

/// One allocation of a program.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "the names say what they are")]
pub struct Allocation {
    /// As recorded; `None` where it was refused, or no address is known.
    pub address: Option<u64>,
    /// Whether the recording refused it.
    pub refused: bool,
    pub requested: Bytes,
    pub stream: StreamId,
    pub stack: StackId,
}

/// A range taken from the driver.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "the names say what they are")]
pub struct DriverRange {
    pub address: u64,
    pub size: Bytes,
    /// The index of its event in the snapshot.
    pub event: u32,
}

/// How a recording ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ended {
    /// No request was refused, or the program went on after it.
    Well,
    /// A request was refused, and nothing was asked for after it.
    Oom {
        /// The operation that was refused.
        operation: usize,
        /// Its event in the snapshot.
        event: u32,
        /// What was asked for, rounded as the recorded settings round it.
        requested: Bytes,
        /// What the device had free.
        device_free: Bytes,
    },
}

/// Something about a program that its reader should know.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, thiserror::Error)]
#[allow(missing_docs, reason = "the names say what they are")]
pub enum Note {
    #[error("the recording starts late, behind {} in {}", count(*blocks, "block"), count(*segments, "segment"))]
    StartsLate { segments: usize, blocks: usize },
    #[error("nothing was recorded: only the segments at the end are known")]
    NothingRecorded,
    #[error("event {event} frees {address:#x}, which lies in no segment: left out")]
    UnknownFree { event: u32, address: u64 },
    #[error("event {event} allocates at {address:#x}, where a block is live: some events were not recorded")]
    Overlap { event: u32, address: u64 },
    #[error(
        "{times} times all cached memory was given back before more was taken, and how much memory the device had is not known: taken for calls of empty_cache"
    )]
    TakenForEmptyCache { times: usize },
    #[error(
        "how much memory the device had is not known; requests that were served only after cached memory had been given back tell that it was from {at_least} to {at_most}, and {at_most} are taken"
    )]
    MemoryInferred { at_least: Bytes, at_most: Bytes },
    #[error(
        "where the addresses begin that were reserved for expandable segments is not recorded: {segments} of them are taken to begin with their first mapped page"
    )]
    ReservationsUnknown { segments: usize },
    #[error(
        "how long free memory had been unused before the recording is not known: garbage collection may choose other segments in a replay"
    )]
    AgesUnknown,
    #[error("event {event} gives back a segment in a way that the allocator's rules do not explain")]
    UnexplainedFree { event: u32 },
}

/// Why no program can be recovered or replayed.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the names say what they are")]
pub enum ProgramError {
    /// Name one that it has.
    #[error("the snapshot has nothing of device {device}: it has {}", devices(.known))]
    NoSuchDevice { device: u32, known: Vec<u32> },
    /// The file is damaged, or of a version that is not known.
    #[error("segment {address:#x}: {why}")]
    Inconsistent { address: u64, why: &'static str },
    /// Give the device more memory.
    #[error("{memory} of memory are less than the {held} that the program held before the recording")]
    TooLittleMemory { memory: Bytes, held: Bytes },
    /// Record the program anew: the snapshot tells of a state that the allocator cannot have been in.
    #[error("the state before the recording: {0}")]
    Start(#[from] RestoreError),
    /// It has more streams than can be replayed.
    #[error(transparent)]
    Prepare(#[from] PrepareError),
    /// The device or the allocator failed: a mistake in this program.
    #[error("operation {operation}: {source}")]
    Replay {
        /// Counted from 1; 0 before the first.
        operation: usize,
        source: DeviceError,
    },
    /// The recorded settings are not known to this version.
    #[error("the snapshot's settings `{conf}`: {source}")]
    Settings { conf: String, source: ConfError },
}

fn devices(known: &[u32]) -> String {
    match known {
        [] => "no segments and no events at all".to_owned(),
        known => known.iter().map(|device| format!("device {device}")).collect::<Vec<_>>().join(", "),
    }
}
