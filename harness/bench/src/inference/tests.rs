use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

use super::*;

#[test]
fn medians_and_spreads_have_the_textbook_values() {
    assert_eq!(median(&mut []), None);
    assert_eq!(median(&mut [3.0, 1.0, 2.0]), Some(2.0));
    assert_eq!(median(&mut [4.0, 1.0, 2.0, 3.0]), Some(2.5));
    assert_eq!(spread_about_zero(&[-1.0, 1.0, 50.0]), Some(DEVIATIONS));
}

/// Tables of the signed-rank test, as in W. J. Conover, Practical Nonparametric Statistics, table
/// A12: the 0.005 quantiles.
#[test]
fn ranks_are_those_of_the_published_tables() {
    let expected = [
        (7, None),
        (8, Some(0)),
        (9, Some(1)),
        (10, Some(3)),
        (12, Some(7)),
        (15, Some(15)),
        (20, Some(37)),
        (30, Some(109)),
    ];
    for (count, rank) in expected {
        assert_eq!(outside(count), rank, "{count} values");
    }
    let (exact, normal) = (outside(MANY - 1), outside(MANY));
    assert!(
        exact.zip(normal).is_some_and(|(a, b)| a < b && b < a + 25),
        "{exact:?} {normal:?}"
    );
}

#[test]
fn an_interval_covers_the_centre_as_often_as_it_says() {
    let mut rng = ChaCha8Rng::seed_from_u64(2);
    for count in [10, 20, 60] {
        let covered = (0..2000).filter(|_| {
            let mut value =
                || 0.3 + if rng.random() { 1.0 } else { -1.0 } * (1.0 - rng.random::<f64>()).ln();
            let values: Vec<f64> = (0..count).map(|_| value()).collect();
            centre(&values).is_some_and(|centre| (centre.low..=centre.high).contains(&0.3))
        });
        let share = covered.count() as f64 / 2000.0;
        assert!((0.983..=0.998).contains(&share), "{count}: {share}");
    }
}

#[test]
fn values_that_are_far_out_hardly_move_it() {
    let mut values = vec![0.0; 60];
    values.extend([5.0, 9.0]);
    assert_eq!(
        centre(&values),
        Some(Estimate {
            low: 0.0,
            middle: 0.0,
            high: 0.0
        })
    );
}
