use super::*;

fn read(copied: &CopiedBytes, start: u64, len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    copied.read(start, &mut bytes);
    bytes
}

#[test]
fn copies_are_read_back_over_bytes_that_stay() {
    let mut copied = CopiedBytes::default();
    copied.write(100, &[1, 2, 3, 4, 5]);
    assert_eq!(read(&copied, 98, 9), [0, 0, 1, 2, 3, 4, 5, 0, 0]);
    copied.forget(101, 2);
    assert_eq!(read(&copied, 100, 5), [1, 0, 0, 4, 5]);
    copied.copy(200, 99, 6);
    assert_eq!(read(&copied, 200, 6), [0, 1, 0, 0, 4, 5]);
    let knows_all =
        |ranges: [(u64, u64); 5]| ranges.map(|(start, len)| copied.knows_all(start, len));
    assert_eq!(
        knows_all([(201, 1), (202, 1), (201, 2), (204, 3), (300, 0)]),
        [true, false, false, false, true]
    );
    copied.forget_around(203);
    assert_eq!(
        read(&copied, 200, 6),
        [0, 1, 0, 0, 4, 5],
        "203 is not stored"
    );
    copied.forget_around(205);
    assert_eq!(read(&copied, 200, 6), [0, 1, 0, 0, 0, 0]);
}

#[test]
fn a_large_copy_is_not_stored_and_forgets_older_copies() {
    let mut copied = CopiedBytes::default();
    copied.write(0, &[7; 16]);
    copied.write(8, &vec![1; (1 << 20) + 1]);
    assert_eq!(read(&copied, 0, 16), [[7; 8], [0; 8]].concat());
}

#[test]
fn what_is_known_is_found_in_ranges_of_each_size_without_the_lock() {
    let mut copied = CopiedBytes::default();
    let start = 1 << 40; // No other test writes there.
    let ranges = [
        (start, 1),
        (start + 7, 1),
        (start - 4096, 4097),
        (start - (1 << 20), 2 << 20),
        (start - (1 << 30), 2 << 30),
    ];
    copied.write(start, &[1, 2, 3, 4, 5, 6, 7, 8]);
    for (from, len) in ranges {
        assert!(may_know_any(from, len), "{len} from {from:#x}");
    }
    assert!(!may_know_any(start, 0));
    let mut bytes = [0; 4];
    assert!(copied.read_all(start + 2, &mut bytes) && bytes == [3, 4, 5, 6]);
    assert!(!copied.read_all(start + 6, &mut bytes));
    copied.write(start + 8, &[9, 10]);
    assert!(copied.read_all(start + 6, &mut bytes) && bytes == [7, 8, 9, 10]);
    copied.forget(start, 10);
    for (from, len) in &ranges[..4] {
        assert!(!may_know_any(*from, *len), "{len} from {from:#x}");
    }
}

#[test]
fn memory_that_another_process_may_write_is_unknown_until_it_is_freed() {
    let mut copied = CopiedBytes::default();
    let start = 1 << 41; // No other test writes there.
    copied.write(start + 8, &[1; 8]);
    copied.write(start + 64, &[2; 8]);
    copied.share(start, 64);
    assert_eq!(read(&copied, start, 64), [0; 64], "what was known before");
    copied.write(start + 8, &[3; 8]);
    copied.copy(start + 60, start + 64, 2);
    assert_eq!(
        read(&copied, start, 64),
        [0; 64],
        "what is written or copied there"
    );
    assert_eq!(read(&copied, start + 64, 8), [2; 8], "its neighbor");
    copied.unshare(start);
    copied.write(start + 8, &[4; 8]);
    assert_eq!(read(&copied, start + 8, 8), [4; 8]);
}

#[test]
fn late_data_arrives_only_where_nothing_else_was_written_and_no_kernel_ran() {
    type Change = fn(&mut CopiedBytes, u64);
    let changes: [(bool, Change); 9] = [
        (true, |_, _| ()),
        (true, |copied, start| copied.write(start + 64, &[1; 8])),
        (true, |copied, start| copied.copy(start + 64, start, 8)),
        (false, |copied, start| copied.write(start + 60, &[1; 8])),
        (false, |copied, start| copied.copy(start, start + 128, 8)),
        (false, |copied, start| copied.forget(start + 8, 4)),
        (false, |copied, start| copied.forget_around(start + 63)),
        (false, |copied, _| copied.forget_device(|_| false)),
        (false, |copied, start| {
            copied.expect(start + 8, 8);
        }),
    ];
    let start = 1 << 42; // No other test writes there.
    for (index, (arrives, change)) in changes.into_iter().enumerate() {
        let mut copied = CopiedBytes::default();
        copied.write(start, &[7; 64]);
        let number = copied.expect(start, 64);
        assert_eq!(
            copied.known_first(start, 64),
            0,
            "nothing is known meanwhile"
        );
        assert!(may_know(start + 32), "launches look for it");
        change(&mut copied, start);
        assert_eq!(copied.arrives(start, number), arrives, "change {index}");
        assert!(!copied.arrives(start, number), "it arrives once");
        copied.forget(start, 4096);
        assert!(!may_know_any(start, 4096), "change {index} leaves nothing");
    }
}

#[test]
fn what_is_known_ends_at_the_first_unknown_byte() {
    let mut copied = CopiedBytes::default();
    let start = 1 << 43; // No other test writes there.
    copied.write(start, &[1; 8]);
    copied.write(start + 8, &[2; 8]);
    copied.write(start + 17, &[3; 8]);
    let first = [(0, 25), (4, 6), (8, 8), (16, 9), (17, 9), (0, 0)]
        .map(|(from, len)| copied.known_first(start + from, len));
    assert_eq!(first, [16, 6, 8, 0, 8, 0]);
}
