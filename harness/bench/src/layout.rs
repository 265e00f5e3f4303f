//! Where a visit finds its heap and its stack: somewhere else each time.
//!
//! Addresses decide what shares a set of a cache or an entry of a predictor. A process has one layout from its start to its end, so that all
//! rounds of a night would be fast or slow by the same chance, and two nights of one build would differ by more than their rounds tell
//! (T. Mytkowicz and others, "Producing Wrong Data Without Doing Anything Obviously Wrong!", 2009, <https://doi.org/10.1145/1508244.1508275>).
//! Drawn anew for each visit, the chance is among the rounds, where statistics see it (C. Curtsinger and E. D. Berger, "STABILIZER:
//! Statistically Sound Performance Evaluation", 2013, <https://doi.org/10.1145/2451116.2451141>).

use std::hint::black_box;

use rand::Rng;
use rand_chacha::ChaCha8Rng;

/// Sizes that the heap keeps lists of its own for: blocks of each are held back, at most so many.
const SIZES: [(usize, usize); 9] = [(24, 8), (40, 8), (72, 8), (136, 8), (264, 8), (520, 8), (1032, 8), (4096, 8), (65_536, 16)];

/// Frames that the stack is deeper by, at most: with their sizes two pages, beyond which addresses repeat in a cache of the first level.
const MOST_FRAMES: u32 = 128;

/// What is held while a visit lasts.
pub(super) struct Layout {
    blocks: Vec<Vec<u8>>,
    frames: u32,
}

impl Layout {
    pub(super) fn drawn(rng: &mut ChaCha8Rng) -> Self {
        let mut blocks = Vec::new();
        for (size, most) in SIZES {
            blocks.extend((0..rng.random_range(0..=most)).map(|_| Vec::with_capacity(size)));
        }
        Self { blocks: black_box(blocks), frames: rng.random_range(0..MOST_FRAMES) }
    }

    pub(super) fn within<R>(self, visit: impl FnOnce() -> R) -> R {
        let result = deeper(self.frames, visit);
        drop(black_box(self.blocks));
        result
    }
}

/// Calls with the stack deeper by so many frames.
#[inline(never)]
fn deeper<R>(frames: u32, call: impl FnOnce() -> R) -> R {
    let frame = black_box([0_u8; 32]);
    let result = if frames == 0 { call() } else { deeper(frames - 1, call) };
    black_box(frame);
    result
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use rand::SeedableRng;

    use super::*;

    #[test]
    fn visits_find_their_stack_and_their_heap_elsewhere() {
        let mut rng = ChaCha8Rng::seed_from_u64(1);
        let places = (0..40).map(|_| {
            let layout = Layout::drawn(&mut rng);
            layout.within(|| {
                let (local, block) = (black_box([0_u8; 8]), black_box(Vec::<u8>::with_capacity(1032)));
                (std::ptr::from_ref(&local).addr(), block.as_ptr().addr())
            })
        });
        let (stack, heap): (BTreeSet<usize>, BTreeSet<usize>) = places.unzip();
        assert!(stack.len() > 20 && heap.len() > 4, "{} places on the stack, {} on the heap", stack.len(), heap.len());
        let room = stack.last().zip(stack.first()).map(|(last, first)| last - first);
        assert!(room.is_some_and(|room| room > 4096), "{room:?}");
    }
}
