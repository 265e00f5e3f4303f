//! One rank: its training in a program of its own, its policies, and what it calls.

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

/// The flag of an agreement: one 64-bit number.
const FLAG: Bytes = Bytes(8);

/// Why a rank does no more.
#[derive(Clone, Debug)]
pub(super) enum End {
    /// All iterations are done.
    Finished,
    /// No policy had another try.
    GaveUp(AllocatorError),
    /// DDP refuses to try again behind this failure.
    Refused(AllocatorError),
    /// Another rank gave up, and all agreed to stop.
    Stopped,
}

/// One rank.
pub(super) struct Rank<'a> {
    number: usize,
    program: ProgramId,
    limit: Bytes,
    /// As reports name it.
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
    /// The iteration at hand and its try, counted from 1.
    iteration: u64,
    attempt: u64,
    /// Samples of the last iteration that it completed.
    pub(super) effective_batch: u64,
    pub(super) ended: Option<End>,
    /// Whether it tries an iteration again that all others have done, and waits for them there.
    pub(super) is_astray: bool,
    /// Collectives that it called.
    pub(super) called: u64,
    /// Its own time since the ranks waited for each other the last time.
    pub(super) busy: Nanos,
    /// Its own time in the try at hand.
    in_try: Nanos,
    /// What it waited for slower ranks.
    pub(super) waited: Nanos,
}

/// A try of an iteration while it goes on.
pub(super) struct Try<'p> {
    program: &'p Program,
    pass: Pass<'p>,
    iteration: training::Begun,
    pub(super) recovery: recovery::Begun,
    /// How far it came.
    pub(super) done: Result<(), Failed>,
}

/// How a try ended.
pub(super) enum Tryout {
    Succeeded,
    /// It ran out of memory.
    Failed(AllocatorError),
    /// Another rank ran out of memory, before any gradient was reduced.
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

    /// Whether it does the next iteration with the others.
    pub(super) const fn is_active(&self) -> bool {
        self.ended.is_none() && !self.is_astray
    }

    /// Does something in the rank's program, and counts the time.
    pub(super) fn within<T>(&mut self, world: &mut World, act: impl FnOnce(&mut Self, &mut World) -> Result<T, Stop>) -> Result<T, Stop> {
        world.rig.enter(self.program);
        world.rig.name_buffers(&self.name, self.line);
        let began = world.rig.now();
        let done = act(self, world)?;
        // What the rank queued is its own time, and not that of the next one.
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

    /// Tells the others whether it ran out of memory.
    pub(super) fn agree(&mut self, matcher: &mut Matcher) {
        self.call(matcher, [(Purpose::Agreement, FLAG)]);
    }

    /// Makes what lives as long as the training.
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

    /// Begins an iteration.
    pub(super) fn begin_iteration(&mut self, number: u64, plan: Plan) {
        (self.iteration, self.attempt) = (number, 0);
        self.trying = Trying::new(plan);
    }

    /// What the last part of the batch does.
    pub(super) fn last_program(&mut self, length: u64) -> Rc<Program> {
        let plan = self.trying.plan.clone();
        self.training.program(&plan, plan.micro_batches - 1, length)
    }

    /// A try up to where the ranks can agree: before anything of this try is reduced.
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

    /// The rest of a try, unless it is to be given up. Whatever fails, what the try made is freed.
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

    /// A try succeeded. Tells how the next iteration is to be done.
    pub(super) fn succeeded(&mut self, world: &mut World, mut begun: recovery::Begun) -> Result<Plan, Stop> {
        begun.took(world, self.in_try);
        self.effective_batch = self.trying.plan.batch;
        self.tally.iterations += 1;
        self.tally.samples += self.trying.plan.batch;
        self.recovery.succeeded(world, Tried::Iteration, &self.trying, &begun)
    }

    /// A try was given up for another rank's sake.
    pub(super) fn gave_up_try(&mut self, world: &mut World, mut begun: recovery::Begun, goes_on: bool) {
        begun.took(world, self.in_try);
        self.recovery.given_up(world, &mut self.trying, &begun, goes_on);
    }

    /// A try failed. Tells whether there is another.
    pub(super) fn failed(
        &mut self,
        world: &mut World,
        mut begun: recovery::Begun,
        error: &AllocatorError,
        matcher: &mut Matcher,
    ) -> Result<bool, Stop> {
        let mut nobody = None;
        begun.took(world, self.in_try);
        let again = self.recovery.failed(world, Tried::Iteration, &mut self.trying, begun, error, &mut nobody)?;
        match (again, self.reducer.refuses()) {
            (false, _) => self.end(End::GaveUp(error.clone()), matcher),
            (true, true) => self.end(End::Refused(error.clone()), matcher),
            (true, false) => return Ok(true),
        }
        Ok(false)
    }

    /// Tries an iteration again that the others have done, or are in the middle of. Only what it calls first is of interest: it gets no further.
    pub(super) fn go_astray(&mut self, matcher: &mut Matcher) {
        self.is_astray = true;
        self.attempt += 1;
        self.call(matcher, self.reducer.opening());
        self.agree(matcher);
    }

    pub(super) fn end(&mut self, end: End, matcher: &mut Matcher) {
        let at = format!("in attempt {} of iteration {}", self.attempt, self.iteration);
        let why = match &end {
            End::Finished => "has done all its iterations".to_owned(),
            End::GaveUp(error) if self.iteration == 0 => format!("gave up before the first iteration: {error}"),
            End::GaveUp(error) => format!("gave up {at}: {error}"),
            End::Refused(error) => format!(
                "ended behind a failure in the backward pass {at}, as DDP refuses the next forward pass (“Expected to have finished reduction in the prior iteration before starting a new one”): {error}"
            ),
            End::Stopped => format!("stopped {at}, as all agreed"),
        };
        matcher.end(self.number, why);
        self.ended = Some(end);
    }

    /// Gives everything back; a rank with a program of its own the cache too, as a process does that ends.
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

/// What a rank leaves behind.
pub(super) struct RankEnd {
    pub(super) limit: Bytes,
    pub(super) stats: MemoryStats,
    pub(super) tally: Tally,
    /// What its policies report.
    pub(super) recovery: BTreeMap<ReportKey, u64>,
    pub(super) record: Option<harness_record::Recovery>,
    pub(super) effective_batch: u64,
    pub(super) ended: Option<End>,
    pub(super) called: u64,
    pub(super) waited: Nanos,
}

/// The share of a device that is that much: half a byte more, so that the product comes down to it.
fn fraction(limit: Bytes, total: Bytes) -> MemoryFraction {
    MemoryFraction::new((limit.0 as f64 + 0.5) / total.0 as f64).unwrap_or(MemoryFraction::ALL)
}
