use super::*;

/// Shortly before the end of a piece, and not a multiple of eight.
const START: u64 = 3 * PIECE as u64 - 5;

#[test]
fn a_pattern_continues_across_pieces_and_each_wrong_byte_is_found() {
    let mut bytes = DeviceBytes::default();
    let pattern = [1, 2, 3, 4, 5, 6, 7, 8];
    bytes.fill(START, 21, pattern);
    let mut read = [9; 23];
    bytes.read(START - 1, &mut read);
    assert_eq!(
        read,
        [
            0, 1, 2, 3, 4, 5, 6, 7, 8, 1, 2, 3, 4, 5, 6, 7, 8, 1, 2, 3, 4, 5, 0
        ]
    );
    assert_eq!(bytes.differing(START, 21, pattern), (0, None));
    assert_eq!(bytes.differing(START, 22, pattern), (1, Some(21)));
    for wrong in [0, 4, 5, 12, 20] {
        bytes.flip(START + wrong);
        assert_eq!(bytes.differing(START, 21, pattern), (1, Some(wrong)));
        bytes.flip(START + wrong);
    }
}

#[test]
fn a_freed_range_is_zeros_and_its_neighbours_stay() {
    let mut bytes = DeviceBytes::default();
    bytes.write(START, &[7; 12]);
    bytes.forget(START + 2, 8);
    let mut read = [9; 12];
    bytes.read(START, &mut read);
    assert_eq!(read, [7, 7, 0, 0, 0, 0, 0, 0, 0, 0, 7, 7]);
    bytes.forget(2 * PIECE as u64, 2 * PIECE as u64);
    assert!(bytes.0.is_empty(), "freed pieces use no host memory");
}

#[test]
fn each_wrong_byte_of_many_stretches_is_found() {
    let mut bytes = DeviceBytes::default();
    let (pattern, len) = ([1, 2, 3, 4, 5, 6, 7, 8], 3 * STRETCH as u64 + 3);
    bytes.fill(START, len, pattern);
    let wrong = [0, 5, STRETCH as u64 + 5, 2 * STRETCH as u64 + 4, len - 1];
    for (count, offset) in (1..).zip(wrong) {
        bytes.flip(START + offset);
        assert_eq!(bytes.differing(START, len, pattern), (count, Some(0)));
    }
    bytes.fill(START, STRETCH as u64 + 3, pattern);
    let first = Some(STRETCH as u64 + 5);
    assert_eq!(bytes.differing(START, len, pattern), (3, first));
}
