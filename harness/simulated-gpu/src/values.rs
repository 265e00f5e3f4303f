//! [`Contents`]: what small copies wrote to device memory, until something may have overwritten it.
//!
//! Kernels do nothing, so what they would have written reads as zeros. What a program copied to a device itself can be read back: a table of
//! indices, a count that processes exchange. A kernel forgets every copy that one of its arguments points into.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Larger copies are not remembered.
const LARGEST: u64 = 1 << 20;

/// How many copies are remembered, for launches to see without the lock.
static REMEMBERED: AtomicUsize = AtomicUsize::new(0);

/// Remembered bytes by their first address. No two overlap.
#[derive(Debug, Default)]
pub(crate) struct Contents(BTreeMap<u64, Vec<u8>>);

/// Whether anything is remembered.
pub(crate) fn any() -> bool {
    REMEMBERED.load(Ordering::Relaxed) > 0
}

impl Contents {
    /// The program writes bytes.
    pub(crate) fn write(&mut self, start: u64, bytes: &[u8]) {
        self.forget(start, bytes.len() as u64);
        if !bytes.is_empty() && bytes.len() as u64 <= LARGEST {
            self.0.insert(start, bytes.to_vec());
        }
        self.publish();
    }

    /// Something unknown is written, or the memory is given back.
    pub(crate) fn forget(&mut self, start: u64, len: u64) {
        let end = start.saturating_add(len);
        let overlapping: Vec<u64> = self.overlapping(start, end).map(|(first, _)| first).collect();
        for first in overlapping {
            let Some(bytes) = self.0.remove(&first) else { continue };
            let cut = |from: u64| usize::try_from(from - first).unwrap_or(usize::MAX).min(bytes.len());
            if first < start {
                self.0.insert(first, bytes[..cut(start)].to_vec());
            }
            if first + bytes.len() as u64 > end {
                self.0.insert(end, bytes[cut(end)..].to_vec());
            }
        }
        self.publish();
    }

    /// A kernel may write to all of the memory around an address.
    pub(crate) fn forget_around(&mut self, address: u64) {
        let around = self.0.range(..=address).next_back().filter(|(first, bytes)| address - **first < bytes.len() as u64);
        if let Some(first) = around.map(|(first, _)| *first) {
            self.0.remove(&first);
            self.publish();
        }
    }

    /// Something unknown may write to anything.
    pub(crate) fn forget_all(&mut self) {
        self.0.clear();
        self.publish();
    }

    /// What memory holds as far as it is known. The rest of `into` is zeros.
    pub(crate) fn read(&self, start: u64, into: &mut [u8]) {
        into.fill(0);
        let end = start + into.len() as u64;
        for (first, bytes) in self.overlapping(start, end) {
            let (from, to) = (first.max(start), (first + bytes.len() as u64).min(end));
            let offset = |at: u64, base: u64| usize::try_from(at - base).unwrap_or(usize::MAX);
            into[offset(from, start)..offset(to, start)].copy_from_slice(&bytes[offset(from, first)..offset(to, first)]);
        }
    }

    /// Device memory is copied to device memory.
    pub(crate) fn copy(&mut self, to: u64, from: u64, len: u64) {
        let pieces: Vec<(u64, Vec<u8>)> = self
            .overlapping(from, from + len)
            .map(|(first, bytes)| {
                let (start, end) = (first.max(from), (first + bytes.len() as u64).min(from + len));
                let offset = |at: u64| usize::try_from(at - first).unwrap_or(usize::MAX);
                (to + (start - from), bytes[offset(start)..offset(end)].to_vec())
            })
            .collect();
        self.forget(to, len);
        self.0.extend(pieces);
        self.publish();
    }

    fn overlapping(&self, start: u64, end: u64) -> impl Iterator<Item = (u64, &Vec<u8>)> {
        // None is longer than the longest.
        let reaching = start.saturating_sub(LARGEST)..end.max(start);
        self.0.range(reaching).map(|(first, bytes)| (*first, bytes)).filter(move |(first, bytes)| first + bytes.len() as u64 > start)
    }

    fn publish(&self) {
        REMEMBERED.store(self.0.len(), Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(contents: &Contents, start: u64, len: usize) -> Vec<u8> {
        let mut bytes = vec![9; len];
        contents.read(start, &mut bytes);
        bytes
    }

    #[test]
    fn what_was_written_is_read_back_and_everything_else_is_zeros() {
        let mut contents = Contents::default();
        contents.write(100, &[1, 2, 3, 4, 5]);
        assert_eq!(read(&contents, 98, 9), [0, 0, 1, 2, 3, 4, 5, 0, 0]);
        contents.forget(101, 2);
        assert_eq!(read(&contents, 100, 5), [1, 0, 0, 4, 5]);
        contents.copy(200, 99, 6);
        assert_eq!(read(&contents, 200, 6), [0, 1, 0, 0, 4, 5]);
        contents.forget_around(203);
        assert_eq!(read(&contents, 200, 6), [0, 1, 0, 0, 4, 5], "203 is not remembered");
        contents.forget_around(205);
        assert_eq!(read(&contents, 200, 6), [0, 1, 0, 0, 0, 0]);
    }

    #[test]
    fn large_copies_are_not_remembered_and_forget_what_was() {
        let mut contents = Contents::default();
        contents.write(0, &[7; 16]);
        contents.write(8, &vec![1; (1 << 20) + 1]);
        assert_eq!(read(&contents, 0, 16), [[7; 8], [0; 8]].concat());
    }
}
