//! What PyTorch's kernels for a GPU make of random numbers: the contents of a tensor.
//!
//! `sin`, `cos`, `log` and the like round as on the CPU, so the last digits can differ.

use std::ffi::c_void;

use half::{bf16, f16};

use crate::random::{self, Draw};

/// Types of `c10::ScalarType`.
const UINT8: i32 = 0;
pub(crate) const INT32: i32 = 3;
const INT64: i32 = 4;
const FLOAT16: i32 = 5;
const FLOAT32: i32 = 6;
const FLOAT64: i32 = 7;
const BOOL: i32 = 11;
const BFLOAT16: i32 = 15;

/// Parameters in brackets.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Distribution {
    /// From a number (inclusive) to another.
    Uniform,
    /// Mean, deviation.
    Normal,
    LogNormal,
    /// Median, sigma.
    Cauchy,
    /// Rate.
    Exponential,
    /// Probability.
    Geometric,
    /// 1 with a probability, otherwise 0.
    Bernoulli,
    /// From [`Filling::least`], [`Filling::count`] of them.
    Integers,
}

impl Distribution {
    const ALL: [Self; 8] = [
        Self::Uniform,
        Self::Normal,
        Self::LogNormal,
        Self::Cauchy,
        Self::Exponential,
        Self::Geometric,
        Self::Bernoulli,
        Self::Integers,
    ];

    const fn is_of_normal(self) -> bool {
        matches!(self, Self::Normal | Self::LogNormal)
    }
}

macro_rules! transformation {
    ($name:ident, $real:ident) => {
        /// What a kernel makes of a uniform or normal number.
        fn $name(distribution: Distribution, number: $real, [first, second]: [f64; 2]) -> $real {
            let [first, second] = [first as $real, second as $real];
            match distribution {
                // A GPU rounds only the sum.
                Distribution::Uniform | Distribution::Normal => number.mul_add(second, first),
                Distribution::LogNormal => number.mul_add(second, first).exp(),
                Distribution::Cauchy => {
                    let number = number.clamp($real::EPSILON, 1.0 - $real::EPSILON);
                    let tangent = (std::$real::consts::PI * (number - 0.5)).tan();
                    tangent.mul_add(second, first)
                }
                Distribution::Exponential => {
                    let least = $real::EPSILON / 2.0;
                    let is_one = number >= 1.0 - least;
                    (if is_one { -least } else { number.ln() }) * (-1.0 / first)
                }
                Distribution::Geometric => (number.ln() / (-first).ln_1p()).ceil(),
                Distribution::Bernoulli => (u8::from(number < first)).into(),
                Distribution::Integers => number,
            }
        }
    };
}
transformation!(single, f32);
transformation!(double, f64);

/// A kernel that fills a tensor.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct Filling {
    /// An index of [`Distribution::ALL`].
    pub(crate) distribution: usize,
    /// A `c10::ScalarType`.
    pub(crate) scalar_type: i32,
    /// Integers consist of two words.
    pub(crate) is_long: bool,
    pub(crate) threads: usize,
    /// The state of the generator.
    pub(crate) state: [u64; 2],
    pub(crate) parameters: [f64; 2],
    pub(crate) least: i64,
    /// How many integers, or 0 for all of 64 bits.
    pub(crate) count: u64,
}

impl Filling {
    /// Fills this many elements, in the order of their addresses.
    pub(crate) fn fill(&self, into: &mut [u8], elements: usize) {
        let size = into.len().checked_div(elements).unwrap_or(1);
        let into = into.chunks_exact_mut(size.max(1));
        let distribution = Distribution::ALL[self.distribution];
        let [seed, offset] = self.state;
        let draw = Draw {
            neighbours: 1,
            threads: self.threads,
            seed,
            offset,
        };
        if distribution == Distribution::Integers {
            let mut words = vec![0; elements];
            match self.is_long {
                true => draw.fill(&mut words, random::long_words),
                false => draw.fill(&mut words, |words| words.map(u64::from)),
            }
            for (into, word) in into.zip(words) {
                let word = word.checked_rem(self.count).unwrap_or(word);
                store_integer(
                    self.scalar_type,
                    self.least.wrapping_add(word.cast_signed()),
                    into,
                );
            }
            return;
        }
        let [first, second] = self.parameters;
        let bounds = [first, second].map(|bound| rounded(self.scalar_type, bound));
        let is_uniform = distribution == Distribution::Uniform;
        let parameters = match is_uniform {
            true => [bounds[0], rounded(self.scalar_type, bounds[1] - bounds[0])],
            false => self.parameters,
        };
        let store = |into: &mut [u8], number: f64| {
            let is_end = is_uniform && rounded(self.scalar_type, number) == bounds[1];
            store_real(
                self.scalar_type,
                if is_end { bounds[0] } else { number },
                into,
            );
        };
        if self.scalar_type == FLOAT64 {
            let mut numbers = vec![0.0; elements];
            match distribution.is_of_normal() {
                true => draw.fill(&mut numbers, random::normal_double),
                false => draw.fill(&mut numbers, random::uniform_doubles),
            }
            into.zip(numbers).for_each(|(into, number)| {
                store(into, double(distribution, number, parameters));
            });
        } else {
            let mut numbers = vec![0.0; elements];
            match distribution.is_of_normal() {
                true => draw.fill(&mut numbers, random::normal),
                false => draw.fill(&mut numbers, |words| words.map(random::uniform)),
            }
            into.zip(numbers).for_each(|(into, number)| {
                store(into, single(distribution, number, parameters).into());
            });
        }
    }
}

/// The digits of a type in binary: those of its largest integer, or of the integers that it holds
/// exactly.
pub(crate) const fn digits(scalar_type: i32) -> Option<u32> {
    Some(match scalar_type {
        BOOL => 1,
        UINT8 | BFLOAT16 => 8,
        1 => 7,
        2 => 15,
        3 => 31,
        INT64 => 63,
        FLOAT16 => 11,
        FLOAT32 => 24,
        FLOAT64 => 53,
        _ => return None,
    })
}

pub(crate) const fn is_real(scalar_type: i32) -> bool {
    matches!(scalar_type, FLOAT16 | FLOAT32 | FLOAT64 | BFLOAT16)
}

/// The number of an element. Of other types, it is no number.
pub(crate) fn real(element: &[u8], scalar_type: i32) -> f64 {
    let of = |number: Option<f64>| number.unwrap_or(f64::NAN);
    of(match scalar_type {
        FLOAT16 => element
            .try_into()
            .ok()
            .map(|bytes| f16::from_ne_bytes(bytes).into()),
        BFLOAT16 => element
            .try_into()
            .ok()
            .map(|bytes| bf16::from_ne_bytes(bytes).into()),
        FLOAT32 => element
            .try_into()
            .ok()
            .map(|bytes| f32::from_ne_bytes(bytes).into()),
        FLOAT64 => element.try_into().ok().map(f64::from_ne_bytes),
        _ => None,
    })
}

/// The number that a floating-point type has for another one.
pub(crate) fn rounded(scalar_type: i32, number: f64) -> f64 {
    match scalar_type {
        FLOAT16 => f16::from_f32(number as f32).into(),
        BFLOAT16 => bf16::from_f32(number as f32).into(),
        FLOAT32 => (number as f32).into(),
        _ => number,
    }
}

/// Stores a number as an element of a type.
pub(crate) fn store_real(scalar_type: i32, number: f64, into: &mut [u8]) {
    match scalar_type {
        FLOAT16 => into.copy_from_slice(&f16::from_f32(number as f32).to_ne_bytes()),
        BFLOAT16 => into.copy_from_slice(&bf16::from_f32(number as f32).to_ne_bytes()),
        FLOAT32 => into.copy_from_slice(&(number as f32).to_ne_bytes()),
        FLOAT64 => into.copy_from_slice(&number.to_ne_bytes()),
        BOOL => into.fill(u8::from(number != 0.0)),
        _ => store_integer(scalar_type, number as i64, into),
    }
}

pub(crate) fn store_integer(scalar_type: i32, number: i64, into: &mut [u8]) {
    match scalar_type {
        UINT8..=INT64 => {
            let size = into.len();
            into.copy_from_slice(&number.to_le_bytes()[..size]);
        }
        BOOL => into.fill(u8::from(number != 0)),
        FLOAT64 => into.copy_from_slice(&(number as f64).to_ne_bytes()),
        FLOAT16 | BFLOAT16 | FLOAT32 => store_real(scalar_type, (number as f32).into(), into),
        _ => {
            let size = into.len().min(size_of::<i64>());
            into[..size].copy_from_slice(&number.to_le_bytes()[..size]);
        }
    }
}

/// The permutation that `randperm` draws. `threads` is the number of threads of its first kernel.
/// Before PyTorch 2.7 (`is_old`), a key of at most 32 bits is one word, and not two.
pub(crate) fn permutation(state: [u64; 2], threads: usize, count: usize, is_old: bool) -> Vec<i64> {
    let [seed, offset] = state;
    let of_count = count as f64;
    // So many bits that most permutations have no equal keys.
    let pairs = (6.0 * of_count * of_count + 1.0) / (12.0 * 0.9_f64.ln());
    let bits = (of_count - pairs).log2().ceil().clamp(0.0, 64.0) as u32;
    let draw = Draw {
        neighbours: 1,
        threads,
        seed,
        offset,
    };
    let mut keys = vec![0; count];
    let keys_per_draw = if is_old && bits <= 32 {
        draw.fill(&mut keys, |words| words.map(u64::from));
        4
    } else {
        draw.fill(&mut keys, random::long_words);
        2
    };
    let below = if bits > 32 { u64::MAX } else { u32::MAX.into() };
    let mask = u64::MAX.checked_shr(64 - bits).unwrap_or(0);
    let key = |place: i64| ((keys[place as usize] % below) & mask).cast_signed();
    let mut order: Vec<i64> = (0..count as i64).collect();
    order.sort_by_key(|place| key(*place));
    let mut first = 0;
    // A second kernel shuffles the places of equal keys. The thread of the first place draws for
    // all.
    let offset = offset + 4 * count.div_ceil(keys_per_draw * threads) as u64;
    for equal in order.chunk_by_mut(|one, other| key(*one) == key(*other)) {
        let words = random::words(seed, first, offset);
        for (last, word) in (1..equal.len()).rev().zip(words) {
            equal.swap(last, word as usize % (last + 1));
        }
        first += equal.len() as u64;
    }
    order
}

/// Fills a dense tensor.
///
/// # Safety
/// There are `elements` of the type, and nothing else uses them meanwhile.
#[unsafe(no_mangle)]
unsafe extern "C" fn harness_values_fill(
    filling: &Filling,
    into: *mut c_void,
    elements: usize,
    size: usize,
) {
    if elements > 0 {
        // SAFETY: as the caller promises.
        let into = unsafe { std::slice::from_raw_parts_mut(into.cast(), elements * size) };
        filling.fill(into, elements);
    }
}

/// Writes a permutation of `count` integers.
///
/// # Safety
/// There are `count` integers, and nothing else uses them meanwhile.
#[unsafe(no_mangle)]
unsafe extern "C" fn harness_values_permutation(
    state: &[u64; 2],
    threads: usize,
    into: *mut i64,
    count: usize,
    is_old: bool,
) {
    if count > 0 {
        // SAFETY: as the caller promises.
        let into = unsafe { std::slice::from_raw_parts_mut(into, count) };
        into.copy_from_slice(&permutation(*state, threads, count, is_old));
    }
}

#[cfg(test)]
mod tests {
    use super::{Distribution, FLOAT32, Filling, INT32, permutation};

    /// The numbers that a kernel of one block draws with this seed.
    fn drawn(distribution: Distribution, seed: u64, parameters: [f64; 2]) -> [f32; 10] {
        let mut bytes = [0; 40];
        Filling {
            distribution: distribution as usize,
            scalar_type: FLOAT32,
            is_long: false,
            threads: 256,
            state: [seed, 0],
            parameters,
            least: 0,
            count: 0,
        }
        .fill(&mut bytes, 10);
        let mut numbers = bytes.as_chunks().0.iter().copied().map(f32::from_ne_bytes);
        std::array::from_fn(|_| numbers.next().expect("ten numbers"))
    }

    #[test]
    fn seed_0_gives_the_published_numbers() {
        let expected = [
            0.3990, 0.5167, 0.0249, 0.9401, 0.9459, 0.7967, 0.4150, 0.8203, 0.2290, 0.9096,
        ];
        let found = drawn(Distribution::Uniform, 0, [0.0, 1.0]);
        assert_eq!(found.map(|number| (number * 1e4).round() / 1e4), expected);
        let found = drawn(Distribution::Normal, 0, [0.0, 1.0]).map(|number| number * 1e4);
        let expected = [-9247.0, -4253.0, -26438.0, 1452.0];
        assert_eq!(found.map(f32::round)[..4], expected);
    }

    #[test]
    fn a_second_kernel_shuffles_equal_keys() {
        // Two of these ten have equal keys. An H200 gave this order.
        assert_eq!(permutation([10, 0], 256, 10, false), SHUFFLED);
        assert!(permutation([10, 0], 256, 0, false).is_empty());
        assert_eq!(permutation([10, 0], 256, 1, false), [0]);
    }

    #[test]
    fn before_torch_2_7_a_permutation_sorts_keys_of_one_word() {
        let mut keys = [0_u8; 40];
        Filling {
            distribution: Distribution::Integers as usize,
            scalar_type: INT32,
            is_long: false,
            threads: 256,
            state: [7, 0],
            parameters: [0.0; 2],
            least: i32::MIN.into(),
            count: u32::MAX.into(),
        }
        .fill(&mut keys, 10);
        let keys = keys.as_chunks().0.iter().copied().map(u32::from_ne_bytes);
        // Ten keys have nine bits. No two of these are equal.
        let mut order: Vec<(u32, i64)> = keys.map(|key| key & 0x1ff).zip(0..).collect();
        order.sort_unstable();
        assert!(order.windows(2).all(|pair| pair[0].0 < pair[1].0));
        let order: Vec<i64> = order.into_iter().map(|(_, place)| place).collect();
        assert_eq!(permutation([7, 0], 256, 10, true), order);
        assert_ne!(permutation([7, 0], 256, 10, false), order);
    }

    const SHUFFLED: [i64; 10] = [0, 2, 7, 4, 5, 3, 1, 6, 9, 8];
}
