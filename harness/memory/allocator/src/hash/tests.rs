use super::*;

#[test]
fn different_words_or_orders_have_different_hashes() {
    let hash = |words: &[u64]| {
        let mut mixer = Mixer::default();
        words.iter().for_each(|word| mixer.write_u64(*word));
        mixer.finish()
    };
    let mut seen = std::collections::BTreeSet::new();
    for first in 0..100 {
        assert!((0..100).all(|second| seen.insert(hash(&[first << 20, second << 20]))));
    }
    assert_eq!(hash(&[3, 4]), hash(&[3, 4]));
    assert!(seen.insert(hash(&[0])) && seen.insert(hash(&[0, 0, 0])));
}

/// Test vectors of the FNV draft.
#[test]
fn the_hash_is_fnv_1a() {
    assert_eq!(fnv1a(b""), 0xcbf2_9ce4_8422_2325);
    assert_eq!(fnv1a(b"a"), 0xaf63_dc4c_8601_ec8c);
    assert_eq!(fnv1a(b"foobar"), 0x8594_4171_f739_67e8);
}
