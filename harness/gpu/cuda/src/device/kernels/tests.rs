use super::*;
use harness_allocator::{device::DevicePtr, units::Bytes};

/// Returns the bytes that the kernels would write for these parts.
fn written(parts: &Parts, tag: Tag) -> Vec<u8> {
    let tag_byte = |offset: u64| tag.0.to_le_bytes()[(offset % 8) as usize];
    let head = (0..parts.head).map(tag_byte);
    let words = (0..parts.words).flat_map(|_| parts.value.to_le_bytes());
    let tail_offset = parts.head + 8 * parts.words;
    let tail = (tail_offset..tail_offset + parts.tail).map(tag_byte);
    head.chain(words).chain(tail).collect()
}

#[test]
fn aligned_words_and_single_bytes_cover_every_range() {
    let tag = Tag(0x1122_3344_5566_7788);
    for start in 0x1000..0x1010_u64 {
        for len in 1..40_u64 {
            let parts = Parts::of(MemoryRange::new(DevicePtr(start), Bytes(len)), tag);
            assert!(
                parts.words == 0 || (start + parts.head).is_multiple_of(8),
                "{start:#x} {len}"
            );
            let expected: Vec<u8> = (0..len)
                .map(|offset| tag.0.to_le_bytes()[(offset % 8) as usize])
                .collect();
            assert_eq!(written(&parts, tag), expected, "{start:#x} {len}");
        }
    }
}

#[test]
fn the_ptx_has_a_slot_for_each_verification() {
    let text = PTX.to_str().expect("PTX is ASCII");
    assert!(text.contains(&format!(
        ".b64 harness_findings[{}];",
        u64::from(SLOTS) * SLOT / 8
    )));
}

#[test]
fn an_unwritten_slot_has_no_result() {
    let slot =
        |count: u64, lowest: u64| (u128::from(lowest) << 64 | u128::from(count)).to_le_bytes();
    assert_eq!(found_in(slot(u64::MAX, u64::MAX)), None);
    assert_eq!(
        found_in(slot(2, 5)),
        Some(Found {
            bytes: 3,
            offset: 5
        })
    );
}

#[test]
fn every_kernel_of_the_table_is_in_the_ptx() {
    let text = PTX.to_str().expect("PTX is ASCII");
    let entries: Vec<_> = text
        .match_indices(".visible .entry ")
        .map(|(at, found)| &text[at + found.len()..])
        .collect();
    let names: Vec<_> = entries
        .iter()
        .filter_map(|rest| rest.split('(').next())
        .collect();
    assert_eq!(
        names,
        [
            "harness_fill_words",
            "harness_fill_bytes",
            "harness_verify_words",
            "harness_verify_bytes",
            "harness_busy"
        ]
    );
}
