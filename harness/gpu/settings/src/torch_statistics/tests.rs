//! Statistics found in files of a known content.
#![allow(clippy::unwrap_used)]

use super::*;

/// The words of an allocator with this many bytes in one block of 2 MiB, as PyTorch stores them.
fn words(bytes: i64) -> Vec<i64> {
    let quantity = |amount: i64| {
        [
            amount, amount, amount, 0, 0, 0, 0, 0, amount, amount, amount, 0,
        ]
    };
    let mut words = [1, 1, 1, 0, bytes, 2 << 20, bytes, (2 << 20) - bytes, bytes]
        .map(quantity)
        .concat();
    words.extend([3, 2, 0, 0, 0, 0, 0, 0, 0, 0, 7, 8, 9, -1]);
    words
}

/// The words after everything is released. Shifted by one number, they obey the same rules, except
/// for the setting.
fn released() -> Vec<i64> {
    let quantity = |amount: i64| {
        [
            0, amount, amount, amount, 0, 0, 0, 0, 0, amount, amount, amount,
        ]
    };
    let mut words = [1, 1, 1, 0, 1 << 20, 2 << 20, 1 << 20, 1 << 20, 1 << 20]
        .map(quantity)
        .concat();
    words.extend([
        0,
        0,
        0,
        0,
        0,
        0,
        0,
        0,
        0,
        0,
        0,
        1,
        1,
        64 << 20,
        0x7f00_0000_1000,
    ]);
    words
}

/// A file with objects of these sizes. Their statistics begin at a byte.
fn file(objects: &[(usize, usize, Vec<i64>)]) -> Vec<u8> {
    let mut file = vec![0; SLOT * (1 + objects.len())];
    for (index, (size, at, words)) in objects.iter().enumerate() {
        file[8 * index..][..8].copy_from_slice(&size.to_le_bytes());
        for (word, into) in words
            .iter()
            .zip(file[SLOT * (1 + index) + at..].as_chunks_mut::<8>().0)
        {
            *into = word.to_le_bytes();
        }
    }
    file
}

#[test]
fn statistics_are_found_wherever_an_allocator_has_them_also_those_of_idle_devices() {
    for at in [0, 40, 1032] {
        let objects = [
            (2048, 0, vec![5; 100]),
            (3104, at, vec![]),
            (3104, at, words(1 << 20)),
            (1500, 0, vec![]),
        ];
        let [idle, used] =
            <[MemoryStats; 2]>::try_from(statistics(&file(&objects)).unwrap()).unwrap();
        assert_eq!(idle, MemoryStats::default());
        assert_eq!(
            (
                used.allocated_bytes.all.peak,
                used.reserved_bytes.large_pool.current
            ),
            (1 << 20, 2 << 20)
        );
        assert_eq!((used.num_alloc_retries, used.num_ooms), (3, 2));
        assert_eq!(
            (
                used.num_sync_all_streams,
                used.num_device_alloc,
                used.num_device_free
            ),
            (7, 8, 9)
        );
    }
}

#[test]
fn statistics_are_found_with_expandable_segments() {
    let mut expandable = words(1 << 20);
    expandable[12..24].fill(0);
    let [stats] =
        <[MemoryStats; 1]>::try_from(statistics(&file(&[(2904, 40, expandable)])).unwrap())
            .unwrap();
    assert_eq!(
        (
            stats.segment.all.peak,
            stats.reserved_bytes.all.peak,
            stats.num_ooms
        ),
        (0, 2 << 20, 2)
    );
}

#[test]
fn statistics_are_found_in_the_layout_of_later_versions() {
    let mut later = words(1 << 20);
    later.splice(72..72, [0x55a9_0000_1000, 0, 0x3eff_ffff_ffff_ffff, 0]);
    later.insert(later.len() - 1, 5);
    let [stats] =
        <[MemoryStats; 1]>::try_from(statistics(&file(&[(3104, 40, later)])).unwrap()).unwrap();
    assert_eq!(
        (
            stats.active_bytes.all.peak,
            stats.num_ooms,
            stats.num_device_free
        ),
        (1 << 20, 2, 9)
    );
}

#[test]
fn statistics_are_found_after_all_memory_is_released() {
    let [stats] =
        <[MemoryStats; 1]>::try_from(statistics(&file(&[(2048, 40, released())])).unwrap())
            .unwrap();
    let Stat {
        current,
        peak,
        allocated,
        freed,
    } = stats.allocated_bytes.all;
    assert_eq!(
        (current, peak, allocated, freed, stats.num_device_free),
        (0, 1 << 20, 1 << 20, 1 << 20, 1)
    );
}

#[test]
fn a_torn_or_foreign_object_has_no_statistics() {
    let mut torn = words(1 << 20);
    torn[8] = 0;
    for (size, words) in [(3104, torn), (3104, vec![1; 300]), (3104, vec![])] {
        assert_eq!(statistics(&file(&[(size, 40, words)])), None);
    }
    assert_eq!(statistics(&[0; 100]), None);
}

#[test]
fn statistics_are_found_while_a_freed_block_waits_for_another_stream() {
    let bytes = 1 << 20;
    let mut waiting = words(bytes);
    for pool in [0, 8] {
        // The block is no longer allocated, but still active and requested.
        (waiting[pool], waiting[pool + 3]) = (0, 1);
        let allocated_bytes = 4 * PER_QUANTITY + pool;
        (waiting[allocated_bytes], waiting[allocated_bytes + 3]) = (0, bytes);
    }
    let file = file(&[(3104, 40, waiting), (3104, 40, vec![])]);
    let found = statistics(&file).unwrap();
    assert_eq!(found[0].active_bytes.all.current, bytes as u64);
    assert_eq!(found[0].allocated_bytes.all.current, 0);
    let number = |at: usize| u64::from_le_bytes(file[at..at + 8].try_into().unwrap());
    let counts = counts(&file).unwrap();
    let numbers: Vec<[u64; 2]> = counts.iter().map(|at| at.map(number)).collect();
    assert_eq!(numbers, [[1, 1], [0, 0]]);
}
