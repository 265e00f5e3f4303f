//! [`Training`]: the long-lived memory of a training, and its iterations.

use std::collections::BTreeMap;
use std::rc::Rc;

use harness_allocator::allocator::AllocatorError;
use harness_allocator::device::{HostMemory, StreamId};
use harness_allocator::units::{Bytes, Nanos};

use super::pass::{ParameterGradients, Pass, Workspaces};
use super::spill::{HostStore, SavedOnHost};
use crate::context::RunContext;
use crate::rig::{Buffer, Finding, HostBuffer, Stop};
use crate::workload::memory::{Failed, answer, free_all, make};
use harness_record::{FailedRequest, HostUse, Invariant};
use harness_scenario::model::Program;
use harness_scenario::steps::train::{Optimizer, Train, Trained, ZeroGrad};
use harness_scenario::{Plan, Precision, SpilledPart};

pub(super) type Answer<T> = Result<Result<T, AllocatorError>, Stop>;

/// The long-lived memory of a training.
pub(super) struct Training<'a> {
    pub(super) train: &'a Train,
    pub(super) stream: StreamId,
    pub(super) sizes: Vec<Bytes>,
    parameters: Vec<Buffer>,
    /// Model buffers that are not trained.
    constants: Vec<Buffer>,
    /// The part of the optimizer's state on the device.
    state: Vec<Buffer>,
    /// The part on the host.
    state_on_host: Vec<HostBuffer>,
    pub(super) host: HostStore,
    /// The gradients that exist between iterations.
    gradients: Vec<Option<Buffer>>,
    workspaces: Workspaces,
    /// Memory of retained graphs.
    retained: Vec<Buffer>,
    programs: Programs<'a>,
}

/// The state at the start of an iteration, and what it made since.
pub(super) struct Begun {
    /// Allocated bytes apart from the training's own.
    allocated: u64,
    retained: usize,
    state: usize,
    /// The numbers of buffers on the host: of retained graphs, and of the optimizer's state.
    on_host: (usize, usize),
    /// Parameters whose gradients it created.
    made: Vec<usize>,
    /// The parameter of each computed gradient.
    pub(super) arrived: Vec<usize>,
}

/// A cache of computed programs.
struct Programs<'a> {
    model: &'a Trained,
    known: BTreeMap<(u64, u64, bool), Rc<Program>>,
}

impl Programs<'_> {
    /// The size of the cache.
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
pub(super) struct Counts {
    pub(super) iterations: u64,
    pub(super) samples: u64,
    /// Total time of all iterations, including failed attempts.
    pub(super) time: Nanos,
    pub(super) final_batch: u64,
    /// The plan of the last completed iteration.
    pub(super) plan: Option<Plan>,
    pub(super) retries: u64,
    pub(super) ooms: u64,
    pub(super) retained: u64,
    pub(super) host: HostUse,
    /// The facts about the last failed request.
    pub(super) failed_request: Option<FailedRequest>,
}

impl Counts {
    pub(super) fn answer<T>(&mut self, done: Result<T, Failed>) -> Answer<T> {
        answer(done, &mut self.ooms, &mut self.failed_request)
    }
}

impl<'a> Training<'a> {
    pub(super) fn new(train: &'a Train, stream: StreamId) -> Self {
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

    pub(super) fn build(&mut self, ctx: &mut RunContext) -> Result<(), Failed> {
        ctx.rig.name_purpose("parameters");
        for &size in &self.sizes {
            self.parameters.push(make(ctx, size, self.stream)?);
        }
        for size in self.train.model.constants() {
            self.constants.push(make(ctx, size, self.stream)?);
        }
        // PyTorch's optimizers create their state in the first update. A model given only by sizes has it from the
        // start.
        match &self.train.model {
            Trained::Uniform(_) => self.make_state(ctx, 1, self.train.optimizer.copies()),
            Trained::Model(_) => Ok(()),
        }
    }

    /// Makes `buffers` buffers per parameter, each `copies` times its size.
    fn make_state(&mut self, ctx: &mut RunContext, buffers: u64, copies: u64) -> Result<(), Failed> {
        ctx.rig.name_purpose("optimizer state");
        for &size in self.sizes.iter().filter(|_| copies > 0) {
            for _ in 0..buffers {
                self.state.push(make(ctx, Bytes(size.0 * copies), self.stream)?);
            }
        }
        Ok(())
    }

    /// The bytes that the training holds between iterations.
    fn held(&self) -> u64 {
        let workspaces = self.workspaces.forward.iter().chain(&self.workspaces.backward);
        let lasting = self.parameters.iter().chain(&self.constants).chain(&self.state).chain(workspaces).chain(&self.retained);
        lasting.chain(self.gradients.iter().flatten()).map(|buffer| buffer.size().0).sum()
    }

    /// Runs one iteration by the plan.
    pub(super) fn iterate(&mut self, ctx: &mut RunContext, plan: &Plan, length: u64, counts: &mut Counts) -> Answer<()> {
        let mut begun = self.begin(ctx);
        let spilled = self.spill_state(ctx, plan);
        begun.state = self.state.len();
        begun.on_host = (self.host.retained.len(), self.state_on_host.len());
        let done = spilled.and_then(|()| (0..plan.micro_batches).try_for_each(|part| self.pass(ctx, plan, (part, length), &mut begun)));
        let done = done.and_then(|()| match plan.spilled.get(&SpilledPart::OptimizerState) {
            Some(memory) => self.update_on_host(ctx, memory),
            None => self.update(ctx),
        });
        let answer = counts.answer(done)?;
        self.end(ctx, begun, answer.is_err(), counts)?;
        Ok(answer)
    }

    pub(super) fn begin(&self, ctx: &RunContext) -> Begun {
        let allocated = ctx.rig.stats().allocated_bytes.all.current.saturating_sub(self.held());
        Begun {
            allocated,
            retained: self.retained.len(),
            state: self.state.len(),
            on_host: (self.host.retained.len(), self.state_on_host.len()),
            made: Vec::new(),
            arrived: Vec::new(),
        }
    }

    /// Ends an iteration. After a failure, frees everything it made and verifies parameters and state.
    pub(super) fn end(&mut self, ctx: &mut RunContext, begun: Begun, failed: bool, counts: &mut Counts) -> Result<(), Stop> {
        let Begun { allocated: before, retained, state, on_host, made, .. } = begun;
        if failed {
            let new = self.retained.drain(retained..).chain(self.state.drain(state..));
            free_all(ctx, new.collect::<Vec<_>>())?;
            self.state_on_host.drain(on_host.1..).for_each(|state| self.host.put_back(state));
            self.host.give_up_retained(on_host.0);
            self.host.give_back_spare(ctx)?;
        }
        if failed || self.train.zero_grad == ZeroGrad::SetToNone {
            for parameter in made {
                free_all(ctx, self.gradients[parameter].take())?;
            }
        }
        let after = ctx.rig.stats().allocated_bytes.all.current.saturating_sub(self.held());
        if failed {
            counts.retained = counts.retained.max(after.saturating_sub(before));
            // This check is not part of the training, so timed runs skip it.
            if !ctx.rig.is_timed() {
                self.verify(ctx)?;
            }
        }
        if after != before {
            let expected = format!("{before} B allocated after an iteration, as before it, apart from the training's own memory");
            ctx.rig.note(Finding::new(Invariant::OomChangesOnlyTheCache, expected, format!("{after} B")));
        }
        Ok(())
    }

    /// The operations of one micro-batch. If the batch does not divide evenly, the first micro-batches are larger.
    pub(super) fn program(&mut self, plan: &Plan, part: u64, length: u64) -> Rc<Program> {
        let (each, rest) = (plan.batch / plan.micro_batches, plan.batch % plan.micro_batches);
        self.programs.of(each + u64::from(part < rest), length, plan.precision)
    }

    /// Runs the forward and backward pass of one micro-batch.
    pub(super) fn pass(&mut self, ctx: &mut RunContext, plan: &Plan, (part, length): (u64, u64), begun: &mut Begun) -> Result<(), Failed> {
        let program = self.program(plan, part, length);
        let saved = plan.spilled.get(&SpilledPart::Activations).cloned();
        let on_host = saved.map(|memory| SavedOnHost::new(memory, &mut self.host, &self.parameters));
        let mut pass = Pass::new(&program, self.stream, self.train.retain_graph).saving_on_host(on_host);
        let Begun { made, arrived, .. } = begun;
        let mut gradients = ParameterGradients { sizes: &self.sizes, buffers: &mut self.gradients, made, arrived };
        ctx.rig.name_purpose("activations");
        let (every, workspaces) = (plan.checkpoint_every, &mut self.workspaces);
        let forward = pass.forward_pass(ctx, every, workspaces);
        let done = forward.and_then(|()| pass.backward_pass(ctx, every, workspaces, &mut gradients));
        let keep = self.train.retain_graph && done.is_ok();
        let left = pass.into_buffers(keep).collect();
        self.end_pass(ctx, left, keep)?;
        done
    }

    /// Runs the forward pass of a rank, which may agree with the others afterward.
    pub(super) fn forward(&mut self, ctx: &mut RunContext, plan: &Plan, pass: &mut Pass<'_>) -> Result<(), Failed> {
        ctx.rig.name_purpose("activations");
        pass.forward_pass(ctx, plan.checkpoint_every, &mut self.workspaces)
    }

    /// Runs the backward pass of a rank.
    pub(super) fn backward(&mut self, ctx: &mut RunContext, plan: &Plan, pass: &mut Pass<'_>, begun: &mut Begun) -> Result<(), Failed> {
        let Begun { made, arrived, .. } = begun;
        let mut gradients = ParameterGradients { sizes: &self.sizes, buffers: &mut self.gradients, made, arrived };
        pass.backward_pass(ctx, plan.checkpoint_every, &mut self.workspaces, &mut gradients)
    }

    /// Keeps the remaining buffers of a pass with its graph, or frees them.
    pub(super) fn end_pass(&mut self, ctx: &mut RunContext, left: Vec<Buffer>, keep: bool) -> Result<(), Stop> {
        if keep {
            self.retained.extend(left);
            return Ok(());
        }
        free_all(ctx, left)
    }

    /// Runs the optimizer, which reads and writes parameters and state. A model's optimizer creates its state in the
    /// first update. Adam computes the square roots of a moment separately, for all parameters together (`foreach`,
    /// PyTorch's default on a GPU).
    pub(super) fn update(&mut self, ctx: &mut RunContext) -> Result<(), Failed> {
        if matches!(self.train.model, Trained::Model(_)) {
            let copies = self.train.optimizer.copies();
            if self.state.is_empty() {
                self.make_state(ctx, copies, copies.min(1))?;
            }
            if self.train.optimizer == Optimizer::Adam {
                self.compute_apart(ctx)?;
            }
        }
        for buffer in self.parameters.iter_mut().chain(&mut self.state) {
            ctx.rig.verify(buffer, self.stream)?;
            ctx.rig.fill(buffer, self.stream)?;
        }
        Ok(())
    }

    /// Moves the optimizer's state to the host if the plan says so. Moved state stays there even if the attempt fails.
    fn spill_state(&mut self, ctx: &mut RunContext, plan: &Plan) -> Result<(), Failed> {
        let Some(memory) = plan.spilled.get(&SpilledPart::OptimizerState) else { return Ok(()) };
        while let Some(buffer) = self.state.last() {
            let mut host = self.host.take(ctx, buffer.range().len, memory)?;
            let copied = self.host.copy_down(ctx, buffer, &mut host, self.stream);
            self.state_on_host.push(host);
            copied?;
            ctx.rig.synchronize_stream(self.stream)?;
            free_all(ctx, self.state.pop())?;
        }
        Ok(())
    }

    /// Runs the optimizer on the host: copies gradients there and parameters back. The arithmetic is skipped. Each
    /// parameter receives the contents of its gradient, so verification covers both copies.
    fn update_on_host(&mut self, ctx: &mut RunContext, memory: &HostMemory) -> Result<(), Failed> {
        if self.state_on_host.is_empty() {
            for &size in &self.sizes {
                for _ in 0..self.train.optimizer.copies() {
                    self.state_on_host.push(self.host.take(ctx, size, memory)?);
                }
            }
        }
        let mut staged = Vec::with_capacity(self.sizes.len());
        let sent = self.send_gradients(ctx, memory, &mut staged);
        let done = sent.and_then(|()| {
            for (parameter, host) in &staged {
                let buffer = &mut self.parameters[*parameter];
                ctx.rig.verify(buffer, self.stream)?;
                self.host.copy_up(ctx, host, buffer, self.stream)?;
            }
            Ok(ctx.rig.synchronize_stream(self.stream)?)
        });
        staged.into_iter().for_each(|(_, host)| self.host.put_back(host));
        done
    }

    /// Copies all gradients to the host and waits.
    fn send_gradients(&mut self, ctx: &mut RunContext, memory: &HostMemory, staged: &mut Vec<(usize, HostBuffer)>) -> Result<(), Failed> {
        for (parameter, gradient) in self.gradients.iter().enumerate() {
            let Some(gradient) = gradient else { continue };
            let mut host = self.host.take(ctx, gradient.range().len, memory)?;
            let copied = self.host.copy_down(ctx, gradient, &mut host, self.stream);
            staged.push((parameter, host));
            copied?;
        }
        Ok(ctx.rig.synchronize_stream(self.stream)?)
    }

    /// Temporarily allocates a copy of every parameter.
    fn compute_apart(&self, ctx: &mut RunContext) -> Result<(), Failed> {
        let mut copies = Vec::with_capacity(self.sizes.len());
        let done = self.sizes.iter().try_for_each(|&size| make(ctx, size, self.stream).map(|copy| copies.push(copy)));
        free_all(ctx, copies)?;
        done
    }

    fn verify(&self, ctx: &mut RunContext) -> Result<(), Stop> {
        self.parameters.iter().chain(&self.state).try_for_each(|buffer| ctx.rig.verify(buffer, self.stream))
    }

    pub(super) fn free(mut self, ctx: &mut RunContext) -> Result<(), Stop> {
        std::mem::take(&mut self.state_on_host).into_iter().for_each(|state| self.host.put_back(state));
        self.host.free(ctx)?;
        let lasting = self.parameters.into_iter().chain(self.constants).chain(self.state).chain(self.gradients.into_iter().flatten());
        let workspaces = self.workspaces.forward.into_iter().chain(self.workspaces.backward);
        free_all(ctx, lasting.chain(workspaces).chain(self.retained))
    }
}
