//! Limits on reading, so that a small file cannot exhaust the memory of the host.

use std::cell::Cell;

use harness_allocator::units::Bytes;

use super::error::SnapshotError;

/// Most memory that reading one snapshot may take: enough for about 6 million events.
pub(super) const MEMORY: Bytes = Bytes::gib(1);

/// Longest text or byte string. PyTorch's longest texts are stack frames of a few hundred bytes.
pub(super) const TEXT: u64 = 16 << 20;

/// More memory than any device has. Larger blocks, segments and amounts of free memory are errors.
pub(super) const DEVICE: Bytes = Bytes::gib(1024);

/// Counts the memory that reading a snapshot takes. Shared objects count once for each copy that
/// the snapshot keeps of them.
pub(super) struct Budget {
    limit: Bytes,
    used: Cell<usize>,
}

impl Default for Budget {
    fn default() -> Self {
        Self::new(MEMORY)
    }
}

impl Budget {
    pub(super) fn new(limit: Bytes) -> Self {
        Self {
            limit,
            used: Cell::new(0),
        }
    }

    #[inline]
    pub(super) fn add(&self, bytes: usize) {
        self.used.set(self.used.get().saturating_add(bytes));
    }

    /// Fails if `more` bytes, in addition to those counted, exceed the budget.
    #[inline]
    pub(super) fn check(&self, more: usize) -> Result<(), SnapshotError> {
        let is_over = self.used.get().saturating_add(more) as u64 > self.limit.0;
        if is_over {
            Err(SnapshotError::TooMuchMemory { limit: self.limit })
        } else {
            Ok(())
        }
    }

    pub(super) fn take(&self, bytes: usize) -> Result<(), SnapshotError> {
        self.add(bytes);
        self.check(0)
    }
}
