//! One rank: its training in its own program, its policies, and its collectives.

use std::collections::BTreeMap;

use harness_allocator::allocator::{AllocatorError, MemoryFraction};
use harness_allocator::stats::MemoryStats;
use harness_allocator::units::{Bytes, Nanos};

use super::matcher::{Collective, Matcher, Purpose};
use super::reducer::{Call, Reducer};
use crate::context::RunContext;
use crate::recovery::{AttemptKind, Attempts, Recovery};
use crate::rig::{Buffer, ProgramId, Stop};
use crate::workload::memory::{Failed, free_all, make};
use crate::workload::train::pass::Pass;
use crate::workload::train::training::{self, Counts, Training};
use harness_scenario::steps::ranks::{Ranks, Reduce};
use harness_scenario::steps::train::Train;
use harness_scenario::{AttemptPlan, ReportKey};

/// The size of the agreement flag: one 64-bit number.
const FLAG: Bytes = Bytes(8);

#[derive(Clone, Debug)]
pub(super) enum End {
    /// All iterations are complete.
    Finished,
    GaveUp(AllocatorError),
    /// DDP refuses another attempt after this failure.
    Refused(AllocatorError),
    /// Another rank gave up, and all agreed to stop.
    Stopped,
}

pub(super) struct Rank<'a> {
    pub(super) number: usize,
    program: ProgramId,
    name: String,
    line: u32,
    reduce: Reduce,
    agrees: bool,
    pub(super) training: Training<'a>,
    pub(super) recovery: Recovery<'a>,
    reducer: Reducer,
    flag: Option<Buffer>,
    pub(super) attempts: Attempts,
    /// The current iteration and its attempt, counted from 1.
    iteration: u64,
    attempt: u64,
    /// True if it retries an iteration that all others have finished, and waits for them there.
    pub(super) is_astray: bool,
    /// Its own time since the ranks last waited for each other.
    pub(super) busy: Nanos,
    /// Its own time in the current attempt.
    in_attempt: Nanos,
    pub(super) totals: RankTotals,
}

pub(super) struct Attempt {
    pass: Pass,
    iteration: training::Begun,
    pub(super) done: Result<(), Failed>,
}

pub(super) enum AttemptResult {
    Succeeded,
    /// It ran out of memory.
    Failed(AllocatorError),
    /// Another rank ran out of memory before any gradient was reduced.
    GivenUp,
}

impl<'a> Rank<'a> {
    pub(super) fn new(
        number: usize,
        program: ProgramId,
        train: &'a Train,
        ranks: &Ranks,
        line: u32,
        ctx: &RunContext,
    ) -> Self {
        let training = Training::new(train, ctx.stream(&train.stream));
        let reducer = Reducer::new(ranks, &training.memory.sizes, &train.model.constants());
        Self {
            number,
            program,
            name: format!("{}, rank {number}", train.id),
            line,
            reduce: ranks.reduce,
            agrees: ranks.sync_batch,
            training,
            recovery: Recovery::new(train.on_oom.as_ref()),
            reducer,
            flag: None,
            attempts: Attempts::new(AttemptKind::Iteration, train.plan.clone()),
            iteration: 0,
            attempt: 0,
            is_astray: false,
            busy: Nanos::ZERO,
            in_attempt: Nanos::ZERO,
            totals: RankTotals {
                limit: ranks.limits[number],
                ..RankTotals::default()
            },
        }
    }

    /// Returns whether it takes part in the next iteration.
    pub(super) const fn is_active(&self) -> bool {
        self.totals.ended.is_none() && !self.is_astray
    }

    /// Calls `act` in the rank's program and measures the time.
    pub(super) fn within<T>(
        &mut self,
        ctx: &mut RunContext,
        act: impl FnOnce(&mut Self, &mut RunContext) -> Result<T, Stop>,
    ) -> Result<T, Stop> {
        ctx.rig.enter(self.program);
        ctx.rig.name_buffers(&self.name, self.line);
        let began = ctx.rig.now();
        let done = act(self, ctx)?;
        // Queued work counts as the rank's own time.
        ctx.rig.synchronize_stream(self.training.memory.stream)?;
        let spent = ctx.rig.now().saturating_sub(began);
        self.busy += spent;
        self.in_attempt += spent;
        Ok(done)
    }

    pub(super) fn call(&mut self, matcher: &mut Matcher, calls: impl IntoIterator<Item = Call>) {
        for (purpose, bytes) in calls {
            self.totals.called += 1;
            matcher.call(
                self.number,
                Collective {
                    purpose,
                    bytes,
                    iteration: self.iteration,
                    attempt: self.attempt,
                },
            );
        }
    }

    pub(super) fn agree(&mut self, matcher: &mut Matcher) {
        self.call(matcher, [(Purpose::Agreement, FLAG)]);
    }

    pub(super) fn build(
        &mut self,
        ctx: &mut RunContext,
        matcher: &mut Matcher,
    ) -> Result<(), Stop> {
        ctx.rig
            .set_memory_fraction(fraction(self.totals.limit, ctx.rig.info().total));
        let mut calls = Vec::new();
        let built = self.training.build(ctx).and_then(|()| {
            self.reducer
                .build(ctx, self.training.memory.stream, &mut calls)
        });
        let built = built.and_then(|()| {
            self.flag = if self.agrees {
                Some(make(ctx, FLAG, self.training.memory.stream)?)
            } else {
                None
            };
            Ok(())
        });
        self.call(matcher, calls);
        if let Err(error) = self.totals.counts.answer(built)? {
            self.end(End::GaveUp(error), matcher);
        }
        Ok(())
    }

    pub(super) fn begin_iteration(&mut self, number: u64, plan: AttemptPlan) {
        (self.iteration, self.attempt) = (number, 0);
        self.attempts = Attempts::new(AttemptKind::Iteration, plan);
    }

    /// Runs an attempt up to the point where the ranks can agree: before any of its gradients is
    /// reduced.
    pub(super) fn first_part(
        &mut self,
        ctx: &mut RunContext,
        length: u64,
        matcher: &mut Matcher,
    ) -> Result<Attempt, Stop> {
        self.attempt += 1;
        self.in_attempt = Nanos::ZERO;
        self.recovery.begin(ctx, &mut self.attempts)?;
        self.call(matcher, self.reducer.opening());
        let prepared = self
            .reducer
            .before_forward(ctx, self.training.memory.stream);
        let iteration = self.training.begin(ctx);
        let plan = &self.attempts.plan;
        let mut pass = self.training.new_pass(plan, plan.parts() - 1, length);
        let done = prepared.and_then(|()| self.forward(ctx, &mut pass, length));
        Ok(Attempt {
            pass,
            iteration,
            done,
        })
    }

    fn forward(
        &mut self,
        ctx: &mut RunContext,
        last: &mut Pass,
        length: u64,
    ) -> Result<(), Failed> {
        for part in 0..self.attempts.plan.parts() - 1 {
            self.training.pass(ctx, &self.attempts.plan, part, length)?;
        }
        self.training.memory.arrived.clear();
        last.forward_pass(ctx, &mut self.training.memory)?;
        match self.reduce {
            Reduce::AfterBackward => last.backward_pass(ctx, &mut self.training.memory),
            Reduce::Ddp | Reduce::Hooks => Ok(()),
        }
    }

    /// Runs the rest of an attempt unless the ranks give it up. After a failure, everything it made
    /// is freed.
    pub(super) fn second_part(
        &mut self,
        ctx: &mut RunContext,
        one: Attempt,
        give_up: bool,
        matcher: &mut Matcher,
    ) -> Result<AttemptResult, Stop> {
        let Attempt {
            mut pass,
            iteration,
            mut done,
        } = one;
        let gives_up = give_up && done.is_ok();
        let goes_on = !give_up && done.is_ok();
        if goes_on {
            if matches!(self.reduce, Reduce::Ddp | Reduce::Hooks) {
                done = pass.backward_pass(ctx, &mut self.training.memory);
            }
            let calls = self.reducer.in_backward(
                &pass.program,
                &self.training.memory.arrived,
                done.is_ok(),
            );
            self.call(matcher, calls);
        }
        let completed = goes_on && done.is_ok();
        self.training.end_pass(ctx, pass, completed)?;
        if completed {
            done = self.training.update(ctx);
        }
        let answer = self.totals.counts.answer(done)?;
        self.training.end(
            ctx,
            iteration,
            gives_up || answer.is_err(),
            &mut self.totals.counts,
        )?;
        Ok(match answer {
            Ok(()) if gives_up => AttemptResult::GivenUp,
            Ok(()) => AttemptResult::Succeeded,
            Err(error) => AttemptResult::Failed(error),
        })
    }

    pub(super) fn succeeded(&mut self, ctx: &mut RunContext) -> Result<AttemptPlan, Stop> {
        self.attempts.took(ctx, self.in_attempt);
        self.totals.effective_batch = self.attempts.plan.batch;
        self.totals.counts.iterations += 1;
        self.totals.counts.samples += self.attempts.plan.batch;
        self.recovery.succeeded(ctx, &self.attempts)
    }

    pub(super) fn gave_up_attempt(&mut self, ctx: &mut RunContext, goes_on: bool) {
        self.attempts.took(ctx, self.in_attempt);
        self.recovery.given_up(ctx, &mut self.attempts, goes_on);
    }

    /// Handles a failed attempt. Returns whether there is another one.
    pub(super) fn failed(
        &mut self,
        ctx: &mut RunContext,
        error: &AllocatorError,
        matcher: &mut Matcher,
    ) -> Result<bool, Stop> {
        self.attempts.took(ctx, self.in_attempt);
        let again = self
            .recovery
            .failed(ctx, &mut self.attempts, error, &mut None)?;
        match (again, self.reducer.refuses()) {
            (false, _) => self.end(End::GaveUp(error.clone()), matcher),
            (true, true) => self.end(End::Refused(error.clone()), matcher),
            (true, false) => return Ok(true),
        }
        Ok(false)
    }

    /// Retries an iteration that the others have finished or are in. Only its first collectives
    /// matter: it gets no further.
    pub(super) fn go_astray(&mut self, matcher: &mut Matcher) {
        self.is_astray = true;
        self.attempt += 1;
        self.call(matcher, self.reducer.opening());
        self.agree(matcher);
    }

    pub(super) fn end(&mut self, end: End, matcher: &mut Matcher) {
        let at = format!(
            "in attempt {} of iteration {}",
            self.attempt, self.iteration
        );
        let why = match &end {
            End::Finished => "completed all its iterations".to_owned(),
            End::GaveUp(error) if self.iteration == 0 => {
                format!("gave up before the first iteration: {error}")
            }
            End::GaveUp(error) => format!("gave up {at}: {error}"),
            End::Refused(error) => format!(
                "ended after a failure in the backward pass {at}, because DDP refuses the next \
                 forward pass (“Expected to have finished reduction in the prior iteration before \
                 starting a new one”): {error}"
            ),
            End::Stopped => format!("stopped {at}, as all ranks agreed"),
        };
        matcher.end(self.number, why);
        self.totals.ended = Some(end);
    }

    /// Frees everything. A rank with its own program also empties its cache, like an exiting
    /// process.
    pub(super) fn free(self, ctx: &mut RunContext) -> Result<RankTotals, Stop> {
        let Self {
            number,
            program,
            training,
            mut recovery,
            reducer,
            flag,
            totals,
            ..
        } = self;
        ctx.rig.enter(program);
        training.free(ctx)?;
        reducer.free(ctx)?;
        free_all(ctx, flag)?;
        ctx.rig.set_memory_fraction(MemoryFraction::ALL);
        let stats = ctx.rig.stats();
        if number > 0 {
            ctx.rig.empty_cache()?;
        }
        recovery.left_behind(Bytes(totals.counts.retained));
        Ok(RankTotals {
            stats,
            recovery: recovery.reports(),
            record: recovery.into_record(ctx),
            ..totals
        })
    }
}

#[derive(Default)]
pub(super) struct RankTotals {
    pub(super) limit: Bytes,
    pub(super) stats: MemoryStats,
    pub(super) counts: Counts,
    pub(super) recovery: BTreeMap<ReportKey, u64>,
    pub(super) record: Option<harness_record::Recovery>,
    pub(super) effective_batch: u64,
    pub(super) ended: Option<End>,
    pub(super) called: u64,
    pub(super) waited: Nanos,
}

/// The memory fraction that gives this limit. The half byte keeps the product from rounding below
/// it.
fn fraction(limit: Bytes, total: Bytes) -> MemoryFraction {
    MemoryFraction::new((limit.0 as f64 + 0.5) / total.0 as f64).unwrap_or(MemoryFraction::ALL)
}
