use super::*;

#[test]
fn a_uuid_is_displayed_in_nvmls_form() {
    let uuid = Uuid([
        0xab, 0xcd, 0xef, 0x01, 0x23, 0x45, 0x67, 0x89, 0x0a, 0xbc, 0xde, 0xf0, 0x12, 0x34, 0x56,
        0x78,
    ]);
    assert_eq!(uuid.to_string(), "abcdef01-2345-6789-0abc-def012345678");
}

#[test]
fn children_are_recognized() -> std::io::Result<()> {
    let mut child = std::process::Command::new("cat")
        .stdin(std::process::Stdio::piped())
        .spawn()?;
    assert!(is_child(child.id()) && !is_this_process(child.id()));
    assert!(is_this_process(std::process::id()) && !is_child(std::process::id()));
    assert!(!is_child(1) && !is_child(u32::MAX));
    drop(child.stdin.take());
    child.wait().map(drop)
}

#[test]
fn a_process_id_is_learned_only_if_one_process_appeared() {
    let twice = |before: &[u32], now: &[u32]| newcomer(before, &[now.to_vec(), now.to_vec()]);
    assert_eq!(twice(&[], &[7]), Some(7));
    assert_eq!(
        twice(&[3, 5], &[5, 7]),
        Some(7),
        "another process may have ended"
    );
    assert_eq!(
        (twice(&[3], &[3]), twice(&[3], &[3, 7, 8]), twice(&[3], &[])),
        (None, None, None)
    );
    assert_eq!(
        newcomer(&[], &[vec![7], vec![]]),
        None,
        "it ended before the second query"
    );
    assert_eq!(
        newcomer(&[], &[vec![7], vec![7, 8]]),
        None,
        "another one came"
    );
}

#[test]
fn throttle_reasons_are_described_and_idling_is_ignored() {
    let words = |mask| {
        throttles(mask)
            .into_iter()
            .map(|throttle| throttle.words)
            .collect::<Vec<_>>()
    };
    assert_eq!(words(0b100_0101), ["power cap", "temperature (hardware)"]);
    assert_eq!(words(1), [""; 0], "idling");
    assert_eq!(words(1 << 9), ["a reason unknown to this program"]);
    assert_eq!(words(u64::MAX).len(), REASONS.len() + 1);
}
