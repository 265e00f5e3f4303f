//! Limits on reading, so that a small file cannot exhaust the memory of the host.

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
    used: usize,
}

impl Budget {
    #[inline]
    pub(super) const fn add(&mut self, bytes: usize) {
        self.used = self.used.saturating_add(bytes);
    }

    /// Fails if `more` bytes, in addition to those counted, exceed the budget.
    #[inline]
    pub(super) const fn check(&self, more: usize) -> Result<(), SnapshotError> {
        if self.used.saturating_add(more) > MEMORY { Err(SnapshotError::TooMuchMemory { limit: Bytes(MEMORY as u64) }) } else { Ok(()) }
    }

    /// Counts memory that is about to be allocated.
    pub(super) fn take(&mut self, bytes: usize) -> Result<(), SnapshotError> {
        self.add(bytes);
        self.check(0)
    }
}
