//! Bins of free blocks by size. Below 8192 units every multiple of the unit has its own bin; above,
//! each doubling has 4096 bins.

/// Bins per row, as a power of two.
const ROW_BITS: u32 = 12;
pub(super) const ROW: usize = 1 << ROW_BITS;
/// The number of rows. Sizes of 64 bits need 44; a power of two makes index checks unnecessary.
pub(super) const ROWS: usize = 64;

/// A bin: its row, and in the low [`ROW_BITS`] bits its index in the row. Each block stores its
/// bin, so it is computed once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Bin(u32);

impl Bin {
    /// The bin of a block outside the index.
    pub(super) const NONE: Self = Self(0);
    /// Up to this row all blocks of a bin have one size.
    pub(super) const LAST_EXACT_ROW: usize = 1;

    /// The bin of a size. All sizes that requests round to are multiples of `unit`.
    #[inline(always)]
    pub(super) const fn of(size: u64, unit: u64) -> Self {
        let units = size / unit;
        // Bins of rows 0 and 1 are one unit wide, so their number is the size in units. The bins of
        // each later row are twice as wide.
        let width = (units | ROW as u64).ilog2() - ROW_BITS;
        Self((units >> width) as u32 + (width << ROW_BITS))
    }

    #[inline(always)]
    pub(super) fn row(self) -> usize {
        (self.0 >> ROW_BITS) as usize % ROWS
    }

    #[inline(always)]
    pub(super) fn index(self) -> usize {
        self.0 as usize % ROW
    }
}

#[cfg(test)]
mod tests;
