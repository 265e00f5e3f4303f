//! Training as a pattern of allocations: parameters and optimizer state live all the time, the forward pass makes activations, the backward pass
//! frees them and makes gradients, and the optimizer reads and writes parameters and state. Contents are verified on the way, so that memory that
//! was handed out twice is found.
//!
//! There is one implementation of an iteration ([`Training::iterate`]); it follows the [`Plan`] that it is given in all its parts.

pub(super) mod pass;
mod ranks;
mod spill;

use std::collections::BTreeMap;
use std::rc::Rc;

use harness_allocator::allocator::AllocatorError;
use harness_allocator::device::{HostMemory, StreamId};
use harness_allocator::units::{Bytes, Nanos};
use harness_base::words::count;

use self::pass::{Failed, ParameterGradients, Pass, Workspaces, free_all, make};
use self::spill::{HostStore, SavedOnHost};
use super::{Between, pause};
use crate::leaks::Watch;
use crate::recovery::{Recovery, Tried};
use crate::rig::{Buffer, Finding, HostBuffer, Stop};
use crate::world::{StepResult, Unmet, World};
use harness_record::Invariant;
use harness_record::{HostUse, Outcome, Shortage};
use harness_scenario::model::Program;
use harness_scenario::steps::train::{Optimizer, Train, Trained, ZeroGrad};
use harness_scenario::{Expected, Plan, Precision, ReportKey, Step};

type Answer<T> = Result<Result<T, AllocatorError>, Stop>;

/// What lives as long as the training.
struct Training<'a> {
    train: &'a Train,
    stream: StreamId,
    sizes: Vec<Bytes>,
    parameters: Vec<Buffer>,
    /// What is there beside them, and not trained.
    constants: Vec<Buffer>,
    /// The optimizer's state, as far as it is on the device.
    state: Vec<Buffer>,
    /// The rest of it.
    state_on_host: Vec<HostBuffer>,
    host: HostStore,
    /// The gradient of each parameter, where there is one between iterations.
    gradients: Vec<Option<Buffer>>,
    workspaces: Workspaces,
    /// What graphs that are never given up keep.
    retained: Vec<Buffer>,
    programs: Programs<'a>,
}

/// What an iteration began with, and what it made.
struct Begun {
    /// Allocated beside what the training holds.
    allocated: u64,
    retained: usize,
    state: usize,
    /// Buffers on the host: of retained graphs, and of the optimizer's state.
    on_host: (usize, usize),
    /// Parameters whose gradients it made.
    made: Vec<usize>,
    /// Parameters that gradients came for.
    arrived: Vec<usize>,
}

/// Programs that were computed, to be used again.
struct Programs<'a> {
    model: &'a Trained,
    known: BTreeMap<(u64, u64, bool), Rc<Program>>,
}

impl Programs<'_> {
    /// Most that are kept.
    const MOST: usize = 16;

    fn of(&mut self, samples: u64, length: u64, precision: Precision) -> Rc<Program> {
        let key = (samples, length, precision == Precision::Mixed);
        if let Some(known) = self.known.get(&key) {
            return Rc::clone(known);
        }
        if self.known.len() == Self::MOST {
            self.known.pop_first();
        }
        let program = Rc::new(self.model.program(samples, length, precision));
        self.known.insert(key, Rc::clone(&program));
        program
    }
}

#[derive(Default)]
struct Tally {
    iterations: u64,
    samples: u64,
    /// Of all iterations, failed tries included.
    time: Nanos,
    final_batch: u64,
    /// How the last iteration that completed was done.
    plan: Option<Plan>,
    retries: u64,
    ooms: u64,
    retained: u64,
    host: HostUse,
    /// Of the last request that failed.
    shortage: Option<Shortage>,
}

impl Tally {
    /// Takes a failure for lack of memory as data.
    fn answer<T>(&mut self, done: Result<T, Failed>) -> Answer<T> {
        match done {
            Ok(value) => Ok(Ok(value)),
            Err(Failed::Stop(stop)) => Err(stop),
            Err(Failed::OutOfMemory(error, shortage)) => {
                self.ooms += 1;
                self.shortage = shortage.map(|shortage| *shortage);
                Ok(Err(error))
            }
        }
    }
}

/// Runs a training, with something else after each of its iterations.
pub(crate) fn run(world: &mut World, step: &Step, train: &Train, between: Between<'_>) -> Result<StepResult, Stop> {
    match &step.id {
        Some(id) => world.rig.name_buffers(id, step.position.line),
        None => world.rig.name_buffers(&step.action.kind(), step.position.line),
    }
    if let Some(ranks) = &train.ranks {
        return ranks::run(world, step, train, ranks, between);
    }
    let mut training = Training::new(train, world.stream(&train.stream));
    let mut tally = Tally::default();
    let mut recovery = Recovery::new(train.on_oom.as_ref());
    let mut watch = Watch::begin(world, train.leak_check.as_ref(), step.position);
    let built = training.build(world);
    let failed = match tally.answer(built)? {
        Ok(()) => iterate(world, &mut training, &mut tally, &mut recovery, watch.as_mut(), between)?,
        Err(error) => Some(error),
    };
    let leaks = watch.map(|watch| watch.judge(world)).transpose()?;
    tally.host = training.host.usage();
    training.free(world)?;
    let mut result = conclude(world, step, train, tally, recovery, failed);
    leaks.into_iter().for_each(|leaks| leaks.add_to(&mut result));
    Ok(result)
}

/// Does all iterations. Returns the error that ended them early, if one did.
fn iterate(
    world: &mut World,
    training: &mut Training<'_>,
    tally: &mut Tally,
    recovery: &mut Recovery<'_>,
    mut watch: Option<&mut Watch>,
    mut between: Between<'_>,
) -> Result<Option<AllocatorError>, Stop> {
    let train = training.train;
    let mut plan = train.plan.clone();
    // What a policy came down to stays: going back up would only fail again, unless the policy looks for the largest batch.
    let mut most = u64::MAX;
    let began = world.rig.now();
    for iteration in 0..train.iterations {
        plan.batch = train.batches[iteration as usize % train.batches.len()].min(most);
        plan.micro_batches = plan.micro_batches.min(plan.batch);
        let asked = plan.batch;
        let length = train.lengths[iteration as usize % train.lengths.len()];
        let attempt = |world: &mut World, plan: &Plan| training.iterate(world, plan, length, tally);
        let recovered = recovery.run(world, Tried::Iteration, plan, &mut between, attempt)?;
        tally.retries += recovered.retries;
        match recovered.answer {
            Ok(()) => {
                plan = recovered.next;
                if plan.batch != asked {
                    most = plan.batch;
                }
                tally.final_batch = recovered.plan.batch;
                tally.plan = Some(recovered.plan);
                tally.iterations += 1;
                tally.samples += plan.batch;
                if matches!(train.model, Trained::Model(_)) {
                    // A program that looks at its loss waits for it.
                    world.rig.synchronize_stream(training.stream)?;
                }
                tally.time = world.rig.now().saturating_sub(began);
                watch.iter_mut().for_each(|watch| watch.iteration_ended(world));
                pause(&mut between, world)?;
            }
            Err(error) => return Ok(Some(error)),
        }
    }
    Ok(None)
}

impl<'a> Training<'a> {
    fn new(train: &'a Train, stream: StreamId) -> Self {
        let sizes = train.model.parameters();
        Self {
            train,
            stream,
            parameters: Vec::with_capacity(sizes.len()),
            constants: Vec::new(),
            state: Vec::new(),
            state_on_host: Vec::new(),
            host: HostStore::default(),
            gradients: sizes.iter().map(|_| None).collect(),
            sizes,
            workspaces: Workspaces::default(),
            retained: Vec::new(),
            programs: Programs { model: &train.model, known: BTreeMap::new() },
        }
    }

    fn build(&mut self, world: &mut World) -> Result<(), Failed> {
        world.rig.name_purpose("parameters");
        for &size in &self.sizes {
            self.parameters.push(make(world, size, self.stream)?);
        }
        for size in self.train.model.constants() {
            self.constants.push(make(world, size, self.stream)?);
        }
        // PyTorch's optimizers make their state in the first update; one of which only sizes are known has it from the start.
        match &self.train.model {
            Trained::Uniform(_) => self.make_state(world, 1, self.train.optimizer.copies()),
            Trained::Model(_) => Ok(()),
        }
    }

    /// Makes so many buffers for each parameter, each of so many copies of it.
    fn make_state(&mut self, world: &mut World, buffers: u64, copies: u64) -> Result<(), Failed> {
        world.rig.name_purpose("optimizer state");
        for &size in self.sizes.iter().filter(|_| copies > 0) {
            for _ in 0..buffers {
                self.state.push(make(world, Bytes(size.0 * copies), self.stream)?);
            }
        }
        Ok(())
    }

    /// What it holds between iterations.
    fn held(&self) -> u64 {
        let workspaces = self.workspaces.forward.iter().chain(&self.workspaces.backward);
        let lasting = self.parameters.iter().chain(&self.constants).chain(&self.state).chain(workspaces).chain(&self.retained);
        lasting.chain(self.gradients.iter().flatten()).map(|buffer| buffer.size().0).sum()
    }

    /// Does one iteration by the plan.
    fn iterate(&mut self, world: &mut World, plan: &Plan, length: u64, tally: &mut Tally) -> Answer<()> {
        let mut begun = self.begin(world);
        let spilled = self.spill_state(world, plan);
        begun.state = self.state.len();
        begun.on_host = (self.host.retained(), self.state_on_host.len());
        let done = spilled.and_then(|()| (0..plan.micro_batches).try_for_each(|part| self.pass(world, plan, (part, length), &mut begun)));
        let done = done.and_then(|()| match &plan.spilled.optimizer_state {
            Some(memory) => self.update_on_host(world, memory),
            None => self.update(world),
        });
        let answer = tally.answer(done)?;
        self.end(world, begun, answer.is_err(), tally)?;
        Ok(answer)
    }

    /// An iteration begins.
    fn begin(&self, world: &World) -> Begun {
        let allocated = world.rig.stats().allocated_bytes.all.current.saturating_sub(self.held());
        Begun {
            allocated,
            retained: self.retained.len(),
            state: self.state.len(),
            on_host: (self.host.retained(), self.state_on_host.len()),
            made: Vec::new(),
            arrived: Vec::new(),
        }
    }

    /// An iteration is over. Where it failed, everything that it made is freed, and parameters and state are verified.
    fn end(&mut self, world: &mut World, begun: Begun, failed: bool, tally: &mut Tally) -> Result<(), Stop> {
        let Begun { allocated: before, retained, state, on_host, made, .. } = begun;
        if failed {
            let new = self.retained.drain(retained..).chain(self.state.drain(state..));
            free_all(world, new.collect::<Vec<_>>())?;
            self.state_on_host.drain(on_host.1..).for_each(|state| self.host.put_back(state));
            self.host.give_up_retained(on_host.0);
            self.host.give_back_spare(world)?;
        }
        if failed || self.train.zero_grad == ZeroGrad::SetToNone {
            for parameter in made {
                free_all(world, self.gradients[parameter].take())?;
            }
        }
        let after = world.rig.stats().allocated_bytes.all.current.saturating_sub(self.held());
        if failed {
            tally.retained = tally.retained.max(after.saturating_sub(before));
            // A check that is no part of the training: a timed run goes without.
            if !world.rig.is_timed() {
                self.verify(world)?;
            }
        }
        if after != before {
            world.rig.note(Finding {
                invariant: Invariant::OomChangesOnlyTheCache,
                expected: format!("{before} B allocated after an iteration as before it, beside what the training keeps"),
                seen: format!("{after} B"),
            });
        }
        Ok(())
    }

    /// What one micro-batch does, by its number: the larger ones come first.
    fn program(&mut self, plan: &Plan, part: u64, length: u64) -> Rc<Program> {
        let (each, rest) = (plan.batch / plan.micro_batches, plan.batch % plan.micro_batches);
        self.programs.of(each + u64::from(part < rest), length, plan.precision)
    }

    /// The forward and the backward pass of one micro-batch.
    fn pass(&mut self, world: &mut World, plan: &Plan, (part, length): (u64, u64), begun: &mut Begun) -> Result<(), Failed> {
        let program = self.program(plan, part, length);
        let saved = plan.spilled.activations.clone();
        let on_host = saved.map(|memory| SavedOnHost::new(memory, &mut self.host, &self.parameters));
        let mut pass = Pass::new(&program, self.stream, self.train.retain_graph).saving_on_host(on_host);
        let Begun { made, arrived, .. } = begun;
        let mut gradients = ParameterGradients { sizes: &self.sizes, buffers: &mut self.gradients, made, arrived };
        world.rig.name_purpose("activations");
        let (every, workspaces) = (plan.checkpoint_every, &mut self.workspaces);
        let forward = pass.forward_pass(world, every, workspaces);
        let done = forward.and_then(|()| pass.backward_pass(world, every, workspaces, &mut gradients));
        let keep = self.train.retain_graph && done.is_ok();
        let left = pass.into_buffers(keep).collect();
        self.end_pass(world, left, keep)?;
        done
    }

    /// The forward pass of a rank, which meets the others behind it.
    fn forward(&mut self, world: &mut World, plan: &Plan, pass: &mut Pass<'_>) -> Result<(), Failed> {
        world.rig.name_purpose("activations");
        pass.forward_pass(world, plan.checkpoint_every, &mut self.workspaces)
    }

    /// The backward pass of a rank.
    fn backward(&mut self, world: &mut World, plan: &Plan, pass: &mut Pass<'_>, begun: &mut Begun) -> Result<(), Failed> {
        let Begun { made, arrived, .. } = begun;
        let mut gradients = ParameterGradients { sizes: &self.sizes, buffers: &mut self.gradients, made, arrived };
        pass.backward_pass(world, plan.checkpoint_every, &mut self.workspaces, &mut gradients)
    }

    /// What a pass leaves is kept with its graph, or freed.
    fn end_pass(&mut self, world: &mut World, left: Vec<Buffer>, keep: bool) -> Result<(), Stop> {
        if keep {
            self.retained.extend(left);
            return Ok(());
        }
        free_all(world, left)
    }

    /// The optimizer reads and writes parameters and state. That of a model makes its state the first time; Adam computes the roots of one of its
    /// moments apart, in all parameters at once (`foreach`, PyTorch's choice on a GPU).
    fn update(&mut self, world: &mut World) -> Result<(), Failed> {
        if matches!(self.train.model, Trained::Model(_)) {
            let copies = self.train.optimizer.copies();
            if self.state.is_empty() {
                self.make_state(world, copies, copies.min(1))?;
            }
            if self.train.optimizer == Optimizer::Adam {
                self.compute_apart(world)?;
            }
        }
        for buffer in self.parameters.iter_mut().chain(&mut self.state) {
            world.rig.verify(buffer, self.stream)?;
            world.rig.fill(buffer, self.stream)?;
        }
        Ok(())
    }

    /// Moves the optimizer's state to the host, where the plan wants it there. What was moved stays there whether or not the attempt succeeds.
    fn spill_state(&mut self, world: &mut World, plan: &Plan) -> Result<(), Failed> {
        let Some(memory) = &plan.spilled.optimizer_state else { return Ok(()) };
        while let Some(buffer) = self.state.last() {
            let mut host = self.host.take(world, buffer.range().len, memory)?;
            let copied = self.host.copy_down(world, buffer, &mut host, self.stream);
            self.state_on_host.push(host);
            copied?;
            world.rig.synchronize_stream(self.stream)?;
            free_all(world, self.state.pop())?;
        }
        Ok(())
    }

    /// The optimizer works on the host: gradients are copied there, and parameters back. What it computes is not done: a parameter comes back with what went
    /// down as its gradient, so that its contents show whether both copies were right.
    fn update_on_host(&mut self, world: &mut World, memory: &HostMemory) -> Result<(), Failed> {
        if self.state_on_host.is_empty() {
            for &size in &self.sizes {
                for _ in 0..self.train.optimizer.copies() {
                    self.state_on_host.push(self.host.take(world, size, memory)?);
                }
            }
        }
        let mut staged = Vec::with_capacity(self.sizes.len());
        let sent = self.send_gradients(world, memory, &mut staged);
        let done = sent.and_then(|()| {
            for (parameter, host) in &staged {
                let buffer = &mut self.parameters[*parameter];
                world.rig.verify(buffer, self.stream)?;
                self.host.copy_up(world, host, buffer, self.stream)?;
            }
            Ok(world.rig.synchronize_stream(self.stream)?)
        });
        staged.into_iter().for_each(|(_, host)| self.host.put_back(host));
        done
    }

    /// Copies all gradients to the host, and waits for them.
    fn send_gradients(&mut self, world: &mut World, memory: &HostMemory, staged: &mut Vec<(usize, HostBuffer)>) -> Result<(), Failed> {
        for (parameter, gradient) in self.gradients.iter().enumerate() {
            let Some(gradient) = gradient else { continue };
            let mut host = self.host.take(world, gradient.range().len, memory)?;
            let copied = self.host.copy_down(world, gradient, &mut host, self.stream);
            staged.push((parameter, host));
            copied?;
        }
        Ok(world.rig.synchronize_stream(self.stream)?)
    }

    /// Holds a copy of every parameter for a moment.
    fn compute_apart(&self, world: &mut World) -> Result<(), Failed> {
        let mut copies = Vec::with_capacity(self.sizes.len());
        let done = self.sizes.iter().try_for_each(|&size| make(world, size, self.stream).map(|copy| copies.push(copy)));
        free_all(world, copies)?;
        done
    }

    fn verify(&self, world: &mut World) -> Result<(), Stop> {
        self.parameters.iter().chain(&self.state).try_for_each(|buffer| world.rig.verify(buffer, self.stream))
    }

    /// Gives everything back.
    fn free(mut self, world: &mut World) -> Result<(), Stop> {
        std::mem::take(&mut self.state_on_host).into_iter().for_each(|state| self.host.put_back(state));
        self.host.free(world)?;
        let lasting = self.parameters.into_iter().chain(self.constants).chain(self.state).chain(self.gradients.into_iter().flatten());
        let workspaces = self.workspaces.forward.into_iter().chain(self.workspaces.backward);
        free_all(world, lasting.chain(workspaces).chain(self.retained))
    }
}

/// What retries came to, in words: the batch, or all of the plan where the batch is the same.
fn what_became(train: &Train, tally: &Tally) -> String {
    let first = train.batches[0];
    match &tally.plan {
        Some(plan) if plan.batch == first && *plan != train.plan => format!("{} became {plan}", train.plan),
        Some(plan) if plan.batch == first => format!("{plan}, as at first"),
        _ => batch_became(train, tally.final_batch),
    }
}

fn batch_became(train: &Train, batch: u64) -> String {
    match train.batches[0] {
        first if first == batch => format!("the last batch was {batch}, as at first"),
        first => format!("batch {first} became {batch}"),
    }
}

fn conclude(
    world: &World,
    step: &Step,
    train: &Train,
    tally: Tally,
    mut recovery: Recovery<'_>,
    failed: Option<AllocatorError>,
) -> StepResult {
    let mut result = StepResult::default();
    result.reports.extend([
        (ReportKey::Iterations, tally.iterations),
        (ReportKey::FirstBatch, train.batches[0]),
        (ReportKey::FinalBatch, 0),
        (ReportKey::EffectiveBatch, 0),
        (ReportKey::Ooms, tally.ooms),
        (ReportKey::HostPeak, tally.host.peak.0),
        (ReportKey::HostCopied, tally.host.copied.0),
        (ReportKey::Throughput, (u128::from(tally.samples) * 1_000_000_000 / u128::from(tally.time.0.max(1))) as u64),
    ]);
    recovery.left_behind(Bytes(tally.retained));
    result.reports.extend(recovery.reports());
    result.recovery = recovery.into_record(world).map(|record| harness_record::Recovery { host: tally.host, ..record });
    let done = (tally.iterations, tally.retries, what_became(train, &tally));
    judge(world, step, train, done, failed.map(|error| (error, tally.shortage)), &mut result);
    result
}

/// Whether a training ended as it should: after so many iterations and retries, and what these made of its plan.
fn judge(
    world: &World,
    step: &Step,
    train: &Train,
    (iterations, retries, became): (u64, u64, String),
    failed: Option<(AllocatorError, Option<Shortage>)>,
    result: &mut StepResult,
) {
    let completed = format!("{iterations} of {}", count(train.iterations, "iteration"));
    match (failed, train.expect.of(&world.arm, world.device)) {
        (None, expected) => {
            result.outcome = Outcome::Fits { retries: retries as u32 };
            if retries > 0 {
                result.notes.push(format!("{}: {became}", count(retries, "retry")));
            }
            if let Expected::Oom(_) = expected {
                result.unmet.push(Unmet::at(step, "training to run out of memory", completed));
            }
        }
        (Some((error, shortage)), expected) => {
            result.outcome = Outcome::OutOfMemory;
            result.shortage = shortage;
            result.notes.push(format!("{completed}, then {error}"));
            if let Expected::Oom(Some(cause)) = expected {
                result.unmet.extend(Unmet::other_cause(step, cause, result.shortage.as_ref()));
            }
            if expected == Expected::Fits {
                result.unmet.push(Unmet::at(step, "training to its end", format!("{completed}, then {error}")));
            }
        }
    }
}
