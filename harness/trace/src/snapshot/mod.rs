//! Memory snapshots of PyTorch (`torch.cuda.memory._dump_snapshot`) as plain data: [`Snapshot`].
//!
//! A snapshot holds the allocator's segments with their blocks at the moment when it was taken, and for each device the last events of the
//! allocator ([`Event`]), oldest first. The keys are those of `torch/csrc/cuda/memory_snapshot.cpp` and `torch/csrc/cuda/Module.cpp`:
//! <https://github.com/pytorch/pytorch/blob/v2.11.0/torch/csrc/cuda/memory_snapshot.cpp>. Texts and stacks repeat a lot and are kept once.

use harness_allocator::stats::{BlockState, PoolKind};
use harness_allocator::units::Bytes;

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
}

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
    /// Microseconds since 1970, or `None` in files of old versions.
    pub time_us: Option<u64>,
    pub stack: StackId,
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

/// The allocator's settings as the file has them.
#[derive(Clone, Debug, Default, PartialEq)]
#[allow(missing_docs, reason = "the names say what they are")]
pub struct Settings {
    /// `PYTORCH_CUDA_ALLOC_CONF` as the program had it.
    pub conf: String,
}

/// A phase that began or ended.
#[derive(Clone, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "the names say what they are")]
pub struct Annotation {
    pub begins: bool,
    pub name: String,
    pub device: u32,
    pub time_us: u64,
}

/// Names a stack of [`Stacks`]. The empty stack is [`StackId::EMPTY`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct StackId(pub u32);

impl StackId {
    /// No frames were recorded.
    pub const EMPTY: Self = Self(0);
}

/// One frame of a call stack.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[allow(missing_docs, reason = "the names say what they are")]
pub struct Frame {
    /// The function.
    pub name: String,
    pub file: String,
    pub line: u32,
}

/// Names a frame of [`Stacks`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct FrameId(pub u32);

/// Call stacks, each kept once, the innermost frame first.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Stacks {
    frames: Vec<Frame>,
    stacks: Vec<Vec<FrameId>>,
}

impl Default for Stacks {
    fn default() -> Self {
        Self { frames: Vec::new(), stacks: vec![Vec::new()] }
    }
}

impl Stacks {
    /// The frames of a stack, the innermost first.
    pub fn frames(&self, stack: StackId) -> impl ExactSizeIterator<Item = &Frame> + DoubleEndedIterator + '_ {
        let ids = self.stacks.get(stack.0 as usize).map_or(&[][..], Vec::as_slice);
        ids.iter().map(|id| &self.frames[id.0 as usize])
    }
}
