use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

use super::*;
use crate::examples::bell;

/// Figures around these levels: normal with 2 %, and one in twenty off by up to a half.
fn noisy(levels: impl Iterator<Item = f64>, seed: u64) -> Vec<f64> {
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    let mut figure = |level: f64| {
        let far = if rng.random_bool(0.05) {
            1.0 + rng.random::<f64>() / 2.0
        } else {
            1.0
        };
        level * (0.02 * bell(&mut rng)).exp() * far
    };
    levels.map(&mut figure).collect()
}

#[test]
fn of_twenty_years_of_noise_with_bad_runs_at_most_one_has_change_points() {
    // The rest are adjacent bad runs, which look like a change.
    let with_points = (0..200)
        .filter(|&seed| !change_points(&noisy((0..365).map(|_| 1.0), seed), 0.05).is_empty())
        .count();
    assert!(with_points <= 10, "{with_points} of 200 years");
}

#[test]
fn a_change_of_a_tenth_is_found_where_it_was_and_so_is_the_way_back() {
    let level = |run: usize| if (100..160).contains(&run) { 1.1 } else { 1.0 };
    let mut found = 0;
    for seed in 0..100 {
        let points = change_points(&noisy((0..365).map(level), seed), 0.05);
        found += usize::from(
            points.len() == 2 && points[0].at.abs_diff(100) <= 2 && points[1].at.abs_diff(160) <= 2,
        );
    }
    assert!(found >= 90, "{found} of 100");
}

#[test]
fn a_change_smaller_than_asked_for_is_no_change_point() {
    let figures = noisy((0..365).map(|run| if run < 180 { 1.0 } else { 1.03 }), 1);
    assert_eq!(change_points(&figures, 0.05), []);
    assert_eq!(change_points(&figures, 0.01).len(), 1);
}

#[test]
fn too_few_runs_have_no_change_points() {
    for count in 0..2 * LEAST_RUNS {
        let figures: Vec<f64> = (0..count)
            .map(|run| if run < count / 2 { 1.0 } else { 2.0 })
            .collect();
        assert_eq!(change_points(&figures, 0.05), [], "{count} runs");
    }
}
