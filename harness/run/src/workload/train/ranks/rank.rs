//! One rank: its training in its own program, its policies, and its collectives.

use std::collections::BTreeMap;
use std::rc::Rc;

use harness_allocator::allocator::{AllocatorError, MemoryFraction};
use harness_allocator::stats::MemoryStats;
use harness_allocator::units::{Bytes, Nanos};

use super::matcher::{Collective, Matcher, Purpose};
use super::reducer::{Call, Reducer};
use crate::recovery::{self, Recovery, Tried, Trying};
use crate::rig::{Buffer, ProgramId, Stop};
use crate::workload::memory::{Failed, free_all, make};
use crate::workload::train::pass::Pass;
use crate::workload::train::training::{self, Tally, Training};
use crate::world::World;
use harness_scenario::model::Program;
use harness_scenario::steps::ranks::{Ranks, Reduce};
use harness_scenario::steps::train::Train;
use harness_scenario::{Plan, ReportKey};

/// The size of the agreement flag: one 64-bit number.
const FLAG: Bytes = Bytes(8);

/// Why a rank stopped.
#[derive(Clone, Debug)]
pub(super) enum End {
    /// All iterations are complete.
    Finished,
    /// The policies gave up.
    GaveUp(AllocatorError),
    /// DDP refuses another attempt after this failure.
    Refused(AllocatorError),
    /// Another rank gave up, and all agreed to stop.
    Stopped,
}

pub(super) struct Rank<'a> {
    number: usize,
    program: ProgramId,
    limit: Bytes,
    /// The name in reports.
    name: String,
    line: u32,
    reduce: Reduce,
    agrees: bool,
    pub(super) training: Training<'a>,
    pub(super) tally: Tally,
    pub(super) recovery: Recovery<'a>,
    reducer: Reducer,
    flag: Option<Buffer>,
    pub(super) trying: Trying,
    /// The current iteration and its attempt, counted from 1.
    iteration: u64,
    attempt: u64,
    /// The samples of the last completed iteration.
    pub(super) effective_batch: u64,
    pub(super) ended: Option<End>,
    /// Whether it retries an iteration that all others have finished, and waits for them there.
    pub(super) is_astray: bool,
    /// The number of collectives that it called.
    pub(super) called: u64,
    /// Its own time since the ranks last waited for each other.
    pub(super) busy: Nanos,
    /// Its own time in the current attempt.
    in_try: Nanos,
    /// The time it waited for slower ranks.
    pub(super) waited: Nanos,
}

/// A running attempt at an iteration.
pub(super) struct Try<'p> {
    program: &'p Program,
    pass: Pass<'p>,
    iteration: training::Begun,
    pub(super) recovery: recovery::Begun,
    /// The result so far.
    pub(super) done: Result<(), Failed>,
}

/// The result of an attempt.
pub(super) enum Tryout {
    Succeeded,
    /// It ran out of memory.
    Failed(AllocatorError),
    /// Another rank ran out of memory before any gradient was reduced.
    GivenUp,
}

impl<'a> Rank<'a> {
    pub(super) fn new(number: usize, program: ProgramId, train: &'a Train, ranks: &Ranks, line: u32, world: &World) -> Self {
        let training = Training::new(train, world.stream(&train.stream));
        let reducer = Reducer::new(ranks, &training.sizes, &train.model.constants());
        Self {
            number,
            program,
            limit: ranks.limits[number],
            name: format!("{}, rank {number}", train.id),
            line,
            reduce: ranks.reduce,
            agrees: ranks.sync_batch,
            training,
            tally: Tally::default(),
            recovery: Recovery::new(train.on_oom.as_ref()),
            reducer,
            flag: None,
            trying: Trying::new(train.plan.clone()),
            iteration: 0,
            attempt: 0,
            effective_batch: 0,
            ended: None,
            is_astray: false,
            called: 0,
            busy: Nanos::ZERO,
            in_try: Nanos::ZERO,
            waited: Nanos::ZERO,
        }
    }

    pub(super) const fn number(&self) -> usize {
        self.number
    }

    /// Whether it takes part in the next iteration.
    pub(super) const fn is_active(&self) -> bool {
        self.ended.is_none() && !self.is_astray
    }

    /// Calls `act` in the rank's program and measures the time.
    pub(super) fn within<T>(&mut self, world: &mut World, act: impl FnOnce(&mut Self, &mut World) -> Result<T, Stop>) -> Result<T, Stop> {
        world.rig.enter(self.program);
        world.rig.name_buffers(&self.name, self.line);
        let began = world.rig.now();
        let done = act(self, world)?;
        // Queued work counts as the rank's own time.
        world.rig.synchronize_stream(self.training.stream)?;
        let spent = world.rig.now().saturating_sub(began);
        self.busy += spent;
        self.in_try += spent;
        Ok(done)
    }

    pub(super) fn call(&mut self, matcher: &mut Matcher, calls: impl IntoIterator<Item = Call>) {
        for (purpose, bytes) in calls {
            self.called += 1;
            matcher.call(self.number, Collective { purpose, bytes, iteration: self.iteration, attempt: self.attempt });
        }
    }

    /// Calls the agreement collective.
    pub(super) fn agree(&mut self, matcher: &mut Matcher) {
        self.call(matcher, [(Purpose::Agreement, FLAG)]);
    }

    /// Allocates the long-lived memory.
    pub(super) fn build(&mut self, world: &mut World, matcher: &mut Matcher) -> Result<(), Stop> {
        world.rig.set_memory_fraction(fraction(self.limit, world.rig.info().total));
        let mut calls = Vec::new();
        let built = self.training.build(world).and_then(|()| self.reducer.build(world, self.training.stream, &mut calls));
        let built = built.and_then(|()| {
            self.flag = if self.agrees { Some(make(world, FLAG, self.training.stream)?) } else { None };
            Ok(())
        });
        self.call(matcher, calls);
        if let Err(error) = self.tally.answer(built)? {
            self.end(End::GaveUp(error), matcher);
        }
        Ok(())
    }

    pub(super) fn begin_iteration(&mut self, number: u64, plan: Plan) {
        (self.iteration, self.attempt) = (number, 0);
        self.trying = Trying::new(plan);
    }

    /// The operations of the last micro-batch.
    pub(super) fn last_program(&mut self, length: u64) -> Rc<Program> {
        let plan = self.trying.plan.clone();
        self.training.program(&plan, plan.micro_batches - 1, length)
    }

    /// Runs an attempt up to the point where the ranks can agree: before any of its gradients is reduced.
    pub(super) fn first_part<'p>(
        &mut self,
        world: &mut World,
        program: &'p Program,
        length: u64,
        matcher: &mut Matcher,
    ) -> Result<Try<'p>, Stop> {
        self.attempt += 1;
        self.in_try = Nanos::ZERO;
        let recovery = self.recovery.begin(world, Tried::Iteration)?;
        self.call(matcher, self.reducer.opening());
        let prepared = self.reducer.before_forward(world, self.training.stream);
        let iteration = self.training.begin(world);
        let pass = Pass::new(program, self.training.stream, self.training.train.retain_graph);
        let mut one = Try { program, pass, iteration, recovery, done: Ok(()) };
        one.done = prepared.and_then(|()| self.forward(world, &mut one, length));
        Ok(one)
    }

    fn forward(&mut self, world: &mut World, one: &mut Try<'_>, length: u64) -> Result<(), Failed> {
        let plan = self.trying.plan.clone();
        for part in 0..plan.micro_batches - 1 {
            self.training.pass(world, &plan, (part, length), &mut one.iteration)?;
        }
        one.iteration.arrived.clear();
        self.training.forward(world, &plan, &mut one.pass)?;
        match self.reduce {
            Reduce::AfterBackward => self.training.backward(world, &plan, &mut one.pass, &mut one.iteration),
            Reduce::Ddp | Reduce::Hooks => Ok(()),
        }
    }

    /// Runs the rest of an attempt unless the ranks give it up. After a failure, everything it made is freed.
    pub(super) fn second_part(
        &mut self,
        world: &mut World,
        one: Try<'_>,
        give_up: bool,
        matcher: &mut Matcher,
    ) -> Result<(Tryout, recovery::Begun), Stop> {
        let Try { program, mut pass, mut iteration, recovery, done } = one;
        let gives_up = give_up && done.is_ok();
        let goes_on = !give_up && done.is_ok();
        let mut done = done;
        if goes_on {
            let plan = self.trying.plan.clone();
            if matches!(self.reduce, Reduce::Ddp | Reduce::Hooks) {
                done = self.training.backward(world, &plan, &mut pass, &mut iteration);
            }
            let mut calls = Vec::new();
            self.reducer.in_backward(program, &iteration.arrived, done.is_ok(), &mut calls);
            self.call(matcher, calls);
        }
        let keep = self.training.train.retain_graph && goes_on && done.is_ok();
        let left = pass.into_buffers(keep).collect();
        self.training.end_pass(world, left, keep)?;
        if goes_on && done.is_ok() {
            done = self.training.update(world);
        }
        let answer = self.tally.answer(done)?;
        self.training.end(world, iteration, gives_up || answer.is_err(), &mut self.tally)?;
        let tryout = match answer {
            Ok(()) if gives_up => Tryout::GivenUp,
            Ok(()) => Tryout::Succeeded,
            Err(error) => Tryout::Failed(error),
        };
        Ok((tryout, recovery))
    }

    /// Handles a successful attempt and returns the plan of the next iteration.
    pub(super) fn succeeded(&mut self, world: &mut World, mut begun: recovery::Begun) -> Result<Plan, Stop> {
        begun.took(world, self.in_try);
        self.effective_batch = self.trying.plan.batch;
        self.tally.iterations += 1;
        self.tally.samples += self.trying.plan.batch;
        self.recovery.succeeded(world, Tried::Iteration, &self.trying, &begun)
    }

    /// Handles an attempt that was given up because of another rank.
    pub(super) fn gave_up_try(&mut self, world: &mut World, mut begun: recovery::Begun, goes_on: bool) {
        begun.took(world, self.in_try);
        self.recovery.given_up(world, &mut self.trying, &begun, goes_on);
    }

    /// Handles a failed attempt. Returns whether there is another one.
    pub(super) fn failed(
        &mut self,
        world: &mut World,
        mut begun: recovery::Begun,
        error: &AllocatorError,
        matcher: &mut Matcher,
    ) -> Result<bool, Stop> {
        let mut between = None;
        begun.took(world, self.in_try);
        let again = self.recovery.failed(world, Tried::Iteration, &mut self.trying, begun, error, &mut between)?;
        match (again, self.reducer.refuses()) {
            (false, _) => self.end(End::GaveUp(error.clone()), matcher),
            (true, true) => self.end(End::Refused(error.clone()), matcher),
            (true, false) => return Ok(true),
        }
        Ok(false)
    }

    /// Retries an iteration that the others have finished or are in. Only its first collectives matter: it gets no
    /// further.
    pub(super) fn go_astray(&mut self, matcher: &mut Matcher) {
        self.is_astray = true;
        self.attempt += 1;
        self.call(matcher, self.reducer.opening());
        self.agree(matcher);
    }

    pub(super) fn end(&mut self, end: End, matcher: &mut Matcher) {
        let at = format!("in attempt {} of iteration {}", self.attempt, self.iteration);
        let why = match &end {
            End::Finished => "completed all its iterations".to_owned(),
            End::GaveUp(error) if self.iteration == 0 => format!("gave up before the first iteration: {error}"),
            End::GaveUp(error) => format!("gave up {at}: {error}"),
            End::Refused(error) => format!(
                "ended after a failure in the backward pass {at}, because DDP refuses the next forward pass (“Expected to have finished reduction in the prior iteration before starting a new one”): {error}"
            ),
            End::Stopped => format!("stopped {at}, as all ranks agreed"),
        };
        matcher.end(self.number, why);
        self.ended = Some(end);
    }

    /// Frees everything. A rank with its own program also empties its cache, like an exiting process.
    pub(super) fn free(self, world: &mut World) -> Result<RankEnd, Stop> {
        let Self { number, program, limit, training, tally, mut recovery, reducer, flag, effective_batch, ended, called, waited, .. } =
            self;
        world.rig.enter(program);
        training.free(world)?;
        reducer.free(world)?;
        free_all(world, flag)?;
        world.rig.set_memory_fraction(MemoryFraction::ALL);
        let stats = world.rig.stats();
        if number > 0 {
            world.rig.empty_cache()?;
        }
        recovery.left_behind(Bytes(tally.retained));
        Ok(RankEnd {
            limit,
            stats,
            tally,
            recovery: recovery.reports(),
            record: recovery.into_record(world),
            effective_batch,
            ended,
            called,
            waited,
        })
    }
}

/// The final state of a rank.
pub(super) struct RankEnd {
    pub(super) limit: Bytes,
    pub(super) stats: MemoryStats,
    pub(super) tally: Tally,
    /// The reports of its policies.
    pub(super) recovery: BTreeMap<ReportKey, u64>,
    pub(super) record: Option<harness_record::Recovery>,
    pub(super) effective_batch: u64,
    pub(super) ended: Option<End>,
    pub(super) called: u64,
    pub(super) waited: Nanos,
}

/// The memory fraction that gives this limit. The half byte keeps the product from rounding below it.
fn fraction(limit: Bytes, total: Bytes) -> MemoryFraction {
    MemoryFraction::new((limit.0 as f64 + 0.5) / total.0 as f64).unwrap_or(MemoryFraction::ALL)
}
