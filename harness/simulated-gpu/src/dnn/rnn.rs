//! Recurrent networks: where their weights lie in the one buffer that programs give cuDNN.
//!
//! All matrices come first, layer by layer and direction by direction: those of the input, those of the hidden state, and the projection.
//! Then all biases in the same order.

use std::ffi::{c_int, c_uint, c_void};

use super::Tensor;

/// A recurrent network; it lies at the start of an object.
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
}

/// Sizes of one layer in one direction, in elements.
struct Layer {
    gates: usize,
    hidden: usize,
    /// What the layer reads.
    input: usize,
    /// What it gives on: the hidden state, or its projection.
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

    /// Bytes of an element by `cudnnDataType_t`.
    const fn element(&self) -> usize {
        match self.kind {
            1 => 8,
            2 | 9 => 2,
            _ => 4,
        }
    }

    /// Bytes of all weights.
    fn bytes(&self) -> usize {
        let layers = (0..self.pseudo_layers()).map(|index| self.layer(index));
        let elements: usize = layers.map(|layer| layer.matrices() + if self.biased != 0 { layer.biases() } else { 0 }).sum();
        elements * self.element()
    }

    /// Where a matrix and its bias lie: offsets in bytes, and rows and columns of the matrix. Numbers are first those of the input's gates, then
    /// those of the hidden state's, then the projection, which has no bias.
    fn place(&self, pseudo_layer: usize, number: usize) -> Place {
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
        Place { matrix: (before + offset) * self.element(), rows, columns, bias, hidden: layer.hidden }
    }
}

struct Place {
    matrix: usize,
    rows: usize,
    columns: usize,
    bias: Option<usize>,
    hidden: usize,
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cudnnSetRNNDescriptor_v8(
    network: *mut Network,
    _: c_int,
    cell: c_int,
    bias: c_int,
    direction: c_int,
    _: c_int,
    kind: c_int,
    _: c_int,
    _: c_int,
    input: c_int,
    hidden: c_int,
    projection: c_int,
    layers: c_int,
    _: *const c_void,
    _: c_uint,
) -> c_int {
    let biased = c_int::from(bias != 0);
    // SAFETY: the program passes a descriptor.
    unsafe { *network = Network { cell, biased, two_directions: direction, kind, input, hidden, projection, layers } };
    0
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cudnnGetRNNWeightSpaceSize(_: usize, network: *const Network, bytes: *mut usize) -> c_int {
    // SAFETY: the program passes a descriptor that was set and a pointer to a number.
    unsafe { *bytes = (*network).bytes() };
    0
}

/// Either pair of outputs may be null.
#[unsafe(no_mangle)]
unsafe extern "C" fn cudnnGetRNNWeightParams(
    _: usize,
    network: *const Network,
    pseudo_layer: c_int,
    _: usize,
    space: usize,
    number: c_int,
    matrix: *mut Tensor,
    matrix_address: *mut usize,
    bias: *mut Tensor,
    bias_address: *mut usize,
) -> c_int {
    // SAFETY: the program passes a descriptor that was set; each output is null or a descriptor or a pointer to a pointer.
    unsafe {
        let network = *network;
        let (pseudo_layer, number) = (usize::try_from(pseudo_layer).unwrap_or(0), usize::try_from(number).unwrap_or(0));
        let place = network.place(pseudo_layer, number);
        put(matrix, matrix_address, network.kind, [place.rows, place.columns], Some(space + place.matrix));
        put(bias, bias_address, network.kind, [place.hidden, 1], place.bias.map(|offset| space + offset));
    }
    0
}

/// # Safety
/// Both pointers are null or may be written.
unsafe fn put(tensor: *mut Tensor, address: *mut usize, kind: c_int, [rows, columns]: [usize; 2], at: Option<usize>) {
    let number = |size: usize| c_int::try_from(size).unwrap_or(c_int::MAX);
    // SAFETY: as the caller promises.
    unsafe {
        if !tensor.is_null() {
            let sizes = if at.is_some() { [1, number(rows), number(columns)] } else { [0; 3] };
            (*tensor).set(kind, &sizes, &[sizes[1] * sizes[2], sizes[2], 1]);
        }
        if !address.is_null() {
            *address = at.unwrap_or(0);
        }
    }
}

/// Workspaces are a model: none. What is kept for the backward pass is one element for each gate of each step is not known here, so one page.
#[unsafe(no_mangle)]
unsafe extern "C" fn cudnnGetRNNTempSpaceSizes(
    _: usize,
    _: *const Network,
    _: c_int,
    _: *const c_void,
    workspace: *mut usize,
    reserve: *mut usize,
) -> c_int {
    // SAFETY: each pointer is null or may be written.
    unsafe {
        for size in [workspace, reserve] {
            if !size.is_null() {
                *size = 4096;
            }
        }
    }
    0
}

#[cfg(test)]
mod tests {
    use super::*;

    /// As `torch.nn.LSTM(256, 512, 2, bidirectional=True)` has it.
    const LSTM: Network = Network { cell: 2, biased: 1, two_directions: 1, kind: 0, input: 256, hidden: 512, projection: 0, layers: 2 };

    #[test]
    fn all_weights_and_biases_of_an_lstm_have_a_place_of_their_own() {
        assert_eq!(LSTM.bytes(), 4 * 9_453_568, "PyTorch counts 9,453,568 parameters");
        let mut ranges = Vec::new();
        for pseudo_layer in 0..4 {
            for number in 0..8 {
                let place = LSTM.place(pseudo_layer, number);
                ranges.push((place.matrix, place.matrix + 4 * place.rows * place.columns));
                let bias = place.bias.expect("there are biases");
                ranges.push((bias, bias + 4 * 512));
            }
        }
        ranges.sort_unstable();
        assert_eq!((ranges[0].0, ranges[63].1), (0, LSTM.bytes()));
        assert!(ranges.windows(2).all(|pair| pair[0].1 == pair[1].0), "one begins where the other ends");
    }

    #[test]
    fn a_projection_has_a_place_and_no_bias() {
        let network = Network { projection: 64, ..LSTM };
        let place = network.place(0, 8);
        assert_eq!((place.rows, place.columns, place.bias), (64, 512, None));
    }
}
