//! Durations of one kind of operation, in bounded memory.

use harness_allocator::units::Nanos;
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

use harness_record::Samples;

/// Enough for a p99 that rests on a hundred samples.
const MOST: usize = 10_000;

/// Keeps all samples up to a bound, then a uniform selection (Vitter's algorithm R,
/// <https://doi.org/10.1145/3147.3165>).
#[derive(Clone, Debug)]
pub(super) struct Reservoir {
    samples: Samples,
    rng: ChaCha8Rng,
}

impl Reservoir {
    pub(super) fn new(seed: u64) -> Self {
        Self { samples: Samples::default(), rng: ChaCha8Rng::seed_from_u64(seed) }
    }

    pub(super) fn push(&mut self, duration: Nanos) {
        self.samples.count += 1;
        if self.samples.kept.len() < MOST {
            self.samples.kept.push(duration);
            return;
        }
        let index = self.rng.random_range(0..self.samples.count);
        if let Some(slot) = self.samples.kept.get_mut(index as usize) {
            *slot = duration;
        }
    }

    pub(super) fn into_samples(self) -> Samples {
        self.samples
    }
}
