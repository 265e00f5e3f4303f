//! [`ModelProgram`]: the memory operations of one forward and backward pass, computed from shapes.

use std::ops::Range;

use harness_allocator::units::Bytes;

use crate::plan::Precision;

pub type TensorId = usize;

pub type ParameterId = usize;

/// The operations of one forward pass and their backward passes, for one number of samples, one
/// length and one precision.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ModelProgram {
    pub tensors: Vec<Bytes>,
    /// Tensors that exist before the first operation and until the end of the pass: the samples.
    pub inputs: Vec<TensorId>,
    pub operations: Vec<ModelOperation>,
    /// Groups of operations that checkpointing can recompute, in order and without gaps.
    pub units: Vec<ModelUnit>,
}

/// Operations that checkpointing keeps together.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ModelUnit {
    pub operations: Range<usize>,
    /// `true` if the backward pass may recompute them.
    pub may_be_done_again: bool,
}

#[derive(Clone, Debug, Default, PartialEq)]
pub struct ModelOperation {
    pub reads: Vec<TensorId>,
    pub makes: Vec<TensorId>,
    /// Its result: a tensor that it allocates, or one that it changes in place.
    pub output: TensorId,
    /// Memory that it needs while it runs.
    pub workspace: Bytes,
    /// Tensors that are saved for its backward pass.
    pub saves: Vec<TensorId>,
    /// Parameters that are saved for its backward pass. They exist anyway, unless saved tensors
    /// move to the host.
    pub saves_parameters: Vec<ParameterId>,
    pub backward: Backward,
    /// `true` if it uses cuBLAS, which allocates its own workspace once and keeps it.
    pub uses_cublas: bool,
    pub work: u64,
}

/// The backward pass of one operation.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Backward {
    pub scratch: Vec<Bytes>,
    pub gradients: Vec<Gradient>,
    /// Memory that it needs while it computes a tensor's gradient.
    pub workspace: Bytes,
    pub parameters: Vec<ParameterId>,
    /// Memory that it needs while it computes the first parameter's gradient.
    pub parameter_workspace: Bytes,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Gradient {
    /// A new buffer of the tensor's size.
    Made(TensorId),
    /// The buffer of the output's gradient.
    HandedOn(TensorId),
}

/// Consecutive operations with or without a checkpoint.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ModelSegment {
    pub operations: Range<usize>,
    /// `true` if only its inputs are kept, and the backward pass recomputes the rest.
    pub is_checkpointed: bool,
}

impl ModelProgram {
    pub fn segments(&self, checkpoint_every: Option<u64>) -> Vec<ModelSegment> {
        let mut segments: Vec<ModelSegment> = Vec::new();
        let mut units_in_last = 0;
        for ModelUnit {
            operations,
            may_be_done_again,
        } in &self.units
        {
            let is_checkpointed = checkpoint_every.is_some() && *may_be_done_again;
            let room = |units: u64| {
                !is_checkpointed || checkpoint_every.is_some_and(|every| units < every)
            };
            match segments.last_mut() {
                Some(last) if last.is_checkpointed == is_checkpointed && room(units_in_last) => {
                    last.operations.end = operations.end;
                    units_in_last += 1;
                }
                _ => {
                    segments.push(ModelSegment {
                        operations: operations.clone(),
                        is_checkpointed,
                    });
                    units_in_last = 1;
                }
            }
        }
        segments
    }

    /// The operation that allocates each tensor; `None` for inputs.
    pub fn makers(&self) -> Vec<Option<usize>> {
        let mut makers = vec![None; self.tensors.len()];
        for (index, operation) in self.operations.iter().enumerate() {
            for &made in &operation.makes {
                makers[made] = Some(index);
            }
        }
        makers
    }
}

/// A model that is described by sizes only: all layers have the same parameters and activations.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Uniform {
    pub parameters: Bytes,
    pub layers: u64,
    /// Size of one sample's activations in all layers, in 32-bit precision.
    pub activations_per_sample: Bytes,
}

impl Uniform {
    pub const fn parameters_per_layer(&self) -> Bytes {
        Bytes(self.parameters.0 / self.layers)
    }

    /// Each layer saves its result for the backward pass. The gradient of the result lives during
    /// the layer's backward pass.
    pub fn program(&self, samples: u64, precision: Precision) -> ModelProgram {
        let all = self.activations_per_sample.0 * samples / self.layers;
        let size = Bytes(match precision {
            Precision::Fp32 => all,
            Precision::Mixed => all.div_ceil(2),
        });
        let layers = self.layers as usize;
        let operation = |layer: usize| ModelOperation {
            reads: layer.checked_sub(1).into_iter().collect(),
            makes: vec![layer],
            output: layer,
            saves: vec![layer],
            backward: Backward {
                scratch: vec![size],
                parameters: vec![layer],
                ..Backward::default()
            },
            ..ModelOperation::default()
        };
        ModelProgram {
            tensors: vec![size; layers],
            inputs: Vec::new(),
            operations: (0..layers).map(operation).collect(),
            units: (0..layers)
                .map(|layer| ModelUnit {
                    operations: layer..layer + 1,
                    may_be_done_again: true,
                })
                .collect(),
        }
    }
}

#[cfg(test)]
mod tests;
