use proptest::prelude::*;

use super::*;
use crate::units::Bytes;

const SPACE: u64 = 64;

fn a_range() -> impl Strategy<Value = MemoryRange> {
    (0..SPACE - 1)
        .prop_flat_map(|start| (Just(start), 1..SPACE - start))
        .prop_map(|(start, len)| range(start, len))
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
            if *forget {
                contents.forget(*range)
            } else {
                contents.fill(*range, *tag)
            }
            for index in 0..range.len.0 {
                bytes[(range.start.0 + index) as usize] = (!forget).then(|| byte(*tag, index));
            }
        }
        // Verify the last fill often: a random tag rarely matches.
        let (verified, expected) = match fills.last() {
            Some((range, tag, _)) if expect_a_fill => (*range, *tag),
            _ => (verified, expected),
        };
        let wrong = (0..verified.len.0).find(|&index| {
            bytes[(verified.start.0 + index) as usize] != Some(byte(expected, index))
        });
        let mismatch = contents.mismatch(verified, expected);
        prop_assert_eq!(
            mismatch.as_ref().map(|mismatch| mismatch.at.0),
            wrong.map(|index| verified.start.0 + index)
        );
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
        prop_assert_eq!(
            byte_at(&contents, to + len),
            Some(Tag(7).0.to_le_bytes()[((to + len) % 8) as usize]),
            "the memory after it keeps its contents"
        );
    }
}

#[test]
fn a_part_of_a_fill_verifies_with_a_rotated_tag() {
    let mut contents = MemoryTags::default();
    let tag = Tag(0x0807_0605_0403_0201);
    contents.fill(range(3, 50), tag);
    assert_eq!(contents.mismatch(range(3 + 16, 11), tag), None);
    assert_eq!(
        contents
            .mismatch(range(3 + 17, 11), tag)
            .map(|mismatch| mismatch.at),
        Some(DevicePtr(20))
    );
    assert_eq!(
        contents.mismatch(range(3 + 17, 11), Tag(tag.0.rotate_right(8))),
        None
    );
}
