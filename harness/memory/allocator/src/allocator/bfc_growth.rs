//! The next region of a best-fit-with-coalescing allocator: [`Growth`].

use super::blocks::CHUNK_UNIT;

/// The size of a region to request from the driver, and the planned size of the one after it.
pub(super) struct Growth {
    pub(super) region: u64,
    pub(super) after_refusal: u64,
    pub(super) after_success: u64,
}

impl Growth {
    /// A planned size, doubled until a request fits.
    pub(super) fn doubled(planned: u64, size: u64) -> u64 {
        let mut region = planned.max(CHUNK_UNIT.0);
        while region < size {
            region = region.saturating_mul(2);
        }
        region
    }
}
