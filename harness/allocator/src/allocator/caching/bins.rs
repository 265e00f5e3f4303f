//! Bins of free blocks by size. Below 4 MiB every multiple of 512 B has its own bin; above, each doubling has 4096 bins.

use super::config::BLOCK_UNIT;

/// Bins per row, as a power of two.
const ROW_BITS: u32 = 12;
/// Bins per row.
pub(super) const ROW: usize = 1 << ROW_BITS;
/// The number of rows. Sizes of 64 bits need 44; a power of two makes index checks unnecessary.
pub(super) const ROWS: usize = 64;

/// A bin: its row, and in the low [`ROW_BITS`] bits its index in the row. Each block stores its bin, so it is computed once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Bin(u32);

impl Bin {
    /// The bin of a block outside the index.
    pub(super) const NONE: Self = Self(0);
    /// Up to this row all blocks of a bin have one size.
    pub(super) const LAST_EXACT_ROW: usize = 1;

    /// The bin of a size in bytes.
    #[inline(always)]
    pub(super) fn of(size: u64) -> Self {
        let units = size / BLOCK_UNIT;
        // Bins of rows 0 and 1 are one unit wide, so their number is the size in units. The bins of each later row are twice as
        // wide.
        let width = (units | ROW as u64).ilog2() - ROW_BITS;
        Self((units >> width) as u32 + (width << ROW_BITS))
    }

    #[inline(always)]
    pub(super) fn row(self) -> usize {
        (self.0 >> ROW_BITS) as usize % ROWS
    }

    /// Its index in the row.
    #[inline(always)]
    pub(super) fn index(self) -> usize {
        self.0 as usize % ROW
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_below_four_mebibytes_have_their_own_bin() {
        for units in 0..8192 {
            assert_eq!(Bin::of(units * BLOCK_UNIT), Bin(units as u32));
        }
        assert_eq!(Bin::of(8191 * BLOCK_UNIT).row(), Bin::LAST_EXACT_ROW);
        let largest = Bin::of(u64::MAX - BLOCK_UNIT + 1);
        assert_eq!((largest.row(), largest.index()), (43, ROW - 1));
    }

    #[test]
    fn larger_sizes_have_a_row_for_each_doubling() {
        for (mebibytes, row) in [(1, 0), (2, 1), (4, 2), (8, 3), (1 << 20, 20)] {
            let (bin, next) = (Bin::of(mebibytes << 20), Bin::of((mebibytes << 20) + (mebibytes << 20) / 2));
            assert_eq!((bin.row(), next.row()), (row, row), "{mebibytes} MiB");
            assert!(next.index() > bin.index());
        }
    }
}
