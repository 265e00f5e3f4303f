//! Recurrent networks: the layout of their weights in the buffer of the program, and their temporary memory.
//!
//! The matrices come first, by layer and direction: the input's, the hidden state's, and the projection. The biases follow in the same order.

use std::ffi::{c_int, c_uint, c_ulonglong, c_void};

use harness_gpu_settings::export;
use harness_gpu_settings::ffi::{Out, write};

use super::{Tensor, answer};
use crate::world::machine;

#[repr(C)]
#[derive(Clone, Copy)]
struct Network {
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
    steps: c_int,
    batch: c_int,
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
        if self.projected { self.hidden * self.output } else { 0 }
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
        let input = if pseudo_layer < self.directions() { size(self.input) } else { output * self.directions() };
        Layer { gates: self.gates(), hidden, input, output, projected }
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
        let elements: usize = layers.map(|layer| layer.matrices() + if self.biased != 0 { layer.biases() } else { 0 }).sum();
        elements * self.element()
    }

    /// The bytes that a forward pass keeps for the backward pass: gates and cells, and the outputs between layers with a bit of dropout per direction. The
    /// formula gives ten sizes measured on an H200: of LSTM, GRU and plain networks, with one and two layers and directions, in 16 and 32 bits.
    fn reserve(&self, states: usize) -> usize {
        let kept = match self.cell {
            2 => 5,
            3 => 6,
            _ => 1,
        };
        let outputs = self.pseudo_layers().saturating_sub(self.directions()) * states;
        let dropout = if self.drops { outputs * self.directions() / 8 } else { 0 };
        (self.pseudo_layers() * states * kept * self.element() + outputs * self.element() + dropout + 256).next_multiple_of(32)
    }

    /// A model of the workspace: 8 MiB per layer and direction, the weights and the gates. Of 18 sizes measured on an H200, 15 are within 5 % of it. Others are up
    /// to 3.1 times as large.
    fn workspace(&self, states: usize) -> usize {
        self.pseudo_layers() * ((8 << 20) + states * self.gates() * self.element()) + self.bytes()
    }

    /// A matrix and its bias. Numbers start with the gates of the input, then of the hidden state, then the projection, which has no bias.
    fn weights(&self, pseudo_layer: usize, number: usize) -> Weights {
        let layer = self.layer(pseudo_layer);
        let before: usize = (0..pseudo_layer).map(|index| self.layer(index).matrices()).sum();
        let (offset, rows, columns) = match number.checked_sub(layer.gates) {
            None => (number * layer.input_matrix(), layer.hidden, layer.input),
            Some(gate) if gate < layer.gates => {
                (layer.gates * layer.input_matrix() + gate * layer.hidden_matrix(), layer.hidden, layer.output)
            }
            Some(_) => (layer.gates * (layer.input_matrix() + layer.hidden_matrix()), layer.output, layer.hidden),
        };
        let all: usize = (0..self.pseudo_layers()).map(|index| self.layer(index).matrices()).sum();
        let biases: usize = (0..pseudo_layer).map(|index| self.layer(index).biases()).sum();
        let bias = (self.biased != 0 && number < 2 * layer.gates).then_some((all + biases + number * layer.hidden) * self.element());
        Weights { matrix: (before + offset) * self.element(), rows, columns, bias, hidden: layer.hidden }
    }
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
        network: Out<'_, Network>, _: c_int, cell: c_int, bias: c_int, direction: c_int, _: c_int, kind: c_int, _: c_int, _: c_int, input:
        c_int, hidden: c_int, projection: c_int, layers: c_int, dropout: Option<&f32>, _: c_uint
    ) = {
        let biased = c_int::from(bias != 0);
        let drops = dropout.is_some_and(|probability| *probability > 0.0);
        answer(write(network, Network { cell, biased, two_directions: direction, kind, input, hidden, projection, layers, drops }))
    };
    cudnnSetRNNDataDescriptor(
        sequences: Out<'_, Sequences>, _: c_int, _: c_int, steps: c_int, batch: c_int, _: c_int, _: *const c_int, _: *const c_void
    ) = answer(write(sequences, Sequences { steps, batch }));
    /// A descriptor of dropout starts with its probability.
    cudnnSetDropoutDescriptor, cudnnRestoreDropoutDescriptor(
        dropout: Out<'_, f32>, _: usize, probability: f32, _: *const c_void, _: usize, _: c_ulonglong
    ) = answer(write(dropout, probability));
}

export! {
    cudnnGetRNNWeightSpaceSize(_: usize, network: Option<&Network>, bytes: Out<'_, usize>) =
        answer(network.is_some_and(|network| write(bytes, network.bytes())));
    /// Both pairs of outputs may be null.
    cudnnGetRNNWeightParams(
        _: usize, network: Option<&Network>, pseudo_layer: c_int, _: usize, space: usize, number: c_int, matrix: Option<&mut Tensor>,
        matrix_address: Out<'_, usize>, bias: Option<&mut Tensor>, bias_address: Out<'_, usize>
    ) = {
        let Some(network) = network else { return answer(false) };
        let (pseudo_layer, number) = (usize::try_from(pseudo_layer).unwrap_or(0), usize::try_from(number).unwrap_or(0));
        let weights = network.weights(pseudo_layer, number);
        put(matrix, matrix_address, network.kind, [weights.rows, weights.columns], Some(space + weights.matrix));
        put(bias, bias_address, network.kind, [weights.hidden, 1], weights.bias.map(|offset| space + offset));
        0
    };
}

/// Describes a matrix at an address; without an address the matrix is empty.
fn put(tensor: Option<&mut Tensor>, place: Out<'_, usize>, kind: c_int, [rows, columns]: [usize; 2], address: Option<usize>) {
    let number = |size: usize| c_int::try_from(size).unwrap_or(c_int::MAX);
    let sizes = if address.is_some() { [1, number(rows), number(columns)] } else { [0; 3] };
    if let Some(tensor) = tensor {
        tensor.set(kind, &sizes, &[sizes[1] * sizes[2], sizes[2], 1]);
    }
    write(place, address.unwrap_or(0));
}

export! {
    /// Only training keeps memory for the backward pass.
    cudnnGetRNNTempSpaceSizes(
        _: usize, network: Option<&Network>, training: c_int, sequences: Option<&Sequences>, workspace: Out<'_, usize>,
        reserve: Out<'_, usize>
    ) = {
        let (Some(network), Some(sequences)) = (network, sequences) else { return answer(false) };
        let states = [sequences.steps, sequences.batch, network.hidden].iter().map(|size| usize::try_from(*size).unwrap_or(0)).product();
        let bytes = network.workspace(states);
        machine().counters.note_workspace(bytes as u64 / 20, 21 * bytes as u64 / 10);
        write(workspace, bytes);
        write(reserve, if training == 0 { 0 } else { network.reserve(states) });
        0
    };
}

#[cfg(test)]
mod tests;
