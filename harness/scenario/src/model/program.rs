//! What one forward and backward pass does with memory: a [`Program`], computed from shapes alone.

use std::ops::Range;

use harness_allocator::units::Bytes;

use crate::plan::Precision;

/// A tensor of a program, by its number.
pub type TensorId = usize;

/// A parameter of a model, by its number.
pub type ParameterId = usize;

/// The operations of one forward pass, each with its part of the backward pass. Made for one number of samples, one length and one precision.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Program {
    /// The size of each tensor.
    pub tensors: Vec<Bytes>,
    /// Tensors that are there before the first operation, and until the pass is over: the samples.
    pub inputs: Vec<TensorId>,
    /// In the order of the forward pass.
    pub operations: Vec<Operation>,
    /// Groups of operations that checkpointing can do again, in order and without gaps; where a group may not be done again it stands alone.
    pub units: Vec<Unit>,
}

/// Operations that stay together when activations are checkpointed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Unit {
    /// Which ones.
    pub operations: Range<usize>,
    /// Whether they may be done again in the backward pass.
    pub may_be_done_again: bool,
}

/// One operation.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Operation {
    /// Tensors that it reads.
    pub reads: Vec<TensorId>,
    /// Tensors that it makes.
    pub makes: Vec<TensorId>,
    /// What carries its result: a tensor that it makes, or one that it reads and changes in place.
    pub output: TensorId,
    /// Memory that it needs only while it runs.
    pub workspace: Bytes,
    /// Tensors that are kept for its backward pass.
    pub saves: Vec<TensorId>,
    /// Parameters that are kept for its backward pass. They are there anyway, unless what is kept goes to the host.
    pub saves_parameters: Vec<ParameterId>,
    /// Its backward pass.
    pub backward: Backward,
    /// Whether it multiplies matrices by cuBLAS, which takes a workspace of its own once and keeps it.
    pub uses_cublas: bool,
    /// Multiplications and additions of the forward pass.
    pub work: u64,
}

/// The backward pass of one operation.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Backward {
    /// Buffers that live while it runs.
    pub scratch: Vec<Bytes>,
    /// What becomes of the gradient for each tensor that it read, where one is wanted.
    pub gradients: Vec<Gradient>,
    /// Memory that it needs only while it computes a tensor's gradient.
    pub workspace: Bytes,
    /// Parameters of which it makes the gradients.
    pub parameters: Vec<ParameterId>,
    /// Memory that it needs only while it computes the first of these.
    pub parameter_workspace: Bytes,
}

/// The gradient of a tensor that an operation read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Gradient {
    /// A buffer of the tensor's size.
    Made(TensorId),
    /// The memory of the output's gradient itself.
    HandedOn(TensorId),
}

/// A stretch of operations as checkpointing does them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Segment {
    /// Which ones.
    pub operations: Range<usize>,
    /// Whether nothing but its inputs is kept for the backward pass, where it is done again.
    pub is_checkpointed: bool,
}

impl Program {
    /// The segments where of each so many units only the inputs are kept.
    #[must_use]
    pub fn segments(&self, checkpoint_every: Option<u64>) -> Vec<Segment> {
        let mut segments: Vec<Segment> = Vec::new();
        let mut units_in_last = 0;
        for Unit { operations, may_be_done_again } in &self.units {
            let is_checkpointed = checkpoint_every.is_some() && *may_be_done_again;
            let room = |units: u64| !is_checkpointed || checkpoint_every.is_some_and(|every| units < every);
            match segments.last_mut() {
                Some(last) if last.is_checkpointed == is_checkpointed && room(units_in_last) => {
                    last.operations.end = operations.end;
                    units_in_last += 1;
                }
                _ => {
                    segments.push(Segment { operations: operations.clone(), is_checkpointed });
                    units_in_last = 1;
                }
            }
        }
        segments
    }

    /// The operation that makes each tensor; `None`: it is an input.
    #[must_use]
    pub fn makers(&self) -> Vec<Option<usize>> {
        let mut makers = vec![None; self.tensors.len()];
        for (index, operation) in self.operations.iter().enumerate() {
            for &made in &operation.makes {
                makers[made] = Some(index);
            }
        }
        makers
    }

    /// Multiplications and additions of the forward pass.
    #[must_use]
    pub fn work(&self) -> u64 {
        self.operations.iter().map(|operation| operation.work).fold(0, u64::saturating_add)
    }
}

/// A model of which nothing is known but sizes: layers of equal parameters and activations.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Uniform {
    /// All parameters together.
    pub parameters: Bytes,
    /// Parts that parameters and activations come in.
    pub layers: u64,
    /// Activations that one sample takes, all layers together, in 32-bit numbers.
    pub activations_per_sample: Bytes,
}

impl Uniform {
    /// The size of the parameters of one layer.
    #[must_use]
    pub const fn parameters_per_layer(&self) -> Bytes {
        Bytes(self.parameters.0 / self.layers)
    }

    /// Each layer keeps its result for the backward pass, where the gradient of that result lives as long as the layer is worked on.
    #[must_use]
    pub fn program(&self, samples: u64, precision: Precision) -> Program {
        let all = self.activations_per_sample.0 * samples / self.layers;
        let size = Bytes(match precision {
            Precision::Fp32 => all,
            Precision::Mixed => all.div_ceil(2),
        });
        let layers = self.layers as usize;
        let operation = |layer: usize| Operation {
            reads: layer.checked_sub(1).into_iter().collect(),
            makes: vec![layer],
            output: layer,
            saves: vec![layer],
            backward: Backward { scratch: vec![size], parameters: vec![layer], ..Backward::default() },
            ..Operation::default()
        };
        Program {
            tensors: vec![size; layers],
            inputs: Vec::new(),
            operations: (0..layers).map(operation).collect(),
            units: (0..layers).map(|layer| Unit { operations: layer..layer + 1, may_be_done_again: true }).collect(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn units_are_checkpointed_in_groups_and_what_may_not_be_done_again_stands_between_them() {
        let unit = |at: usize, may_be_done_again| Unit { operations: at..at + 1, may_be_done_again };
        let units = vec![unit(0, false), unit(1, true), unit(2, true), unit(3, true), unit(4, false), unit(5, false), unit(6, true)];
        let program = Program { units, ..Program::default() };
        let segments = |every| -> Vec<_> {
            program.segments(every).into_iter().map(|segment| (segment.operations, segment.is_checkpointed)).collect()
        };
        assert_eq!(segments(None), [(0..7, false)]);
        assert_eq!(segments(Some(1)), [(0..1, false), (1..2, true), (2..3, true), (3..4, true), (4..6, false), (6..7, true)]);
        assert_eq!(segments(Some(2)), [(0..1, false), (1..3, true), (3..4, true), (4..6, false), (6..7, true)]);
    }

    #[test]
    fn a_uniform_program_has_its_activations_in_the_precision_of_the_plan() {
        let uniform = Uniform { parameters: Bytes::mib(8), layers: 4, activations_per_sample: Bytes::mib(3) };
        let full = uniform.program(5, Precision::Fp32);
        assert_eq!((full.operations.len(), full.tensors[0]), (4, Bytes(3 * 5 * 1024 * 1024 / 4)));
        let half = uniform.program(5, Precision::Mixed);
        assert_eq!(half.tensors[3].0 * 2, full.tensors[3].0);
    }
}
