//! The arithmetic of reductions.

use std::ffi::c_int;

use half::{bf16, f16};

/// `ncclRedOp_t`: 0 sum, 1 product, 2 maximum, 3 minimum, 4 average. Later numbers multiply with a
/// scalar before the sum.
pub(super) type Operation = c_int;

const PRODUCT: Operation = 1;
pub(super) const MAXIMUM: Operation = 2;
pub(super) const MINIMUM: Operation = 3;
const AVERAGE: Operation = 4;

/// Reduces the elements that `read` reads for each rank. It returns `false` for zeros. Returns
/// whether there are any others.
pub(super) fn reduce(
    into: &mut [u8],
    ranks: usize,
    (kind, operation, scalar): (c_int, Operation, f64),
    read: impl Fn(usize, &mut [u8]) -> bool,
) -> bool {
    macro_rules! of {
        ($type:ty, $wide:ty, $widen:expr, $narrow:expr) => {{
            const SIZE: usize = size_of::<$type>();
            let mut part = vec![0; into.len()];
            let mut reduced: Vec<$wide> = Vec::new();
            let mut is_known = false;
            for rank in 0..ranks {
                if read(rank, &mut part) {
                    is_known = true;
                } else {
                    part.fill(0);
                }
                let values = part
                    .as_chunks::<SIZE>()
                    .0
                    .iter()
                    .map(|bytes| -> $wide { $widen(<$type>::from_ne_bytes(*bytes)) });
                if reduced.is_empty() {
                    reduced.extend(values);
                    continue;
                }
                let pairs = reduced.iter_mut().zip(values);
                match operation {
                    PRODUCT => pairs.for_each(|(a, b)| *a *= b),
                    MAXIMUM => pairs.for_each(|(a, b)| *a = if *a < b { b } else { *a }),
                    MINIMUM => pairs.for_each(|(a, b)| *a = if b < *a { b } else { *a }),
                    _ => pairs.for_each(|(a, b)| *a += b),
                }
            }
            let scaled = |reduced: $wide| match operation {
                AVERAGE => reduced / ranks as $wide,
                5.. => (reduced as f64 * scalar) as $wide,
                _ => reduced,
            };
            let results = reduced
                .into_iter()
                .map(|reduced| <$type>::to_ne_bytes($narrow(scaled(reduced))));
            into.as_chunks_mut()
                .0
                .iter_mut()
                .zip(results)
                .for_each(|(into, bytes)| *into = bytes);
            is_known
        }};
    }
    // By `ncclDataType_t`. Integers of 64 bits wrap in 128.
    match kind {
        0 => of!(i8, i64, i64::from, |wide| wide as i8),
        1 => of!(u8, i64, i64::from, |wide| wide as u8),
        2 => of!(i32, i64, i64::from, |wide| wide as i32),
        3 => of!(u32, i64, i64::from, |wide| wide as u32),
        4 => of!(i64, i128, i128::from, |wide| wide as i64),
        5 => of!(u64, i128, i128::from, |wide| wide as u64),
        6 => of!(f16, f32, f32::from, f16::from_f32),
        7 => of!(f32, f32, |narrow| narrow, |wide| wide),
        8 => of!(f64, f64, |narrow| narrow, |wide| wide),
        9 => of!(bf16, f32, f32::from, bf16::from_f32),
        // Sums of 8-bit floating point numbers are not computed: the part of one rank stands for
        // the result.
        _ => (0..ranks).any(|rank| read(rank, into)),
    }
}

/// The number in an element.
pub(super) fn number(bytes: &[u8], kind: c_int) -> f64 {
    match (
        kind,
        bytes.try_into().map(u32::from_ne_bytes),
        bytes.try_into().map(u64::from_ne_bytes),
    ) {
        (7, Ok(bits), _) => f32::from_bits(bits).into(),
        (8, _, Ok(bits)) => f64::from_bits(bits),
        (6 | 9, ..) => {
            let bits = u16::from_ne_bytes(bytes.try_into().unwrap_or_default());
            if kind == 6 {
                f16::from_bits(bits).to_f64()
            } else {
                bf16::from_bits(bits).to_f64()
            }
        }
        _ => 1.0,
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "tests fail by panicking")]

    use super::*;

    #[test]
    fn each_operation_reduces_floats_and_integers_and_takes_missing_parts_as_zeros() {
        let floats = |values: [f32; 2]| {
            values
                .into_iter()
                .flat_map(f32::to_ne_bytes)
                .collect::<Vec<u8>>()
        };
        let (first, second) = (floats([1.5, -2.0]), floats([0.5, 6.0]));
        let of = |parts: &[&[u8]], len, kind| {
            let mut into = vec![1; len];
            let read = |rank: usize, into: &mut [u8]| {
                parts[rank].len() == into.len() && {
                    into.copy_from_slice(parts[rank]);
                    true
                }
            };
            reduce(&mut into, parts.len(), kind, read).then_some(into)
        };
        let reduced =
            |operation, scalar| of(&[&first, &second], 8, (7, operation, scalar)).unwrap();
        let expected = [
            (0, [2.0, 4.0]),
            (PRODUCT, [0.75, -12.0]),
            (MAXIMUM, [1.5, 6.0]),
            (MINIMUM, [0.5, -2.0]),
            (AVERAGE, [1.0, 2.0]),
            (5, [1.0, 2.0]),
        ];
        for (operation, values) in expected {
            assert_eq!(reduced(operation, 0.5), floats(values), "{operation}");
        }
        let bytes = |value: i64| value.to_ne_bytes().to_vec();
        assert_eq!(
            of(&[&bytes(3), &[], &bytes(-5)], 8, (4, 0, 1.0)),
            Some(bytes(-2))
        );
        assert_eq!(
            of(
                &[
                    &bf16::from_f32(1.5).to_ne_bytes(),
                    &bf16::from_f32(2.0).to_ne_bytes()
                ],
                2,
                (9, 0, 1.0)
            )
            .unwrap(),
            bf16::from_f32(3.5).to_ne_bytes()
        );
        assert_eq!(of(&[&[], &[]], 8, (7, 0, 1.0)), None);
    }
}
