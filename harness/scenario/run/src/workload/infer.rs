//! Inference as a pattern of allocations.

use std::collections::VecDeque;

use harness_allocator::allocator::{AllocatorError, Request};
use harness_allocator::{device::StreamId, units::Bytes};
use harness_base::words::count;
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

use crate::between::{Between, pause};
use crate::context::RunContext;
use crate::context::requests::{Requests, Running, Sequence};
use crate::recovery::{AttemptKind, Recovery};
use crate::rig::{Buffer, Stop};
use crate::step_result::StepResult;
use crate::workload::memory::{Failed, answer, answered, free_all, make};
use harness_record::FailedRequest;
use harness_scenario::steps::infer::{Cache, Infer};
use harness_scenario::{AttemptPlan, Chain, ReportKey, Step};

#[derive(Default)]
struct Counts {
    served: u64,
    evicted: u64,
    peak_running: u64,
    recomputed: u64,
    ooms: u64,
    failed_request: Option<FailedRequest>,
}

struct Serving<'a> {
    infer: &'a Infer,
    stream: StreamId,
    /// In the order of arrival, with evicted requests first.
    waiting: VecDeque<Sequence>,
    requests: Requests,
    recovery: Recovery<'a>,
    counts: Counts,
}

pub(crate) fn run(
    ctx: &mut RunContext,
    step: &Step,
    infer: &Infer,
    mut between: Between<'_>,
) -> Result<StepResult, Stop> {
    ctx.rig.name_buffers(&infer.id, step.position.line);
    let (stream, waiting) = (ctx.stream(&infer.stream), arrivals(ctx.setup.seed, infer));
    let recovery = Recovery::new(infer.on_oom.as_ref());
    let mut serving = Serving {
        infer,
        stream,
        waiting,
        requests: Requests::default(),
        recovery,
        counts: Counts::default(),
    };
    let mut now = 0;
    let mut failed = None;
    while failed.is_none() && !(serving.waiting.is_empty() && serving.requests.running.is_empty()) {
        failed = serving.decode(ctx, now)?;
        now += 1;
        pause(&mut between, ctx)?;
    }
    for running in serving.requests.running.into_values() {
        free_all(ctx, running.cache)?;
    }
    let mut result = conclude(ctx, step, infer, serving.counts, failed);
    result.recovery = serving.recovery.into_record(ctx);
    Ok(result)
}

/// Draws the requests. Each `infer` of a scenario has its own random sequence.
fn arrivals(seed: u64, infer: &Infer) -> VecDeque<Sequence> {
    let mut rng = ChaCha8Rng::seed_from_u64(seed.wrapping_add(infer.id.index() as u64));
    let mut arrives = 0;
    let next = |number| {
        let sequence = Sequence {
            number,
            arrives,
            words: rng.random_range(infer.prompt.clone()),
            left: rng.random_range(infer.output.clone()),
        };
        arrives += rng.random_range(infer.gap.clone());
        sequence
    };
    (1..=infer.requests).map(next).collect()
}

impl Serving<'_> {
    /// Runs one decoding step: begins requests while there is room, then adds a token to each
    /// running one.
    fn decode(&mut self, ctx: &mut RunContext, now: u64) -> Result<Option<AllocatorError>, Stop> {
        let mut progress = self.waiting.front().is_some_and(|next| next.arrives > now);
        let mut refused = None;
        while (self.requests.running.len() as u64) < self.infer.max_running
            && let Some(next) = self
                .waiting
                .front()
                .copied()
                .filter(|next| next.arrives <= now)
        {
            match self.begin(ctx, next)? {
                Ok(()) => progress = true,
                Err(error) => {
                    refused = Some(error);
                    break;
                }
            }
        }
        self.counts.peak_running = self
            .counts
            .peak_running
            .max(self.requests.running.len() as u64);
        let numbers: Vec<u64> = self.requests.running.keys().copied().collect();
        for number in numbers {
            // An earlier request may have evicted this one.
            if !self.requests.running.contains_key(&number) {
                continue;
            }
            match self.grow(ctx, number)? {
                Ok(()) => progress = true,
                Err(error) if self.infer.waits => refused = Some(error),
                Err(error) => return Ok(Some(error)),
            }
        }
        for (_, Running { cache, .. }) in self
            .requests
            .running
            .extract_if(.., |_, running| running.sequence.left == 0)
        {
            self.counts.served += 1;
            free_all(ctx, cache)?;
        }
        let can_wait = self.infer.waits || self.evicts_requests();
        Ok(refused.filter(|_| !can_wait || !progress))
    }

    fn evicts_requests(&self) -> bool {
        self.infer
            .on_oom
            .as_ref()
            .is_some_and(Chain::evicts_requests)
    }

    /// Begins the next request and allocates its cache. A new request waits instead of evicting
    /// others.
    fn begin(
        &mut self,
        ctx: &mut RunContext,
        sequence: Sequence,
    ) -> Result<Result<(), AllocatorError>, Stop> {
        let (count, size) = match self.infer.cache {
            Cache::Growing => (2 * self.infer.layers, self.of_words(sequence.words)),
            Cache::Paged(words) => (sequence.words.div_ceil(words), self.page(words)),
        };
        let recovers = self.requests.running.is_empty() || !self.evicts_requests();
        let mut cache = Vec::new();
        let made = (0..count).try_for_each(|_| {
            let made = if recovers {
                self.make(ctx, size, sequence.number)
            } else {
                make(ctx, size, self.stream)
            };
            made.map(|buffer| cache.push(buffer))
        });
        match self.answer(made)? {
            Ok(()) => {
                self.waiting.pop_front();
                self.requests.begin(sequence, cache);
                Ok(Ok(()))
            }
            Err(error) => {
                free_all(ctx, cache)?;
                Ok(Err(error))
            }
        }
    }

    fn make(&mut self, ctx: &mut RunContext, size: Bytes, number: u64) -> Result<Buffer, Failed> {
        let request = Request {
            size,
            stream: self.stream,
        };
        self.requests.trying = Some(number);
        ctx.requests = std::mem::take(&mut self.requests);
        let recovered = self.recovery.run(
            ctx,
            AttemptKind::Request(size),
            AttemptPlan::of_batch(1),
            &mut None,
            |ctx, _| ctx.rig.allocate(request),
        );
        self.requests = std::mem::take(&mut ctx.requests);
        self.counts.evicted += self.requests.evicted.len() as u64;
        self.counts.recomputed += self
            .requests
            .evicted
            .iter()
            .map(|sequence| sequence.words)
            .sum::<u64>();
        self.requests
            .evicted
            .drain(..)
            .for_each(|sequence| self.waiting.push_front(sequence));
        let mut buffer = answered(ctx, request, recovered?.answer)?;
        ctx.rig.fill(&mut buffer, self.stream)?;
        Ok(buffer)
    }

    /// Makes room for one more token. If memory runs out midway, the buffers made so far are kept.
    fn grow(
        &mut self,
        ctx: &mut RunContext,
        number: u64,
    ) -> Result<Result<(), AllocatorError>, Stop> {
        let words = self.requests.running[&number].sequence.words + 1;
        let held = self.cache(number).len() as u64;
        let done = match self.infer.cache {
            Cache::Paged(page) if held * page >= words => Ok(()),
            Cache::Paged(page) => self
                .make(ctx, self.page(page), number)
                .map(|buffer| self.cache(number).push(buffer)),
            Cache::Growing => self.copy_to_larger(ctx, number, words),
        };
        let answer = self.answer(done)?;
        if answer.is_ok() {
            self.requests.grown(number);
        }
        Ok(answer)
    }

    fn cache(&mut self, number: u64) -> &mut Vec<Buffer> {
        &mut self
            .requests
            .running
            .get_mut(&number)
            .expect("an allocating request keeps its cache")
            .cache
    }

    /// Grows the keys and values of each layer: allocates a larger buffer, then reads and frees the
    /// old one.
    fn copy_to_larger(
        &mut self,
        ctx: &mut RunContext,
        number: u64,
        words: u64,
    ) -> Result<(), Failed> {
        let size = self.of_words(words);
        for place in 0..self.cache(number).len() {
            if self.cache(number)[place].requested() < size {
                let larger = self.make(ctx, size, number)?;
                let old = std::mem::replace(&mut self.cache(number)[place], larger);
                ctx.rig.verify(&old, self.stream)?;
                ctx.rig.free(old)?;
            }
        }
        Ok(())
    }

    /// The size of the keys, or of the values, of this many tokens in one layer.
    fn of_words(&self, words: u64) -> Bytes {
        Bytes(self.infer.token.0.saturating_mul(words))
    }

    fn page(&self, words: u64) -> Bytes {
        Bytes(self.of_words(words).0.saturating_mul(2 * self.infer.layers))
    }

    fn answer<T>(&mut self, done: Result<T, Failed>) -> Result<Result<T, AllocatorError>, Stop> {
        answer(done, &mut self.counts.ooms, &mut self.counts.failed_request)
    }
}

fn conclude(
    ctx: &RunContext,
    step: &Step,
    infer: &Infer,
    counts: Counts,
    failed: Option<AllocatorError>,
) -> StepResult {
    let mut result = StepResult::default();
    result.reports.extend([
        (ReportKey::Served, counts.served),
        (ReportKey::Evicted, counts.evicted),
        (ReportKey::PeakRunning, counts.peak_running),
        (ReportKey::RecomputedTokens, counts.recomputed),
        (ReportKey::Ooms, counts.ooms),
    ]);
    let served = format!(
        "{} of {} served",
        counts.served,
        count(infer.requests, "request")
    );
    let wanted = ["serving to run out of memory", "every request to be served"];
    result.ends(
        step,
        infer.expect.of(&ctx.setup.arm, ctx.setup.device),
        wanted,
        served,
        failed.map(|error| (error, counts.failed_request)),
    );
    result
}
