//! Inference as a pattern of allocations: requests come, their caches of keys and values grow with every word, and are given up at the end, or before it
//! where memory runs out.

use std::collections::VecDeque;

use harness_allocator::allocator::AllocatorError;
use harness_allocator::device::StreamId;
use harness_allocator::units::Bytes;
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

use super::train::pass::{Failed, free_all, make};
use super::{Between, pause};
use crate::rig::{Buffer, Stop};
use crate::world::{StepResult, Unmet, World};
use harness_record::{Outcome, Shortage};
use harness_scenario::steps::infer::{Cache, Infer, OnExhaustion};
use harness_scenario::{Expected, ReportKey, Step};

#[derive(Clone, Copy, Debug)]
struct Sequence {
    /// The step of decoding in which it comes.
    arrives: u64,
    /// Words that are there: those of the prompt, and of the answer so far.
    words: u64,
    /// Words that are still to be made.
    left: u64,
}

/// A request that is served, and its cache.
#[derive(Debug)]
struct Running {
    sequence: Sequence,
    /// For a growing cache the keys and the values of each layer, else pages.
    cache: Vec<Buffer>,
}

#[derive(Default)]
struct Tally {
    served: u64,
    evicted: u64,
    peak_running: u64,
    recomputed: u64,
    ooms: u64,
    shortage: Option<Shortage>,
}

struct Serving<'a> {
    infer: &'a Infer,
    stream: StreamId,
    /// In the order of arrival; those that gave up their cache in front.
    waiting: VecDeque<Sequence>,
    /// In the order in which they were begun.
    running: Vec<Running>,
    tally: Tally,
}

/// Serves all requests, with something else after each step of decoding.
pub(crate) fn run(world: &mut World, step: &Step, infer: &Infer, mut between: Between<'_>) -> Result<StepResult, Stop> {
    world.rig.name_buffers(&infer.id, step.position.line);
    let stream = world.stream(&infer.stream);
    let mut serving = Serving { infer, stream, waiting: arrivals(world.seed, infer), running: Vec::new(), tally: Tally::default() };
    let mut now = 0;
    let mut failed = None;
    while failed.is_none() && !(serving.waiting.is_empty() && serving.running.is_empty()) {
        failed = serving.decode(world, now)?;
        now += 1;
        pause(&mut between, world)?;
    }
    for running in serving.running {
        free_all(world, running.cache)?;
    }
    Ok(conclude(&world.arm, world.device, step, infer, serving.tally, failed))
}

/// The requests, drawn from the seed: each `infer` of a scenario draws from a sequence of its own.
fn arrivals(seed: u64, infer: &Infer) -> VecDeque<Sequence> {
    let mut rng = ChaCha8Rng::seed_from_u64(seed.wrapping_add(infer.id.index() as u64));
    let mut arrives = 0;
    let mut next = || {
        let sequence = Sequence { arrives, words: rng.random_range(infer.prompt.clone()), left: rng.random_range(infer.output.clone()) };
        arrives += rng.random_range(infer.gap.clone());
        sequence
    };
    (0..infer.requests).map(|_| next()).collect()
}

impl Serving<'_> {
    /// One step: requests are begun as far as there is room, then each running one gets a word. Returns the error that ends serving, if one does.
    fn decode(&mut self, world: &mut World, now: u64) -> Result<Option<AllocatorError>, Stop> {
        let mut progress = self.waiting.front().is_some_and(|next| next.arrives > now);
        let mut refused = None;
        while (self.running.len() as u64) < self.infer.max_running
            && let Some(next) = self.waiting.front().copied().filter(|next| next.arrives <= now)
        {
            match self.begin(world, next)? {
                Ok(()) => progress = true,
                Err(error) => {
                    refused = Some(error);
                    break;
                }
            }
        }
        self.tally.peak_running = self.tally.peak_running.max(self.running.len() as u64);
        let mut index = 0;
        while index < self.running.len() {
            match self.grow(world, index)? {
                Ok(()) => progress = true,
                Err(error) => match self.infer.on_exhaustion {
                    OnExhaustion::Fail => return Ok(Some(error)),
                    OnExhaustion::Wait => refused = Some(error),
                    OnExhaustion::Evict if self.running.len() == 1 => return Ok(Some(error)),
                    OnExhaustion::Evict => {
                        self.evict(world)?;
                        progress = true;
                        // The same request tries again, if it was not the one to go.
                        continue;
                    }
                },
            }
            index += 1;
        }
        self.end_those_done(world)?;
        let fails = self.infer.on_exhaustion == OnExhaustion::Fail || !progress;
        Ok(refused.filter(|_| fails))
    }

    /// Begins the request in front: makes its cache.
    fn begin(&mut self, world: &mut World, sequence: Sequence) -> Result<Result<(), AllocatorError>, Stop> {
        let (count, size) = match self.infer.cache {
            Cache::Growing => (2 * self.infer.layers, self.of_words(sequence.words)),
            Cache::Paged(words) => (sequence.words.div_ceil(words), self.page(words)),
        };
        let mut cache = Vec::new();
        let made = (0..count).try_for_each(|_| make(world, size, self.stream).map(|buffer| cache.push(buffer)));
        match self.answer(made)? {
            Ok(()) => {
                self.waiting.pop_front();
                self.running.push(Running { sequence, cache });
                Ok(Ok(()))
            }
            Err(error) => {
                free_all(world, cache)?;
                Ok(Err(error))
            }
        }
    }

    /// Makes room for one more word. What was made of it stays where there is no memory for the rest.
    fn grow(&mut self, world: &mut World, index: usize) -> Result<Result<(), AllocatorError>, Stop> {
        let words = self.running[index].sequence.words + 1;
        let done = match self.infer.cache {
            Cache::Paged(page) if self.running[index].cache.len() as u64 * page >= words => Ok(()),
            Cache::Paged(page) => {
                let size = self.page(page);
                make(world, size, self.stream).map(|buffer| self.running[index].cache.push(buffer))
            }
            Cache::Growing => self.copy_to_larger(world, index, words),
        };
        let answer = self.answer(done)?;
        if answer.is_ok() {
            let sequence = &mut self.running[index].sequence;
            sequence.words += 1;
            sequence.left -= 1;
        }
        Ok(answer)
    }

    /// Each layer's keys, then values: a larger buffer is made, the old one read and freed. One that was grown before memory ran out is large enough.
    fn copy_to_larger(&mut self, world: &mut World, index: usize, words: u64) -> Result<(), Failed> {
        let size = self.of_words(words);
        for place in 0..self.running[index].cache.len() {
            if self.running[index].cache[place].requested() < size {
                let larger = make(world, size, self.stream)?;
                let old = std::mem::replace(&mut self.running[index].cache[place], larger);
                world.rig.verify(&old, self.stream)?;
                world.rig.free(old)?;
            }
        }
        Ok(())
    }

    /// The request that was begun last gives its cache up, and is the next to be begun.
    fn evict(&mut self, world: &mut World) -> Result<(), Stop> {
        if let Some(Running { sequence, cache }) = self.running.pop() {
            free_all(world, cache)?;
            self.tally.evicted += 1;
            self.tally.recomputed += sequence.words;
            self.waiting.push_front(sequence);
        }
        Ok(())
    }

    fn end_those_done(&mut self, world: &mut World) -> Result<(), Stop> {
        let (done, running) = std::mem::take(&mut self.running).into_iter().partition(|running| running.sequence.left == 0);
        self.running = running;
        for Running { cache, .. } in done {
            self.tally.served += 1;
            free_all(world, cache)?;
        }
        Ok(())
    }

    /// Keys, or values, of so many words in one layer.
    fn of_words(&self, words: u64) -> Bytes {
        Bytes(self.infer.word.0.saturating_mul(words))
    }

    fn page(&self, words: u64) -> Bytes {
        Bytes(self.of_words(words).0.saturating_mul(2 * self.infer.layers))
    }

    /// Takes a failure for lack of memory as data.
    fn answer<T>(&mut self, done: Result<T, Failed>) -> Result<Result<T, AllocatorError>, Stop> {
        match done {
            Ok(value) => Ok(Ok(value)),
            Err(Failed::Stop(stop)) => Err(stop),
            Err(Failed::OutOfMemory(error, shortage)) => {
                self.tally.ooms += 1;
                self.tally.shortage = shortage.map(|shortage| *shortage);
                Ok(Err(error))
            }
        }
    }
}

fn conclude(
    arm: &str,
    device: harness_scenario::DeviceKind,
    step: &Step,
    infer: &Infer,
    tally: Tally,
    failed: Option<AllocatorError>,
) -> StepResult {
    let mut result = StepResult::default();
    result.reports.extend([
        (ReportKey::Served, tally.served),
        (ReportKey::Evicted, tally.evicted),
        (ReportKey::PeakRunning, tally.peak_running),
        (ReportKey::RecomputedWords, tally.recomputed),
        (ReportKey::Ooms, tally.ooms),
    ]);
    let served = format!("{} of {} requests served", tally.served, infer.requests);
    match (failed, infer.expect.of(arm, device)) {
        (None, expected) => {
            if let Expected::Oom(_) = expected {
                result.unmet.push(Unmet::at(step, "serving to run out of memory", served));
            }
        }
        (Some(error), expected) => {
            result.outcome = Outcome::OutOfMemory;
            result.shortage = tally.shortage;
            result.notes.push(format!("{served}, then {error}"));
            match expected {
                Expected::Fits => result.unmet.push(Unmet::at(step, "every request to be served", format!("{served}, then {error}"))),
                Expected::Oom(Some(cause)) => result.unmet.extend(Unmet::other_cause(step, cause, result.shortage.as_ref())),
                Expected::Oom(None) | Expected::Any => {}
            }
        }
    }
    result
}
