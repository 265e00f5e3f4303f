//! The forward and backward pass of one micro-batch: the operations of a [`Program`], with its tensors and gradients as buffers.
//!
//! Tensors are freed by the rules of PyTorch's autograd: one lives as long as an operation to come reads it, or a backward pass has it saved.

use std::ops::Range;

use harness_allocator::device::StreamId;
use harness_allocator::units::{Bytes, Nanos};

use super::spill::SavedOnHost;
use crate::rig::{Buffer, Stop};
use crate::workload::memory::{Failed, free_all, make};
use crate::world::World;
use harness_scenario::DeviceKind;
use harness_scenario::model::{Gradient, ParameterId, Program, Segment, TensorId};

/// Memory that cuBLAS takes once for each thread that calls it, and keeps: one for forward passes, one for backward passes.
#[derive(Debug, Default)]
pub(super) struct Workspaces {
    pub(super) forward: Option<Buffer>,
    pub(super) backward: Option<Buffer>,
}

/// What PyTorch 2.11 has cuBLAS use on devices of compute capability 9.0 (`getChosenWorkspaceSize`,
/// <https://github.com/pytorch/pytorch/blob/v2.11.0/aten/src/ATen/cuda/CublasHandlePool.cpp>).
const CUBLAS_WORKSPACE: Bytes = Bytes::mib(32);

/// Multiplications with additions that a simulated device does in a nanosecond: a model, half of the 67 TFLOPS in 32-bit numbers that the data sheet of the
/// H100 SXM names (<https://www.nvidia.com/en-us/data-center/h100/>), whatever the precision.
const MULTIPLICATIONS_PER_NANOSECOND: u64 = 33_500;

/// A tensor, where it has memory now.
#[derive(Debug, Default)]
struct Tensor {
    buffer: Option<Buffer>,
    /// Operations to come that read it.
    reads: u32,
    /// Backward passes that have it saved, and checkpoints that begin with it.
    saves: u32,
}

/// Memory that carries a gradient, of one tensor or of several.
#[derive(Debug)]
struct Flow {
    buffer: Option<Buffer>,
    tensors: u32,
}

/// One pass. Whatever happens, [`Pass::free`] gives back what it holds.
#[derive(Debug)]
pub(super) struct Pass<'a> {
    program: &'a Program,
    makers: Vec<Option<usize>>,
    stream: StreamId,
    tensors: Vec<Tensor>,
    flows: Vec<Flow>,
    /// Which flow carries the gradient of each tensor.
    gradients: Vec<Option<usize>>,
    /// What the operation at hand needs only while it runs.
    scratch: Vec<Buffer>,
    /// Whether saved tensors stay.
    retains: bool,
    /// Saved tensors that are kept on the host, if they are.
    on_host: Option<SavedOnHost<'a>>,
    /// What came back from there for the operation at hand, and for the checkpointed segment that it is of.
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

    /// The same with saved tensors on the host.
    pub(super) fn saving_on_host(self, on_host: Option<SavedOnHost<'a>>) -> Self {
        Self { on_host, ..self }
    }

    /// Does the forward pass.
    pub(super) fn forward_pass(
        &mut self,
        world: &mut World,
        checkpoint_every: Option<u64>,
        workspaces: &mut Workspaces,
    ) -> Result<(), Failed> {
        let program = self.program;
        for &input in &program.inputs {
            self.tensors[input].buffer = Some(make(world, program.tensors[input], self.stream)?);
            self.tensors[input].saves += 1;
        }
        for &read in program.operations.iter().flat_map(|operation| &operation.reads) {
            self.tensors[read].reads += 1;
        }
        for segment in &program.segments(checkpoint_every) {
            self.forward(world, segment, !segment.is_checkpointed, workspaces)?;
        }
        Ok(())
    }

    /// Does the backward pass, behind the forward pass.
    pub(super) fn backward_pass(
        &mut self,
        world: &mut World,
        checkpoint_every: Option<u64>,
        workspaces: &mut Workspaces,
        parameters: &mut ParameterGradients<'_>,
    ) -> Result<(), Failed> {
        let segments = self.program.segments(checkpoint_every);
        for segment in segments.iter().rev() {
            self.backward(world, segment, workspaces, parameters)?;
        }
        Ok(self.compute(world, &segments)?)
    }

    /// Keeps the stream of a simulated device busy for as long as the arithmetic takes: the forward pass once, twice as much for the backward pass, and
    /// once more what is done again. A GPU fills and reads what it is given, and no arithmetic is done there. Where nothing is timed, it is left out.
    fn compute(&self, world: &mut World, segments: &[Segment]) -> Result<(), Stop> {
        if !world.rig.is_timed() || world.device != DeviceKind::Simulated {
            return Ok(());
        }
        let times = |segment: &Segment| if segment.is_checkpointed { 4 } else { 3 };
        let work_of = |segment: &Segment| self.program.operations[segment.operations.clone()].iter().map(|operation| operation.work);
        let work = segments.iter().flat_map(|segment| work_of(segment).map(move |work| work.saturating_mul(times(segment))));
        let work = work.fold(0, u64::saturating_add);
        match work / MULTIPLICATIONS_PER_NANOSECOND {
            0 => Ok(()),
            duration => world.rig.work(self.stream, Nanos(duration)),
        }
    }

    /// Does the operations of a segment. Of a checkpointed one only the inputs are kept.
    fn forward(&mut self, world: &mut World, segment: &Segment, saves: bool, workspaces: &mut Workspaces) -> Result<(), Failed> {
        if segment.is_checkpointed {
            self.keep(world, segment.operations.start, &self.inputs_of(&segment.operations), &[])?;
        }
        segment.operations.clone().try_for_each(|index| self.forward_one(world, index, saves, None, workspaces))
    }

    /// Tensors that operations read and that were made before them, each once.
    fn inputs_of(&self, operations: &Range<usize>) -> Vec<TensorId> {
        let is_input = |tensor: &TensorId| self.makers[*tensor].is_none_or(|maker| maker < operations.start);
        let read = self.program.operations[operations.clone()].iter().flat_map(|operation| &operation.reads);
        let mut inputs: Vec<TensorId> = read.copied().filter(is_input).collect();
        inputs.sort_unstable();
        inputs.dedup();
        inputs
    }

    /// Does one operation. Where it is done `again_from` an operation, reads count of what was made by that one or a later one.
    fn forward_one(
        &mut self,
        world: &mut World,
        index: usize,
        saves: bool,
        again_from: Option<usize>,
        workspaces: &mut Workspaces,
    ) -> Result<(), Failed> {
        let operation = &self.program.operations[index];
        if operation.uses_cublas && workspaces.forward.is_none() {
            workspaces.forward = Some(make(world, CUBLAS_WORKSPACE, self.stream)?);
        }
        for &made in &operation.makes {
            self.tensors[made].buffer = Some(make(world, self.program.tensors[made], self.stream)?);
        }
        self.work_in(world, operation.workspace)?;
        match (saves, again_from) {
            (true, None) => self.keep(world, index, &operation.saves, &operation.saves_parameters)?,
            // What a checkpointed segment saves when it is done again is used soon.
            (true, Some(_)) => self.keep_on_device(&operation.saves),
            (false, _) => {}
        }
        for &read in &operation.reads {
            if again_from.is_none_or(|first| self.makers[read].is_some_and(|maker| maker >= first)) {
                self.tensors[read].reads -= 1;
            }
        }
        for &tensor in operation.reads.iter().chain(&operation.makes) {
            self.free_if_unused(world, tensor)?;
        }
        Ok(())
    }

    /// Keeps tensors for the backward pass of an operation, or of the segment that begins there: where they are, or on the host with the parameters that
    /// are saved beside them.
    fn keep(&mut self, world: &mut World, operation: usize, tensors: &[TensorId], parameters: &[ParameterId]) -> Result<(), Failed> {
        let Some(on_host) = &mut self.on_host else {
            self.keep_on_device(tensors);
            return Ok(());
        };
        let buffers = tensors.iter().filter_map(|&tensor| self.tensors[tensor].buffer.as_ref());
        on_host.save(world, operation, buffers, parameters, self.stream)
    }

    fn keep_on_device(&mut self, tensors: &[TensorId]) {
        for &tensor in tensors {
            self.tensors[tensor].saves += 1;
        }
    }

    /// Has back from the host what was kept there of an operation, or of the segment that begins there. Whether it was kept there.
    fn fetch(&mut self, world: &mut World, operation: usize) -> Result<bool, Failed> {
        let Some(on_host) = &mut self.on_host else { return Ok(false) };
        on_host.fetch(world, operation, &mut self.fetched, self.retains, self.stream)
    }

    /// Lets tensors go that were kept, where they were, or what came back of them from the host.
    fn let_kept_go(&mut self, world: &mut World, tensors: &[TensorId], fetched: Option<usize>) -> Result<(), Stop> {
        if let Some(first) = fetched {
            return free_all(world, self.fetched.drain(first..).collect::<Vec<_>>());
        }
        for &tensor in tensors {
            self.tensors[tensor].saves -= 1;
            self.free_if_unused(world, tensor)?;
        }
        Ok(())
    }

    /// Takes memory for as long as something is computed.
    fn work_in(&mut self, world: &mut World, workspace: Bytes) -> Result<(), Failed> {
        if workspace > Bytes::ZERO {
            let buffer = make(world, workspace, self.stream)?;
            world.rig.free(buffer)?;
        }
        Ok(())
    }

    fn free_if_unused(&mut self, world: &mut World, tensor: TensorId) -> Result<(), Stop> {
        let tensor = &mut self.tensors[tensor];
        if tensor.reads == 0 && tensor.saves == 0 {
            free_all(world, tensor.buffer.take())?;
        }
        Ok(())
    }

    /// Goes through a segment from its last operation to its first; a checkpointed one is done again before.
    fn backward(
        &mut self,
        world: &mut World,
        segment: &Segment,
        workspaces: &mut Workspaces,
        parameters: &mut ParameterGradients<'_>,
    ) -> Result<(), Failed> {
        let operations = segment.operations.clone();
        let mut inputs_fetched = None;
        if segment.is_checkpointed {
            let first = self.fetched.len();
            inputs_fetched = self.fetch(world, operations.start)?.then_some(first);
            for &read in self.program.operations[operations.clone()].iter().flat_map(|operation| &operation.reads) {
                if self.makers[read].is_some_and(|maker| maker >= operations.start) {
                    self.tensors[read].reads += 1;
                }
            }
            operations.clone().try_for_each(|index| self.forward_one(world, index, true, Some(operations.start), workspaces))?;
        }
        for index in operations.clone().rev() {
            self.backward_one(world, (index, segment.is_checkpointed), workspaces, parameters)?;
        }
        if segment.is_checkpointed {
            self.let_kept_go(world, &self.inputs_of(&operations), inputs_fetched)?;
        }
        Ok(())
    }

    /// The backward pass of one operation: the gradients of what it read and of its parameters are made, what it saved is read and let go.
    fn backward_one(
        &mut self,
        world: &mut World,
        (index, is_checkpointed): (usize, bool),
        workspaces: &mut Workspaces,
        parameters: &mut ParameterGradients<'_>,
    ) -> Result<(), Failed> {
        let operation = &self.program.operations[index];
        let backward = &operation.backward;
        let first = self.fetched.len();
        let fetched = (!is_checkpointed && self.fetch(world, index)?).then_some(first);
        if operation.uses_cublas && workspaces.backward.is_none() {
            workspaces.backward = Some(make(world, CUBLAS_WORKSPACE, self.stream)?);
        }
        let incoming = self.gradients[operation.output].take();
        for &size in &backward.scratch {
            let buffer = make(world, size, self.stream)?;
            self.scratch.push(buffer);
        }
        let mut outgoing = Vec::with_capacity(backward.gradients.len());
        for &gradient in &backward.gradients {
            outgoing.extend(self.gradient(world, gradient, backward.workspace, incoming)?);
        }
        let mut workspace = backward.parameter_workspace;
        for &parameter in &backward.parameters {
            parameters.make(world, parameter, self.stream)?;
            self.work_in(world, std::mem::take(&mut workspace))?;
        }
        // A checked run verifies what is freed in any case.
        if world.rig.is_timed() || self.retains {
            let there = operation.saves.iter().filter_map(|&saved| self.tensors[saved].buffer.as_ref());
            for buffer in there.chain(&self.fetched[first..]) {
                world.rig.verify(buffer, self.stream)?;
            }
        }
        free_all(world, self.scratch.drain(..).collect::<Vec<_>>())?;
        if !self.retains || fetched.is_some() {
            self.let_kept_go(world, &operation.saves, fetched)?;
        }
        if let Some(incoming) = incoming {
            self.let_go(world, incoming)?;
        }
        outgoing.into_iter().try_for_each(|(tensor, flow)| self.arrive(world, tensor, flow))
    }

    /// Makes the gradient of a tensor, or hands the incoming one on.
    fn gradient(
        &mut self,
        world: &mut World,
        gradient: Gradient,
        workspace: Bytes,
        incoming: Option<usize>,
    ) -> Result<Option<(TensorId, usize)>, Failed> {
        match gradient {
            Gradient::Made(tensor) => {
                let buffer = make(world, self.program.tensors[tensor], self.stream)?;
                self.flows.push(Flow { buffer: Some(buffer), tensors: 1 });
                self.work_in(world, workspace)?;
                Ok(Some((tensor, self.flows.len() - 1)))
            }
            Gradient::HandedOn(tensor) => Ok(incoming.map(|flow| {
                self.flows[flow].tensors += 1;
                (tensor, flow)
            })),
        }
    }

    fn let_go(&mut self, world: &mut World, flow: usize) -> Result<(), Stop> {
        let flow = &mut self.flows[flow];
        flow.tensors -= 1;
        if flow.tensors == 0 { free_all(world, flow.buffer.take()) } else { Ok(()) }
    }

    /// A gradient arrives at a tensor; where one is there already, they are added up: in place, where nobody else has that memory.
    fn arrive(&mut self, world: &mut World, tensor: TensorId, flow: usize) -> Result<(), Failed> {
        let Some(there) = self.gradients[tensor] else {
            self.gradients[tensor] = Some(flow);
            return Ok(());
        };
        let sum = if self.flows[there].tensors == 1 {
            there
        } else {
            let buffer = make(world, self.program.tensors[tensor], self.stream)?;
            self.flows.push(Flow { buffer: Some(buffer), tensors: 1 });
            self.let_go(world, there)?;
            self.flows.len() - 1
        };
        if let Some(buffer) = &mut self.flows[sum].buffer {
            world.rig.fill(buffer, self.stream)?;
        }
        self.gradients[tensor] = Some(sum);
        Ok(self.let_go(world, flow)?)
    }

    /// What is left when the passes are over, in the order of the forward pass: with a retained graph what was saved, else the inputs; where a
    /// pass failed all that it had made. `retain`: what it saved on the host stays there.
    pub(super) fn into_buffers(mut self, retain: bool) -> impl Iterator<Item = Buffer> {
        self.on_host.take().into_iter().for_each(|on_host| on_host.end(retain));
        let tensors = self.tensors.into_iter().filter_map(|tensor| tensor.buffer);
        let flows = self.flows.into_iter().filter_map(|flow| flow.buffer);
        tensors.chain(flows).chain(self.scratch).chain(self.fetched)
    }
}

/// The gradients of the parameters, as one iteration makes them.
pub(super) struct ParameterGradients<'a> {
    pub(super) sizes: &'a [Bytes],
    /// Those there are.
    pub(super) buffers: &'a mut [Option<Buffer>],
    /// Parameters whose gradients this iteration made.
    pub(super) made: &'a mut Vec<ParameterId>,
    /// Parameters that a gradient came for, as often as one came: those of which several operations make a part come several times.
    pub(super) arrived: &'a mut Vec<ParameterId>,
}

impl ParameterGradients<'_> {
    /// Makes the gradient of a parameter; where there is one, the new one is added to it and goes.
    fn make(&mut self, world: &mut World, parameter: ParameterId, stream: StreamId) -> Result<(), Failed> {
        world.rig.name_purpose("gradients");
        let new = make(world, self.sizes[parameter], stream)?;
        world.rig.name_purpose("activations");
        match &mut self.buffers[parameter] {
            Some(sum) => {
                world.rig.fill(sum, stream)?;
                world.rig.free(new)?;
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
