use proptest::prelude::*;

use super::*;
use crate::profile::Nanoseconds;

fn curve(sizes: u32, cost: impl Fn(f64) -> f64) -> Curve {
    (0..sizes)
        .map(|step| f64::from(1_u32 << step))
        .map(|size| (size, vec![cost(size); 3]))
        .collect()
}

proptest! {
    #[test]
    fn a_line_is_recovered(base in 0_u32..1_000_000, slope in 0_u32..100_000) {
        let (base, slope) = (f64::from(base), f64::from(slope));
        let curve = curve(12, |size| base + slope * size);
        prop_assert_eq!(line(&curve), Line { base, slope });
        let error = error_of(&curve, |size| base + slope * size);
        prop_assert_eq!(error, FitError { median: Share::of(0.0), worst: Share::of(0.0) });
    }

    /// One sample of three at each size, and all samples of two of twelve sizes, are arbitrary.
    #[test]
    fn disturbed_samples_do_not_move_the_line(
        disturbed in prop::collection::btree_set(0_usize..10, 2),
        noise in prop::collection::vec(0.0..1e9, 12),
    ) {
        let mut curve = curve(12, |size| 50_000.0 + 1_000.0 * size);
        for (index, ((_, samples), noise)) in curve.iter_mut().zip(noise).enumerate() {
            let count = if disturbed.contains(&index) { samples.len() } else { 1 };
            samples[..count].fill(noise);
        }
        let found = line(&curve);
        prop_assert!((found.slope - 1_000.0).abs() < 1.0, "{found:?}");
        prop_assert!((found.base - 50_000.0).abs() < 2_000.0, "{found:?}");
    }
}

#[test]
fn a_line_is_never_negative() {
    assert_eq!(line(&curve(5, |size| 100.0 - size)).slope, 0.0);
    assert_eq!(line(&curve(5, |size| size * size * 100.0)).base, 0.0);
    assert_eq!(
        line(&Vec::new()),
        Line {
            base: 0.0,
            slope: 0.0
        }
    );
}

#[test]
fn the_error_of_a_fit_is_relative_to_the_measurement() {
    let curve = vec![(1.0, vec![100.0]), (2.0, vec![200.0]), (3.0, vec![400.0])];
    let error = error_of(&curve, |size| 100.0 * size);
    assert_eq!(
        error,
        FitError {
            median: Share::of(0.0),
            worst: Share::of(0.25)
        }
    );
    let figure: MeasuredFigure<Nanoseconds> = constant(&[90.0, 100.0, 130.0]);
    assert_eq!(
        (figure.value, figure.samples, figure.spread),
        (100, 3, Spread::of(10.0))
    );
    assert_eq!(figure.fit_error.median, Share::of(1.0 / 9.0));
    assert_eq!(figure.fit_error.worst, Share::of(30.0 / 130.0));
}
