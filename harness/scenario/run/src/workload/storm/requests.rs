use harness_allocator::{allocator::Request, device::StreamId, units::Bytes};
use rand::{Rng, SeedableRng, seq::IndexedRandom};
use rand_chacha::ChaCha8Rng;

use crate::context::RunContext;
use crate::context::live_blocks::{Block, LiveBlocks};
use harness_scenario::steps::storm::{Distribution, FreeOrder, Storm, StormSizes};

pub(super) enum Operation<B> {
    Free(B),
    /// A request, and the number of operations until its block is due.
    Allocate(Request, u64),
}

pub(super) struct Requests<'a> {
    rng: ChaCha8Rng,
    storm: &'a Storm,
    streams: Vec<StreamId>,
    /// For a LIFO storm: the current run of requests or frees.
    row: Row,
}

/// A run of consecutive requests or frees.
struct Row {
    frees: bool,
    left: u64,
}

impl<'a> Requests<'a> {
    /// Each storm of a scenario, and each thread of a storm, has its own random sequence.
    pub(super) fn new(ctx: &RunContext, storm: &'a Storm, thread: u64) -> Self {
        let mut rng =
            ChaCha8Rng::seed_from_u64(ctx.setup.seed.wrapping_add(storm.id.index() as u64));
        rng.set_stream(thread);
        Self {
            rng,
            storm,
            streams: storm
                .streams
                .iter()
                .map(|stream| ctx.stream(stream))
                .collect(),
            row: Row {
                frees: true,
                left: 0,
            },
        }
    }

    /// Frees a block that is due.
    pub(super) fn next_operation<B: Block>(
        &mut self,
        live: &mut LiveBlocks<B>,
        now: u64,
    ) -> Operation<B> {
        let by = self.frees_what_is_due_by(now, live.count());
        if let Some(due) = by.and_then(|by| live.take_due(by)) {
            return Operation::Free(due);
        }
        let (request, lifetime) = self.next();
        if live
            .bytes()
            .checked_add(request.size.0)
            .is_none_or(|bytes| bytes > self.storm.live.0)
            && let Some(next_due) = live.take_due(u64::MAX)
        {
            self.row = Row {
                frees: true,
                left: live.count(),
            };
            return Operation::Free(next_due);
        }
        Operation::Allocate(request, lifetime)
    }

    fn next(&mut self) -> (Request, u64) {
        let size = draw_size(&mut self.rng, &self.storm.sizes);
        let stream = *self
            .streams
            .choose(&mut self.rng)
            .unwrap_or(&StreamId::DEFAULT);
        (Request { size, stream }, self.lifetime())
    }

    fn lifetime(&mut self) -> u64 {
        let (shortest, longest) = self.storm.lifetime;
        match self.storm.order {
            FreeOrder::Random | FreeOrder::Lifo => self.rng.random_range(shortest..=longest),
            FreeOrder::Fifo => longest,
            FreeOrder::Generational => {
                let young = shortest + (longest - shortest) / 10;
                if self.rng.random_range(0..10) < 9 {
                    self.rng.random_range(shortest..=young)
                } else {
                    self.rng.random_range(young..=longest)
                }
            }
        }
    }

    /// When a new block is due. In a LIFO storm, newer blocks are due before older ones.
    pub(super) fn due(&self, now: u64, lifetime: u64) -> u64 {
        match self.storm.order {
            FreeOrder::Lifo => u64::MAX - now,
            FreeOrder::Random | FreeOrder::Fifo | FreeOrder::Generational => now + lifetime,
        }
    }

    /// The latest due time of a block that this operation may free; `None` if it may free no block.
    fn frees_what_is_due_by(&mut self, now: u64, live: u64) -> Option<u64> {
        if self.storm.order != FreeOrder::Lifo {
            return Some(now);
        }
        if self.row.left == 0 {
            let frees = !self.row.frees && live > 0;
            self.row = Row {
                frees,
                left: if frees { live } else { self.lifetime() },
            };
        }
        self.row.left -= 1;
        self.row.frees.then_some(u64::MAX)
    }
}

fn draw_size(rng: &mut ChaCha8Rng, sizes: &StormSizes) -> Bytes {
    match sizes {
        StormSizes::Choices(choices) => choices.choose(rng).copied().unwrap_or_default(),
        // Each interval between two powers of two is equally likely, and each size within it. Only
        // integers are used, so all machines draw the same sizes. An interval includes both ends;
        // otherwise a maximum that is a power of two would have its own interval.
        StormSizes::Range {
            min,
            max,
            distribution: Distribution::LogUniform,
        } => {
            let doubling = rng.random_range(min.0.ilog2()..=(max.0 - 1).max(min.0).ilog2());
            let (lowest, highest) = (
                min.0.max(1 << doubling),
                max.0.min((1_u64 << doubling).saturating_mul(2)),
            );
            Bytes(rng.random_range(lowest..=highest))
        }
        StormSizes::Range {
            min,
            max,
            distribution: Distribution::Uniform,
        } => Bytes(rng.random_range(min.0..=max.0)),
        StormSizes::Range {
            min,
            max,
            distribution: Distribution::Bimodal,
        } if rng.random() => Bytes(rng.random_range(min.0..=min.0.saturating_mul(2).min(max.0))),
        StormSizes::Range {
            min,
            max,
            distribution: Distribution::Bimodal,
        } => Bytes(rng.random_range((max.0 / 2).max(min.0)..=max.0)),
        StormSizes::Recorded(sizes) => sizes.choose(rng).copied().unwrap_or_default(),
    }
}

#[cfg(test)]
mod tests;
