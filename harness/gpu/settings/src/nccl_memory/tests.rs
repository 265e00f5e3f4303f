use super::*;

#[test]
fn a_communicator_takes_the_row_with_the_most_ranks_up_to_its_own() {
    let rows =
        rows("# measured\nranks\tcollective\tpoint_to_point\n2\t544MiB\t0B\n4\t688MiB\t1GiB\n")
            .expect("read the table");
    let memory = NcclMemory {
        file: String::new(),
        rows,
    };
    let of = |ranks| [false, true].map(|is_point_to_point| memory.of(ranks, is_point_to_point));
    assert_eq!(
        [1, 2, 3, 64].map(of),
        [
            [Bytes::ZERO; 2],
            [Bytes::mib(544), Bytes::ZERO],
            [Bytes::mib(544), Bytes::ZERO],
            [Bytes::mib(688), Bytes::gib(1)],
        ]
    );
}

#[test]
fn an_error_in_the_table_names_line_column_and_expectation() {
    assert_eq!(
        rows("ranks\tcollective\tpoint_to_point\n2\tmuch\t0B\n").expect_err("the table is wrong"),
        "2:3: `much` is not a size, as in 544MiB (column collective)"
    );
    assert_eq!(
        rows("").expect_err("the table is wrong"),
        "1:1: the first line must be `ranks collective point_to_point`, separated by tabs"
    );
}
