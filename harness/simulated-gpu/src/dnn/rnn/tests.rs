use super::*;

/// The network of `torch.nn.LSTM(256, 512, 2, bidirectional=True)`.
const LSTM: Network = Network { cell: 2, biased: 1, two_directions: 1, kind: 0, input: 256, hidden: 512, projection: 0, layers: 2 };

#[test]
fn weights_and_biases_of_an_lstm_do_not_overlap() {
    assert_eq!(LSTM.bytes(), 4 * 9_453_568, "PyTorch counts 9,453,568 parameters");
    let mut ranges = Vec::new();
    for pseudo_layer in 0..4 {
        for number in 0..8 {
            let weights = LSTM.weights(pseudo_layer, number);
            ranges.push((weights.matrix, weights.matrix + 4 * weights.rows * weights.columns));
            let bias = weights.bias.expect("find the bias");
            ranges.push((bias, bias + 4 * 512));
        }
    }
    ranges.sort_unstable();
    assert_eq!((ranges[0].0, ranges[63].1), (0, LSTM.bytes()));
    assert!(ranges.windows(2).all(|pair| pair[0].1 == pair[1].0), "the ranges touch");
}

#[test]
fn a_projection_has_no_bias() {
    let network = Network { projection: 64, ..LSTM };
    let weights = network.weights(0, 8);
    assert_eq!((weights.rows, weights.columns, weights.bias), (64, 512, None));
}
