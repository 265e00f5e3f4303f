use proptest::prelude::*;
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

use super::*;

#[test]
fn ranks_are_those_of_the_published_tables() {
    // Conover's table A3 and any table of the sign test: the extremes for 6 to 8 values, the second
    // ones for 9 to 11, and so on.
    let expected = [
        (0, 0),
        (1, 0),
        (5, 0),
        (6, 0),
        (8, 0),
        (9, 1),
        (11, 1),
        (12, 2),
        (15, 3),
        (20, 5),
        (25, 7),
        (50, 17),
        (100, 39),
    ];
    for (count, outside) in expected {
        assert_eq!(interval_rank(count), outside, "{count} values");
    }
}

#[test]
fn the_interval_covers_the_true_median_as_often_as_it_says() {
    // Exponential times with median ln 2, because times are skewed.
    let mut rng = ChaCha8Rng::seed_from_u64(7);
    let (trials, truth) = (4000, (std::f64::consts::LN_2 * 1e6) as u64);
    for count in [6, 10, 30] {
        let covered = (0..trials)
            .filter(|_| {
                let mut values: Vec<u64> = (0..count)
                    .map(|_| (-(1.0 - rng.random::<f64>()).ln() * 1e6) as u64)
                    .collect();
                median_interval(&mut values)
                    .is_some_and(|(low, high)| (low..=high).contains(&truth))
            })
            .count();
        let share = covered as f64 / f64::from(trials);
        assert!(
            (0.94..0.995).contains(&share),
            "{share} of intervals over {count} values cover the median"
        );
    }
}

#[test]
fn a_summary_has_the_textbook_values() {
    let rounds = vec![vec![10, 12], vec![11, 11], vec![10, 90]];
    let summary = summarize(&rounds);
    let expected = EntrySummary {
        count: 6,
        median: 11,
        mad: 1,
        p99: None,
        min: 10,
        max: 90,
        low: 11,
        high: 50,
    };
    assert_eq!(summary, expected);
    assert_eq!(
        precision(&summary, rounds.len()),
        None,
        "three rounds are too few"
    );
    assert_eq!(summarize(&[]), EntrySummary::default());
    assert_eq!(summarize(&vec![vec![5]; 100]).p99, Some(5));
}

#[test]
fn equal_rounds_are_precise_even_at_zero() {
    let summary = summarize(&vec![vec![0]; 6]);
    assert_eq!(precision(&summary, 6), Some(0.0));
    let summary = summarize(&[
        vec![99],
        vec![99],
        vec![100],
        vec![100],
        vec![101],
        vec![101],
    ]);
    assert_eq!(precision(&summary, 6), Some(0.01));
}

proptest! {
    #[test]
    fn the_median_lies_in_its_interval(
        rounds in prop::collection::vec(prop::collection::vec(any::<u64>(), 0..9), 0..30)
    ) {
        let summary = summarize(&rounds);
        prop_assert!(summary.min <= summary.low && summary.low <= summary.median);
        prop_assert!(summary.median <= summary.high && summary.high <= summary.max);
    }
}
