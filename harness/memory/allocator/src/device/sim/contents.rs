//! The contents of device memory: not bytes, but the tags written to each range. A fill of 40 GiB
//! is one entry.

use super::ranges::RangeMap;
use crate::device::{DevicePtr, MemoryRange, Tag};

#[derive(Clone, Debug, Default)]
pub(super) struct MemoryTags {
    /// The pattern of each written range: eight repeating bytes, the first at an address divisible
    /// by eight. So two fills with one tag but different phases differ, and a part of a fill can be
    /// compared without its start.
    written: RangeMap<u64>,
}

/// The first byte that does not match the expected tag.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Mismatch {
    pub(super) at: DevicePtr,
    /// The tag written there, relative to the start of the verified range, or `None` if the byte
    /// was never written.
    pub(super) found: Option<Tag>,
}

impl MemoryTags {
    pub(super) fn fill(&mut self, range: MemoryRange, tag: Tag) {
        let pattern = pattern(range, tag);
        match self.written.exact_mut(range.start.0, range.end().0) {
            Some(written) => *written = pattern,
            None => self.written.insert(range.start.0, range.end().0, pattern),
        }
    }

    pub(super) fn forget(&mut self, range: MemoryRange) {
        self.written.remove(range.start.0, range.end().0);
    }

    /// Copies the contents of a range to another one of the same length. They do not overlap.
    pub(super) fn copy(&mut self, from: MemoryRange, to: MemoryRange) {
        // The phase of the pattern depends on the address of a byte.
        let shift = (to.start.0.wrapping_sub(from.start.0) % 8 * 8) as u32;
        let moved = |at: u64| at - from.start.0 + to.start.0;
        let written = self.written.overlapping(from.start.0, from.end().0);
        let copied: Vec<_> = written
            .map(|(start, end, pattern)| (moved(start), moved(end), pattern.rotate_left(shift)))
            .collect();
        self.forget(to);
        for (start, end, pattern) in copied {
            self.written.insert(start, end, pattern);
        }
    }

    /// Returns the first byte of the range that does not match the tag.
    pub(super) fn mismatch(&self, range: MemoryRange, tag: Tag) -> Option<Mismatch> {
        let expected = pattern(range, tag);
        if self.written.exact(range.start.0, range.end().0) == Some(&expected) {
            return None;
        }
        let mut cursor = range.start.0;
        for (start, end, &found) in self.written.overlapping(range.start.0, range.end().0) {
            if cursor < start {
                break;
            }
            if let Some(at) = first_difference(start, end, expected, found) {
                let seen = Tag(found.rotate_right(phase(range)));
                return Some(Mismatch {
                    at: DevicePtr(at),
                    found: Some(seen),
                });
            }
            cursor = end;
        }
        (cursor < range.end().0).then_some(Mismatch {
            at: DevicePtr(cursor),
            found: None,
        })
    }
}

/// The offset of a range's start from an address divisible by eight, in bits.
const fn phase(range: MemoryRange) -> u32 {
    (range.start.0 % 8 * 8) as u32
}

/// Converts a tag into a pattern. The tag's first byte is at the start of the range, the pattern's
/// at the next lower multiple of eight.
const fn pattern(range: MemoryRange, tag: Tag) -> u64 {
    tag.0.rotate_left(phase(range))
}

/// The first address of `start..end` at which two patterns differ.
fn first_difference(start: u64, end: u64, expected: u64, found: u64) -> Option<u64> {
    if expected == found {
        return None;
    }
    let (expected, found) = (expected.to_le_bytes(), found.to_le_bytes());
    (start..end.min(start.saturating_add(8))).find(|address| {
        let byte = (address % 8) as usize;
        expected[byte] != found[byte]
    })
}

#[cfg(test)]
mod tests;
