//! Memory snapshots of PyTorch (`torch.cuda.memory._dump_snapshot`) as plain data: [`Snapshot`].
//!
//! A snapshot contains the allocator's segments with their blocks at one moment and, for each
//! device, the allocator's last [`Event`]s. The keys match `torch/csrc/cuda/memory_snapshot.cpp`
//! and `torch/csrc/cuda/Module.cpp`:
//! <https://github.com/pytorch/pytorch/blob/v2.11.0/torch/csrc/cuda/memory_snapshot.cpp>. Texts and
//! stacks repeat often and are stored once.

mod budget;
mod error;
mod extras;
mod host_memory;
mod pickle;
mod ranges;
mod read;
mod recorder;
mod recording;
mod rmm;
mod run;
mod settings;
mod stacks;
mod values;
mod write;

use std::collections::BTreeSet;

use harness_allocator::allocator::Allocator;
use harness_allocator::allocator::caching::{ConfError, Config, TorchVersion};
use harness_allocator::stats::{BlockInfo, BlockState, PoolKind, SegmentInfo};
use harness_allocator::{device::DevicePtr, named_enum, units::Bytes};
use serde::Serialize;

pub use self::extras::{ExtraId, Extras, Value};
pub use self::host_memory::RecordedHostMemory;
pub use self::recorder::{Recorded, Recorder};
pub use self::stacks::{Frame, FrameId, StackId, Stacks};
pub use self::{
    error::SnapshotError, ranges::AddressRanges, recording::Recording,
    rmm::HEADER as RMM_LOG_HEADER, run::RunInfo, settings::RecordedSettings,
};

#[derive(Clone, Debug, Default, PartialEq)]
pub struct Snapshot {
    pub segments: Vec<Segment>,
    /// The events of each device by its index, oldest first. Empty if nothing was recorded.
    pub traces: Vec<Vec<Event>>,
    /// `None` in files of old versions.
    pub settings: Option<RecordedSettings>,
    /// The version of PyTorch, if the user names it. Files do not.
    pub given_torch: Option<TorchVersion>,
    /// Phases that the program marked, in file order.
    pub annotations: Vec<Annotation>,
    pub stacks: Stacks,
    /// The unknown keys of the snapshot, its segments, blocks, events, frames and annotations.
    pub extras: Extras,
    pub extra: ExtraId,
    /// Sentences about data that reading left out. Empty for nearly all files.
    pub notes: Vec<String>,
}

impl Snapshot {
    pub fn devices(&self) -> Vec<u32> {
        let of_events = (0_u32..)
            .zip(&self.traces)
            .filter(|(_, events)| !events.is_empty())
            .map(|(device, _)| device);
        let devices: BTreeSet<u32> = self
            .segments
            .iter()
            .map(|segment| segment.device)
            .chain(of_events)
            .collect();
        devices.into_iter().collect()
    }

    pub fn events_of(&self, device: u32) -> &[Event] {
        self.traces.get(device as usize).map_or(&[], Vec::as_slice)
    }

    pub fn segments_of(&self, device: u32) -> impl Iterator<Item = &Segment> + Clone {
        self.segments
            .iter()
            .filter(move |segment| segment.device == device)
    }

    /// The version of PyTorch whose decisions the snapshot shows: the given one, the one that the
    /// harness wrote, or the newest one whose rules agree with the file's fields. Events have pools
    /// since 2.12, and the settings have `max_round_threshold` since 2.13.
    pub fn torch(&self) -> TorchVersion {
        let setting = |key| {
            self.settings
                .as_ref()
                .and_then(|settings| settings.value(key))
        };
        let written = || {
            setting(settings::TORCH)
                .and_then(Value::as_text)?
                .parse()
                .ok()
        };
        let inferred = || {
            let is_13 = setting("max_round_threshold").is_some();
            let has_pools = || {
                self.traces
                    .iter()
                    .flatten()
                    .any(|event| self.extras.value(event.extra, "pool_id").is_some())
            };
            match () {
                () if is_13 => TorchVersion::default(),
                () if has_pools() => TorchVersion::V2_12,
                () => TorchVersion::V2_11,
            }
        };
        self.given_torch.or_else(written).unwrap_or_else(inferred)
    }

    pub fn config(&self) -> Result<Config, ConfError> {
        Config::parse_for(
            self.torch(),
            self.settings.as_ref().map_or("", |settings| &settings.conf),
        )
    }

    /// The private pool of an event. Versions after PyTorch 2.11 record it.
    pub fn pool_of(&self, event: &Event) -> Option<MempoolId> {
        let (Value::Tuple(parts) | Value::List(parts)) =
            self.extras.value(event.extra, "pool_id")?
        else {
            return None;
        };
        let [first, second] = parts.as_slice() else {
            return None;
        };
        Some(MempoolId(first.as_u64()?, second.as_u64()?))
    }
}

/// Returns true if a freed block at this address waits for other streams.
pub(crate) fn is_pending(allocator: &dyn Allocator, address: u64) -> bool {
    let segment = allocator.segment_at(DevicePtr(address));
    let mut blocks = segment.iter().flat_map(|segment| &segment.blocks);
    blocks.any(|block| block.address.0 == address && block.state == BlockState::PendingFree)
}

const ACTIVE: [BlockState; 2] = [BlockState::Allocated, BlockState::PendingFree];

/// The id of a private pool as PyTorch writes it. `(0, 0)` is the default pool.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
pub struct MempoolId(pub u64, pub u64);

impl MempoolId {
    pub const DEFAULT: Self = Self(0, 0);

    pub const fn is_default(&self) -> bool {
        matches!(self, Self(0, 0))
    }
}

/// A contiguous range reserved from the driver. In expandable segments, one mapped range.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Segment {
    pub device: u32,
    pub address: u64,
    pub size: Bytes,
    /// The stream's handle. 0 is the default stream.
    pub stream: u64,
    pub pool: PoolKind,
    /// [`MempoolId::DEFAULT`] if the file has no pool.
    pub private_pool: MempoolId,
    pub expandable: bool,
    pub stack: StackId,
    /// In address order, without gaps.
    pub blocks: Vec<Block>,
    pub extra: ExtraId,
}

impl Segment {
    pub(crate) fn of(
        segment: &SegmentInfo,
        stream: u64,
        private_pool: MempoolId,
        stack: impl Fn(u64) -> StackId,
    ) -> Self {
        let block = |block: &BlockInfo| {
            let (address, size, requested, state) =
                (block.address.0, block.size, block.requested, block.state);
            let stack = if state == BlockState::Inactive {
                StackId::EMPTY
            } else {
                stack(address)
            };
            Block {
                address,
                size,
                requested,
                state,
                stack,
                extra: ExtraId::NONE,
            }
        };
        Self {
            device: 0,
            address: segment.address.0,
            size: segment.size,
            stream,
            pool: segment.pool,
            private_pool,
            expandable: segment.expandable,
            stack: StackId::EMPTY,
            blocks: segment.blocks.iter().map(block).collect(),
            extra: ExtraId::NONE,
        }
    }

    /// Sets the blocks: these, in address order, cut at the end of the segment, and the free memory
    /// between them.
    pub fn fill(&mut self, live: impl Iterator<Item = Block>) {
        let (mut at, end) = (self.address, self.address + self.size.0);
        for block in live {
            let size = block.size.min(Bytes(end - block.address));
            self.blocks.extend(Block::free(at, block.address));
            self.blocks.push(Block { size, ..block });
            at = block.address + size.0;
        }
        self.blocks.extend(Block::free(at, end));
    }

    /// The sizes and the requested sizes of the blocks in these states. The sums saturate.
    pub fn bytes_in(&self, states: &[BlockState]) -> (Bytes, Bytes) {
        let blocks = self
            .blocks
            .iter()
            .filter(|block| states.contains(&block.state));
        let add = |sum: Bytes, more: Bytes| Bytes(sum.0.saturating_add(more.0));
        blocks.fold((Bytes::ZERO, Bytes::ZERO), |(held, requested), block| {
            (add(held, block.size), add(requested, block.requested))
        })
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Block {
    pub address: u64,
    pub size: Bytes,
    /// The requested size. For a free block, the size that its last owner requested.
    pub requested: Bytes,
    /// `active_pending_free` and `active_awaiting_free` are both [`BlockState::PendingFree`].
    pub state: BlockState,
    pub stack: StackId,
    pub extra: ExtraId,
}

impl Block {
    /// A free block between two addresses, if they differ.
    pub fn free(from: u64, to: u64) -> Option<Self> {
        let size = to.checked_sub(from).filter(|&size| size > 0).map(Bytes)?;
        let (requested, state, stack, extra) = (
            Bytes::ZERO,
            BlockState::Inactive,
            StackId::EMPTY,
            ExtraId::NONE,
        );
        Some(Self {
            address: from,
            size,
            requested,
            state,
            stack,
            extra,
        })
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Event {
    pub action: Action,
    /// The address, or for [`Action::Oom`] the device's free memory in bytes.
    pub address: u64,
    /// The requested size for blocks and OOMs, without rounding. The reserved size for segments.
    pub size: Bytes,
    pub stream: u64,
    /// Microseconds since 1970, or since midnight in RMM logs. `None` in files of old versions.
    pub time_us: Option<u64>,
    pub stack: StackId,
    /// Keys such as `compile_context`, `user_metadata` and, in new versions, `pool_id` (see
    /// [`Snapshot::pool_of`]).
    pub extra: ExtraId,
}

impl Event {
    /// An event without time, stack and further keys.
    pub const fn new(action: Action, address: u64, size: Bytes, stream: u64) -> Self {
        Self {
            action,
            address,
            size,
            stream,
            time_us: None,
            stack: StackId::EMPTY,
            extra: ExtraId::NONE,
        }
    }
}

named_enum! {
    Action {
        Alloc = "alloc",
        FreeRequested = "free_requested",
        /// The block can be reused: all its events are complete.
        FreeCompleted = "free_completed",
        SegmentAlloc = "segment_alloc",
        SegmentFree = "segment_free",
        SegmentMap = "segment_map",
        SegmentUnmap = "segment_unmap",
        Snapshot = "snapshot",
        Oom = "oom",
    }
}

impl Action {
    /// Returns true if the driver allocated or mapped memory.
    pub const fn reserves(self) -> bool {
        matches!(self, Self::SegmentAlloc | Self::SegmentMap)
    }

    pub const fn releases(self) -> bool {
        matches!(self, Self::SegmentFree | Self::SegmentUnmap)
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Annotation {
    pub begins: bool,
    pub name: String,
    pub device: u32,
    pub time_us: u64,
    pub extra: ExtraId,
}
