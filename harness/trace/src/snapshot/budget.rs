//! Limits on reading, so that a small file cannot exhaust the memory of the host.

use std::cell::Cell;

use harness_allocator::units::Bytes;

use super::error::SnapshotError;

/// Most memory that reading one snapshot may take: enough for about 6 million events.
pub(super) const MEMORY: usize = 1 << 30;

/// Longest text or byte string. PyTorch's longest texts are stack frames of a few hundred bytes.
pub(super) const TEXT: u64 = 16 << 20;

/// More memory than any device has. Larger blocks, segments and amounts of free memory are errors.
pub(super) const DEVICE: Bytes = Bytes::gib(1024);

/// Counts the memory that reading a snapshot takes. Shared objects count once for each copy that the snapshot keeps of them.
#[derive(Default)]
pub(super) struct Budget {
    used: Cell<usize>,
}

impl Budget {
    #[inline]
    pub(super) fn add(&self, bytes: usize) {
        self.used.set(self.used.get().saturating_add(bytes));
    }

    /// Fails if `more` bytes, in addition to those counted, exceed the budget.
    #[inline]
    pub(super) fn check(&self, more: usize) -> Result<(), SnapshotError> {
        let is_over = self.used.get().saturating_add(more) > MEMORY;
        if is_over { Err(SnapshotError::TooMuchMemory { limit: Bytes(MEMORY as u64) }) } else { Ok(()) }
    }

    pub(super) fn take(&self, bytes: usize) -> Result<(), SnapshotError> {
        self.add(bytes);
        self.check(0)
    }
}
