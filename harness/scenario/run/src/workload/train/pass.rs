//! The forward and backward pass of one micro-batch: runs the operations of a [`ModelProgram`] with
//! buffers for its tensors and gradients.
//!
//! Tensors live as in PyTorch's autograd: as long as a later operation reads them or a backward
//! pass has saved them.

use std::{ops::Range, rc::Rc};

use harness_allocator::device::{HostMemory, StreamId};
use harness_allocator::units::{Bytes, Nanos};

use super::spill::{HostStore, SavedOnHost};
use crate::context::RunContext;
use crate::rig::{Buffer, Stop};
use crate::workload::memory::{Failed, free_all, make};
use harness_scenario::DeviceKind;
use harness_scenario::model::{Gradient, ModelProgram, ModelSegment, ParameterId, TensorId};

/// PyTorch 2.11's cuBLAS workspace on devices of compute capability 9.0 (`getChosenWorkspaceSize`,
/// <https://github.com/pytorch/pytorch/blob/v2.11.0/aten/src/ATen/cuda/CublasHandlePool.cpp>).
const CUBLAS_WORKSPACE: Bytes = Bytes::mib(32);

/// Multiply-adds per nanosecond on a simulated device, for every precision. This model uses half of
/// the 67 TFLOPS (32-bit) in the data sheet of the H100 SXM
/// (<https://www.nvidia.com/en-us/data-center/h100/>).
const MULTIPLICATIONS_PER_NANOSECOND: u64 = 33_500;

/// The memory of a training that its passes use.
pub(super) struct PassMemory {
    pub(super) stream: StreamId,
    pub(super) sizes: Vec<Bytes>,
    pub(super) parameters: Vec<Buffer>,
    pub(super) gradients: Vec<Option<Buffer>>,
    /// cuBLAS allocates a workspace once per calling thread and keeps it: one for forward and one
    /// for backward passes.
    pub(super) workspaces: [Option<Buffer>; 2],
    pub(super) host: HostStore,
    /// True if saved tensors stay allocated after their backward pass.
    pub(super) retains: bool,
    /// Parameters whose gradients this iteration created.
    pub(super) made: Vec<ParameterId>,
    /// The parameter of each gradient that this iteration computed, in order.
    pub(super) arrived: Vec<ParameterId>,
}

impl PassMemory {
    /// Allocates the cuBLAS workspace of forward passes (0) or backward passes (1) at the first
    /// use.
    fn use_cublas(&mut self, ctx: &mut RunContext, thread: usize) -> Result<(), Failed> {
        if self.workspaces[thread].is_none() {
            self.workspaces[thread] = Some(make(ctx, CUBLAS_WORKSPACE, self.stream)?);
        }
        Ok(())
    }

    /// Allocates a workspace for the duration of a computation.
    fn work_in(&self, ctx: &mut RunContext, workspace: Bytes) -> Result<(), Failed> {
        if workspace > Bytes::ZERO {
            let buffer = make(ctx, workspace, self.stream)?;
            ctx.rig.free(buffer)?;
        }
        Ok(())
    }

    /// Makes the gradient of a parameter. If there is one already, adds the new one to it and frees
    /// the new one.
    fn make_gradient(
        &mut self,
        ctx: &mut RunContext,
        parameter: ParameterId,
    ) -> Result<(), Failed> {
        ctx.rig.name_purpose("gradients");
        let new = make(ctx, self.sizes[parameter], self.stream)?;
        ctx.rig.name_purpose("activations");
        match &mut self.gradients[parameter] {
            Some(sum) => {
                ctx.rig.fill(sum, self.stream)?;
                ctx.rig.free(new)?;
            }
            none => {
                *none = Some(new);
                self.made.push(parameter);
            }
        }
        self.arrived.push(parameter);
        Ok(())
    }
}

#[derive(Debug, Default)]
struct Tensor {
    buffer: Option<Buffer>,
    /// Later operations that read it.
    reads: u32,
    /// Backward passes that saved it, and checkpoints that begin with it.
    saves: u32,
    /// The flow that carries its gradient.
    gradient: Option<usize>,
}

/// Memory of a gradient, shared by one or several tensors.
#[derive(Debug)]
struct Flow {
    buffer: Option<Buffer>,
    tensors: u32,
}

/// The state of one pass. [`Pass::into_buffers`] returns its remaining buffers, even after a
/// failure.
#[derive(Debug)]
pub(super) struct Pass {
    pub(super) program: Rc<ModelProgram>,
    segments: Vec<ModelSegment>,
    makers: Vec<Option<usize>>,
    tensors: Vec<Tensor>,
    flows: Vec<Flow>,
    scratch: Vec<Buffer>,
    /// Saved tensors on the host, if they are spilled.
    on_host: Option<SavedOnHost>,
    /// Buffers fetched from the host for the current operation and its checkpointed segment.
    fetched: Vec<Buffer>,
}

impl Pass {
    /// `save_to` is the host memory that saved tensors are spilled to, if any.
    pub(super) fn new(
        program: Rc<ModelProgram>,
        checkpoint_every: Option<u64>,
        save_to: Option<HostMemory>,
    ) -> Self {
        Self {
            segments: program.segments(checkpoint_every),
            makers: program.makers(),
            tensors: program.tensors.iter().map(|_| Tensor::default()).collect(),
            program,
            flows: Vec::new(),
            scratch: Vec::new(),
            on_host: save_to.map(SavedOnHost::new),
            fetched: Vec::new(),
        }
    }

    pub(super) fn forward_pass(
        &mut self,
        ctx: &mut RunContext,
        memory: &mut PassMemory,
    ) -> Result<(), Failed> {
        ctx.rig.name_purpose("activations");
        for &input in &self.program.inputs {
            self.tensors[input].buffer =
                Some(make(ctx, self.program.tensors[input], memory.stream)?);
            self.tensors[input].saves += 1;
        }
        for &read in self
            .program
            .operations
            .iter()
            .flat_map(|operation| &operation.reads)
        {
            self.tensors[read].reads += 1;
        }
        for segment in self.segments.clone() {
            if segment.is_checkpointed {
                self.keep(
                    ctx,
                    segment.operations.start,
                    &self.inputs_of(&segment.operations),
                    &[],
                    memory,
                )?;
            }
            segment.operations.into_iter().try_for_each(|index| {
                self.forward(ctx, index, !segment.is_checkpointed, None, memory)
            })?;
        }
        Ok(())
    }

    /// Runs the backward pass, after the forward pass.
    pub(super) fn backward_pass(
        &mut self,
        ctx: &mut RunContext,
        memory: &mut PassMemory,
    ) -> Result<(), Failed> {
        for segment in self.segments.clone().iter().rev() {
            self.backward_segment(ctx, segment, memory)?;
        }
        Ok(self.compute(ctx, memory.stream)?)
    }

    /// Keeps a simulated device's stream busy for the duration of the arithmetic: once for the
    /// forward pass, twice for the backward pass, and once more for recomputation.
    fn compute(&self, ctx: &mut RunContext, stream: StreamId) -> Result<(), Stop> {
        if !ctx.rig.is_timed() || ctx.setup.device != DeviceKind::Simulated {
            return Ok(());
        }
        let times = |segment: &ModelSegment| if segment.is_checkpointed { 4 } else { 3 };
        let work_of = |segment: &ModelSegment| {
            self.program.operations[segment.operations.clone()]
                .iter()
                .map(|operation| operation.work)
        };
        let work = self.segments.iter().flat_map(|segment| {
            work_of(segment).map(move |work| work.saturating_mul(times(segment)))
        });
        let work = work.fold(0, u64::saturating_add);
        match work / MULTIPLICATIONS_PER_NANOSECOND {
            0 => Ok(()),
            duration => ctx.rig.work(stream, Nanos(duration)),
        }
    }

    /// The distinct tensors that these operations read and earlier operations made.
    fn inputs_of(&self, operations: &Range<usize>) -> Vec<TensorId> {
        let is_input =
            |tensor: &TensorId| self.makers[*tensor].is_none_or(|maker| maker < operations.start);
        let read = self.program.operations[operations.clone()]
            .iter()
            .flat_map(|operation| &operation.reads);
        let mut inputs: Vec<TensorId> = read.copied().filter(is_input).collect();
        inputs.sort_unstable();
        inputs.dedup();
        inputs
    }

    fn forward(
        &mut self,
        ctx: &mut RunContext,
        index: usize,
        saves: bool,
        again_from: Option<usize>,
        memory: &mut PassMemory,
    ) -> Result<(), Failed> {
        let program = Rc::clone(&self.program);
        let operation = &program.operations[index];
        if operation.uses_cublas {
            memory.use_cublas(ctx, 0)?;
        }
        for &made in &operation.makes {
            self.tensors[made].buffer = Some(make(ctx, program.tensors[made], memory.stream)?);
        }
        memory.work_in(ctx, operation.workspace)?;
        match (saves, again_from) {
            (true, None) => self.keep(
                ctx,
                index,
                &operation.saves,
                &operation.saves_parameters,
                memory,
            )?,
            // The backward pass soon uses what a recomputed segment saves, so it stays on the
            // device.
            (true, Some(_)) => self.keep_on_device(&operation.saves),
            (false, _) => {}
        }
        for &read in &operation.reads {
            if again_from.is_none_or(|first| self.makers[read].is_some_and(|maker| maker >= first))
            {
                self.tensors[read].reads -= 1;
            }
        }
        operation
            .reads
            .iter()
            .chain(&operation.makes)
            .try_for_each(|&tensor| Ok(self.free_if_unused(ctx, tensor)?))
    }

    /// Keeps tensors for the backward pass of an operation, or of the segment that begins there: on
    /// the device, or on the host together with the saved parameters.
    fn keep(
        &mut self,
        ctx: &mut RunContext,
        operation: usize,
        tensors: &[TensorId],
        parameters: &[ParameterId],
        memory: &mut PassMemory,
    ) -> Result<(), Failed> {
        let Some(on_host) = &mut self.on_host else {
            self.keep_on_device(tensors);
            return Ok(());
        };
        let tensors = tensors
            .iter()
            .filter_map(|&tensor| self.tensors[tensor].buffer.as_ref());
        let parameters = parameters
            .iter()
            .filter_map(|&parameter| memory.parameters.get(parameter));
        on_host.save(
            ctx,
            &mut memory.host,
            operation,
            tensors.chain(parameters),
            memory.stream,
        )
    }

    fn keep_on_device(&mut self, tensors: &[TensorId]) {
        tensors
            .iter()
            .for_each(|&tensor| self.tensors[tensor].saves += 1);
    }

    /// Fetches the tensors of an operation, or of the segment that begins there, from the host.
    fn fetch(
        &mut self,
        ctx: &mut RunContext,
        operation: usize,
        memory: &mut PassMemory,
    ) -> Result<Option<usize>, Failed> {
        let first = self.fetched.len();
        let Some(on_host) = &mut self.on_host else {
            return Ok(None);
        };
        let were_there = on_host.fetch(
            ctx,
            &mut memory.host,
            operation,
            &mut self.fetched,
            memory.retains,
            memory.stream,
        )?;
        Ok(were_there.then_some(first))
    }

    /// Frees kept tensors, or their copies fetched from the host.
    fn release_saved(
        &mut self,
        ctx: &mut RunContext,
        tensors: &[TensorId],
        fetched: Option<usize>,
    ) -> Result<(), Stop> {
        if let Some(first) = fetched {
            return free_all(ctx, self.fetched.drain(first..));
        }
        for &tensor in tensors {
            self.tensors[tensor].saves -= 1;
            self.free_if_unused(ctx, tensor)?;
        }
        Ok(())
    }

    fn free_if_unused(&mut self, ctx: &mut RunContext, tensor: TensorId) -> Result<(), Stop> {
        let tensor = &mut self.tensors[tensor];
        if tensor.reads == 0 && tensor.saves == 0 {
            free_all(ctx, tensor.buffer.take())
        } else {
            Ok(())
        }
    }

    fn backward_segment(
        &mut self,
        ctx: &mut RunContext,
        segment: &ModelSegment,
        memory: &mut PassMemory,
    ) -> Result<(), Failed> {
        let operations = segment.operations.clone();
        let mut inputs_fetched = None;
        if segment.is_checkpointed {
            inputs_fetched = self.fetch(ctx, operations.start, memory)?;
            for &read in self.program.operations[operations.clone()]
                .iter()
                .flat_map(|operation| &operation.reads)
            {
                if self.makers[read].is_some_and(|maker| maker >= operations.start) {
                    self.tensors[read].reads += 1;
                }
            }
            operations.clone().try_for_each(|index| {
                self.forward(ctx, index, true, Some(operations.start), memory)
            })?;
        }
        for index in operations.clone().rev() {
            self.backward(ctx, index, segment.is_checkpointed, memory)?;
        }
        if segment.is_checkpointed {
            self.release_saved(ctx, &self.inputs_of(&operations), inputs_fetched)?;
        }
        Ok(())
    }

    /// Runs the backward pass of one operation: makes the gradients of its inputs and parameters,
    /// and reads and frees its saved tensors.
    fn backward(
        &mut self,
        ctx: &mut RunContext,
        index: usize,
        is_checkpointed: bool,
        memory: &mut PassMemory,
    ) -> Result<(), Failed> {
        let program = Rc::clone(&self.program);
        let operation = &program.operations[index];
        let backward = &operation.backward;
        let first = self.fetched.len();
        let fetched = if is_checkpointed {
            None
        } else {
            self.fetch(ctx, index, memory)?
        };
        if operation.uses_cublas {
            memory.use_cublas(ctx, 1)?;
        }
        let incoming = self.tensors[operation.output].gradient.take();
        for &size in &backward.scratch {
            self.scratch.push(make(ctx, size, memory.stream)?);
        }
        let mut outgoing = Vec::with_capacity(backward.gradients.len());
        for &gradient in &backward.gradients {
            match gradient {
                Gradient::Made(tensor) => {
                    outgoing.push((tensor, self.new_flow(ctx, tensor, memory.stream)?));
                    memory.work_in(ctx, backward.workspace)?;
                }
                Gradient::HandedOn(tensor) => outgoing.extend(incoming.map(|flow| {
                    self.flows[flow].tensors += 1;
                    (tensor, flow)
                })),
            }
        }
        let mut workspace = backward.parameter_workspace;
        for &parameter in &backward.parameters {
            memory.make_gradient(ctx, parameter)?;
            memory.work_in(ctx, std::mem::take(&mut workspace))?;
        }
        // A checked run verifies buffers anyway when it frees them.
        if ctx.rig.is_timed() || memory.retains {
            let there = operation
                .saves
                .iter()
                .filter_map(|&saved| self.tensors[saved].buffer.as_ref());
            for buffer in there.chain(&self.fetched[first..]) {
                ctx.rig.verify(buffer, memory.stream)?;
            }
        }
        free_all(ctx, self.scratch.drain(..))?;
        if !memory.retains || fetched.is_some() {
            self.release_saved(ctx, &operation.saves, fetched)?;
        }
        if let Some(incoming) = incoming {
            self.release_gradient(ctx, incoming)?;
        }
        outgoing
            .into_iter()
            .try_for_each(|(tensor, flow)| self.arrive(ctx, tensor, flow, memory.stream))
    }

    /// Allocates the gradient of a tensor and returns its flow.
    fn new_flow(
        &mut self,
        ctx: &mut RunContext,
        tensor: TensorId,
        stream: StreamId,
    ) -> Result<usize, Failed> {
        let buffer = make(ctx, self.program.tensors[tensor], stream)?;
        self.flows.push(Flow {
            buffer: Some(buffer),
            tensors: 1,
        });
        Ok(self.flows.len() - 1)
    }

    fn release_gradient(&mut self, ctx: &mut RunContext, flow: usize) -> Result<(), Stop> {
        let flow = &mut self.flows[flow];
        flow.tensors -= 1;
        if flow.tensors == 0 {
            free_all(ctx, flow.buffer.take())
        } else {
            Ok(())
        }
    }

    /// Adds a gradient to a tensor. A second gradient is added in place if no other tensor shares
    /// the memory.
    fn arrive(
        &mut self,
        ctx: &mut RunContext,
        tensor: TensorId,
        flow: usize,
        stream: StreamId,
    ) -> Result<(), Failed> {
        let Some(mut sum) = self.tensors[tensor].gradient else {
            self.tensors[tensor].gradient = Some(flow);
            return Ok(());
        };
        if self.flows[sum].tensors > 1 {
            let shared = std::mem::replace(&mut sum, self.new_flow(ctx, tensor, stream)?);
            self.release_gradient(ctx, shared)?;
        }
        if let Some(buffer) = &mut self.flows[sum].buffer {
            ctx.rig.fill(buffer, stream)?;
        }
        self.tensors[tensor].gradient = Some(sum);
        Ok(self.release_gradient(ctx, flow)?)
    }

    /// The remaining buffers in the order of the forward pass. After a success these are the saved
    /// tensors of a retained graph, else the inputs; after a failure everything the pass made.
    /// `retain` keeps saved tensors on the host.
    pub(super) fn into_buffers(
        mut self,
        host: &mut HostStore,
        retain: bool,
    ) -> impl Iterator<Item = Buffer> + use<> {
        self.on_host
            .take()
            .into_iter()
            .for_each(|on_host| on_host.end(host, retain));
        let tensors = self.tensors.into_iter().filter_map(|tensor| tensor.buffer);
        let flows = self.flows.into_iter().filter_map(|flow| flow.buffer);
        tensors.chain(flows).chain(self.scratch).chain(self.fetched)
    }
}
