//! The forward and backward pass of one micro-batch: runs the operations of a [`Program`] with buffers for its tensors
//! and gradients.
//!
//! Tensors live as in PyTorch's autograd: as long as a later operation reads them or a backward pass has saved them.

use std::ops::Range;

use harness_allocator::device::StreamId;
use harness_allocator::units::{Bytes, Nanos};

use super::spill::SavedOnHost;
use crate::context::RunContext;
use crate::rig::{Buffer, Stop};
use crate::workload::memory::{Failed, free_all, make};
use harness_scenario::DeviceKind;
use harness_scenario::model::{Gradient, ParameterId, Program, Segment, TensorId};

/// cuBLAS allocates a workspace once per calling thread and keeps it: one for forward and one for backward passes.
#[derive(Debug, Default)]
pub(super) struct Workspaces {
    pub(super) forward: Option<Buffer>,
    pub(super) backward: Option<Buffer>,
}

/// PyTorch 2.11's cuBLAS workspace on devices of compute capability 9.0 (`getChosenWorkspaceSize`,
/// <https://github.com/pytorch/pytorch/blob/v2.11.0/aten/src/ATen/cuda/CublasHandlePool.cpp>).
const CUBLAS_WORKSPACE: Bytes = Bytes::mib(32);

/// Multiply-adds per nanosecond on a simulated device, for every precision. This model uses half of the 67 TFLOPS
/// (32-bit) in the data sheet of the H100 SXM (<https://www.nvidia.com/en-us/data-center/h100/>).
const MULTIPLICATIONS_PER_NANOSECOND: u64 = 33_500;

#[derive(Debug, Default)]
struct Tensor {
    buffer: Option<Buffer>,
    /// Later operations that read it.
    reads: u32,
    /// Backward passes that saved it, and checkpoints that begin with it.
    saves: u32,
}

/// Memory of a gradient, shared by one or several tensors.
#[derive(Debug)]
struct Flow {
    buffer: Option<Buffer>,
    tensors: u32,
}

/// The state of one pass. [`Pass::into_buffers`] returns its remaining buffers, even after a failure.
#[derive(Debug)]
pub(super) struct Pass<'a> {
    program: &'a Program,
    makers: Vec<Option<usize>>,
    stream: StreamId,
    tensors: Vec<Tensor>,
    flows: Vec<Flow>,
    /// The flow that carries each tensor's gradient.
    gradients: Vec<Option<usize>>,
    /// Temporary buffers of the current operation.
    scratch: Vec<Buffer>,
    /// True if saved tensors stay allocated.
    retains: bool,
    /// Saved tensors on the host, if they are spilled.
    on_host: Option<SavedOnHost<'a>>,
    /// Buffers fetched from the host for the current operation and its checkpointed segment.
    fetched: Vec<Buffer>,
}

impl<'a> Pass<'a> {
    pub(super) fn new(program: &'a Program, stream: StreamId, retains: bool) -> Self {
        let mut tensors = Vec::new();
        tensors.resize_with(program.tensors.len(), Tensor::default);
        let gradients = vec![None; tensors.len()];
        let (flows, scratch) = (Vec::new(), Vec::new());
        let (on_host, fetched) = (None, Vec::new());
        Self { program, makers: program.makers(), stream, tensors, flows, gradients, scratch, retains, on_host, fetched }
    }

    /// Spills saved tensors to the host.
    pub(super) fn saving_on_host(self, on_host: Option<SavedOnHost<'a>>) -> Self {
        Self { on_host, ..self }
    }

    pub(super) fn forward_pass(
        &mut self,
        ctx: &mut RunContext,
        checkpoint_every: Option<u64>,
        workspaces: &mut Workspaces,
    ) -> Result<(), Failed> {
        let program = self.program;
        for &input in &program.inputs {
            self.tensors[input].buffer = Some(make(ctx, program.tensors[input], self.stream)?);
            self.tensors[input].saves += 1;
        }
        for &read in program.operations.iter().flat_map(|operation| &operation.reads) {
            self.tensors[read].reads += 1;
        }
        for segment in &program.segments(checkpoint_every) {
            self.forward(ctx, segment, !segment.is_checkpointed, workspaces)?;
        }
        Ok(())
    }

    /// Runs the backward pass, after the forward pass.
    pub(super) fn backward_pass(
        &mut self,
        ctx: &mut RunContext,
        checkpoint_every: Option<u64>,
        workspaces: &mut Workspaces,
        parameters: &mut ParameterGradients<'_>,
    ) -> Result<(), Failed> {
        let segments = self.program.segments(checkpoint_every);
        for segment in segments.iter().rev() {
            self.backward(ctx, segment, workspaces, parameters)?;
        }
        Ok(self.compute(ctx, &segments)?)
    }

    /// Keeps a simulated device's stream busy for the duration of the arithmetic: once for the forward pass, twice for
    /// the backward pass, and once more for recomputation. A real GPU only fills and reads memory. Untimed runs skip
    /// this.
    fn compute(&self, ctx: &mut RunContext, segments: &[Segment]) -> Result<(), Stop> {
        if !ctx.rig.is_timed() || ctx.device != DeviceKind::Simulated {
            return Ok(());
        }
        let times = |segment: &Segment| if segment.is_checkpointed { 4 } else { 3 };
        let work_of = |segment: &Segment| self.program.operations[segment.operations.clone()].iter().map(|operation| operation.work);
        let work = segments.iter().flat_map(|segment| work_of(segment).map(move |work| work.saturating_mul(times(segment))));
        let work = work.fold(0, u64::saturating_add);
        match work / MULTIPLICATIONS_PER_NANOSECOND {
            0 => Ok(()),
            duration => ctx.rig.work(self.stream, Nanos(duration)),
        }
    }

    /// Runs the operations of a segment. A checkpointed segment keeps only its inputs.
    fn forward(&mut self, ctx: &mut RunContext, segment: &Segment, saves: bool, workspaces: &mut Workspaces) -> Result<(), Failed> {
        if segment.is_checkpointed {
            self.keep(ctx, segment.operations.start, &self.inputs_of(&segment.operations), &[])?;
        }
        segment.operations.clone().try_for_each(|index| self.forward_one(ctx, index, saves, None, workspaces))
    }

    /// The distinct tensors that these operations read and earlier operations made.
    fn inputs_of(&self, operations: &Range<usize>) -> Vec<TensorId> {
        let is_input = |tensor: &TensorId| self.makers[*tensor].is_none_or(|maker| maker < operations.start);
        let read = self.program.operations[operations.clone()].iter().flat_map(|operation| &operation.reads);
        let mut inputs: Vec<TensorId> = read.copied().filter(is_input).collect();
        inputs.sort_unstable();
        inputs.dedup();
        inputs
    }

    /// Runs one operation. In a recomputation from `again_from`, only reads of tensors made since that operation count.
    fn forward_one(
        &mut self,
        ctx: &mut RunContext,
        index: usize,
        saves: bool,
        again_from: Option<usize>,
        workspaces: &mut Workspaces,
    ) -> Result<(), Failed> {
        let operation = &self.program.operations[index];
        if operation.uses_cublas && workspaces.forward.is_none() {
            workspaces.forward = Some(make(ctx, CUBLAS_WORKSPACE, self.stream)?);
        }
        for &made in &operation.makes {
            self.tensors[made].buffer = Some(make(ctx, self.program.tensors[made], self.stream)?);
        }
        self.work_in(ctx, operation.workspace)?;
        match (saves, again_from) {
            (true, None) => self.keep(ctx, index, &operation.saves, &operation.saves_parameters)?,
            // The backward pass soon uses what a recomputed segment saves, so it stays on the device.
            (true, Some(_)) => self.keep_on_device(&operation.saves),
            (false, _) => {}
        }
        for &read in &operation.reads {
            if again_from.is_none_or(|first| self.makers[read].is_some_and(|maker| maker >= first)) {
                self.tensors[read].reads -= 1;
            }
        }
        for &tensor in operation.reads.iter().chain(&operation.makes) {
            self.free_if_unused(ctx, tensor)?;
        }
        Ok(())
    }

    /// Keeps tensors for the backward pass of an operation, or of the segment that begins there: on the device, or on
    /// the host together with the saved parameters.
    fn keep(&mut self, ctx: &mut RunContext, operation: usize, tensors: &[TensorId], parameters: &[ParameterId]) -> Result<(), Failed> {
        let Some(on_host) = &mut self.on_host else {
            self.keep_on_device(tensors);
            return Ok(());
        };
        let buffers = tensors.iter().filter_map(|&tensor| self.tensors[tensor].buffer.as_ref());
        on_host.save(ctx, operation, buffers, parameters, self.stream)
    }

    fn keep_on_device(&mut self, tensors: &[TensorId]) {
        for &tensor in tensors {
            self.tensors[tensor].saves += 1;
        }
    }

    /// Fetches the tensors of an operation, or of the segment that begins there, from the host. Returns whether they
    /// were on the host.
    fn fetch(&mut self, ctx: &mut RunContext, operation: usize) -> Result<bool, Failed> {
        let Some(on_host) = &mut self.on_host else { return Ok(false) };
        on_host.fetch(ctx, operation, &mut self.fetched, self.retains, self.stream)
    }

    /// Frees kept tensors, or their copies fetched from the host.
    fn release_saved(&mut self, ctx: &mut RunContext, tensors: &[TensorId], fetched: Option<usize>) -> Result<(), Stop> {
        if let Some(first) = fetched {
            return free_all(ctx, self.fetched.drain(first..).collect::<Vec<_>>());
        }
        for &tensor in tensors {
            self.tensors[tensor].saves -= 1;
            self.free_if_unused(ctx, tensor)?;
        }
        Ok(())
    }

    /// Allocates a workspace for the duration of a computation.
    fn work_in(&mut self, ctx: &mut RunContext, workspace: Bytes) -> Result<(), Failed> {
        if workspace > Bytes::ZERO {
            let buffer = make(ctx, workspace, self.stream)?;
            ctx.rig.free(buffer)?;
        }
        Ok(())
    }

    fn free_if_unused(&mut self, ctx: &mut RunContext, tensor: TensorId) -> Result<(), Stop> {
        let tensor = &mut self.tensors[tensor];
        if tensor.reads == 0 && tensor.saves == 0 {
            free_all(ctx, tensor.buffer.take())?;
        }
        Ok(())
    }

    /// Runs a segment backward. A checkpointed segment is first recomputed.
    fn backward(
        &mut self,
        ctx: &mut RunContext,
        segment: &Segment,
        workspaces: &mut Workspaces,
        parameters: &mut ParameterGradients<'_>,
    ) -> Result<(), Failed> {
        let operations = segment.operations.clone();
        let mut inputs_fetched = None;
        if segment.is_checkpointed {
            let first = self.fetched.len();
            inputs_fetched = self.fetch(ctx, operations.start)?.then_some(first);
            for &read in self.program.operations[operations.clone()].iter().flat_map(|operation| &operation.reads) {
                if self.makers[read].is_some_and(|maker| maker >= operations.start) {
                    self.tensors[read].reads += 1;
                }
            }
            operations.clone().try_for_each(|index| self.forward_one(ctx, index, true, Some(operations.start), workspaces))?;
        }
        for index in operations.clone().rev() {
            self.backward_one(ctx, (index, segment.is_checkpointed), workspaces, parameters)?;
        }
        if segment.is_checkpointed {
            self.release_saved(ctx, &self.inputs_of(&operations), inputs_fetched)?;
        }
        Ok(())
    }

    /// Runs the backward pass of one operation: makes the gradients of its inputs and parameters, and reads and frees
    /// its saved tensors.
    fn backward_one(
        &mut self,
        ctx: &mut RunContext,
        (index, is_checkpointed): (usize, bool),
        workspaces: &mut Workspaces,
        parameters: &mut ParameterGradients<'_>,
    ) -> Result<(), Failed> {
        let operation = &self.program.operations[index];
        let backward = &operation.backward;
        let first = self.fetched.len();
        let fetched = (!is_checkpointed && self.fetch(ctx, index)?).then_some(first);
        if operation.uses_cublas && workspaces.backward.is_none() {
            workspaces.backward = Some(make(ctx, CUBLAS_WORKSPACE, self.stream)?);
        }
        let incoming = self.gradients[operation.output].take();
        for &size in &backward.scratch {
            let buffer = make(ctx, size, self.stream)?;
            self.scratch.push(buffer);
        }
        let mut outgoing = Vec::with_capacity(backward.gradients.len());
        for &gradient in &backward.gradients {
            outgoing.extend(self.gradient(ctx, gradient, backward.workspace, incoming)?);
        }
        let mut workspace = backward.parameter_workspace;
        for &parameter in &backward.parameters {
            parameters.make(ctx, parameter, self.stream)?;
            self.work_in(ctx, std::mem::take(&mut workspace))?;
        }
        // A checked run verifies buffers anyway when it frees them.
        if ctx.rig.is_timed() || self.retains {
            let there = operation.saves.iter().filter_map(|&saved| self.tensors[saved].buffer.as_ref());
            for buffer in there.chain(&self.fetched[first..]) {
                ctx.rig.verify(buffer, self.stream)?;
            }
        }
        free_all(ctx, self.scratch.drain(..).collect::<Vec<_>>())?;
        if !self.retains || fetched.is_some() {
            self.release_saved(ctx, &operation.saves, fetched)?;
        }
        if let Some(incoming) = incoming {
            self.release_gradient(ctx, incoming)?;
        }
        outgoing.into_iter().try_for_each(|(tensor, flow)| self.arrive(ctx, tensor, flow))
    }

    /// Makes the gradient of a tensor, or passes the incoming one on.
    fn gradient(
        &mut self,
        ctx: &mut RunContext,
        gradient: Gradient,
        workspace: Bytes,
        incoming: Option<usize>,
    ) -> Result<Option<(TensorId, usize)>, Failed> {
        match gradient {
            Gradient::Made(tensor) => {
                let buffer = make(ctx, self.program.tensors[tensor], self.stream)?;
                self.flows.push(Flow { buffer: Some(buffer), tensors: 1 });
                self.work_in(ctx, workspace)?;
                Ok(Some((tensor, self.flows.len() - 1)))
            }
            Gradient::HandedOn(tensor) => Ok(incoming.map(|flow| {
                self.flows[flow].tensors += 1;
                (tensor, flow)
            })),
        }
    }

    fn release_gradient(&mut self, ctx: &mut RunContext, flow: usize) -> Result<(), Stop> {
        let flow = &mut self.flows[flow];
        flow.tensors -= 1;
        if flow.tensors == 0 { free_all(ctx, flow.buffer.take()) } else { Ok(()) }
    }

    /// Adds a gradient to a tensor. A second gradient is added in place if no other tensor shares the memory.
    fn arrive(&mut self, ctx: &mut RunContext, tensor: TensorId, flow: usize) -> Result<(), Failed> {
        let Some(there) = self.gradients[tensor] else {
            self.gradients[tensor] = Some(flow);
            return Ok(());
        };
        let sum = if self.flows[there].tensors == 1 {
            there
        } else {
            let buffer = make(ctx, self.program.tensors[tensor], self.stream)?;
            self.flows.push(Flow { buffer: Some(buffer), tensors: 1 });
            self.release_gradient(ctx, there)?;
            self.flows.len() - 1
        };
        if let Some(buffer) = &mut self.flows[sum].buffer {
            ctx.rig.fill(buffer, self.stream)?;
        }
        self.gradients[tensor] = Some(sum);
        Ok(self.release_gradient(ctx, flow)?)
    }

    /// The remaining buffers in the order of the forward pass. After a success these are the saved tensors of a
    /// retained graph, else the inputs; after a failure everything the pass made. `retain` keeps saved tensors on the
    /// host.
    pub(super) fn into_buffers(mut self, retain: bool) -> impl Iterator<Item = Buffer> {
        self.on_host.take().into_iter().for_each(|on_host| on_host.end(retain));
        let tensors = self.tensors.into_iter().filter_map(|tensor| tensor.buffer);
        let flows = self.flows.into_iter().filter_map(|flow| flow.buffer);
        tensors.chain(flows).chain(self.scratch).chain(self.fetched)
    }
}

/// The gradients of the parameters during one iteration.
pub(super) struct ParameterGradients<'a> {
    pub(super) sizes: &'a [Bytes],
    /// The existing gradients.
    pub(super) buffers: &'a mut [Option<Buffer>],
    /// Parameters whose gradients this iteration created.
    pub(super) made: &'a mut Vec<ParameterId>,
    /// The parameter of each computed gradient, in order. A parameter that several operations use appears several
    /// times.
    pub(super) arrived: &'a mut Vec<ParameterId>,
}

impl ParameterGradients<'_> {
    /// Makes the gradient of a parameter. If there is one already, adds the new one to it and frees the new one.
    fn make(&mut self, ctx: &mut RunContext, parameter: ParameterId, stream: StreamId) -> Result<(), Failed> {
        ctx.rig.name_purpose("gradients");
        let new = make(ctx, self.sizes[parameter], stream)?;
        ctx.rig.name_purpose("activations");
        match &mut self.buffers[parameter] {
            Some(sum) => {
                ctx.rig.fill(sum, stream)?;
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
