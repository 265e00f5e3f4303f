use super::*;

/// Workspaces that others measured on real GPUs.
const MEASURED: &str = include_str!("measured.tsv");

fn convolution(element: Element, [batch, channels, side, kernel]: [i64; 4]) -> Convolution {
    let image = vec![batch, channels, side, side];
    Convolution {
        direction: Direction::Forward,
        input: image.clone(),
        filter: vec![channels, channels, kernel, kernel],
        output: image,
        element,
        channels_last: false,
        geometry: [vec![1, 1], vec![kernel / 2; 2], vec![1, 1]],
    }
}

#[test]
fn the_row_of_a_convolution_is_read_back() {
    for (direction, channels_last) in [
        (Direction::Forward, false),
        (Direction::DataGradient, true),
        (Direction::FilterGradient, false),
    ] {
        let convolution = Convolution {
            direction,
            channels_last,
            ..convolution(Element::Half, [2, 64, 128, 3])
        };
        let rows = rows(&format!("{HEADER}{}", convolution.row((9, 0), 4096)))
            .expect("the table is valid");
        let table = CudnnWorkspace::Measured {
            file: "mine.tsv".to_owned(),
            rows,
        };
        assert_eq!(table.of(&convolution, (9, 0)), Workspace::exact(4096));
        assert_ne!(
            table.of(&convolution, (8, 9)),
            Workspace::exact(4096),
            "of another capability"
        );
    }
}

#[test]
fn the_rule_gives_all_measured_workspaces() {
    let measured = rows(MEASURED).expect("the table is valid");
    assert_eq!(measured.len() + MEASURED.matches("aten::mm").count(), 10);
    for row in &measured {
        let output = vec![row.input[0], row.filter[0], row.input[2], row.input[3]];
        let MeasuredWorkspace {
            direction,
            input,
            filter,
            element,
            channels_last,
            capability,
            bytes,
            ..
        } = row.clone();
        let geometry = [vec![1, 1], vec![1, 1], vec![1, 1]];
        let convolution = Convolution {
            direction,
            input,
            filter,
            output,
            element,
            channels_last,
            geometry,
        };
        let capability = capability.expect("the table names the GPU");
        assert_eq!(
            convolution.estimate(capability),
            Workspace::exact(bytes),
            "{convolution:?} on {capability:?}"
        );
        let table = CudnnWorkspace::Measured {
            file: "measured.tsv".to_owned(),
            rows: measured.clone(),
        };
        assert_eq!(table.of(&convolution, capability), Workspace::exact(bytes));
    }
}

#[test]
fn pointwise_convolutions_need_nothing_and_channels_last_copies_input_and_output() {
    let pointwise = convolution(Element::Float, [1, 64, 512, 1]);
    assert_eq!(pointwise.estimate((8, 9)), Workspace::exact(0));
    let channels_last = Convolution {
        channels_last: true,
        ..convolution(Element::Float, [1, 64, 512, 3])
    };
    assert_eq!(
        channels_last.estimate((8, 9)).bytes,
        512 * 512 * 512,
        "512 bytes per pixel"
    );
    let half = Convolution {
        element: Element::Half,
        ..channels_last
    };
    assert_eq!(half.estimate((8, 9)).bytes, 0);
}

#[test]
fn unmeasured_workspaces_have_bounds() {
    for (capability, element) in [
        ((8, 0), Element::Float),
        ((9, 0), Element::Bfloat16),
        ((7, 5), Element::Half),
        ((8, 6), Element::Double),
    ] {
        for direction in [
            Direction::Forward,
            Direction::DataGradient,
            Direction::FilterGradient,
        ] {
            for channels_last in [false, true] {
                let convolution = Convolution {
                    direction,
                    channels_last,
                    ..convolution(element, [2, 64, 128, 3])
                };
                let Workspace { bytes, least, most } = convolution.estimate(capability);
                assert!(
                    least == 0 && (0..=most).contains(&bytes) && most > 0,
                    "{convolution:?} on {capability:?}: {bytes} of {least}..={most}"
                );
            }
        }
    }
}

#[test]
fn a_table_decides_for_its_convolutions_only() {
    let text = "operator\tinput_shapes\toutput_shape\tdtypes\tlayout\tbytes\n\
        filter_gradient\t[[2, 64, 128, 128], [64, 64, 3, \
        3]]\t\ttorch.float16\tchannels_last\t1234\n\
        forward\t[[2, 64, 128, 128], [64, 64, 3, 3]]\t[2, 64, 64, 64]\ttorch.float16\t\t77\n";
    let table = CudnnWorkspace::Measured {
        file: "mine.tsv".to_owned(),
        rows: rows(text).expect("the table is valid"),
    };
    let forward = convolution(Element::Half, [2, 64, 128, 3]);
    assert_eq!(
        table.of(&forward, (9, 0)),
        forward.estimate((9, 0)),
        "another stride"
    );
    assert_eq!(
        table.of(
            &Convolution {
                output: vec![2, 64, 64, 64],
                ..forward.clone()
            },
            (9, 0)
        ),
        Workspace::exact(77)
    );
    let gradient = Convolution {
        direction: Direction::FilterGradient,
        channels_last: true,
        ..forward
    };
    assert_eq!(table.of(&gradient, (9, 0)), Workspace::exact(1234));
    assert_eq!(
        CudnnWorkspace::None.of(&gradient, (9, 0)),
        Workspace::exact(0)
    );
}

#[test]
fn a_row_with_several_errors_reports_the_first_column() {
    let right = [
        "forward",
        "[[2, 64, 8, 8], [64, 64, 3, 3]]",
        "[2, 64, 8, 8]",
        "[1, 1]",
        "[1, 1]",
        "[1, 1]",
        "torch.float32",
        "nchw",
        "9.0",
        "0",
    ];
    let read = |fields: &[&str]| rows(&format!("{HEADER}{}\n", fields.join("\t")));
    assert!(read(&right).is_ok());
    let mut fields = right;
    let names: Vec<&str> = HEADER.trim_end().split('\t').collect();
    for (index, name) in names.into_iter().enumerate().rev() {
        // The number of bytes decides what an operator means, and the geometry is not read.
        if !matches!(name, "bytes" | "stride" | "padding" | "dilation") {
            fields[index] = "x";
            let error = read(&fields).expect_err("the field is wrong");
            assert!(error.ends_with(&format!("(column {name})")), "{error}");
        }
    }
}

#[test]
fn errors_of_a_table_name_line_and_column() {
    let header = "operator\tinput_shapes\tdtypes\tbytes";
    let error = |line: &str| {
        rows(&format!("# measured\n{header}\n{line}\n")).expect_err("the row is wrong")
    };
    let shapes = "[[2, 64, 8, 8], [64, 64, 3, 3]]";
    let texts = [
        rows("").expect_err("there is no header"),
        rows("operator\tbytes\n").expect_err("columns are missing"),
        error(&format!("forward\t{shapes}\ttorch.float32\t-1")),
        error(&format!("aten::mm\t{shapes}\ttorch.float32\t5")),
        error("forward\t[2, 64]\ttorch.float32\t5"),
        error(&format!("forward\t{shapes}\tfloat\t5")),
        error("forward"),
        CudnnWorkspace::parse("operand", |path| std::fs::read_to_string(path))
            .expect_err("there is no such model")
            .to_string(),
        CudnnWorkspace::parse("no/table.tsv", |path| std::fs::read_to_string(path))
            .expect_err("there is no such file")
            .to_string(),
        CudnnWorkspace::parse("no/libcudnn_graph.so.9", |path| {
            std::fs::read_to_string(path)
        })
        .expect_err("there is no such library")
        .to_string(),
    ];
    let expected = [
        "1:1: the table is empty: its first line names the columns operator, input_shapes, dtypes, \
         bytes",
        "1:1: the table has no column `input_shapes`: its first line names operator, input_shapes, \
         dtypes, bytes, separated by tabs",
        "3:55: `-1` is not a number of bytes (column bytes)",
        "3:1: `aten::mm` is not forward, data_gradient, filter_gradient, aten::convolution, or \
         aten::mm with 0 bytes (column operator)",
        "3:9: `[2, 64]` is not the shapes of input and filter, as in [[2, 64, 128, 128], [64, 64, \
         3, 3]] (column input_shapes)",
        "3:41: `float` is not a type of torch, as in torch.float32 (column dtypes)",
        "3:9: `` is not a number of bytes (column bytes)",
        "`operand` is not a model of cuDNN's workspaces: write none, estimate, operands, a file \
         such as measured.tsv, or a path of libcudnn_graph.so.9",
        "no/table.tsv: No such file or directory (os error 2): name a table of measured workspaces",
        "no/libcudnn_graph.so.9: No such file or directory (os error 2): name cuDNN's \
         libcudnn_graph.so.9",
    ];
    assert_eq!(texts.each_ref().map(String::as_str), expected);
}
