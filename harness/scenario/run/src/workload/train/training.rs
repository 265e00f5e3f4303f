//! [`Training`]: the long-lived memory of a training, and its iterations.

use std::{collections::BTreeMap, rc::Rc};

use harness_allocator::allocator::AllocatorError;
use harness_allocator::device::{HostMemory, StreamId};
use harness_allocator::units::{Bytes, Nanos};

use super::pass::{Pass, PassMemory};
use super::spill::HostStore;
use crate::context::RunContext;
use crate::rig::{Buffer, Finding, HostBuffer, Stop};
use crate::workload::memory::{Failed, answer, free_all, make};
use harness_record::{FailedRequest, HostUse, Invariant};
use harness_scenario::steps::train::{Optimizer, Train, TrainedModel, ZeroGrad};
use harness_scenario::{AttemptPlan, Precision, SpilledPart, model::ModelProgram};

pub(super) type Answer<T> = Result<Result<T, AllocatorError>, Stop>;

pub(super) struct Training<'a> {
    pub(super) train: &'a Train,
    pub(super) memory: PassMemory,
    /// Model buffers that are not trained.
    constants: Vec<Buffer>,
    /// The part of the optimizer's state on the device.
    state: Vec<Buffer>,
    state_on_host: Vec<HostBuffer>,
    /// Memory of retained graphs.
    retained: Vec<Buffer>,
    programs: Programs<'a>,
}

#[derive(Clone, Copy)]
pub(super) struct Begun {
    /// Allocated bytes apart from the training's own.
    allocated: u64,
    retained: usize,
    state: usize,
    /// The numbers of buffers on the host: of retained graphs, and of the optimizer's state.
    on_host: (usize, usize),
}

/// A cache of computed programs.
struct Programs<'a> {
    model: &'a TrainedModel,
    known: BTreeMap<(u64, u64, bool), Rc<ModelProgram>>,
}

impl Programs<'_> {
    /// The size of the cache.
    const MOST: usize = 16;

    fn of(&mut self, samples: u64, length: u64, precision: Precision) -> Rc<ModelProgram> {
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
    pub(super) time: Nanos,
    pub(super) final_batch: u64,
    pub(super) plan: Option<AttemptPlan>,
    pub(super) retries: u64,
    pub(super) ooms: u64,
    pub(super) retained: u64,
    pub(super) host: HostUse,
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
        let memory = PassMemory {
            stream,
            parameters: Vec::with_capacity(sizes.len()),
            gradients: sizes.iter().map(|_| None).collect(),
            sizes,
            workspaces: [None, None],
            host: HostStore::default(),
            retains: train.retain_graph,
            made: Vec::new(),
            arrived: Vec::new(),
        };
        let programs = Programs {
            model: &train.model,
            known: BTreeMap::new(),
        };
        Self {
            train,
            memory,
            constants: Vec::new(),
            state: Vec::new(),
            state_on_host: Vec::new(),
            retained: Vec::new(),
            programs,
        }
    }

    pub(super) fn build(&mut self, ctx: &mut RunContext) -> Result<(), Failed> {
        ctx.rig.name_purpose("parameters");
        let PassMemory {
            stream,
            sizes,
            parameters,
            ..
        } = &mut self.memory;
        for &size in &*sizes {
            parameters.push(make(ctx, size, *stream)?);
        }
        for size in self.train.model.constants() {
            self.constants.push(make(ctx, size, *stream)?);
        }
        // PyTorch's optimizers create their state in the first update. A model given only by sizes
        // has it from the start.
        match &self.train.model {
            TrainedModel::Uniform(_) => self.make_state(ctx, 1, self.train.optimizer.copies()),
            TrainedModel::Model(_) => Ok(()),
        }
    }

    /// Makes `buffers` buffers per parameter, each `copies` times its size.
    fn make_state(
        &mut self,
        ctx: &mut RunContext,
        buffers: u64,
        copies: u64,
    ) -> Result<(), Failed> {
        ctx.rig.name_purpose("optimizer state");
        for &size in self.memory.sizes.iter().filter(|_| copies > 0) {
            for _ in 0..buffers {
                self.state
                    .push(make(ctx, Bytes(size.0 * copies), self.memory.stream)?);
            }
        }
        Ok(())
    }

    /// The bytes that the training holds between iterations.
    fn held(&self) -> u64 {
        let memory = &self.memory;
        let lasting = memory
            .parameters
            .iter()
            .chain(&self.constants)
            .chain(&self.state)
            .chain(&self.retained);
        lasting
            .chain(memory.gradients.iter().chain(&memory.workspaces).flatten())
            .map(|buffer| buffer.size().0)
            .sum()
    }

    pub(super) fn iterate(
        &mut self,
        ctx: &mut RunContext,
        plan: &AttemptPlan,
        length: u64,
        counts: &mut Counts,
    ) -> Answer<()> {
        let mut begun = self.begin(ctx);
        let spilled = self.spill_state(ctx, plan);
        (begun.state, begun.on_host) = (
            self.state.len(),
            (self.memory.host.retained.len(), self.state_on_host.len()),
        );
        let done = spilled.and_then(|()| {
            (0..plan.parts()).try_for_each(|part| self.pass(ctx, plan, part, length))
        });
        let done = done.and_then(|()| match plan.spilled.get(&SpilledPart::OptimizerState) {
            Some(memory) => self.update_on_host(ctx, memory),
            None => self.update(ctx),
        });
        let answer = counts.answer(done)?;
        self.end(ctx, begun, answer.is_err(), counts)?;
        Ok(answer)
    }

    /// The allocated bytes that the training does not hold.
    fn allocated_by_others(&self, ctx: &RunContext) -> u64 {
        let allocated = ctx.rig.stats().allocated_bytes.all.current;
        allocated.saturating_sub(self.held())
    }

    pub(super) fn begin(&mut self, ctx: &RunContext) -> Begun {
        self.memory.made.clear();
        self.memory.arrived.clear();
        let allocated = self.allocated_by_others(ctx);
        let on_host = (self.memory.host.retained.len(), self.state_on_host.len());
        Begun {
            allocated,
            retained: self.retained.len(),
            state: self.state.len(),
            on_host,
        }
    }

    /// Ends an iteration. After a failure, frees everything it made and verifies parameters and
    /// state.
    pub(super) fn end(
        &mut self,
        ctx: &mut RunContext,
        begun: Begun,
        failed: bool,
        counts: &mut Counts,
    ) -> Result<(), Stop> {
        let Begun {
            allocated: before,
            retained,
            state,
            on_host,
        } = begun;
        let PassMemory {
            host,
            gradients,
            made,
            ..
        } = &mut self.memory;
        if failed {
            free_all(
                ctx,
                self.retained
                    .drain(retained..)
                    .chain(self.state.drain(state..)),
            )?;
            self.state_on_host
                .drain(on_host.1..)
                .for_each(|state| host.put_back(state));
            host.give_up_retained(on_host.0);
            host.give_back_spare(ctx)?;
        }
        if failed || self.train.zero_grad == ZeroGrad::SetToNone {
            free_all(
                ctx,
                made.drain(..)
                    .filter_map(|parameter| gradients[parameter].take()),
            )?;
        }
        let after = self.allocated_by_others(ctx);
        if failed {
            counts.retained = counts.retained.max(after.saturating_sub(before));
            // This check is not part of the training, so timed runs skip it.
            if !ctx.rig.is_timed() {
                self.verify(ctx)?;
            }
        }
        if after != before {
            let expected = format!(
                "{before} B allocated after an iteration, as before it, apart from the training's \
                 own memory"
            );
            ctx.rig.note(Finding::new(
                Invariant::OomChangesOnlyTheCache,
                expected,
                format!("{after} B"),
            ));
        }
        Ok(())
    }

    /// Prepares one micro-batch.
    pub(super) fn new_pass(&mut self, plan: &AttemptPlan, part: u64, length: u64) -> Pass {
        let program = self
            .programs
            .of(plan.samples_of(part), length, plan.precision);
        Pass::new(
            program,
            plan.checkpoint_every,
            plan.spilled.get(&SpilledPart::Activations).cloned(),
        )
    }

    pub(super) fn pass(
        &mut self,
        ctx: &mut RunContext,
        plan: &AttemptPlan,
        part: u64,
        length: u64,
    ) -> Result<(), Failed> {
        let mut pass = self.new_pass(plan, part, length);
        let forward = pass.forward_pass(ctx, &mut self.memory);
        let done = forward.and_then(|()| pass.backward_pass(ctx, &mut self.memory));
        self.end_pass(ctx, pass, done.is_ok())?;
        done
    }

    /// Keeps the remaining buffers of a completed pass if its graph is retained. Frees the others.
    pub(super) fn end_pass(
        &mut self,
        ctx: &mut RunContext,
        pass: Pass,
        completed: bool,
    ) -> Result<(), Stop> {
        let keep = self.memory.retains && completed;
        let left = pass.into_buffers(&mut self.memory.host, keep);
        if keep {
            self.retained.extend(left);
            return Ok(());
        }
        free_all(ctx, left)
    }

    /// Runs the optimizer, which reads and writes parameters and state. A model's optimizer creates
    /// its state in the first update. Adam computes the square roots of a moment separately, for
    /// all parameters together (`foreach`, PyTorch's default on a GPU).
    pub(super) fn update(&mut self, ctx: &mut RunContext) -> Result<(), Failed> {
        if matches!(self.train.model, TrainedModel::Model(_)) {
            let copies = self.train.optimizer.copies();
            if self.state.is_empty() {
                self.make_state(ctx, copies, copies.min(1))?;
            }
            if self.train.optimizer == Optimizer::Adam {
                let mut roots = Vec::with_capacity(self.memory.sizes.len());
                let mut compute =
                    |&size| make(ctx, size, self.memory.stream).map(|root| roots.push(root));
                let done = self.memory.sizes.iter().try_for_each(&mut compute);
                free_all(ctx, roots)?;
                done?;
            }
        }
        for buffer in self.memory.parameters.iter_mut().chain(&mut self.state) {
            ctx.rig.verify(buffer, self.memory.stream)?;
            ctx.rig.fill(buffer, self.memory.stream)?;
        }
        Ok(())
    }

    /// Moves the optimizer's state to the host if the plan says so. Moved state stays there even if
    /// the attempt fails.
    fn spill_state(&mut self, ctx: &mut RunContext, plan: &AttemptPlan) -> Result<(), Failed> {
        let Some(memory) = plan.spilled.get(&SpilledPart::OptimizerState) else {
            return Ok(());
        };
        while let Some(buffer) = self.state.last() {
            self.memory.host.save(
                ctx,
                buffer,
                memory,
                self.memory.stream,
                &mut self.state_on_host,
            )?;
            ctx.rig.synchronize_stream(self.memory.stream)?;
            free_all(ctx, self.state.pop())?;
        }
        Ok(())
    }

    /// Runs the optimizer on the host: copies gradients there and parameters back. The arithmetic
    /// is skipped. Each parameter receives the contents of its gradient, so verification covers
    /// both copies.
    fn update_on_host(&mut self, ctx: &mut RunContext, memory: &HostMemory) -> Result<(), Failed> {
        let PassMemory {
            stream,
            sizes,
            parameters,
            gradients,
            host,
            ..
        } = &mut self.memory;
        if self.state_on_host.is_empty() {
            for &size in &*sizes {
                for _ in 0..self.train.optimizer.copies() {
                    self.state_on_host.push(host.take(ctx, size, memory)?);
                }
            }
        }
        let mut staged = Vec::with_capacity(sizes.len());
        let sent = gradients
            .iter()
            .flatten()
            .try_for_each(|gradient| host.save(ctx, gradient, memory, *stream, &mut staged));
        let done = sent.and_then(|()| {
            ctx.rig.synchronize_stream(*stream)?;
            let updated = parameters
                .iter_mut()
                .zip(&*gradients)
                .filter(|(_, gradient)| gradient.is_some());
            for ((parameter, _), staged) in updated.zip(&staged) {
                ctx.rig.verify(parameter, *stream)?;
                host.copy_up(ctx, staged, parameter, *stream)?;
            }
            Ok(ctx.rig.synchronize_stream(*stream)?)
        });
        staged.into_iter().for_each(|staged| host.put_back(staged));
        done
    }

    fn verify(&self, ctx: &mut RunContext) -> Result<(), Stop> {
        self.memory
            .parameters
            .iter()
            .chain(&self.state)
            .try_for_each(|buffer| ctx.rig.verify(buffer, self.memory.stream))
    }

    pub(super) fn free(self, ctx: &mut RunContext) -> Result<(), Stop> {
        let PassMemory {
            parameters,
            gradients,
            workspaces,
            mut host,
            ..
        } = self.memory;
        self.state_on_host
            .into_iter()
            .for_each(|state| host.put_back(state));
        host.free(ctx)?;
        let lasting = parameters
            .into_iter()
            .chain(self.constants)
            .chain(self.state);
        free_all(
            ctx,
            lasting
                .chain(gradients.into_iter().chain(workspaces).flatten())
                .chain(self.retained),
        )
    }
}
