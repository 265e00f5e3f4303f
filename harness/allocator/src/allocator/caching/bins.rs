//! Bins of free blocks by size: below 4 MiB every multiple of 512 B has a bin of its own; above, each doubling has 4096 bins.

use super::config::BLOCK_UNIT;

/// Bins of a row, as a power of two.
const ROW_BITS: u32 = 12;
/// Bins of a row.
pub(super) const ROW: usize = 1 << ROW_BITS;
/// Rows of a lane. Sizes of 64 bits need 44; with a power of two no index needs a check.
pub(super) const ROWS: usize = 64;

/// A bin of a lane: its row, and in the low [`ROW_BITS`] bits its place in the row. A block keeps its own, so that it is computed once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Bin(u32);

impl Bin {
    /// Of a block that is in none.
    pub(super) const NONE: Self = Self(0);
    /// Up to this row all blocks of a bin have one size.
    pub(super) const LAST_EXACT_ROW: usize = 1;

    /// The bin of a size, in bytes.
    #[inline(always)]
    pub(super) fn of(size: u64) -> Self {
        let units = size / BLOCK_UNIT;
        // Rows 0 and 1 have bins of one unit, and together the numbers of the units themselves; the bins of each row behind are twice as wide.
        let width = (units | ROW as u64).ilog2() - ROW_BITS;
        Self((units >> width) as u32 + (width << ROW_BITS))
    }

    /// Its row in the lane.
    #[inline(always)]
    pub(super) fn row(self) -> usize {
        (self.0 >> ROW_BITS) as usize % ROWS
    }

    /// Its place in the row.
    #[inline(always)]
    pub(super) fn index(self) -> usize {
        self.0 as usize % ROW
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_below_four_mebibytes_have_a_bin_of_their_own() {
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
