//! Memory snapshots of PyTorch (`torch.cuda.memory._dump_snapshot`) as plain data: [`Snapshot`].
//!
//! A snapshot holds the allocator's segments with their blocks at the moment when it was taken, and for each device the last events of the
//! allocator ([`Event`]), oldest first. The keys are those of `torch/csrc/cuda/memory_snapshot.cpp` and `torch/csrc/cuda/Module.cpp`:
//! <https://github.com/pytorch/pytorch/blob/v2.11.0/torch/csrc/cuda/memory_snapshot.cpp>. Texts and stacks repeat a lot and are kept once.

mod error;
mod extras;
mod pickle;
mod read;
mod recorder;
mod recording;
mod rmm;
mod run;
mod settings;
mod stacks;
mod values;
mod write;

use harness_allocator::stats::{BlockState, PoolKind};
use harness_allocator::units::Bytes;

pub use self::error::SnapshotError;
pub use self::extras::{ExtraId, Extras, Value};
pub use self::recorder::{Recorded, Recorder};
pub use self::recording::Recording;
pub use self::rmm::HEADER as RMM_LOG_HEADER;
pub use self::run::RunInfo;
pub use self::settings::Settings;
pub use self::stacks::{Frame, FrameId, StackId, Stacks};

/// A whole snapshot.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Snapshot {
    /// Of all devices, in the order of the file.
    pub segments: Vec<Segment>,
    /// The events of each device, by its index. Empty where nothing was recorded.
    pub traces: Vec<Vec<Event>>,
    /// `None` in files of old versions.
    pub settings: Option<Settings>,
    /// What the program told PyTorch about its phases, in the order of the file.
    pub annotations: Vec<Annotation>,
    /// The call stacks that segments, blocks and events name.
    pub stacks: Stacks,
    /// The further keys that the snapshot, its segments, blocks, events, frames and annotations name.
    pub extras: Extras,
    /// Further keys of the whole.
    pub extra: ExtraId,
    /// What was left out of the file while it was read, in plain sentences. Empty for nearly all files.
    pub notes: Vec<String>,
}

impl Snapshot {
    /// The private pool that an event belongs to, where the file says it: versions of PyTorch after 2.11 do.
    #[must_use]
    pub fn pool_of(&self, event: &Event) -> Option<PoolId> {
        match self.extras.value(event.extra, "pool_id")? {
            Value::Tuple(parts) | Value::List(parts) => match parts[..] {
                [ref first, ref second] => Some(PoolId(first.as_u64()?, second.as_u64()?)),
                _ => None,
            },
            _ => None,
        }
    }
}

/// The states of blocks that are in use.
const ACTIVE: [BlockState; 2] = [BlockState::Allocated, BlockState::PendingFree];

/// A private pool's id as PyTorch writes it; `(0, 0)` is the default pool.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PoolId(pub u64, pub u64);

impl PoolId {
    /// The pool of whatever is in no private pool.
    pub const DEFAULT: Self = Self(0, 0);
}

/// A contiguous range held from the driver. Of expandable memory, one mapped range.
#[derive(Clone, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "the names say what they are")]
pub struct Segment {
    pub device: u32,
    pub address: u64,
    pub size: Bytes,
    /// The stream's handle: 0 is the default stream.
    pub stream: u64,
    pub pool: PoolKind,
    /// [`PoolId::DEFAULT`] where the file does not say.
    pub private_pool: PoolId,
    pub expandable: bool,
    /// Who asked for it, where that was recorded.
    pub stack: StackId,
    /// In address order, without gaps.
    pub blocks: Vec<Block>,
    /// Further keys.
    pub extra: ExtraId,
}

impl Segment {
    /// The bytes of the blocks in these states: as held, and as requested. What is more than [`Bytes::MAX`] counts as that.
    #[must_use]
    pub fn bytes_in(&self, states: &[BlockState]) -> (Bytes, Bytes) {
        let blocks = self.blocks.iter().filter(|block| states.contains(&block.state));
        let add = |sum: Bytes, more: Bytes| Bytes(sum.0.saturating_add(more.0));
        blocks.fold((Bytes::ZERO, Bytes::ZERO), |(held, requested), block| (add(held, block.size), add(requested, block.requested)))
    }
}

/// A slice of a segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "the names say what they are")]
pub struct Block {
    pub address: u64,
    pub size: Bytes,
    /// What its owner asked for; of a free block, its last owner.
    pub requested: Bytes,
    /// Both spellings of a pending free (`active_pending_free` and `active_awaiting_free`) are [`BlockState::PendingFree`].
    pub state: BlockState,
    pub stack: StackId,
    /// Further keys.
    pub extra: ExtraId,
}

/// One event of the allocator.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "the names say what they are")]
pub struct Event {
    pub action: Action,
    /// For [`Action::Oom`] the device's free memory in bytes.
    pub address: u64,
    /// As requested for blocks, not rounded; as held for segments; what was asked for an [`Action::Oom`].
    pub size: Bytes,
    pub stream: u64,
    /// Microseconds since 1970, in RMM's logs since midnight; `None` in files of old versions.
    pub time_us: Option<u64>,
    pub stack: StackId,
    /// Further keys: `compile_context`, `user_metadata`; in new versions `pool_id`, see [`Snapshot::pool_of`].
    pub extra: ExtraId,
}

/// What happened.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Action {
    /// A block was handed out.
    Alloc,
    /// The program gave a block back.
    FreeRequested,
    /// The block can be used again: all its events are done.
    FreeCompleted,
    /// Memory was taken from the driver.
    SegmentAlloc,
    /// Memory was given back to the driver.
    SegmentFree,
    /// Pages of an expandable segment were mapped.
    SegmentMap,
    /// Pages of an expandable segment were unmapped.
    SegmentUnmap,
    /// A snapshot was taken.
    Snapshot,
    /// A request was refused.
    Oom,
}

impl Action {
    /// All of them.
    pub const ALL: [Self; 9] = [
        Self::Alloc,
        Self::FreeRequested,
        Self::FreeCompleted,
        Self::SegmentAlloc,
        Self::SegmentFree,
        Self::SegmentMap,
        Self::SegmentUnmap,
        Self::Snapshot,
        Self::Oom,
    ];

    /// PyTorch's name of it.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Alloc => "alloc",
            Self::FreeRequested => "free_requested",
            Self::FreeCompleted => "free_completed",
            Self::SegmentAlloc => "segment_alloc",
            Self::SegmentFree => "segment_free",
            Self::SegmentMap => "segment_map",
            Self::SegmentUnmap => "segment_unmap",
            Self::Snapshot => "snapshot",
            Self::Oom => "oom",
        }
    }
}

/// A phase that began or ended.
#[derive(Clone, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "the names say what they are")]
pub struct Annotation {
    pub begins: bool,
    pub name: String,
    pub device: u32,
    pub time_us: u64,
    /// Further keys.
    pub extra: ExtraId,
}
