#![allow(clippy::unwrap_used)]

use proptest::prelude::*;

use super::*;

fn row(program: &str, peak: Option<u64>) -> MatrixRow {
    MatrixRow {
        cell: MatrixCell {
            program: program.to_owned(),
            values: BTreeMap::from([("batch".to_owned(), "8".to_owned())]),
        },
        figures: RunFigures {
            exit_code: Some(0),
            peak_reserved: peak,
            ..RunFigures::default()
        },
        ..MatrixRow::default()
    }
}

#[test]
fn a_row_is_read_as_it_was_written() {
    let row = row("train", Some(3));
    let text = serde_json::to_string(&row).unwrap();
    assert_eq!(serde_json::from_str::<MatrixRow>(&text).unwrap(), row);
    assert!(text.starts_with(r#"{"version":0,"program":"train","values":{"batch":"8"},"run":"#));
}

#[test]
fn peaks_that_grew_are_listed_and_unknown_ones_are_only_counted() {
    let rows = vec![
        row("a", Some(5)),
        row("b", Some(9)),
        row("c", None),
        row("d", Some(1)),
    ];
    let earlier = [
        row("a", Some(4)),
        row("b", Some(4)),
        row("c", Some(1)),
        row("d", Some(2)),
    ];
    let report = MatrixReport::new(rows.clone(), Some(&earlier));
    let grown = report.grown.iter().map(|grown| grown.cell.program.as_str());
    assert_eq!(grown.collect::<Vec<_>>(), ["b", "a"]);
    assert_eq!(report.not_compared, Some(1));
    assert!(!report.is_success());
    assert!(MatrixReport::new(rows, None).is_success());
}

#[test]
fn shards_take_equally_long_by_the_known_times() {
    let times = [Some(60), Some(20), Some(20), Some(20), None];
    let of = |index| of_shard(&times, Shard { index, count: 2 });
    assert_eq!(of(1), [true, false, false, true, false]);
    assert_eq!(of(2), [false, true, true, false, true]);
}

proptest! {
    #[test]
    fn every_run_belongs_to_exactly_one_shard(
        times in prop::collection::vec(prop::option::of(0_u64..1000), 0..40),
        count in 1_u32..9,
    ) {
        let shards: Vec<Vec<bool>> =
            (1..=count).map(|index| of_shard(&times, Shard { index, count })).collect();
        for run in 0..times.len() {
            prop_assert_eq!(shards.iter().filter(|shard| shard[run]).count(), 1);
        }
        if times.iter().all(Option::is_none) {
            let sizes = shards.iter().map(|shard| shard.iter().filter(|own| **own).count());
            let sizes: Vec<usize> = sizes.collect();
            prop_assert!(sizes.iter().max().unwrap() - sizes.iter().min().unwrap() <= 1);
        }
    }
}
