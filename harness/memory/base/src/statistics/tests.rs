use proptest::prelude::*;

use super::*;

#[test]
fn small_samples_have_the_textbook_values() {
    assert_eq!(median(&mut []), None);
    assert_eq!(median(&mut [7]), Some(7));
    assert_eq!(median(&mut [9, 1, 4]), Some(4));
    assert_eq!(median(&mut [10, 1, 4, 7]), Some(5));
    assert_eq!(median(&mut [u64::MAX, u64::MAX]), Some(u64::MAX));
    assert_eq!(
        median_absolute_deviation(&[1, 1, 2, 2, 4, 6, 9], 2),
        Some(1)
    );
    assert_eq!(nearest_rank(&mut [15, 20, 35, 40, 50], 30), Some(20));
    assert_eq!(nearest_rank(&mut [15, 20, 35, 40, 50], 100), Some(50));
    assert_eq!(nearest_rank(&mut [], 99), None);
}

#[test]
fn a_99th_percentile_is_told_from_100_samples_on() {
    assert_eq!(Summary::new(99, (1..=99).collect()).p99, None);
    let summary = Summary::new(100, (1..=100).collect());
    assert_eq!(
        (summary.p99, summary.max),
        (Some(Nanos(99)), Some(Nanos(100)))
    );
}

#[test]
fn a_ratio_to_nothing_does_not_exist() {
    assert_eq!(ratio(Nanos(3), Nanos::ZERO), None);
    assert_eq!(ratio(Nanos::ZERO, Nanos::ZERO), None);
    assert_eq!(ratio(Nanos(3), Nanos(2)), Some(1.5));
}

proptest! {
    #[test]
    fn the_median_lies_between_minimum_and_maximum(
        values in prop::collection::vec(any::<u64>(), 1..200)
    ) {
        let median = median(&mut values.clone()).expect("there are values");
        prop_assert!(values.iter().min() <= Some(&median) && Some(&median) <= values.iter().max());
    }

    #[test]
    fn the_order_of_samples_does_not_matter(
        (values, shuffled) in prop::collection::vec(any::<u64>(), 0..300)
            .prop_flat_map(|v| (Just(v.clone()), Just(v).prop_shuffle()))
    ) {
        prop_assert_eq!(Summary::new(5, values), Summary::new(5, shuffled));
    }

    #[test]
    fn the_deviation_of_equal_samples_is_zero(value in any::<u64>(), count in 2_usize..200) {
        let summary = Summary::new(count as u64, vec![value; count]);
        prop_assert_eq!(
            (summary.median, summary.mad, summary.max),
            (Some(Nanos(value)), Some(Nanos(0)), Some(Nanos(value)))
        );
    }

    #[test]
    fn at_least_99_of_100_samples_do_not_exceed_the_99th_percentile(
        values in prop::collection::vec(any::<u64>(), 1..500)
    ) {
        let p99 = nearest_rank(&mut values.clone(), 99).expect("there are values");
        let not_above = values.iter().filter(|&&value| value <= p99).count();
        let below = values.iter().filter(|&&value| value < p99).count();
        prop_assert!(
            values.contains(&p99)
                && not_above * 100 >= values.len() * 99
                && below * 100 < values.len() * 99
        );
    }

    #[test]
    fn at_least_half_of_the_samples_lie_within_one_deviation(
        values in prop::collection::vec(0_u64..1 << 40, 2..200)
    ) {
        let summary = Summary::new(0, values.clone());
        let (Some(Nanos(median)), Some(Nanos(mad))) = (summary.median, summary.mad) else {
            unreachable!("there are samples")
        };
        let within = values.iter().filter(|value| value.abs_diff(median) <= mad).count();
        prop_assert!(within * 2 >= values.len());
    }
}
