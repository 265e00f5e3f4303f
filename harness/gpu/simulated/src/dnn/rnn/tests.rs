use super::*;

/// The network of `torch.nn.LSTM(256, 512, 2, bidirectional=True)`.
const LSTM: Network = Network {
    algorithm: 0,
    cell: 2,
    biased: 1,
    two_directions: 1,
    kind: 0,
    input: 256,
    hidden: 512,
    projection: 0,
    layers: 2,
    drops: false,
};

#[test]
fn weights_and_biases_of_an_lstm_do_not_overlap() {
    assert_eq!(
        LSTM.bytes(),
        4 * 9_453_568,
        "PyTorch counts 9,453,568 parameters"
    );
    let mut ranges = Vec::new();
    for pseudo_layer in 0..4 {
        for number in 0..8 {
            let weights = LSTM.weights(pseudo_layer, number);
            ranges.push((
                weights.matrix,
                weights.matrix + 4 * weights.rows * weights.columns,
            ));
            let bias = weights.bias.expect("find the bias");
            ranges.push((bias, bias + 4 * 512));
        }
    }
    ranges.sort_unstable();
    assert_eq!((ranges[0].0, ranges[63].1), (0, LSTM.bytes()));
    assert!(
        ranges.windows(2).all(|pair| pair[0].1 == pair[1].0),
        "the ranges touch"
    );
}

#[test]
fn a_projection_has_no_bias() {
    let network = Network {
        projection: 64,
        ..LSTM
    };
    let weights = network.weights(0, 8);
    assert_eq!(
        (weights.rows, weights.columns, weights.bias),
        (64, 512, None)
    );
}

/// Sizes without dropout, chosen from all branches of the formulas.
const SIZES: &str = include_str!("sizes.tsv");

#[test]
fn temporary_memory_is_as_measured_on_an_h200() {
    for row in SIZES.lines().filter(|line| !line.starts_with('#')) {
        let columns: Vec<Vec<usize>> = row
            .split('\t')
            .map(|column| {
                column
                    .split(',')
                    .map(|number| number.parse().expect("read a number"))
                    .collect()
            })
            .collect();
        let number = |column: usize| columns[column][0];
        let small = |column: usize| c_int::try_from(number(column)).expect("read a small number");
        let network = Network {
            algorithm: small(0),
            cell: small(1),
            biased: small(2),
            two_directions: small(3),
            kind: small(4),
            input: small(5),
            hidden: small(6),
            projection: small(6),
            layers: small(7),
            drops: false,
        };
        let (batch, lengths) = (number(8), &columns[9]);
        let packed = lengths.len() > 1;
        let rows = if packed {
            lengths.iter().sum()
        } else {
            lengths[0] * batch
        };
        let sequences = Sequences {
            steps: lengths[0],
            batch,
            rows,
            packed,
        };
        let training = number(10) != 0;
        let reserve = if training {
            network.reserve(&sequences)
        } else {
            0
        };
        assert_eq!(
            (
                network.workspace(&sequences, training),
                reserve,
                network.bytes()
            ),
            (number(11), number(12), number(13)),
            "{row}"
        );
    }
}

#[test]
fn temporary_memory_with_dropout_is_as_measured_on_an_h200() {
    let network = Network {
        input: 128,
        hidden: 256,
        drops: true,
        ..LSTM
    };
    let words = Network {
        two_directions: 0,
        input: 200,
        hidden: 200,
        ..network
    };
    // The network, steps, batch, workspace and reserve.
    for (network, steps, batch, workspace, reserve) in [
        (network, 50, 16, 55_656_832, 18_125_056),
        (
            Network { cell: 3, ..network },
            50,
            16,
            51_741_056,
            21_401_856,
        ),
        (
            Network {
                cell: 1,
                algorithm: 3,
                ..network
            },
            50,
            16,
            54_395_264,
            5_017_856,
        ),
        (words, 35, 20, 23_577_632, 6_177_760),
        (words, 4, 20, 20_105_632, 706_272),
    ] {
        let sequences = Sequences {
            steps,
            batch,
            rows: steps * batch,
            packed: false,
        };
        assert_eq!(
            (
                network.workspace(&sequences, true),
                network.reserve(&sequences)
            ),
            (workspace, reserve),
            "{steps} steps"
        );
    }
}
