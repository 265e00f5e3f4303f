//! Compiles layers to a [`ModelProgram`]: the tensors that each layer allocates and saves in
//! PyTorch 2.11, forward and backward.
//!
//! An operation saves the tensors that its formula in PyTorch's `derivatives.yaml` uses
//! (<https://github.com/pytorch/pytorch/blob/v2.11.0/tools/autograd/derivatives.yaml>). Autocast
//! decides which operations use 16 bits
//! (<https://docs.pytorch.org/docs/2.11/amp.html#autocast-op-reference>). The workspace of a
//! convolution is a model, the same as in `harness exec`: the bytes of input, filter and result,
//! plus four times the filter for the gradient of the filter. Temporaries of a few bytes per sample
//! are ignored.

use harness_allocator::units::Bytes;

use super::layers::{Layer, Shape};
use super::program::{
    Backward, Gradient, ModelOperation, ModelProgram, ModelUnit, ParameterId, TensorId,
};
use crate::plan::Precision;

/// Rounding of PyTorch's allocator. The simulated GPU rounds the operands of a convolution in the
/// same way.
const ROUNDING: u64 = 512;

#[derive(Clone, Copy, Debug)]
struct Value {
    id: TensorId,
    elements: u64,
    is_half: bool,
    wants_gradient: bool,
}

#[derive(Default)]
pub(super) struct Compiler {
    pub(super) program: ModelProgram,
    pub(super) parameters: Vec<Bytes>,
    /// Bytes of tensors that live as long as the parameters and are not trained.
    pub(super) constants: Vec<Bytes>,
    samples: u64,
    length: u64,
    is_mixed: bool,
    /// The weights of the embedding, for a tied layer.
    embedding: Option<ParameterId>,
    targets: TensorId,
    /// The first operation of the current unit.
    unit: usize,
}

pub(super) fn compile(
    layers: &[Layer],
    input: Shape,
    samples: u64,
    length: u64,
    precision: Precision,
) -> Compiler {
    let mut compiler = Compiler {
        samples,
        length,
        is_mixed: precision == Precision::Mixed,
        ..Compiler::default()
    };
    let (elements, bytes, targets) = match input {
        Shape::Tokens => (product(&[samples, length]), 8, product(&[samples, length])),
        Shape::Sequence { width } => (
            product(&[samples, length, width]),
            4,
            product(&[samples, length]),
        ),
        Shape::Features { width } => (product(&[samples, width]), 4, samples),
        Shape::Image {
            channels,
            height,
            width,
        } => (product(&[samples, channels, height, width]), 4, samples),
    };
    let id = compiler.tensor(elements, bytes);
    compiler.targets = compiler.tensor(targets, 8);
    compiler.program.inputs = vec![id, compiler.targets];
    let has_blocks = layers
        .iter()
        .any(|layer| matches!(layer, Layer::Block { .. }));
    let mut value = Value {
        id,
        elements,
        is_half: false,
        wants_gradient: false,
    };
    for layer in layers {
        value = compiler.layer(layer, value);
        compiler.end_unit(!has_blocks || matches!(layer, Layer::Block { .. }));
    }
    compiler
}

fn product(factors: &[u64]) -> u64 {
    factors.iter().copied().fold(1, u64::saturating_mul)
}

fn rounded(bytes: Bytes) -> u64 {
    bytes
        .0
        .checked_next_multiple_of(ROUNDING)
        .unwrap_or(u64::MAX)
}

impl Compiler {
    /// Makes one unit of the operations since the last one.
    fn end_unit(&mut self, may_be_done_again: bool) {
        let end = self.program.operations.len();
        if end > self.unit {
            self.program.units.push(ModelUnit {
                operations: self.unit..end,
                may_be_done_again,
            });
            self.unit = end;
        }
    }

    fn tensor(&mut self, elements: u64, bytes: u64) -> TensorId {
        self.program
            .tensors
            .push(Bytes(elements.saturating_mul(bytes)));
        self.program.tensors.len() - 1
    }

    fn made(&mut self, elements: u64, is_half: bool) -> Value {
        let id = self.tensor(elements, if is_half { 2 } else { 4 });
        Value {
            id,
            elements,
            is_half,
            wants_gradient: true,
        }
    }

    fn parameter(&mut self, elements: u64) -> ParameterId {
        self.parameters.push(Bytes(elements.saturating_mul(4)));
        self.parameters.len() - 1
    }

    /// Adds an operation that reads these values and allocates these tensors, the first of which is
    /// its result. `complete` sets the rest.
    fn push(
        &mut self,
        reads: &[Value],
        makes: &[TensorId],
        complete: impl FnOnce(&mut ModelOperation),
    ) {
        let gradients = reads
            .iter()
            .filter(|value| value.wants_gradient)
            .map(|value| Gradient::Made(value.id))
            .collect();
        let mut operation = ModelOperation {
            reads: reads.iter().map(|value| value.id).collect(),
            makes: makes.to_vec(),
            output: makes.first().copied().unwrap_or_default(),
            backward: Backward {
                gradients,
                ..Backward::default()
            },
            ..ModelOperation::default()
        };
        complete(&mut operation);
        self.program.operations.push(operation);
    }

    /// Casts a value to 16 or 32 bits with a copy, unless it has that precision.
    fn cast(&mut self, value: Value, is_half: bool) -> Value {
        if value.is_half == is_half {
            return value;
        }
        let cast = Value {
            wants_gradient: value.wants_gradient,
            ..self.made(value.elements, is_half)
        };
        self.push(&[value], &[cast.id], |_| ());
        cast
    }

    fn layer(&mut self, layer: &Layer, value: Value) -> Value {
        match layer {
            Layer::Linear {
                inputs,
                outputs,
                bias,
                tied,
            } => self.linear(value, *inputs, *outputs, *bias, *tied),
            Layer::Conv2d {
                input,
                output,
                kernel,
                bias,
            } => self.convolution(value, *input, *output, *kernel, *bias),
            Layer::BatchNorm { channels } => self.batch_norm(value, *channels),
            Layer::LayerNorm { width } => {
                // Under autocast the result has 32 bits.
                let value = self.cast(value, false);
                self.normalization(value, false, *width, value.elements / width, 2)
            }
            Layer::Relu { in_place: true } => {
                self.push(&[value], &[], |relu| {
                    (relu.output, relu.saves) = (value.id, vec![value.id])
                });
                value
            }
            Layer::Relu { in_place: false } | Layer::Tanh => {
                let result = self.made(value.elements, value.is_half);
                self.simple(value, result, vec![result.id], &[])
            }
            Layer::Gelu => {
                let result = self.made(value.elements, value.is_half);
                self.simple(value, result, vec![value.id], &[])
            }
            Layer::Dropout => {
                let result = self.made(value.elements, value.is_half);
                let mask = self.tensor(value.elements, 1);
                self.simple(value, result, vec![mask], &[mask])
            }
            Layer::MaxPool { output } => self.max_pool(value, *output),
            Layer::AveragePool { channels: width } | Layer::FirstToken { width } => {
                let result = self.made(product(&[self.samples, *width]), value.is_half);
                self.simple(value, result, Vec::new(), &[])
            }
            Layer::Embedding {
                vocabulary,
                width,
                positions,
                types,
            } => self.embedding(value, *vocabulary, *width, *positions, *types),
            Layer::SelfAttention { width, heads } => self.attention(value, *width, *heads),
            Layer::CrossEntropy => self.cross_entropy(value),
            Layer::Residual {
                layers,
                shortcut,
                in_place,
            } => {
                let inner = self.layers(layers, value);
                let beside = self.layers(shortcut, value);
                self.sum(inner, beside, *in_place)
            }
            Layer::Block { layers } => self.layers(layers, value),
        }
    }

    fn layers(&mut self, layers: &[Layer], value: Value) -> Value {
        let next = |value, layer: &Layer| self.layer(layer, value);
        layers.iter().fold(value, next)
    }

    fn batch_norm(&mut self, value: Value, channels: u64) -> Value {
        let of_channels = Bytes(channels.saturating_mul(4));
        // Running mean and variance, and the number of batches.
        self.constants.extend([of_channels, of_channels, Bytes(8)]);
        self.normalization(value, value.is_half, channels, channels, 1)
    }

    fn max_pool(&mut self, value: Value, (channels, height, width): (u64, u64, u64)) -> Value {
        let elements = product(&[self.samples, channels, height, width]);
        let result = self.made(elements, value.is_half);
        let places = self.tensor(elements, 8);
        self.simple(value, result, vec![value.id, places], &[places])
    }

    /// Adds an operation with one input and one result, and other tensors that it allocates.
    fn simple(
        &mut self,
        value: Value,
        result: Value,
        saves: Vec<TensorId>,
        more: &[TensorId],
    ) -> Value {
        self.push(&[value], &[&[result.id], more].concat(), |operation| {
            operation.saves = saves
        });
        result
    }

    fn sum(&mut self, left: Value, right: Value, in_place: bool) -> Value {
        let result = if in_place {
            left
        } else {
            self.made(left.elements, left.is_half && right.is_half)
        };
        let tensors = &self.program.tensors;
        // The gradient of a 16-bit summand is a separate copy.
        let gradient = |id: TensorId| {
            if tensors[id] == tensors[result.id] {
                Gradient::HandedOn(id)
            } else {
                Gradient::Made(id)
            }
        };
        let gradients = [left, right]
            .into_iter()
            .filter(|value| value.wants_gradient)
            .map(|value| gradient(value.id))
            .collect();
        self.push(&[left, right], &[result.id], |sum| {
            sum.backward.gradients = gradients;
            if in_place {
                sum.makes.clear();
            }
        });
        result
    }

    /// Adds an operation with a weight, and an optional bias of this many elements.
    fn weighted(
        &mut self,
        value: Value,
        weight: ParameterId,
        bias: Option<ParameterId>,
        elements: u64,
        complete: impl FnOnce(&mut ModelOperation),
    ) -> Value {
        let value = self.cast(value, self.is_mixed);
        let mut reads = vec![value];
        let mut parameters: Vec<ParameterId> = bias.into_iter().collect();
        let mut saves_parameters = Vec::new();
        if self.is_mixed {
            let copy = self.made(self.parameters[weight].0 / 4, true);
            self.push(&[], &[copy.id], |cast| {
                cast.backward.parameters = vec![weight]
            });
            reads.push(copy);
        } else {
            parameters.insert(0, weight);
            saves_parameters.push(weight);
        }
        let result = self.made(elements, self.is_mixed);
        self.push(&reads, &[result.id], |operation| {
            operation.saves = operation.reads.clone();
            operation.saves_parameters = saves_parameters;
            operation.backward.parameters = parameters;
            complete(operation);
        });
        result
    }

    fn linear(&mut self, value: Value, inputs: u64, outputs: u64, bias: bool, tied: bool) -> Value {
        let own = self.embedding.filter(|_| tied);
        let weight = own.unwrap_or_else(|| self.parameter(inputs.saturating_mul(outputs)));
        let bias = bias.then(|| self.parameter(outputs));
        let rows = value.elements / inputs;
        self.weighted(value, weight, bias, product(&[rows, outputs]), |linear| {
            linear.uses_cublas = true;
            linear.work = product(&[rows, inputs, outputs]);
        })
    }

    fn convolution(
        &mut self,
        value: Value,
        input: (u64, u64, u64),
        output: (u64, u64, u64),
        kernel: u64,
        bias: bool,
    ) -> Value {
        let filter = product(&[output.0, input.0, kernel, kernel]);
        let weight = self.parameter(filter);
        let bias = bias.then(|| self.parameter(output.0));
        let elements = product(&[self.samples, output.0, output.1, output.2]);
        let bytes = if self.is_mixed { 2 } else { 4 };
        let operands = [value.elements, filter, elements]
            .map(|elements| rounded(Bytes(elements.saturating_mul(bytes))));
        let workspace = operands.into_iter().fold(0, u64::saturating_add);
        self.weighted(value, weight, bias, elements, |convolution| {
            convolution.workspace = Bytes(workspace);
            convolution.backward.workspace = Bytes(workspace);
            convolution.backward.parameter_workspace =
                Bytes(workspace.saturating_add(filter.saturating_mul(bytes * 4)));
            convolution.work = product(&[elements, input.0, kernel, kernel]);
        })
    }

    /// Adds an operation with two parameters of this width, the first of which it saves, or both,
    /// and as many means and deviations as groups.
    fn normalization(
        &mut self,
        value: Value,
        is_half: bool,
        width: u64,
        groups: u64,
        saved: usize,
    ) -> Value {
        let parameters = vec![self.parameter(width), self.parameter(width)];
        let result = self.made(value.elements, is_half);
        let (mean, deviation) = (self.tensor(groups, 4), self.tensor(groups, 4));
        self.push(&[value], &[result.id, mean, deviation], |operation| {
            operation.saves = vec![value.id, mean, deviation];
            operation.saves_parameters = parameters[..saved].to_vec();
            operation.backward.parameters = parameters;
        });
        result
    }

    fn embedding(
        &mut self,
        value: Value,
        vocabulary: u64,
        width: u64,
        positions: u64,
        types: u64,
    ) -> Value {
        let weight = self.parameter(product(&[vocabulary, width]));
        self.embedding = Some(weight);
        let elements = product(&[value.elements, width]);
        let words = self.made(elements, false);
        self.push(&[value], &[words.id], |embedding| {
            embedding.saves = vec![value.id];
            embedding.backward.parameters = vec![weight];
        });
        let mut sum = words;
        for (entries, elements) in [
            (positions, product(&[self.length, width])),
            (types, elements),
        ] {
            if entries > 0 {
                let weight = self.parameter(product(&[entries, width]));
                let more = self.made(elements, false);
                self.push(&[], &[more.id], |embedding| {
                    embedding.backward.parameters = vec![weight]
                });
                sum = self.sum(sum, more, false);
            }
        }
        sum
    }

    /// Fused attention: memory-efficient in 32 bits, flash in 16 bits.
    fn attention(&mut self, value: Value, width: u64, heads: u64) -> Value {
        let projected = self.linear(value, width, width.saturating_mul(3), true, false);
        let result = self.made(projected.elements / 3, projected.is_half);
        let rows = product(&[self.samples, heads]);
        let length = self
            .length
            .checked_next_multiple_of(if self.is_mixed { 1 } else { 32 })
            .unwrap_or(u64::MAX);
        let sums = self.tensor(product(&[rows, length]), 4);
        let parts = self.program.tensors[projected.id];
        let padded = self
            .length
            .checked_next_multiple_of(128)
            .unwrap_or(u64::MAX);
        let scratch = if self.is_mixed {
            let accumulated = product(&[self.samples, padded, width, 4]);
            vec![
                parts,
                Bytes(accumulated),
                Bytes(product(&[rows, padded, 4])),
            ]
        } else {
            vec![parts, Bytes(product(&[rows, self.length, 4]))]
        };
        let work = product(&[self.samples, self.length, self.length, width, 2]);
        self.push(&[projected], &[result.id, sums], |attention| {
            attention.saves = vec![projected.id, result.id, sums];
            attention.backward.scratch = scratch;
            attention.work = work;
        });
        self.linear(result, width, width, true, false)
    }

    /// The log-softmax has 32 bits for every input, without a cast of the input.
    fn cross_entropy(&mut self, value: Value) -> Value {
        let logarithms = self.made(value.elements, false);
        let logarithms = self.simple(value, logarithms, vec![logarithms.id], &[]);
        let loss = self.made(1, false);
        let weight = self.tensor(1, 4);
        let targets = self.targets;
        self.push(&[logarithms], &[loss.id, weight], |entropy| {
            entropy.reads.push(targets);
            entropy.saves = vec![logarithms.id, targets, weight];
        });
        loss
    }
}
