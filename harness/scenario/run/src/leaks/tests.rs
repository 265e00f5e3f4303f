use proptest::prelude::*;

use super::*;

fn growth_of(held: impl IntoIterator<Item = u64>) -> Option<(i128, u64)> {
    let mut lows = Lows::new();
    held.into_iter().for_each(|held| lows.add(&[held]));
    lows.growth(1).map(|(growth, looks)| (growth[0], looks))
}

proptest! {
    #[test]
    fn a_steady_leak_is_measured_exactly_for_any_number_of_iterations(
        by in 0_u64..1 << 30, looks in 2_u64..5_000, base in 0_u64..1 << 40
    ) {
        let (growth, iterations) =
            growth_of((0..looks).map(|look| base + by * look)).expect("there are two looks");
        prop_assert_eq!(growth, i128::from(by) * i128::from(iterations));
        prop_assert!(iterations >= looks / 4, "{} of {} iterations", iterations, looks);
    }

    #[test]
    fn fluctuation_is_not_growth(
        held in prop::collection::vec(0_u64..1 << 40, 1..20), times in 4_usize..100
    ) {
        let all: Vec<u64> = held.iter().copied().cycle().take(held.len() * times).collect();
        // With long intervals, the last one may be incomplete and ignored. Each half still contains
        // each value.
        prop_assert_eq!(growth_of(all).map(|(growth, _)| growth), Some(0));
    }

    #[test]
    fn a_leak_is_found_under_fluctuation(
        by in 1_u64..1 << 20, held in prop::collection::vec(0_u64..1 << 30, 1..10),
        times in 4_u64..50
    ) {
        let period = held.len() as u64;
        let all = (0..period * times).map(|look| held[(look % period) as usize] + by * look);
        let (growth, _) = growth_of(all).expect("there are two looks");
        prop_assert!(growth > 0);
    }
}

#[test]
fn one_sample_is_not_enough() {
    assert_eq!(growth_of([]), None);
    assert_eq!(growth_of([7]), None);
    assert_eq!(growth_of([7, 9]), Some((2, 1)));
}

#[test]
fn a_site_that_appears_later_held_nothing_before() {
    let mut lows = Lows::new();
    lows.add(&[]);
    lows.add(&[5]);
    assert_eq!(lows.growth(1), Some((vec![5], 1)));
}
