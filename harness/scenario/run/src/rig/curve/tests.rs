use harness_allocator::units::Bytes;

use super::*;

const POINT: CurvePoint = CurvePoint {
    at: 0,
    step: 1,
    allocated: Bytes(1),
    active: Bytes(1),
    reserved: Bytes(5),
    used: Bytes(5),
    ooms: 0,
    retries: 0,
};

/// Builds a curve from pairs of allocated bytes and OOMs so far.
fn curve(points: u64, of: impl Fn(u64) -> (u64, u64)) -> Vec<CurvePoint> {
    let mut curve = Curve::default();
    for n in 0..points {
        let (allocated, ooms) = of(n);
        // The step makes each point differ from the one before.
        let point = CurvePoint {
            ooms,
            allocated: Bytes(allocated),
            active: Bytes(allocated),
            step: n as u32,
            ..POINT
        };
        curve.push(point);
    }
    let kept = curve.into_points();
    assert!(kept.len() <= 6 * BUCKETS, "{} points", kept.len());
    assert!(kept.is_sorted_by(|a, b| a.at < b.at));
    assert_eq!(
        (
            kept.first().map(|point| point.at),
            kept.last().map(|point| point.at)
        ),
        (Some(0), Some(points - 1))
    );
    kept
}

const LONG: u64 = 1_000_003;

#[test]
fn a_short_run_is_kept_whole() {
    assert_eq!(curve(BUCKETS as u64, |n| (n % 7, 0)).len(), BUCKETS);
}

#[test]
fn unchanged_points_take_no_room() {
    let mut curve = Curve::default();
    let point = POINT;
    (0..100).for_each(|_| curve.push(point));
    assert_eq!(curve.into_points(), [point]);
}

#[test]
fn a_ramp_stays_a_ramp_from_its_beginning_to_its_end() {
    let kept = curve(LONG, |n| (n, 0));
    assert!(
        kept.iter().all(|point| point.allocated.0 == point.at),
        "each point was pushed"
    );
    let widest = kept.windows(2).map(|pair| pair[1].at - pair[0].at).max();
    assert!(
        widest <= Some(2 * LONG / BUCKETS as u64),
        "{widest:?} consecutive points are missing"
    );
}

#[test]
fn every_part_of_a_comb_shows_its_extremes() {
    let kept = curve(LONG, |n| (if n % 16 == 0 { 1_000 } else { 1 }, 0));
    for part in kept.chunks(kept.len() / 64) {
        let (low, high) = (
            part.iter().map(|point| point.allocated.0).min(),
            part.iter().map(|point| point.allocated.0).max(),
        );
        assert_eq!(
            (low, high),
            (Some(1), Some(1_000)),
            "from point {}",
            part[0].at
        );
    }
}

#[test]
fn a_single_peak_in_a_long_run_is_kept() {
    let kept = curve(LONG, |n| {
        (if n == 77_777 { 1_000_000 } else { n % 1_000 }, 0)
    });
    assert!(
        kept.iter()
            .any(|point| point.allocated == Bytes(1_000_000) && point.at == 77_777)
    );
}

#[test]
fn evenly_spread_ooms_stay_evenly_spread() {
    let every = 200;
    let kept = curve(LONG, |n| (n % 3, n / every));
    for eighth in 0..8 {
        let (from, to) = (LONG * eighth / 8, LONG * (eighth + 1) / 8);
        let inside: Vec<_> = kept
            .iter()
            .filter(|point| (from..to).contains(&point.at))
            .collect();
        let seen = inside.last().map_or(0, |point| point.ooms)
            - inside.first().map_or(0, |point| point.ooms);
        let (expected, slack) = (LONG / 8 / every, 2 * (LONG / BUCKETS as u64) / every + 2);
        assert!(
            seen.abs_diff(expected) <= slack,
            "{seen} of {expected} OOMs in eighth {eighth}"
        );
    }
}
