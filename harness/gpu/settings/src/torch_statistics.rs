//! PyTorch's allocator of each device is one C++ object that contains its statistics. The simulated
//! GPU places these objects into a mapped file, so the statistics are complete however a process
//! ends. [`read_folder`] finds them in the file.
//!
//! The position of the statistics in the object depends on PyTorch's version. Their own layout does
//! not: `DeviceStats` (c10/cuda/CUDACachingAllocator.h, since PyTorch 2.11
//! c10/core/CachingDeviceAllocator.h) begins with nine quantities, each of all pools, the small and
//! the large pool, and each of these with four numbers. These obey rules that no other part of the
//! object does.

use std::collections::BTreeMap;
use std::{fs, io, ops::Range, path::Path};

use harness_allocator::stats::{MemoryStats, PooledStat, Stat};

/// The end of the name of a file of statistics, after the process number.
pub const ENDING: &str = ".allocator";
/// Bytes of each slot. The first one contains the size of each object, the others an object each.
pub const SLOT: usize = 4096;
/// Most objects of a file.
pub const MOST_OBJECTS: usize = SLOT / 8;
/// The smallest object that contains the statistics of an allocator.
pub const SMALLEST: usize = 1280;

/// Numbers per quantity: current, peak, allocated and freed, of all pools, the small one and the
/// large one.
const PER_QUANTITY: usize = 12;
/// The numbers of all allocations and frees, within the first quantity.
const ALLOCATED: usize = 2;
const FREED: usize = 3;
const QUANTITIES: usize = 9;
/// Values of the setting `max_split_size`. By default it is -1.
const SPLIT_SIZES: Range<i64> = 20 << 20..1 << 45;
/// The layouts of all versions: words of a table after the reserved bytes, and of a counter of
/// refused requests, which PyTorch 2.15 has.
const LAYOUTS: [Layout; 4] = [
    Layout::new(0, 0),
    Layout::new(4, 1),
    Layout::new(4, 0),
    Layout::new(0, 1),
];

#[derive(Clone, Copy, Debug)]
struct Layout {
    table: usize,
    rejections: usize,
}

/// Reads the statistics of each process, by process number. They are by device index; `None` if
/// PyTorch's version has another layout, or if a process was killed during an allocation.
pub fn read_folder(folder: &Path) -> io::Result<BTreeMap<u32, Option<Vec<MemoryStats>>>> {
    let mut found = BTreeMap::new();
    for entry in fs::read_dir(folder)? {
        let entry = entry?;
        let name = entry.file_name();
        if let Some(pid) = name
            .to_str()
            .and_then(|name| name.strip_suffix(ENDING)?.parse().ok())
        {
            found.insert(pid, statistics(&fs::read(entry.path())?));
        }
    }
    Ok(found)
}

/// Returns the statistics in a file. The allocators of all devices have the same size, and the
/// program creates them in the order of the devices.
fn statistics(file: &[u8]) -> Option<Vec<MemoryStats>> {
    let words = words(file);
    let (layout, positions) = positions(&words)?;
    let read = |at: usize| layout.read(&words[at..]);
    Some(positions.into_iter().map(read).collect())
}

/// Returns where a file has the numbers of allocations and of frees so far, by device: the
/// positions of two words, counted in bytes. `None` before the first allocation.
pub fn counts(file: &[u8]) -> Option<Vec<[usize; 2]>> {
    let (_, positions) = positions(&words(file))?;
    let bytes = |at: usize| [8 * (at + ALLOCATED), 8 * (at + FREED)];
    Some(positions.into_iter().map(bytes).collect())
}

fn words(file: &[u8]) -> Vec<i64> {
    let words = file.as_chunks::<8>().0.iter();
    words.map(|word| i64::from_le_bytes(*word)).collect()
}

/// The layout, and the first word of the statistics of each device.
fn positions(words: &[i64]) -> Option<(Layout, Vec<usize>)> {
    let (sizes, objects) = words.split_at_checked(SLOT / 8)?;
    let sized = || {
        let objects = objects.chunks_exact(SLOT / 8).zip(1..);
        sizes
            .iter()
            .zip(objects)
            .filter(|(size, _)| **size > 0)
            .map(|(size, (object, slot))| (*size, object, slot * (SLOT / 8)))
    };
    let position = |object: &[i64]| {
        let mut positions = LAYOUTS
            .into_iter()
            .flat_map(|layout| (0..object.len() - layout.words()).map(move |at| (layout, at)));
        positions.find(|(layout, at)| layout.fits(&object[*at..]))
    };
    let (size, (layout, at)) =
        sized().find_map(|(size, object, _)| Some((size, position(object)?)))?;
    let alike = sized().filter(|(other, ..)| *other == size);
    Some((layout, alike.map(|(_, _, slot)| slot + at).collect()))
}

impl Layout {
    const fn new(table: usize, rejections: usize) -> Self {
        Self { table, rejections }
    }

    const fn quantity(self, index: usize) -> usize {
        index * PER_QUANTITY + if index > 5 { self.table } else { 0 }
    }

    /// The retries and errors, two quantities of four numbers, waits, driver allocations and frees.
    const fn counters(self) -> usize {
        self.quantity(QUANTITIES)
    }

    /// The setting after the counters.
    const fn max_split_size(self) -> usize {
        self.counters() + 13 + self.rejections
    }

    const fn words(self) -> usize {
        self.max_split_size() + 1
    }

    /// Returns whether these words are statistics of an allocator that has reserved memory.
    /// Expandable segments are not counted as segments.
    fn fits(self, words: &[i64]) -> bool {
        let is_quantity = |index: usize| {
            let number =
                |pool: usize, number: usize| words[self.quantity(index) + 4 * pool + number];
            let is_sum = |index: &usize| {
                number(0, *index).checked_sub(number(1, *index)) == Some(number(2, *index))
            };
            let is_stat = |pool: usize| {
                (0..4).all(|index| number(pool, index) >= 0) && number(pool, 0) <= number(pool, 1)
            };
            let [all, small, large] = [0, 1, 2].map(|pool| number(pool, 1));
            (0..3).all(is_stat)
                && [0, 2, 3].iter().all(is_sum)
                && all >= small.max(large)
                && all - small <= large
        };
        let current = |index: usize| words[self.quantity(index)];
        let peak = |index: usize| words[self.quantity(index) + 1];
        let [
            allocation,
            segment,
            active,
            allocated_bytes,
            reserved_bytes,
            active_bytes,
            requested_bytes,
        ] = [0, 1, 2, 4, 5, 6, 8];
        let ordered = [
            // A freed block that waits for another stream is still active and requested.
            (requested_bytes, active_bytes),
            (allocated_bytes, active_bytes),
            (active_bytes, reserved_bytes),
            (allocation, active),
        ];
        (0..QUANTITIES).all(is_quantity)
            && peak(reserved_bytes) > peak(segment).max(1 << 20)
            && ordered
                .iter()
                .all(|(less, more)| current(*less) <= current(*more))
            && words[self.counters()..self.max_split_size()]
                .iter()
                .all(|counter| *counter >= 0)
            && (words[self.max_split_size()] == -1
                || SPLIT_SIZES.contains(&words[self.max_split_size()]))
    }

    fn read(self, words: &[i64]) -> MemoryStats {
        let number = |index: usize| words.get(index).map_or(0, |word| word.unsigned_abs());
        let stat = |at: usize| Stat {
            current: number(at),
            peak: number(at + 1),
            allocated: number(at + 2),
            freed: number(at + 3),
        };
        let quantity = |index: usize| {
            let at = self.quantity(index);
            PooledStat {
                all: stat(at),
                small_pool: stat(at + 4),
                large_pool: stat(at + 8),
            }
        };
        let counter = |index: usize| number(self.counters() + index);
        MemoryStats {
            allocation: quantity(0),
            segment: quantity(1),
            active: quantity(2),
            inactive_split: quantity(3),
            allocated_bytes: quantity(4),
            reserved_bytes: quantity(5),
            active_bytes: quantity(6),
            inactive_split_bytes: quantity(7),
            requested_bytes: quantity(8),
            num_alloc_retries: counter(0),
            num_ooms: counter(1),
            num_sync_all_streams: counter(10),
            num_device_alloc: counter(11),
            num_device_free: counter(12),
        }
    }
}

#[cfg(test)]
mod tests;
