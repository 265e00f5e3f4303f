use super::*;

fn labels(axis: &LogAxis) -> Vec<String> {
    axis.key_points(10)
        .iter()
        .map(|figure| axis.format_ext(figure))
        .collect()
}

#[test]
fn an_axis_has_round_figures_whatever_it_spans() {
    let labels = |values: [u64; 2]| labels(&LogAxis::new(Some(Quantity::HostTime), values));
    assert_eq!(
        labels([3_000, 900_000]),
        [
            "5 ns", "10 ns", "20 ns", "50 ns", "100 ns", "200 ns", "500 ns", "1 µs"
        ]
    );
    assert_eq!(
        labels([3_000, 9_000_000_000]),
        [
            "10 ns", "100 ns", "1 µs", "10 µs", "100 µs", "1 ms", "10 ms"
        ]
    );
    assert_eq!(
        labels([100_000, 103_000]),
        ["100 ns", "101 ns", "102 ns", "103 ns"]
    );
}

#[test]
fn marks_stand_at_the_points_that_there_are() {
    assert_eq!(
        labels(&LogAxis::marked(None, [1, 2, 4, 5], 0.2)),
        ["1", "2", "4"]
    );
}

#[test]
fn zero_has_a_place_of_its_own_below_all_others() {
    let axis = LogAxis::new(Some(Quantity::ModelTime), [0, 1_000, 1_000_000]);
    let place = |figure| axis.map(&figure, (300, 0));
    assert!(
        place(0) < 300 && place(0) > place(1_000) + 20,
        "{} {}",
        place(0),
        place(1_000)
    );
    assert_eq!(labels(&axis)[..2], ["0", "1 ns"]);
}

#[test]
fn figures_that_do_not_differ_do_not_look_as_if_they_did() {
    let axis = LogAxis::new(Some(Quantity::HostTime), [1_000_000, 1_000_001]);
    assert!((axis.map(&1_000_000, (0, 600)) - axis.map(&1_000_001, (0, 600))).abs() <= 1);
}
