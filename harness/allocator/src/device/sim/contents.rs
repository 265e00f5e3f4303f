//! The contents of device memory: not bytes, but the tags written to each range. A fill of 40 GiB is one entry.

use super::ranges::RangeMap;
use crate::device::{DevicePtr, MemoryRange, Tag};

#[derive(Clone, Debug, Default)]
pub(super) struct MemoryTags {
    /// The pattern of each written range: eight repeating bytes, the first at an address divisible by eight. So two fills with
    /// one tag but different phases differ, and a part of a fill can be compared without its start.
    written: RangeMap<u64>,
}

/// The first byte that does not match the expected tag.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Mismatch {
    pub(super) at: DevicePtr,
    /// The tag written there, relative to the start of the verified range, or `None` if the byte was never written.
    pub(super) found: Option<Tag>,
}

impl MemoryTags {
    /// Writes the tag to the range.
    pub(super) fn fill(&mut self, range: MemoryRange, tag: Tag) {
        let pattern = pattern(range, tag);
        match self.written.exact_mut(range.start.0, range.end().0) {
            Some(written) => *written = pattern,
            None => self.written.insert(range.start.0, range.end().0, pattern),
        }
    }

    /// Forgets the contents of a freed range.
    pub(super) fn forget(&mut self, range: MemoryRange) {
        self.written.remove(range.start.0, range.end().0);
    }

    /// Copies the contents of a range to another one of the same length. They do not overlap.
    pub(super) fn copy(&mut self, from: MemoryRange, to: MemoryRange) {
        // The phase of the pattern depends on the address of a byte.
        let shift = (to.start.0.wrapping_sub(from.start.0) % 8 * 8) as u32;
        let moved = |at: u64| at - from.start.0 + to.start.0;
        let written = self.written.overlapping(from.start.0, from.end().0);
        let copied: Vec<_> = written.map(|(start, end, pattern)| (moved(start), moved(end), pattern.rotate_left(shift))).collect();
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
                return Some(Mismatch { at: DevicePtr(at), found: Some(seen) });
            }
            cursor = end;
        }
        (cursor < range.end().0).then_some(Mismatch { at: DevicePtr(cursor), found: None })
    }
}

/// The offset of a range's start from an address divisible by eight, in bits.
const fn phase(range: MemoryRange) -> u32 {
    (range.start.0 % 8 * 8) as u32
}

/// Converts a tag into a pattern. The tag's first byte is at the start of the range, the pattern's at the next lower multiple of
/// eight.
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
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::units::Bytes;

    const SPACE: u64 = 64;

    fn a_range() -> impl Strategy<Value = MemoryRange> {
        (0..SPACE - 1).prop_flat_map(|start| (Just(start), 1..SPACE - start)).prop_map(|(start, len)| range(start, len))
    }

    fn range(start: u64, len: u64) -> MemoryRange {
        MemoryRange::new(DevicePtr(start), Bytes(len))
    }

    /// Tags with few distinct bytes, so different tags often share some.
    fn a_tag() -> impl Strategy<Value = Tag> {
        prop::array::uniform8(0_u8..2).prop_map(|bytes| Tag(u64::from_le_bytes(bytes)))
    }

    fn byte(tag: Tag, index: u64) -> u8 {
        tag.0.to_le_bytes()[(index % 8) as usize]
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(1024))]
        #[test]
        fn contents_are_a_byte_array(
            fills in prop::collection::vec((a_range(), a_tag(), prop::bool::weighted(0.2)), 0..12),
            verified in a_range(),
            expected in a_tag(),
            expect_a_fill in any::<bool>(),
        ) {
            let mut contents = MemoryTags::default();
            let mut bytes = [None; SPACE as usize];
            for (range, tag, forget) in &fills {
                if *forget { contents.forget(*range) } else { contents.fill(*range, *tag) }
                for index in 0..range.len.0 {
                    bytes[(range.start.0 + index) as usize] = (!forget).then(|| byte(*tag, index));
                }
            }
            // Verify the last fill often: a random tag rarely matches.
            let (verified, expected) = match fills.last() {
                Some((range, tag, _)) if expect_a_fill => (*range, *tag),
                _ => (verified, expected),
            };
            let wrong = (0..verified.len.0).find(|&index| bytes[(verified.start.0 + index) as usize] != Some(byte(expected, index)));
            let mismatch = contents.mismatch(verified, expected);
            prop_assert_eq!(mismatch.as_ref().map(|mismatch| mismatch.at.0), wrong.map(|index| verified.start.0 + index));
            if let (Some(mismatch), Some(index)) = (mismatch, wrong) {
                let found = bytes[(verified.start.0 + index) as usize];
                prop_assert_eq!(mismatch.found.map(|tag| byte(tag, index)), found);
            }
        }
    }

    proptest! {
        #[test]
        fn a_copy_holds_at_every_phase_what_its_source_holds(
            fills in prop::collection::vec((a_range(), a_tag()), 0..8),
            from in 0..SPACE / 4,
            to in SPACE..SPACE + 16,
            len in 1..SPACE / 2,
        ) {
            let mut contents = MemoryTags::default();
            contents.fill(range(SPACE, SPACE), Tag(7));
            fills.iter().for_each(|(range, tag)| contents.fill(*range, *tag));
            let byte_at = |contents: &MemoryTags, at: u64| {
                let found = contents.written.overlapping(at, at + 1).next();
                found.map(|(_, _, pattern)| pattern.to_le_bytes()[(at % 8) as usize])
            };
            let expected: Vec<_> = (0..len).map(|offset| byte_at(&contents, from + offset)).collect();
            contents.copy(range(from, len), range(to, len));
            let copied: Vec<_> = (0..len).map(|offset| byte_at(&contents, to + offset)).collect();
            prop_assert_eq!(copied, expected);
            prop_assert_eq!(byte_at(&contents, to + len), Some(Tag(7).0.to_le_bytes()[((to + len) % 8) as usize]), "the memory after it keeps its contents");
        }
    }

    #[test]
    fn a_part_of_a_fill_verifies_with_a_rotated_tag() {
        let mut contents = MemoryTags::default();
        let tag = Tag(0x0807_0605_0403_0201);
        contents.fill(range(3, 50), tag);
        assert_eq!(contents.mismatch(range(3 + 16, 11), tag), None);
        assert_eq!(contents.mismatch(range(3 + 17, 11), tag).map(|mismatch| mismatch.at), Some(DevicePtr(20)));
        assert_eq!(contents.mismatch(range(3 + 17, 11), Tag(tag.0.rotate_right(8))), None);
    }
}
