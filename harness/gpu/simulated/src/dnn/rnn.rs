//! Recurrent networks: the layout of their weights in the buffer of the program, and their
//! temporary memory.
//!
//! The sizes of the temporary memory follow formulas. They equal all of 463,402 sizes that cuDNN
//! 9.19 gave on an H200 for networks without projections, with the standard algorithm and the one
//! for small states. `sizes.tsv` has a selection.
//!
//! The matrices come first, by layer and direction: the input's, the hidden state's, and the
//! projection. The biases follow in the same order.

use std::ffi::{c_int, c_uint, c_ulonglong, c_void};
use std::slice;

use harness_gpu_settings::export;
use harness_gpu_settings::ffi::{Out, write};

use super::{Tensor, answer};
use crate::world::machine;

#[repr(C)]
#[derive(Clone, Copy)]
struct Network {
    algorithm: c_int,
    cell: c_int,
    biased: c_int,
    two_directions: c_int,
    kind: c_int,
    input: c_int,
    hidden: c_int,
    projection: c_int,
    layers: c_int,
    /// `true` if training drops outputs between layers.
    drops: bool,
}

/// The inputs of a network, at the start of an object.
#[repr(C)]
#[derive(Clone, Copy)]
struct Sequences {
    steps: usize,
    batch: usize,
    /// Rows of the input: the lengths of packed sequences, or steps times batch.
    rows: usize,
    packed: bool,
}

/// Sizes of one layer in one direction, in elements.
struct Layer {
    gates: usize,
    hidden: usize,
    input: usize,
    /// Elements of the hidden state or of its projection.
    output: usize,
    projected: bool,
}

impl Layer {
    const fn input_matrix(&self) -> usize {
        self.hidden * self.input
    }

    const fn hidden_matrix(&self) -> usize {
        self.hidden * self.output
    }

    const fn projection(&self) -> usize {
        if self.projected {
            self.hidden * self.output
        } else {
            0
        }
    }

    const fn matrices(&self) -> usize {
        self.gates * (self.input_matrix() + self.hidden_matrix()) + self.projection()
    }

    const fn biases(&self) -> usize {
        2 * self.gates * self.hidden
    }
}

impl Network {
    fn directions(&self) -> usize {
        if self.two_directions != 0 { 2 } else { 1 }
    }

    /// Gates by `cudnnRNNMode_t`: two plain networks, LSTM, GRU.
    const fn gates(&self) -> usize {
        match self.cell {
            2 => 4,
            3 => 3,
            _ => 1,
        }
    }

    /// Layers times directions.
    fn pseudo_layers(&self) -> usize {
        usize::try_from(self.layers).unwrap_or(0) * self.directions()
    }

    fn layer(&self, pseudo_layer: usize) -> Layer {
        let size = |size: c_int| usize::try_from(size).unwrap_or(0);
        let (hidden, projection) = (size(self.hidden), size(self.projection));
        let projected = projection > 0 && projection < hidden;
        let output = if projected { projection } else { hidden };
        let input = if pseudo_layer < self.directions() {
            size(self.input)
        } else {
            output * self.directions()
        };
        Layer {
            gates: self.gates(),
            hidden,
            input,
            output,
            projected,
        }
    }

    /// Bytes per element, by `cudnnDataType_t`.
    const fn element(&self) -> usize {
        match self.kind {
            1 => 8,
            2 | 9 => 2,
            _ => 4,
        }
    }

    fn bytes(&self) -> usize {
        let layers = (0..self.pseudo_layers()).map(|index| self.layer(index));
        let elements: usize = layers
            .map(|layer| layer.matrices() + if self.biased != 0 { layer.biases() } else { 0 })
            .sum();
        elements * self.element()
    }

    const fn is_lstm(&self) -> bool {
        self.cell == 2
    }

    /// The bytes that a forward pass keeps for the backward pass: gates, cells, the outputs between
    /// layers, and a bit of dropout per direction.
    fn reserve(&self, sequences: &Sequences) -> usize {
        let states = sequences.rows * self.first().hidden * self.element();
        let cells = if self.is_lstm() {
            self.pseudo_layers() * states
        } else {
            0
        };
        let outputs = self.pseudo_layers().saturating_sub(self.directions()) * states;
        let dropout = if self.drops {
            outputs / self.element() * self.directions() / 8
        } else {
            0
        };
        aligned([
            self.pseudo_layers() * states * self.kept(),
            cells,
            outputs + dropout,
        ]) + 256
    }

    /// Values that the backward pass needs per output, without the cells of an LSTM.
    const fn kept(&self) -> usize {
        match self.cell {
            2 => 4,
            3 => 6,
            _ => 1,
        }
    }

    fn first(&self) -> Layer {
        self.layer(0)
    }

    /// Bytes of the workspace: 8 MiB per layer and direction, the matrices, and what the larger of
    /// the passes needs.
    fn workspace(&self, sequences: &Sequences, training: bool) -> usize {
        let parts = aligned(self.forward(sequences));
        let parts = if training {
            parts.max(aligned(self.backward(sequences)))
        } else {
            parts
        };
        let matrices: usize = (0..self.pseudo_layers())
            .map(|index| self.layer(index).matrices())
            .sum();
        self.pseudo_layers() * (8 << 20) + aligned([matrices * self.element()]) + 256 + parts
    }

    /// Whether cuDNN uses a persistent algorithm (`CUDNN_RNN_ALGO_PERSIST_STATIC` or its form for
    /// small states). For bfloat16 it uses the standard one.
    const fn is_persistent(&self) -> bool {
        matches!(self.algorithm, 1 | 3) && matches!(self.kind, 0 | 2)
    }

    /// Parts of the forward pass.
    fn forward(&self, sequences: &Sequences) -> Vec<usize> {
        let sizes = self.sizes(sequences);
        let (gates, states, layers) = (self.gates(), sizes.states, sizes.layers);
        let mut parts = self.copies(sequences, &sizes, 1);
        if self.directions() == 1 {
            parts.push(
                gates
                    * if self.is_persistent() {
                        states
                    } else {
                        sizes.of_steps(sequences, 256)
                    },
            );
        } else {
            parts.extend([2 * gates * states, 4 * states, 4 * layers]);
        }
        if self.is_persistent() {
            parts.extend([4 * gates * states, 2 * layers]);
        } else {
            parts.push(self.directions() * gates * layers);
        }
        if self.is_lstm() {
            parts.push(2 * self.directions() * layers);
        }
        if self.drops && self.layers > 1 && self.directions() == 1 {
            parts.push(states);
        }
        parts
    }

    /// Parts of the backward pass.
    fn backward(&self, sequences: &Sequences) -> Vec<usize> {
        let sizes = self.sizes(sequences);
        let (states, layers) = (sizes.states, sizes.layers);
        let mut parts = self.copies(sequences, &sizes, 2);
        let widest = states.max(sizes.inputs);
        match (self.directions(), self.layers > 1) {
            (1, false) => parts.extend([states, widest]),
            (1, true) if self.is_persistent() => parts.extend([2 * states, widest]),
            (1, true) => parts.extend([
                sizes.of_steps(sequences, self.steps_between_layers(sequences)),
                widest,
            ]),
            (_, several) => {
                parts.extend([if several { 4 } else { 2 } * states, 4 * widest, 4 * layers])
            }
        }
        if self.is_persistent() {
            parts.extend([8 * states, self.kept() * states]);
        }
        let one = self.directions() == 1 && !self.is_persistent();
        match (one, self.is_lstm()) {
            (true, false) => parts.push(layers),
            (true, true) => parts.extend([2 * layers, layers]),
            (false, false) => parts.push(2 * layers),
            (false, true) => parts.extend([2 * layers, 2 * self.directions() * layers]),
        }
        parts
    }

    /// Copies without padding: of inputs, outputs, states before and after, and lengths. Packed
    /// sequences need none.
    fn copies(&self, sequences: &Sequences, sizes: &Sizes, times: usize) -> Vec<usize> {
        if sequences.packed {
            return Vec::new();
        }
        let states = if self.is_lstm() { 4 } else { 2 };
        let mut parts = vec![8 * sequences.batch];
        for _ in 0..times {
            parts.extend([self.directions() * sizes.states, sizes.inputs]);
            parts.extend(std::iter::repeat_n(
                self.directions() * sizes.layers,
                states,
            ));
        }
        parts
    }

    /// Steps whose gradients between layers exist at the same time.
    fn steps_between_layers(&self, sequences: &Sequences) -> usize {
        let group = match (sequences.steps, sequences.batch) {
            (_, 1) => 16,
            (_, 2..=8) => 8,
            (_, 9..=16) | (128.., _) => 4,
            (_, 17..=96) => 2,
            _ => 1,
        };
        2 * group * self.pseudo_layers() + 8.max(2 * group)
    }

    fn sizes(&self, sequences: &Sequences) -> Sizes {
        let layer = self.first();
        let state = layer.hidden * self.element();
        Sizes {
            states: sequences.rows * state,
            inputs: sequences.rows * layer.input * self.element(),
            layers: usize::try_from(self.layers).unwrap_or(0) * sequences.batch * state,
            step: sequences.batch * state,
        }
    }

    /// A matrix and its bias. Numbers start with the gates of the input, then of the hidden state,
    /// then the projection, which has no bias.
    fn weights(&self, pseudo_layer: usize, number: usize) -> Weights {
        let layer = self.layer(pseudo_layer);
        let before: usize = (0..pseudo_layer)
            .map(|index| self.layer(index).matrices())
            .sum();
        let (offset, rows, columns) = match number.checked_sub(layer.gates) {
            None => (number * layer.input_matrix(), layer.hidden, layer.input),
            Some(gate) if gate < layer.gates => (
                layer.gates * layer.input_matrix() + gate * layer.hidden_matrix(),
                layer.hidden,
                layer.output,
            ),
            Some(_) => (
                layer.gates * (layer.input_matrix() + layer.hidden_matrix()),
                layer.output,
                layer.hidden,
            ),
        };
        let all: usize = (0..self.pseudo_layers())
            .map(|index| self.layer(index).matrices())
            .sum();
        let biases: usize = (0..pseudo_layer)
            .map(|index| self.layer(index).biases())
            .sum();
        let bias = (self.biased != 0 && number < 2 * layer.gates)
            .then_some((all + biases + number * layer.hidden) * self.element());
        Weights {
            matrix: (before + offset) * self.element(),
            rows,
            columns,
            bias,
            hidden: layer.hidden,
        }
    }
}

/// Bytes of the tensors of a network.
struct Sizes {
    /// A state for each row of the input.
    states: usize,
    inputs: usize,
    /// A state for each layer and sequence.
    layers: usize,
    /// A state for each sequence.
    step: usize,
}

impl Sizes {
    /// The states of at most `most` steps.
    fn of_steps(&self, sequences: &Sequences, most: usize) -> usize {
        if sequences.steps > most {
            self.states.min(most * self.step)
        } else {
            self.states
        }
    }
}

/// The sum of parts that start at multiples of 32 bytes.
fn aligned(parts: impl IntoIterator<Item = usize>) -> usize {
    parts
        .into_iter()
        .map(|bytes| bytes.next_multiple_of(32))
        .sum()
}

/// A matrix and its bias: offsets in bytes, and sizes in elements.
struct Weights {
    matrix: usize,
    rows: usize,
    columns: usize,
    bias: Option<usize>,
    hidden: usize,
}

export! {
    cudnnSetRNNDescriptor_v8(
        network: Out<'_, Network>, algorithm: c_int, cell: c_int, bias: c_int, direction: c_int,
        _: c_int, kind: c_int, _: c_int, _: c_int, input: c_int, hidden: c_int, projection: c_int,
        layers: c_int, dropout: Option<&f32>, _: c_uint
    ) = {
        let biased = c_int::from(bias != 0);
        let drops = dropout.is_some_and(|probability| *probability > 0.0);
        answer(write(
            network,
            Network {
                algorithm,
                cell,
                biased,
                two_directions: direction,
                kind,
                input,
                hidden,
                projection,
                layers,
                drops,
            },
        ))
    };
    /// Layout 1 packs sequences of several lengths.
    cudnnSetRNNDataDescriptor(
        sequences: Out<'_, Sequences>, _: c_int, layout: c_int, steps: c_int, batch: c_int,
        _: c_int, lengths: *const c_int, _: *const c_void
    ) = {
        let packed = layout == 1 && !lengths.is_null();
        let [steps, batch] = [steps, batch].map(|size| usize::try_from(size).unwrap_or(0));
        let rows = if packed {
            // SAFETY: the array has a length for each sequence of the batch.
            let lengths = unsafe { slice::from_raw_parts(lengths, batch) };
            lengths.iter().map(|length| usize::try_from(*length).unwrap_or(0)).sum()
        } else {
            steps * batch
        };
        answer(write(sequences, Sequences { steps, batch, rows, packed }))
    };
    /// A descriptor of dropout starts with its probability.
    cudnnSetDropoutDescriptor, cudnnRestoreDropoutDescriptor(
        dropout: Out<'_, f32>, _: usize, probability: f32, _: *const c_void, _: usize,
        _: c_ulonglong
    ) = answer(write(dropout, probability));
}

export! {
    cudnnGetRNNWeightSpaceSize(_: usize, network: Option<&Network>, bytes: Out<'_, usize>) =
        answer(network.is_some_and(|network| write(bytes, network.bytes())));
    /// Both pairs of outputs may be null.
    cudnnGetRNNWeightParams(
        _: usize, network: Option<&Network>, pseudo_layer: c_int, _: usize, space: usize,
        number: c_int, matrix: Option<&mut Tensor>, matrix_address: Out<'_, usize>,
        bias: Option<&mut Tensor>, bias_address: Out<'_, usize>
    ) = {
        let Some(network) = network else { return answer(false) };
        let (pseudo_layer, number) =
            (usize::try_from(pseudo_layer).unwrap_or(0), usize::try_from(number).unwrap_or(0));
        let weights = network.weights(pseudo_layer, number);
        put(
            matrix,
            matrix_address,
            network.kind,
            [weights.rows, weights.columns],
            Some(space + weights.matrix),
        );
        put(
            bias,
            bias_address,
            network.kind,
            [weights.hidden, 1],
            weights.bias.map(|offset| space + offset),
        );
        0
    };
}

/// Describes a matrix at an address; without an address the matrix is empty.
fn put(
    tensor: Option<&mut Tensor>,
    place: Out<'_, usize>,
    kind: c_int,
    [rows, columns]: [usize; 2],
    address: Option<usize>,
) {
    let number = |size: usize| c_int::try_from(size).unwrap_or(c_int::MAX);
    let sizes = if address.is_some() {
        [1, number(rows), number(columns)]
    } else {
        [0; 3]
    };
    if let Some(tensor) = tensor {
        tensor.set(kind, &sizes, &[sizes[1] * sizes[2], sizes[2], 1]);
    }
    write(place, address.unwrap_or(0));
}

export! {
    /// Only training keeps memory for the backward pass.
    cudnnGetRNNTempSpaceSizes(
        _: usize, network: Option<&Network>, training: c_int, sequences: Option<&Sequences>,
        workspace: Out<'_, usize>, reserve: Out<'_, usize>
    ) = {
        let (Some(network), Some(sequences)) = (network, sequences) else { return answer(false) };
        let bytes = network.workspace(sequences, training != 0);
        if network.first().projected {
            // Of 14,309 networks with projections, none needs less than 0.8 or more than 1.25 times
            // the formula.
            machine().counters.note_workspace(bytes as u64 / 5, bytes as u64 / 4);
        }
        write(workspace, bytes);
        write(reserve, if training == 0 { 0 } else { network.reserve(sequences) });
        0
    };
}

#[cfg(test)]
mod tests;
