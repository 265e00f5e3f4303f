use super::*;

/// The network of `torch.nn.LSTM(256, 512, 2, bidirectional=True)`.
const LSTM: Network =
    Network { cell: 2, biased: 1, two_directions: 1, kind: 0, input: 256, hidden: 512, projection: 0, layers: 2, drops: false };

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

#[test]
fn temporary_memory_is_as_measured_on_an_h200() {
    let fp32 = Network { input: 128, hidden: 256, drops: true, ..LSTM };
    let fp16 = Network { two_directions: 0, kind: 2, drops: false, ..fp32 };
    let small = Network { two_directions: 0, input: 64, hidden: 64, layers: 1, ..LSTM };
    let (packed, two) = (Network { input: 8, hidden: 8, ..small }, Network { input: 1, hidden: 8, layers: 2, drops: true, ..small });
    let words = Network { input: 200, hidden: 200, layers: 2, drops: true, ..small };
    let digits = Network { input: 28, ..small };
    // The network, steps times batch, and the measured reserve and workspace.
    let measured = [
        (fp32, 50 * 16, 18_125_056, 55_656_832),
        (Network { cell: 3, ..fp32 }, 50 * 16, 21_401_856, 51_741_056),
        (Network { cell: 1, ..fp32 }, 50 * 16, 5_017_856, 54_395_264),
        (fp16, 50 * 16, 4_505_856, 21_029_248),
        (small, 5 * 2, 13_056, 8_580_384_usize),
        (packed, 320, 51_456, 8_434_944),
        (two, 304, 107_584, 16_835_456),
        (words, 35 * 20, 6_177_760, 23_577_632),
        (words, 4 * 20, 706_272, 20_105_632),
        (digits, 28 * 64, 2_294_016, 18_449_152),
    ];
    for (network, inputs, reserve, workspace) in measured {
        let states = inputs * network.hidden as usize;
        assert_eq!(network.reserve(states), reserve, "{}", network.cell);
        let percent = network.workspace(states).abs_diff(workspace) * 100 / workspace;
        let most = if network.input == digits.input {
            45
        } else if network.cell == 1 {
            29
        } else {
            5
        };
        assert!(percent < most, "{percent} % of {workspace}");
    }
}
