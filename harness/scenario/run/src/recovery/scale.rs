//! `scale_batch`: the search of Lightning 2.6.6 for a batch that fits (`batch_size_scaling.py`).

use harness_scenario::{SCALE_LIMIT, ScaleMode};

/// Iterations with a batch before it counts as fitting.
const STEPS: u32 = 3;
/// The most batches that `power` tries, and that may fit with `binsearch`.
const TRIALS: u32 = 25;
/// The batch for which the finder takes the first one.
const FIRST: u64 = 2;

/// The state of a search.
#[derive(Clone, Copy, Debug)]
pub(super) struct Scale {
    mode: ScaleMode,
    /// The batch that it tries. Of the first one it knows only [`FIRST`].
    batch: u64,
    /// The largest batch that worked, or 1.
    low: u64,
    high: Option<u64>,
    steps: u32,
    trials: u32,
    has_worked: bool,
    is_done: bool,
}

impl Scale {
    pub(super) const fn new(mode: ScaleMode) -> Self {
        Self {
            mode,
            batch: FIRST,
            low: 1,
            high: None,
            steps: 0,
            trials: 0,
            has_worked: false,
            is_done: false,
        }
    }

    /// Notes an iteration that worked. Returns the batch of the next one, unless it stays the same.
    pub(super) fn worked(&mut self) -> Option<u64> {
        self.steps += 1;
        if self.is_done || self.steps < STEPS {
            return None;
        }
        (self.steps, self.has_worked, self.low) = (0, true, self.batch);
        self.trials += 1;
        match self.high {
            _ if self.trials >= TRIALS => Some(self.end()),
            Some(high) if high - self.low <= 1 => Some(self.end()),
            Some(high) => {
                self.batch = u64::midpoint(high, self.low);
                Some(self.batch)
            }
            None => {
                self.batch = (2 * self.batch).min(SCALE_LIMIT);
                Some(if self.batch == SCALE_LIMIT {
                    self.end()
                } else {
                    self.batch
                })
            }
        }
    }

    /// Notes an iteration that failed. Returns the next batch; `None`: the search is over, or no
    /// batch fits.
    pub(super) fn failed(&mut self) -> Option<u64> {
        if self.is_done {
            return None;
        }
        self.steps = 0;
        match self.mode {
            ScaleMode::Power => {
                self.trials += 1;
                self.batch /= 2;
                self.is_done = self.has_worked || self.trials >= TRIALS || self.batch == 0;
                (self.batch > 0).then_some(self.batch)
            }
            ScaleMode::Binsearch => {
                let high = self.batch;
                self.high = Some(high);
                self.batch = u64::midpoint(high, self.low);
                Some(if high - self.low <= 1 {
                    self.end()
                } else {
                    self.batch
                })
            }
        }
    }

    fn end(&mut self) -> u64 {
        self.is_done = true;
        if self.mode == ScaleMode::Binsearch {
            self.batch = (self.batch * 95 / 100).max(1);
        }
        self.batch
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The batches that a search tries and its result, if batches up to `fits` fit.
    fn search(mode: ScaleMode, first: u64, fits: u64) -> (Vec<u64>, u64) {
        let (mut scale, mut batch, mut tried) = (Scale::new(mode), first, vec![first]);
        while !scale.is_done {
            let next = if batch > fits {
                scale.failed()
            } else {
                scale.worked()
            };
            if let Some(next) = next.filter(|_| !scale.is_done) {
                tried.push(next);
            }
            batch = next.unwrap_or(batch);
        }
        (tried, scale.batch)
    }

    /// Recorded with pytorch-lightning 2.6.6: the length of each batch of a model whose training
    /// step raises an error above a batch.
    #[test]
    fn the_search_tries_the_batches_that_lightning_tries() {
        use ScaleMode::{Binsearch, Power};
        let doubled = |from: u64, to: u64| {
            std::iter::successors(Some(from), |batch| Some(2 * batch))
                .take_while(move |batch| *batch <= to)
        };
        let searched: &[u64] = &[96, 112, 104, 100, 102, 101];
        for (mode, first, fits, then, more, found) in [
            (Power, 64, 100, doubled(4, 128), &[][..], 64),
            (Power, 2, 100, doubled(4, 128), &[], 64),
            (Power, 64, 32, doubled(1, 64), &[], 32),
            (Power, 300, 100, doubled(1, 128), &[], 64),
            (Power, 2, 1_000_000, doubled(4, 4096), &[], 8192),
            (Binsearch, 2, 100, doubled(4, 128), searched, 95),
            (Binsearch, 64, 100, doubled(4, 128), searched, 95),
            (Binsearch, 64, 32, doubled(1, 0), &[], 1),
            (Binsearch, 2, 1, doubled(1, 0), &[], 1),
            (Binsearch, 2, 5000, doubled(4, 4096), &[], 7782),
        ] {
            let tried: Vec<u64> = [first]
                .into_iter()
                .chain(then)
                .chain(more.iter().copied())
                .collect();
            assert_eq!(
                search(mode, first, fits),
                (tried, found),
                "{mode} from {first}, up to {fits} fit"
            );
        }
    }
}
