//! [`CopiedBytes`]: bytes that small copies wrote to device memory, until something may overwrite
//! them.
//!
//! Kernels are no-ops, so their output reads as zeros. A program can read back its own copies, for
//! example a table of indices or a count that processes exchange. A kernel launch forgets each copy
//! that one of its arguments points into.

use std::cell::Cell;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU32, AtomicU64, AtomicUsize, Ordering};

/// Larger copies are not stored.
const LARGEST: u64 = 1 << 20;
/// Larger ranges stay unknown if their data is late.
const LARGEST_EXPECTED: u64 = 64 * LARGEST;

/// The number of stored copies and of expected ranges, which launches read without the lock.
static STORED: AtomicUsize = AtomicUsize::new(0);

/// Blocks of a group, which are neighbors.
const GROUP: u64 = u64::BITS as u64;
const GROUPS: usize = 1 << 8;

/// How many stored copies reach into the blocks of this many bytes whose groups have a hash. Only
/// holders of the state change them.
struct Blocks<const BYTES: u64> {
    copies: [AtomicU32; GROUPS * GROUP as usize],
    /// The blocks of each group with copies, as bits.
    known: [AtomicU64; GROUPS],
}

static BLOCKS: Blocks<512> = Blocks::new();
/// PyTorch keeps tensors of up to 1 MiB in segments of this size, and larger ones elsewhere.
static SEGMENTS: Blocks<{ 2 << 20 }> = Blocks::new();
/// The most blocks that are looked up for a range.
const MOST_BLOCKS: u64 = 8 * GROUP;

impl<const BYTES: u64> Blocks<BYTES> {
    const fn new() -> Self {
        Self {
            copies: [const { AtomicU32::new(0) }; GROUPS * GROUP as usize],
            known: [const { AtomicU64::new(0) }; GROUPS],
        }
    }

    /// The hash of each group with blocks of a range, which is not empty, and these blocks as bits.
    fn of(start: u64, len: u64) -> impl Iterator<Item = (usize, u64)> {
        let (first, last) = (start / BYTES, start.saturating_add(len - 1) / BYTES);
        (first / GROUP..=last / GROUP).map(move |group| Self::of_group(group, first, last))
    }

    const fn of_group(group: u64, first: u64, last: u64) -> (usize, u64) {
        let from = first.saturating_sub(group * GROUP);
        let after = (group * GROUP + GROUP - 1).saturating_sub(last);
        (Self::hash(group), u64::MAX << from & u64::MAX >> after)
    }

    /// The upper bits of a product with 2⁶⁴ divided by the golden ratio.
    #[inline]
    const fn hash(group: u64) -> usize {
        (group.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> (u64::BITS - GROUPS.ilog2())) as usize
    }

    fn change(&self, start: u64, len: u64, change: impl Fn(u32) -> u32) {
        for (group, blocks) in Self::of(start, len) {
            let mut known = self.known[group].load(Ordering::Relaxed);
            for block in blocks.trailing_zeros()..=blocks.ilog2() {
                let copies = &self.copies[group * GROUP as usize + block as usize];
                let count = change(copies.load(Ordering::Relaxed));
                copies.store(count, Ordering::Relaxed);
                known = known & !(1 << block) | u64::from(count > 0) << block;
            }
            self.known[group].store(known, Ordering::Relaxed);
        }
    }

    #[inline]
    fn may_know(&self, start: u64, len: u64) -> bool {
        let (first, last) = (start / BYTES, start.saturating_add(len - 1) / BYTES);
        if first / GROUP == last / GROUP {
            // Shifts out the blocks before and after the range.
            let known = self.known[Self::hash(first / GROUP)].load(Ordering::Relaxed);
            return known >> (first % GROUP) << (GROUP - 1 - (last - first)) != 0;
        }
        Self::of(start, len)
            .any(|(group, blocks)| self.known[group].load(Ordering::Relaxed) & blocks != 0)
    }

    fn clear(&self) {
        let copies = self.copies.iter();
        copies.for_each(|copies| copies.store(0, Ordering::Relaxed));
        let known = self.known.iter();
        known.for_each(|known| known.store(0, Ordering::Relaxed));
    }
}

fn count(start: u64, len: usize, change: impl Fn(u32) -> u32 + Copy) {
    BLOCKS.change(start, len as u64, change);
    SEGMENTS.change(start, len as u64, change);
}

fn uncount(start: u64, len: usize) {
    count(start, len, |copies| copies.saturating_sub(1));
}

/// Returns `false` if no stored copy is around an address. Needs no lock.
pub(crate) fn may_know(address: u64) -> bool {
    BLOCKS.may_know(address, 1)
}

/// Returns `false` if no byte of a range is stored. Needs no lock.
pub(crate) fn may_know_any(start: u64, len: u64) -> bool {
    match len {
        0 => false,
        _ if len > MOST_BLOCKS * (2 << 20) => true,
        _ if !SEGMENTS.may_know(start, len) => false,
        _ => len > MOST_BLOCKS * 512 || BLOCKS.may_know(start, len),
    }
}

thread_local! {
    static IS_KEPT: Cell<bool> = const { Cell::new(false) };
}

/// While this exists, this thread's launches forget nothing: the caller knows what the kernels
/// write.
pub(crate) struct Kept {
    earlier: bool,
}

impl Kept {
    pub(crate) fn new() -> Self {
        Self {
            earlier: IS_KEPT.replace(true),
        }
    }

    /// Returns `None` if launches forget nothing already.
    pub(crate) fn if_any() -> Option<Self> {
        let is_any = STORED.load(Ordering::Relaxed) > 0 && !IS_KEPT.replace(true);
        is_any.then(|| Self { earlier: false })
    }
}

impl Drop for Kept {
    fn drop(&mut self) {
        IS_KEPT.set(self.earlier);
    }
}

/// Stored bytes by their first address. Copies do not overlap.
#[derive(Debug, Default)]
pub(crate) struct CopiedBytes {
    known: BTreeMap<u64, Vec<u8>>,
    /// The lengths and numbers of ranges whose data is late, by their starts. They do not overlap,
    /// and nothing is stored in them.
    expected: BTreeMap<u64, (u64, u64)>,
    /// How many there have been.
    expectations: u64,
    /// The starts and ends of memory that other processes may write, of which nothing is stored.
    shared: BTreeMap<u64, u64>,
}

/// Returns whether a launch of this thread has to forget stored copies.
pub(crate) fn any() -> bool {
    STORED.load(Ordering::Relaxed) > 0 && !IS_KEPT.get()
}

impl CopiedBytes {
    /// Stores bytes that the program copies to the device.
    pub(crate) fn write(&mut self, start: u64, bytes: &[u8]) {
        let known = self.known.get_mut(&start);
        if let Some(known) = known.filter(|known| known.len() == bytes.len()) {
            return known.copy_from_slice(bytes);
        }
        self.forget(start, bytes.len() as u64);
        if bytes.len() as u64 <= LARGEST {
            self.insert(start, bytes.to_vec());
        }
        self.publish();
    }

    /// Stores nothing of a range from now on, because another process may write to it.
    pub(crate) fn share(&mut self, start: u64, len: u64) {
        self.forget(start, len);
        self.shared.insert(start, start.saturating_add(len));
    }

    /// Ends [`Self::share`] of the memory that starts here.
    pub(crate) fn unshare(&mut self, start: u64) {
        self.shared.remove(&start);
    }

    fn is_shared(&self, start: u64, len: u64) -> bool {
        let before = self.shared.range(..start.saturating_add(len)).next_back();
        before.is_some_and(|(_, end)| *end > start)
    }

    /// Forgets a range that is freed or written with unknown bytes.
    pub(crate) fn forget(&mut self, start: u64, len: u64) {
        if !may_know_any(start, len) {
            return;
        }
        let end = start.saturating_add(len);
        self.unexpect(start, end);
        let overlapping: Vec<u64> = self
            .overlapping(start, end)
            .map(|(first, _)| first)
            .collect();
        if overlapping.is_empty() {
            return;
        }
        for first in overlapping {
            let Some(bytes) = self.known.remove(&first) else {
                continue;
            };
            let cut = |from: u64| {
                usize::try_from(from - first)
                    .unwrap_or(usize::MAX)
                    .min(bytes.len())
            };
            if first < start {
                self.insert(first, bytes[..cut(start)].to_vec());
            }
            if first + bytes.len() as u64 > end {
                self.insert(end, bytes[cut(end)..].to_vec());
            }
            // Only now, so that launches of other threads see the pieces that stay.
            uncount(first, bytes.len());
        }
        self.publish();
    }

    /// Expects late data for a range, unless something else is written there until then. Nothing of
    /// the range is known. Returns a number for [`Self::arrives`].
    pub(crate) fn expect(&mut self, start: u64, len: u64) -> u64 {
        self.forget(start, len);
        self.expectations += 1;
        if (1..=LARGEST_EXPECTED).contains(&len) && !self.is_shared(start, len) {
            count(start, len as usize, |copies| copies + 1);
            self.expected.insert(start, (len, self.expectations));
            self.publish();
        }
        self.expectations
    }

    /// Returns whether the late data of a range is still expected, and no longer expects it.
    pub(crate) fn arrives(&mut self, start: u64, number: u64) -> bool {
        let expected = self.expected.get(&start);
        let is_expected = expected.is_some_and(|(_, expected)| *expected == number);
        if is_expected {
            self.unexpect(start, start + 1);
        }
        is_expected
    }

    /// Expects no data for ranges that overlap this one, because something else is written there.
    fn unexpect(&mut self, start: u64, end: u64) {
        while let Some((&first, &(len, _))) = self.expected.range(..end).next_back()
            && first + len > start
        {
            self.expected.remove(&first);
            uncount(first, len as usize);
            self.publish();
        }
    }

    /// Forgets the copy around an address, because a kernel may write to it.
    pub(crate) fn forget_around(&mut self, address: u64) {
        self.unexpect(address, address + 1);
        if let Some((first, _)) = self.around(address) {
            self.remove(first);
            self.publish();
        }
    }

    /// Forgets what `is_kept` does not accept, by its start.
    pub(crate) fn forget_device(&mut self, is_kept: impl Fn(u64) -> bool) {
        self.shared.retain(|start, _| is_kept(*start));
        let gone = self.known.keys().filter(|start| !is_kept(**start));
        for start in gone.copied().collect::<Vec<_>>() {
            self.remove(start);
        }
        let late = self.expected.keys().filter(|start| !is_kept(**start));
        for start in late.copied().collect::<Vec<_>>() {
            self.unexpect(start, start + 1);
        }
        self.publish();
    }

    /// Forgets everything, because a kernel may write anywhere.
    pub(crate) fn forget_all(&mut self) {
        self.known.clear();
        self.expected.clear();
        BLOCKS.clear();
        SEGMENTS.clear();
        self.publish();
    }

    /// Stores bytes where nothing is stored, if they are not shared.
    fn insert(&mut self, start: u64, bytes: Vec<u8>) {
        if !bytes.is_empty() && !self.is_shared(start, bytes.len() as u64) {
            count(start, bytes.len(), |copies| copies + 1);
            self.known.insert(start, bytes);
        }
    }

    fn remove(&mut self, first: u64) -> Option<Vec<u8>> {
        let bytes = self.known.remove(&first)?;
        uncount(first, bytes.len());
        Some(bytes)
    }

    /// Returns how many of the first bytes of a range are stored.
    pub(crate) fn known_first(&self, start: u64, len: u64) -> u64 {
        let end = start.saturating_add(len);
        let mut known = start;
        for (first, bytes) in self.overlapping(start, end) {
            if first > known {
                break;
            }
            known = first + bytes.len() as u64;
        }
        known.min(end) - start
    }

    /// Returns whether all bytes of a range are stored.
    pub(crate) fn knows_all(&self, start: u64, len: u64) -> bool {
        self.known_first(start, len) == len
    }

    /// Reads a range if all its bytes are stored. Returns whether they are.
    pub(crate) fn read_all(&self, start: u64, into: &mut [u8]) -> bool {
        if let Some((first, bytes)) = self.around(start) {
            let offset = (start - first) as usize;
            if let Some(bytes) = bytes.get(offset..offset + into.len()) {
                into.copy_from_slice(bytes);
                return true;
            }
        }
        let is_known = self.knows_all(start, into.len() as u64);
        if is_known {
            self.read(start, into);
        }
        is_known
    }

    /// Reads the stored bytes of a range. Other bytes of the result stay what they are.
    pub(crate) fn read(&self, start: u64, into: &mut [u8]) {
        let end = start + into.len() as u64;
        for (first, bytes) in self.overlapping(start, end) {
            let (from, to) = (first.max(start), (first + bytes.len() as u64).min(end));
            let offset = |at: u64, base: u64| usize::try_from(at - base).unwrap_or(usize::MAX);
            into[offset(from, start)..offset(to, start)]
                .copy_from_slice(&bytes[offset(from, first)..offset(to, first)]);
        }
    }

    /// Copies device memory to device memory.
    pub(crate) fn copy(&mut self, to: u64, from: u64, len: u64) {
        let pieces: Vec<(u64, Vec<u8>)> = self
            .overlapping(from, from + len)
            .map(|(first, bytes)| {
                let (start, end) = (
                    first.max(from),
                    (first + bytes.len() as u64).min(from + len),
                );
                let offset = |at: u64| usize::try_from(at - first).unwrap_or(usize::MAX);
                (
                    to + (start - from),
                    bytes[offset(start)..offset(end)].to_vec(),
                )
            })
            .collect();
        self.forget(to, len);
        pieces
            .into_iter()
            .for_each(|(first, bytes)| self.insert(first, bytes));
        self.publish();
    }

    /// The copy that an address points into.
    fn around(&self, address: u64) -> Option<(u64, &Vec<u8>)> {
        let (first, bytes) = self.known.range(..=address).next_back()?;
        (address - first < bytes.len() as u64).then_some((*first, bytes))
    }

    fn overlapping(&self, start: u64, end: u64) -> impl Iterator<Item = (u64, &Vec<u8>)> {
        // Copies do not overlap, so only the last one before the range can reach into it.
        let before = self
            .known
            .range(..start)
            .next_back()
            .filter(|(first, bytes)| *first + bytes.len() as u64 > start);
        before
            .into_iter()
            .chain(self.known.range(start..end.max(start)))
            .map(|(first, bytes)| (*first, bytes))
    }

    fn publish(&self) {
        STORED.store(self.known.len() + self.expected.len(), Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests;
