use super::*;
use crate::allocator::blocks::BLOCK_UNIT;

#[test]
fn sizes_below_four_mebibytes_have_their_own_bin() {
    for units in 0..8192 {
        assert_eq!(Bin::of(units * BLOCK_UNIT, BLOCK_UNIT), Bin(units as u32));
    }
    assert_eq!(
        Bin::of(8191 * BLOCK_UNIT, BLOCK_UNIT).row(),
        Bin::LAST_EXACT_ROW
    );
    let largest = Bin::of(u64::MAX - BLOCK_UNIT + 1, BLOCK_UNIT);
    assert_eq!((largest.row(), largest.index()), (43, ROW - 1));
}

#[test]
fn larger_sizes_have_a_row_for_each_doubling() {
    for (mebibytes, row) in [(1, 0), (2, 1), (4, 2), (8, 3), (1 << 20, 20)] {
        let (bin, next) = (
            Bin::of(mebibytes << 20, BLOCK_UNIT),
            Bin::of((mebibytes << 20) + (mebibytes << 20) / 2, BLOCK_UNIT),
        );
        assert_eq!((bin.row(), next.row()), (row, row), "{mebibytes} MiB");
        assert!(next.index() > bin.index());
    }
}
