//! [`Buffer`]: memory that a scenario or a workload holds.

use harness_allocator::allocator::Allocation;
use harness_allocator::device::{MemoryRange, StreamId, Tag};
use harness_allocator::units::Bytes;

use super::ProgramId;

/// Memory that a scenario or a workload holds. It goes back to the program that it is of.
#[derive(Debug)]
#[must_use = "a buffer goes back by `Rig::free`"]
pub struct Buffer {
    pub(super) allocation: Allocation,
    pub(super) program: ProgramId,
    /// What was written last, and on which stream.
    pub(super) content: Option<(Tag, StreamId)>,
    /// Whether another stream's use was reported to the allocator.
    pub(super) shared: bool,
}

impl Buffer {
    /// A buffer that nothing was written to yet.
    pub(super) const fn new(allocation: Allocation, program: ProgramId) -> Self {
        Self { allocation, program, content: None, shared: false }
    }

    /// The program whose allocator handed it out.
    #[must_use]
    pub const fn program(&self) -> ProgramId {
        self.program
    }

    /// What was asked for.
    #[must_use]
    pub const fn requested(&self) -> Bytes {
        self.allocation.requested()
    }

    /// What it is charged as: at least what was asked for.
    #[must_use]
    pub const fn size(&self) -> Bytes {
        self.allocation.size()
    }

    /// The stream it was made for.
    #[must_use]
    pub const fn stream(&self) -> StreamId {
        self.allocation.stream()
    }

    /// Whether the stream that it was made for wrote what it holds.
    #[must_use]
    pub fn is_own_work(&self) -> bool {
        self.content.is_some_and(|(_, writer)| writer == self.stream())
    }

    /// The bytes that may be touched.
    #[must_use]
    pub const fn range(&self) -> MemoryRange {
        self.allocation.range()
    }
}
