//! Random numbers of a GPU: the generator Philox4x32-10 of cuRAND, and the order in which PyTorch's
//! kernels store its numbers.
//!
//! Each thread of a kernel has the subsequence of its index, and draws four words at a time. The
//! element `(n / k * threads + thread) * k + n % k` gets the number `n` of a thread. `k` is the
//! number of neighbouring elements that a thread handles in a round. If `k` is 2, it uses only the
//! first two numbers of a draw.
//!
//! Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011, and the device API
//! of cuRAND. An H200 gave the numbers of the tests.

use std::array::from_fn;
use std::f64::consts::TAU;
use std::ffi::c_void;

/// Draws that are made together, in the lanes of a vector.
const LANES: usize = 16;
/// Steps of the generator in cuRAND.
const STEPS: u32 = 10;
/// Steps of the generator in FlashAttention.
const FLASH_STEPS: u32 = 7;

/// Returns four words for each place: the subsequence of a thread, and the number of its draw.
fn philox<const PLACES: usize>(
    seed: u64,
    places: [(u64, u64); PLACES],
    steps: u32,
) -> [[u32; PLACES]; 4] {
    let mut words = [
        places.map(|(_, draw)| draw as u32),
        places.map(|(_, draw)| (draw >> 32) as u32),
        places.map(|(thread, _)| thread as u32),
        places.map(|(thread, _)| (thread >> 32) as u32),
    ];
    let [mut low, mut high] = [seed as u32, (seed >> 32) as u32];
    for _ in 0..steps {
        let [one, two, three, four] = &mut words;
        for (((one, two), three), four) in one.iter_mut().zip(two).zip(three).zip(four) {
            let [first, second] = [
                0xD251_1F53 * u64::from(*one),
                0xCD9E_8D57 * u64::from(*three),
            ];
            (*one, *two) = ((second >> 32) as u32 ^ *two ^ low, second as u32);
            (*three, *four) = ((first >> 32) as u32 ^ *four ^ high, first as u32);
        }
        low = low.wrapping_add(0x9E37_79B9);
        high = high.wrapping_add(0xBB67_AE85);
    }
    words
}

pub(crate) fn uniform(word: u32) -> f32 {
    // In double precision the sum is exact, so it is rounded once, as on a GPU.
    (f64::from(word as f32) * 2f64.powi(-32) + 2f64.powi(-33)) as f32
}

/// 53 bits of two words.
fn bits([low, high]: [u32; 2]) -> f64 {
    (u64::from(low) ^ u64::from(high) << 21) as f64
}

fn uniform_double(words: [u32; 2]) -> f64 {
    bits(words) * 2f64.powi(-53) + 2f64.powi(-54)
}

fn pairs([first, second, third, fourth]: [u32; 4]) -> [[u32; 2]; 2] {
    [[first, second], [third, fourth]]
}

pub(crate) fn uniform_doubles(words: [u32; 4]) -> [f64; 2] {
    pairs(words).map(uniform_double)
}

pub(crate) fn long_words(words: [u32; 4]) -> [u64; 2] {
    pairs(words).map(|[high, low]| u64::from(high) << 32 | u64::from(low))
}

/// The next four words of a thread.
pub(crate) fn words(seed: u64, thread: u64, offset: u64) -> [u32; 4] {
    philox(seed, [(thread, offset / 4)], STEPS).map(|[word]| word)
}

/// The method of Box and Muller.
pub(crate) fn normal(words: [u32; 4]) -> [f32; 4] {
    let [[first, second], [third, fourth]] = pairs(words).map(|[first, second]| {
        let angle = (f64::from(second) + 0.5) * (2f64.powi(-32) * TAU);
        let (sine, cosine) = (angle as f32).sin_cos();
        let radius = (-2.0 * uniform(first).ln()).sqrt();
        [radius * sine, radius * cosine]
    });
    [first, second, third, fourth]
}

pub(crate) fn normal_double(words: [u32; 4]) -> [f64; 2] {
    let [first, second] = pairs(words);
    let (sine, cosine) = ((bits(second) + 0.5) * (2f64.powi(-53) * TAU)).sin_cos();
    let radius = (-2.0 * uniform_double(first).ln()).sqrt();
    [radius * sine, radius * cosine]
}

/// What a thread makes of four words.
#[derive(Clone, Copy)]
enum Numbers {
    /// Between 0 (exclusive) and 1.
    Uniform,
    UniformDouble,
    Normal,
    NormalDouble,
}

impl Numbers {
    const ALL: [Self; 4] = [
        Self::Uniform,
        Self::UniformDouble,
        Self::Normal,
        Self::NormalDouble,
    ];
}

/// How a kernel of PyTorch draws numbers.
#[derive(Clone, Copy)]
pub(crate) struct Draw {
    /// Neighbouring elements of a thread in a round.
    pub(crate) neighbours: usize,
    pub(crate) threads: usize,
    pub(crate) seed: u64,
    /// Words that each thread has drawn since the seed was set: a multiple of 4.
    pub(crate) offset: u64,
}

impl Draw {
    /// Fills the elements with the numbers that `make` makes of four words.
    pub(crate) fn fill<T, const N: usize>(self, into: &mut [T], make: impl Fn([u32; 4]) -> [T; N]) {
        let Self {
            neighbours,
            threads,
            seed,
            ..
        } = self;
        let first_draw = self.offset / 4;
        // One thread draws neighbouring elements, so its draws are made together.
        if threads == 1 {
            for (draw, into) in (first_draw..)
                .step_by(LANES)
                .zip(into.chunks_mut(LANES * N))
            {
                let words = philox(
                    seed,
                    from_fn::<_, LANES, _>(|lane| (0, draw + lane as u64)),
                    STEPS,
                );
                for (lane, into) in into.chunks_mut(N).enumerate() {
                    into.iter_mut()
                        .zip(make(words.map(|words| words[lane])))
                        .for_each(|(into, number)| *into = number);
                }
            }
            return;
        }
        // Of the numbers of a draw, a thread uses these.
        let used = if neighbours == 2 { 2 } else { N };
        let rounds = into.len().div_ceil(threads * neighbours);
        for draw in 0..(rounds * neighbours).div_ceil(used) {
            let places: [usize; N] = from_fn(|index| {
                let number = draw * used + index;
                number / neighbours * threads * neighbours + number % neighbours
            });
            let drawing = into
                .len()
                .saturating_sub(places[0])
                .div_ceil(neighbours)
                .min(threads);
            for first in (0..drawing).step_by(LANES) {
                let words = philox(
                    seed,
                    from_fn::<_, LANES, _>(|lane| {
                        ((first + lane) as u64, first_draw + draw as u64)
                    }),
                    STEPS,
                );
                for lane in 0..LANES.min(drawing - first) {
                    let numbers = make(words.map(|words| words[lane]));
                    for (place, number) in places.iter().zip(numbers).take(used) {
                        if let Some(into) = into.get_mut(place + (first + lane) * neighbours) {
                            *into = number;
                        }
                    }
                }
            }
        }
    }
}

/// Fills `count` elements with numbers that a kernel of PyTorch draws. `numbers` is an index of
/// [`Numbers::ALL`].
///
/// # Safety
/// There are `count` elements of the type of the numbers, aligned, and nothing else uses them
/// meanwhile.
#[unsafe(no_mangle)]
unsafe extern "C" fn harness_values_random(
    numbers: usize,
    neighbours: usize,
    threads: usize,
    seed: u64,
    offset: u64,
    into: *mut c_void,
    count: usize,
) {
    if count == 0 {
        return;
    }
    let draw = Draw {
        neighbours,
        threads,
        seed,
        offset,
    };
    // SAFETY: as the caller promises.
    unsafe {
        match Numbers::ALL[numbers] {
            Numbers::Uniform => draw.fill(elements(into, count), |words| words.map(uniform)),
            Numbers::UniformDouble => draw.fill(elements(into, count), uniform_doubles),
            Numbers::Normal => draw.fill(elements(into, count), normal),
            Numbers::NormalDouble => draw.fill(elements(into, count), normal_double),
        }
    }
}

/// # Safety
/// As for [`harness_values_random`].
const unsafe fn elements<'a, T>(into: *mut c_void, count: usize) -> &'a mut [T] {
    // SAFETY: as the caller promises.
    unsafe { std::slice::from_raw_parts_mut(into.cast(), count) }
}

/// The bytes by which FlashAttention drops the scores of `rows` × `columns` of one head. Each of
/// 32 threads draws 16 bytes for a tile of 16 × 32 scores.
fn flash_bytes(seed: u64, offset: u64, [rows, columns]: [usize; 2], into: &mut [u8]) {
    for first_row in (0..rows).step_by(16) {
        for first_column in (0..columns).step_by(32) {
            let tile = (first_row / 16) as u64 | ((first_column / 32) as u64) << 32;
            for thread in 0..32 {
                let words = philox(seed, [(tile, offset + thread as u64)], FLASH_STEPS)
                    .map(|[word]| word.to_le_bytes());
                for (index, &byte) in words.as_flattened().iter().enumerate() {
                    let (row, column) = (
                        thread / 4 + index / 2 % 2 * 8,
                        index / 4 * 8 + thread % 4 * 2 + index % 2,
                    );
                    let (row, column) = (first_row + row, first_column + column);
                    if row < rows && column < columns {
                        into[row * columns + column] = byte;
                    }
                }
            }
        }
    }
}

/// Writes the bytes by which FlashAttention drops scores: `heads` of all sequences × `rows` ×
/// `columns`.
///
/// # Safety
/// The memory may be written, and nothing else uses it meanwhile.
#[unsafe(no_mangle)]
unsafe extern "C" fn harness_values_flash(
    seed: u64,
    offset: u64,
    heads: usize,
    rows: usize,
    columns: usize,
    into: *mut u8,
) {
    if heads * rows * columns == 0 {
        return;
    }
    // SAFETY: as the caller promises.
    let into = unsafe { std::slice::from_raw_parts_mut(into, heads * rows * columns) };
    for (head, into) in into.chunks_exact_mut(rows * columns).enumerate() {
        flash_bytes(seed, offset + 32 * head as u64, [rows, columns], into);
    }
}

#[cfg(test)]
mod tests {
    use super::{Draw, flash_bytes, normal, uniform};

    /// Threads that an H200 runs at once.
    const H200: usize = 132 * 2048;

    #[test]
    fn kernels_store_the_numbers_of_an_h200() {
        let draw = Draw {
            neighbours: 1,
            threads: H200,
            seed: 1234,
            offset: 0,
        };
        let mut numbers = vec![0.0; 3_000_001];
        draw.fill(&mut numbers, |words| words.map(uniform));
        assert_eq!(
            [0, 255, 1_108_024, 2_233_024].map(|place| numbers[place]),
            [0.127_207_95, 0.210_613_52, 0.432_657_8, 0.554_577_3]
        );
        draw.fill(&mut numbers, normal);
        let close = |place: usize, number: f32| (numbers[place] - number).abs() < 1e-5;
        assert!(close(0, -1.616_490_5) && close(255, -1.760_372_9));
    }

    #[test]
    fn dropout_keeps_the_elements_that_an_h200_keeps() {
        let kept = |neighbours, count: usize| {
            let mut numbers = vec![0.0; count];
            Draw {
                neighbours,
                threads: count.min(H200),
                seed: 1234,
                offset: 0,
            }
            .fill(&mut numbers, |words| words.map(uniform));
            move |place: usize| numbers[place] < 0.5
        };
        let pattern = |kept: &dyn Fn(usize) -> bool, first: usize, step: usize| {
            (0..24_usize)
                .map(|index| if kept(first + index * step) { '1' } else { '0' })
                .collect::<String>()
        };
        assert_eq!(pattern(&kept(4, 4096), 0, 1), "101001010011000110100000");
        assert_eq!(pattern(&kept(8, 4096), 0, 1), "101001010101111000111001");
        assert_eq!(
            pattern(&kept(2, 4 * H200), 541_024, 270),
            "010011110001010000111111"
        );
    }

    #[test]
    fn flash_attention_keeps_the_scores_that_an_h200_keeps() {
        let mut bytes = [0; 64 * 64];
        flash_bytes(1234, 0, [64, 64], &mut bytes);
        let kept: String = bytes[..32]
            .iter()
            .map(|&byte| if byte <= 178 { '1' } else { '0' })
            .collect();
        assert_eq!(kept, "11111011111111000111110111011110");
    }
}
