use super::*;

#[test]
fn units_are_checkpointed_in_groups_and_what_may_not_be_done_again_stands_between_them() {
    let unit = |at: usize, may_be_done_again| ModelUnit {
        operations: at..at + 1,
        may_be_done_again,
    };
    let units = vec![
        unit(0, false),
        unit(1, true),
        unit(2, true),
        unit(3, true),
        unit(4, false),
        unit(5, false),
        unit(6, true),
    ];
    let program = ModelProgram {
        units,
        ..ModelProgram::default()
    };
    let segments = |every| -> Vec<_> {
        program
            .segments(every)
            .into_iter()
            .map(|segment| (segment.operations, segment.is_checkpointed))
            .collect()
    };
    assert_eq!(segments(None), [(0..7, false)]);
    assert_eq!(
        segments(Some(1)),
        [
            (0..1, false),
            (1..2, true),
            (2..3, true),
            (3..4, true),
            (4..6, false),
            (6..7, true)
        ]
    );
    assert_eq!(
        segments(Some(2)),
        [
            (0..1, false),
            (1..3, true),
            (3..4, true),
            (4..6, false),
            (6..7, true)
        ]
    );
}

#[test]
fn a_uniform_program_has_its_activations_in_the_precision_of_the_plan() {
    let uniform = Uniform {
        parameters: Bytes::mib(8),
        layers: 4,
        activations_per_sample: Bytes::mib(3),
    };
    let full = uniform.program(5, Precision::Fp32);
    assert_eq!(
        (full.operations.len(), full.tensors[0]),
        (4, Bytes(3 * 5 * 1024 * 1024 / 4))
    );
    let half = uniform.program(5, Precision::Mixed);
    assert_eq!(half.tensors[3].0 * 2, full.tensors[3].0);
}
