//! Hashes that are the same on every machine and in every version. They do not resist attacks.

use std::hash::Hasher;

/// FNV-1a with 64 bits, <https://datatracker.ietf.org/doc/html/draft-eastlake-fnv>.
pub fn fnv1a(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3))
}

/// A fast hasher of numbers. It adds each word and mixes as SplitMix64 does (Steele, Lea, Flood: Fast Splittable Pseudorandom
/// Number Generators, OOPSLA 2014, <https://doi.org/10.1145/2660193.2660195>). The probability of a collision among n items is
/// about n² / 2⁶⁵.
#[derive(Clone, Copy, Debug, Default)]
pub struct Mixer(u64);

impl Hasher for Mixer {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        for chunk in bytes.chunks(8) {
            let mut word = [0; 8];
            word[..chunk.len()].copy_from_slice(chunk);
            self.write_u64(u64::from_le_bytes(word));
        }
    }

    fn write_u8(&mut self, value: u8) {
        self.write_u64(value.into());
    }

    fn write_u32(&mut self, value: u32) {
        self.write_u64(value.into());
    }

    fn write_u64(&mut self, value: u64) {
        let mixed = self.0.wrapping_add(value).wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (mixed ^ mixed >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ mixed >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        self.0 = mixed ^ mixed >> 31;
    }

    fn write_usize(&mut self, value: usize) {
        self.write_u64(value as u64);
    }
}

#[cfg(test)]
mod tests {
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
}
