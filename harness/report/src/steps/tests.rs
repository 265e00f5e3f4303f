use super::*;
use crate::tests::examples;

#[test]
fn a_long_run_shows_its_ends_and_every_step_that_has_something_to_say() {
    let run = examples::long_run(1_000, &[500, 700]);
    let selection = Selection::notable(&run);
    let numbers: Vec<u32> = selection.steps().map(|step| step.number).collect();
    let expected: Vec<u32> = (1..=30).chain([500, 700]).chain(971..=1_000).collect();
    assert_eq!(numbers, expected);
    assert_eq!(selection.left_out(), 938);
    let gaps: Vec<String> = selection
        .grid()
        .rows
        .into_iter()
        .filter(|row| row[0] == "…")
        .map(|row| row[2].clone())
        .collect();
    assert_eq!(
        gaps,
        [
            "469 steps left out",
            "199 steps left out",
            "270 steps left out"
        ]
    );
}

#[test]
fn a_step_shows_what_its_size_came_to_and_which_pass_it_was() {
    let mut step = examples::fragmented().steps.remove(2);
    step.size = Some(Bytes::mib(64));
    assert_eq!(what(&step), "alloc: wanted, 64 MiB");
    (step.text, step.iteration) = ("wanted, 4MiB * i".to_owned(), Some("i = 16".to_owned()));
    assert_eq!(what(&step), "alloc: wanted, 4MiB * i (= 64 MiB), i = 16");
}

#[test]
fn every_row_has_a_cell_for_each_column() {
    for run in examples::every_ending().runs {
        let grid = Selection::notable(&run).grid();
        assert!(
            grid.rows.iter().all(|row| row.len() == grid.columns.len()),
            "{}",
            run.scenario.name
        );
    }
}
