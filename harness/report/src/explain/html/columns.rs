//! Columns of integers as compact text.
//!
//! A column stores the differences between neighbors as zigzag-encoded base-128 integers
//! (<https://protobuf.dev/programming-guides/encoding/#varints>), in base64. Columns of a recording
//! change little from row to row, so most rows take one or two bytes.

use base64::{Engine as _, engine::general_purpose::STANDARD};

/// Encodes a column. Differences wrap modulo 2⁶⁴, so every value survives.
pub(super) fn encode(values: impl IntoIterator<Item = u64>) -> String {
    let (mut bytes, mut before) = (Vec::new(), 0_u64);
    for value in values {
        let difference = value.wrapping_sub(before).cast_signed();
        let mut rest = ((difference << 1) ^ (difference >> 63)).cast_unsigned();
        while rest >= 0x80 {
            bytes.push((rest & 0x7f) as u8 | 0x80);
            rest >>= 7;
        }
        bytes.push(rest as u8);
        before = value;
    }
    STANDARD.encode(bytes)
}

#[cfg(test)]
pub(super) fn decode(text: &str) -> Vec<u64> {
    let (mut values, mut before, mut bits, mut shift) = (Vec::new(), 0_u64, 0_u64, 0);
    for byte in STANDARD.decode(text).expect("base64") {
        bits |= u64::from(byte & 0x7f) << shift;
        shift += 7;
        if byte < 0x80 {
            before = before.wrapping_add((bits >> 1) ^ (bits & 1).wrapping_neg());
            values.push(before);
            (bits, shift) = (0, 0);
        }
    }
    values
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn every_column_comes_back(values: Vec<u64>) {
            prop_assert_eq!(decode(&encode(values.iter().copied())), values);
        }
    }

    #[test]
    fn small_differences_take_one_byte() {
        let column = encode((0..3000_u64).map(|index| 0x7000_0000_0000 + index * 60));
        assert!(column.len() < 3000 * 4 / 3 + 20, "{}", column.len());
    }
}
