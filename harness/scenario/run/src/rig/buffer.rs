use harness_allocator::device::{MemoryRange, StreamId, Tag};
use harness_allocator::{allocator::Allocation, units::Bytes};

use super::ProgramId;

/// Memory that a scenario or a workload holds. It is freed in its own program.
#[derive(Debug)]
#[must_use = "free the buffer with `Rig::free`"]
pub struct Buffer {
    pub(super) allocation: Allocation,
    pub(super) program: ProgramId,
    /// The last written tag and the stream that wrote it.
    pub(super) content: Option<(Tag, StreamId)>,
    /// True if another stream's use was reported to the allocator.
    pub(super) shared: bool,
}

impl Buffer {
    pub(super) const fn new(allocation: Allocation, program: ProgramId) -> Self {
        Self {
            allocation,
            program,
            content: None,
            shared: false,
        }
    }

    pub const fn program(&self) -> ProgramId {
        self.program
    }

    pub const fn requested(&self) -> Bytes {
        self.allocation.requested()
    }

    /// The size that the allocator counts, at least the requested size.
    pub const fn size(&self) -> Bytes {
        self.allocation.size()
    }

    pub const fn stream(&self) -> StreamId {
        self.allocation.stream()
    }

    pub fn is_own_work(&self) -> bool {
        self.content
            .is_some_and(|(_, writer)| writer == self.stream())
    }

    pub const fn range(&self) -> MemoryRange {
        self.allocation.range()
    }
}
