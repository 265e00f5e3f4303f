//! Compiles layers to a [`Program`]: the tensors that each layer allocates and saves in PyTorch 2.11, forward and backward.
//!
//! An operation saves the tensors that its formula in PyTorch's `derivatives.yaml` uses
//! (<https://github.com/pytorch/pytorch/blob/v2.11.0/tools/autograd/derivatives.yaml>). Autocast decides which operations use 16 bits
//! (<https://docs.pytorch.org/docs/2.11/amp.html#autocast-op-reference>). The workspace of a convolution is a model, the same as in
//! `harness exec`: the bytes of input, filter and result, plus four times the filter for the gradient of the filter.
//! Temporaries of a few bytes per sample are ignored.

use harness_allocator::units::Bytes;

use super::layers::{Layer, Shape};
use super::program::{Backward, Gradient, Operation, ParameterId, Program, TensorId, Unit};
use crate::plan::Precision;

/// Rounding of PyTorch's allocator. The simulated GPU rounds the operands of a convolution in the same way.
const ROUNDING: u64 = 512;

/// A tensor between two layers.
#[derive(Clone, Copy, Debug)]
struct Value {
    id: TensorId,
    elements: u64,
    is_half: bool,
    /// `true` if autograd computes its gradient.
    wants_gradient: bool,
}

pub(super) struct Compiler {
    program: Program,
    /// Bytes of each parameter, in the order of the layers.
    parameters: Vec<Bytes>,
    /// Bytes of tensors that live as long as the parameters and are not trained.
    constants: Vec<Bytes>,
    samples: u64,
    length: u64,
    is_mixed: bool,
    /// The weights of the embedding, for a tied layer.
    embedding: Option<ParameterId>,
    targets: TensorId,
    /// The first operation of the current unit.
    unit: usize,
}

/// A program, and the sizes of its model.
pub(super) struct Compiled {
    pub(super) program: Program,
    pub(super) parameters: Vec<Bytes>,
    pub(super) constants: Vec<Bytes>,
}

/// Compiles one pass over this many samples of this length.
pub(super) fn compile(layers: &[Layer], input: Shape, samples: u64, length: u64, precision: Precision) -> Compiled {
    let mut compiler = Compiler {
        program: Program::default(),
        parameters: Vec::new(),
        constants: Vec::new(),
        samples,
        length,
        is_mixed: precision == Precision::Mixed,
        embedding: None,
        targets: 0,
        unit: 0,
    };
    let (elements, bytes, targets) = match input {
        Shape::Tokens => (product(&[samples, length]), 8, product(&[samples, length])),
        Shape::Sequence { width } => (product(&[samples, length, width]), 4, product(&[samples, length])),
        Shape::Features { width } => (product(&[samples, width]), 4, samples),
        Shape::Image { channels, height, width } => (product(&[samples, channels, height, width]), 4, samples),
    };
    let id = compiler.tensor(elements, bytes);
    compiler.targets = compiler.tensor(targets, 8);
    compiler.program.inputs = vec![id, compiler.targets];
    let has_blocks = layers.iter().any(|layer| matches!(layer, Layer::Block { .. }));
    let mut value = Value { id, elements, is_half: false, wants_gradient: false };
    for layer in layers {
        value = compiler.layer(layer, value);
        compiler.end_unit(!has_blocks || matches!(layer, Layer::Block { .. }));
    }
    let Compiler { program, parameters, constants, .. } = compiler;
    Compiled { program, parameters, constants }
}

fn product(factors: &[u64]) -> u64 {
    factors.iter().copied().fold(1, u64::saturating_mul)
}

fn rounded(bytes: Bytes) -> u64 {
    bytes.0.checked_next_multiple_of(ROUNDING).unwrap_or(u64::MAX)
}

impl Compiler {
    /// Makes one unit of the operations since the last one.
    fn end_unit(&mut self, may_be_done_again: bool) {
        let end = self.program.operations.len();
        if end > self.unit {
            self.program.units.push(Unit { operations: self.unit..end, may_be_done_again });
            self.unit = end;
        }
    }

    fn tensor(&mut self, elements: u64, bytes: u64) -> TensorId {
        self.program.tensors.push(Bytes(elements.saturating_mul(bytes)));
        self.program.tensors.len() - 1
    }

    /// Adds a result of an operation.
    fn made(&mut self, elements: u64, is_half: bool) -> Value {
        let id = self.tensor(elements, if is_half { 2 } else { 4 });
        Value { id, elements, is_half, wants_gradient: true }
    }

    fn parameter(&mut self, elements: u64) -> ParameterId {
        self.parameters.push(Bytes(elements.saturating_mul(4)));
        self.parameters.len() - 1
    }

    fn push(&mut self, operation: Operation) {
        self.program.operations.push(operation);
    }

    fn gradient(value: Value) -> Vec<Gradient> {
        if value.wants_gradient { vec![Gradient::Made(value.id)] } else { Vec::new() }
    }

    /// Casts a value to 16 or 32 bits with a copy, unless it has that precision.
    fn cast(&mut self, value: Value, is_half: bool) -> Value {
        if value.is_half == is_half {
            return value;
        }
        let cast = Value { wants_gradient: value.wants_gradient, ..self.made(value.elements, is_half) };
        self.push(Operation {
            reads: vec![value.id],
            makes: vec![cast.id],
            output: cast.id,
            backward: Backward { gradients: Self::gradient(value), ..Backward::default() },
            ..Operation::default()
        });
        cast
    }

    /// A 16-bit copy of a parameter under autocast. Its gradient is the parameter's gradient.
    fn half_weight(&mut self, parameter: ParameterId) -> Option<Value> {
        if !self.is_mixed {
            return None;
        }
        let copy = self.made(self.parameters[parameter].0 / 4, true);
        self.push(Operation {
            makes: vec![copy.id],
            output: copy.id,
            backward: Backward { parameters: vec![parameter], ..Backward::default() },
            ..Operation::default()
        });
        Some(copy)
    }

    fn layer(&mut self, layer: &Layer, value: Value) -> Value {
        match layer {
            Layer::Linear { inputs, outputs, bias, tied } => self.linear(value, *inputs, *outputs, *bias, *tied),
            Layer::Conv2d { input, output, kernel, bias } => self.convolution(value, *input, *output, *kernel, *bias),
            Layer::BatchNorm { channels } => self.batch_norm(value, *channels),
            Layer::LayerNorm { width } => self.layer_norm(value, *width),
            Layer::Relu { in_place: true } => {
                self.push(Operation {
                    reads: vec![value.id],
                    output: value.id,
                    saves: vec![value.id],
                    backward: Backward { gradients: Self::gradient(value), ..Backward::default() },
                    ..Operation::default()
                });
                value
            }
            Layer::Relu { in_place: false } | Layer::Tanh => {
                let result = self.made(value.elements, value.is_half);
                self.simple(value, result, vec![result.id], Vec::new())
            }
            Layer::Gelu => {
                let result = self.made(value.elements, value.is_half);
                self.simple(value, result, vec![value.id], Vec::new())
            }
            Layer::Dropout => {
                let result = self.made(value.elements, value.is_half);
                let mask = self.tensor(value.elements, 1);
                self.simple(value, result, vec![mask], vec![mask])
            }
            Layer::MaxPool { output: (channels, height, width) } => {
                let elements = product(&[self.samples, *channels, *height, *width]);
                let result = self.made(elements, value.is_half);
                let places = self.tensor(elements, 8);
                self.simple(value, result, vec![value.id, places], vec![places])
            }
            Layer::AveragePool { channels } => {
                let result = self.made(product(&[self.samples, *channels]), value.is_half);
                self.simple(value, result, Vec::new(), Vec::new())
            }
            Layer::FirstToken { width } => {
                let result = self.made(product(&[self.samples, *width]), value.is_half);
                self.simple(value, result, Vec::new(), Vec::new())
            }
            Layer::Embedding { vocabulary, width, positions, types } => self.embedding(value, *vocabulary, *width, *positions, *types),
            Layer::SelfAttention { width, heads } => self.attention(value, *width, *heads),
            Layer::CrossEntropy => self.cross_entropy(value),
            Layer::Residual { layers, shortcut, in_place } => {
                let inner = layers.iter().fold(value, |value, layer| self.layer(layer, value));
                let beside = shortcut.iter().fold(value, |value, layer| self.layer(layer, value));
                self.sum(inner, beside, *in_place)
            }
            Layer::Block { layers } => layers.iter().fold(value, |value, layer| self.layer(layer, value)),
        }
    }

    /// Adds an operation with one input and one result, and other tensors that it allocates.
    fn simple(&mut self, value: Value, result: Value, saves: Vec<TensorId>, more: Vec<TensorId>) -> Value {
        let makes = std::iter::once(result.id).chain(more).collect();
        self.push(Operation {
            reads: vec![value.id],
            makes,
            output: result.id,
            saves,
            backward: Backward { gradients: Self::gradient(value), ..Backward::default() },
            ..Operation::default()
        });
        result
    }

    fn sum(&mut self, left: Value, right: Value, in_place: bool) -> Value {
        let handed_on = |value: Value| value.wants_gradient.then_some(Gradient::HandedOn(value.id));
        let gradients: Vec<Gradient> = [left, right].into_iter().filter_map(handed_on).collect();
        let result = if in_place { left } else { self.made(left.elements, left.is_half && right.is_half) };
        // The gradient of a 16-bit summand is a separate copy.
        let copied = |gradient: Gradient| match gradient {
            Gradient::HandedOn(id) if self.program.tensors[id] != self.program.tensors[result.id] => Gradient::Made(id),
            same => same,
        };
        let gradients = gradients.into_iter().map(copied).collect();
        self.push(Operation {
            reads: vec![left.id, right.id],
            makes: if in_place { Vec::new() } else { vec![result.id] },
            output: result.id,
            backward: Backward { gradients, ..Backward::default() },
            ..Operation::default()
        });
        result
    }

    fn linear(&mut self, value: Value, inputs: u64, outputs: u64, bias: bool, tied: bool) -> Value {
        let own = self.embedding.filter(|_| tied);
        let weight = own.unwrap_or_else(|| self.parameter(inputs.saturating_mul(outputs)));
        let bias = bias.then(|| self.parameter(outputs));
        let value = self.cast(value, self.is_mixed);
        let copy = self.half_weight(weight);
        let rows = value.elements / inputs;
        let result = self.made(product(&[rows, outputs]), self.is_mixed);
        let mut gradients = Self::gradient(value);
        gradients.extend(copy.map(|copy| Gradient::Made(copy.id)));
        let parameters = copy.is_none().then_some(weight).into_iter().chain(bias).collect();
        self.push(Operation {
            reads: std::iter::once(value.id).chain(copy.map(|copy| copy.id)).collect(),
            makes: vec![result.id],
            output: result.id,
            saves: std::iter::once(value.id).chain(copy.map(|copy| copy.id)).collect(),
            saves_parameters: copy.is_none().then_some(weight).into_iter().collect(),
            backward: Backward { gradients, parameters, ..Backward::default() },
            uses_cublas: true,
            work: product(&[rows, inputs, outputs]),
            ..Operation::default()
        });
        result
    }

    fn convolution(&mut self, value: Value, input: (u64, u64, u64), output: (u64, u64, u64), kernel: u64, bias: bool) -> Value {
        let filter = product(&[output.0, input.0, kernel, kernel]);
        let weight = self.parameter(filter);
        let bias = bias.then(|| self.parameter(output.0));
        let value = self.cast(value, self.is_mixed);
        let copy = self.half_weight(weight);
        let elements = product(&[self.samples, output.0, output.1, output.2]);
        let result = self.made(elements, self.is_mixed);
        let filter_bytes = filter.saturating_mul(if self.is_mixed { 2 } else { 4 });
        let operands = [self.program.tensors[value.id], Bytes(filter_bytes), self.program.tensors[result.id]];
        let workspace = operands.into_iter().map(rounded).fold(0, u64::saturating_add);
        let of_filter = Bytes(workspace.saturating_add(filter_bytes.saturating_mul(4)));
        let mut gradients = Self::gradient(value);
        gradients.extend(copy.map(|copy| Gradient::Made(copy.id)));
        let parameters: Vec<ParameterId> = copy.is_none().then_some(weight).into_iter().chain(bias).collect();
        self.push(Operation {
            reads: std::iter::once(value.id).chain(copy.map(|copy| copy.id)).collect(),
            makes: vec![result.id],
            output: result.id,
            workspace: Bytes(workspace),
            saves: std::iter::once(value.id).chain(copy.map(|copy| copy.id)).collect(),
            saves_parameters: copy.is_none().then_some(weight).into_iter().collect(),
            backward: Backward {
                gradients,
                workspace: Bytes(workspace),
                parameters,
                parameter_workspace: of_filter,
                ..Backward::default()
            },
            work: product(&[elements, input.0, kernel, kernel]),
            ..Operation::default()
        });
        result
    }

    fn batch_norm(&mut self, value: Value, channels: u64) -> Value {
        let parameters = vec![self.parameter(channels), self.parameter(channels)];
        // Running mean and variance, and the number of batches.
        self.constants.extend([Bytes(channels.saturating_mul(4)), Bytes(channels.saturating_mul(4)), Bytes(8)]);
        let result = self.made(value.elements, value.is_half);
        let (mean, deviation) = (self.tensor(channels, 4), self.tensor(channels, 4));
        self.push(Operation {
            reads: vec![value.id],
            makes: vec![result.id, mean, deviation],
            output: result.id,
            saves: vec![value.id, mean, deviation],
            saves_parameters: vec![parameters[0]],
            backward: Backward { gradients: Self::gradient(value), parameters, ..Backward::default() },
            ..Operation::default()
        });
        result
    }

    /// Under autocast the result has 32 bits.
    fn layer_norm(&mut self, value: Value, width: u64) -> Value {
        let parameters = vec![self.parameter(width), self.parameter(width)];
        let value = self.cast(value, false);
        let result = self.made(value.elements, false);
        let rows = value.elements / width;
        let (mean, deviation) = (self.tensor(rows, 4), self.tensor(rows, 4));
        self.push(Operation {
            reads: vec![value.id],
            makes: vec![result.id, mean, deviation],
            output: result.id,
            saves: vec![value.id, mean, deviation],
            saves_parameters: parameters.clone(),
            backward: Backward { gradients: Self::gradient(value), parameters, ..Backward::default() },
            ..Operation::default()
        });
        result
    }

    fn embedding(&mut self, value: Value, vocabulary: u64, width: u64, positions: u64, types: u64) -> Value {
        let weight = self.parameter(product(&[vocabulary, width]));
        self.embedding = Some(weight);
        let elements = product(&[value.elements, width]);
        let words = self.made(elements, false);
        self.push(Operation {
            reads: vec![value.id],
            makes: vec![words.id],
            output: words.id,
            saves: vec![value.id],
            backward: Backward { parameters: vec![weight], ..Backward::default() },
            ..Operation::default()
        });
        let mut sum = words;
        for (entries, elements) in [(positions, product(&[self.length, width])), (types, elements)] {
            if entries > 0 {
                let weight = self.parameter(product(&[entries, width]));
                let more = self.made(elements, false);
                self.push(Operation {
                    makes: vec![more.id],
                    output: more.id,
                    backward: Backward { parameters: vec![weight], ..Backward::default() },
                    ..Operation::default()
                });
                sum = self.sum(sum, more, false);
            }
        }
        sum
    }

    /// Fused attention: memory-efficient in 32 bits, flash in 16 bits. Queries, keys and values are views of one tensor, whose gradient is
    /// concatenated from three parts.
    fn attention(&mut self, value: Value, width: u64, heads: u64) -> Value {
        let projected = self.linear(value, width, width.saturating_mul(3), true, false);
        let result = self.made(projected.elements / 3, projected.is_half);
        let rows = product(&[self.samples, heads]);
        let length = self.length.checked_next_multiple_of(if self.is_mixed { 1 } else { 32 }).unwrap_or(u64::MAX);
        let sums = self.tensor(product(&[rows, length]), 4);
        let parts = self.program.tensors[projected.id];
        let padded = self.length.checked_next_multiple_of(128).unwrap_or(u64::MAX);
        let scratch = if self.is_mixed {
            let accumulated = product(&[self.samples, padded, width, 4]);
            vec![parts, Bytes(accumulated), Bytes(product(&[rows, padded, 4]))]
        } else {
            vec![parts, Bytes(product(&[rows, self.length, 4]))]
        };
        self.push(Operation {
            reads: vec![projected.id],
            makes: vec![result.id, sums],
            output: result.id,
            saves: vec![projected.id, result.id, sums],
            backward: Backward { scratch, gradients: Self::gradient(projected), ..Backward::default() },
            work: product(&[self.samples, self.length, self.length, width, 2]),
            ..Operation::default()
        });
        self.linear(result, width, width, true, false)
    }

    /// The log-softmax has 32 bits for every input, without a cast of the input.
    fn cross_entropy(&mut self, value: Value) -> Value {
        let logarithms = self.made(value.elements, false);
        let logarithms = self.simple(value, logarithms, vec![logarithms.id], Vec::new());
        let loss = self.made(1, false);
        let weight = self.tensor(1, 4);
        self.push(Operation {
            reads: vec![logarithms.id, self.targets],
            makes: vec![loss.id, weight],
            output: loss.id,
            saves: vec![logarithms.id, self.targets, weight],
            backward: Backward { gradients: Self::gradient(logarithms), ..Backward::default() },
            ..Operation::default()
        });
        loss
    }
}
