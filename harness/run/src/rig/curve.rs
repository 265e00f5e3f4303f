//! The history of the accounts for a chart: exact over the whole run, in bounded memory.
//! || Points are collected in buckets. Each bucket keeps its first point, its last point and its extremes. So no peak
//! is lost, and the counters at the bucket's ends are exact. If there are too many buckets, neighbors are merged in
//! pairs, and each new bucket takes twice as many points. So all buckets cover the same number of points: a longer run
//! gets a coarser chart, evenly over its length.

use harness_record::CurvePoint;

/// With more buckets than this, neighbors are merged.
const BUCKETS: usize = 1024;

/// The relevant points of a range.
#[derive(Clone, Copy, Debug)]
struct Bucket {
    first: CurvePoint,
    last: CurvePoint,
    /// The first points with the lowest and the highest allocated memory.
    lowest: CurvePoint,
    highest: CurvePoint,
    /// The first point with the most active memory.
    most_active: CurvePoint,
    /// The first point with the most reserved or used memory.
    most_held: CurvePoint,
}

impl Bucket {
    const fn of(point: CurvePoint) -> Self {
        Self { first: point, last: point, lowest: point, highest: point, most_active: point, most_held: point }
    }

    /// Merges the next bucket into this one.
    fn append(&mut self, next: &Self) {
        let held = |point: &CurvePoint| point.reserved.max(point.used);
        self.last = next.last;
        if next.lowest.allocated < self.lowest.allocated {
            self.lowest = next.lowest;
        }
        if next.highest.allocated > self.highest.allocated {
            self.highest = next.highest;
        }
        if next.most_active.active > self.most_active.active {
            self.most_active = next.most_active;
        }
        if held(&next.most_held) > held(&self.most_held) {
            self.most_held = next.most_held;
        }
    }

    /// Its points in time order.
    fn points(&self) -> Vec<CurvePoint> {
        let mut points = vec![self.first, self.lowest, self.highest, self.most_active, self.most_held, self.last];
        points.sort_by_key(|point| point.at);
        points.dedup();
        points
    }
}

#[derive(Clone, Debug)]
pub(super) struct Curve {
    /// All full, except possibly the last one.
    buckets: Vec<Bucket>,
    /// The number of points in a full bucket.
    width: u64,
    /// The number of points in the last bucket.
    filled: u64,
    /// The number of points so far, including merged ones.
    pushed: u64,
}

impl Default for Curve {
    fn default() -> Self {
        Self { buckets: Vec::new(), width: 1, filled: 0, pushed: 0 }
    }
}

impl Curve {
    /// Adds and numbers a point, unless nothing has changed since the last one.
    pub(super) fn push(&mut self, point: CurvePoint) {
        let point = CurvePoint { at: self.pushed, ..point };
        if self.buckets.last().is_some_and(|bucket| CurvePoint { at: point.at, ..bucket.last } == point) {
            return;
        }
        self.pushed += 1;
        match self.buckets.last_mut() {
            Some(bucket) if self.filled < self.width => {
                bucket.append(&Bucket::of(point));
                self.filled += 1;
            }
            _ => {
                if self.buckets.len() == BUCKETS {
                    self.halve();
                }
                self.buckets.push(Bucket::of(point));
                self.filled = 1;
            }
        }
    }

    /// Merges neighbors in pairs. All buckets are full, and their number is even.
    fn halve(&mut self) {
        let merged = |pair: &[Bucket]| {
            let mut bucket = pair[0];
            pair[1..].iter().for_each(|next| bucket.append(next));
            bucket
        };
        self.buckets = self.buckets.chunks(2).map(merged).collect();
        self.width *= 2;
    }

    /// At most six points per bucket, in time order.
    pub(super) fn into_points(self) -> Vec<CurvePoint> {
        self.buckets.iter().flat_map(Bucket::points).collect()
    }
}

#[cfg(test)]
mod tests {
    use harness_allocator::units::Bytes;

    use super::*;

    const POINT: CurvePoint =
        CurvePoint { at: 0, step: 1, allocated: Bytes(1), active: Some(Bytes(1)), reserved: Bytes(5), used: Bytes(5), ooms: 0, retries: 0 };

    /// Builds a curve from pairs of allocated bytes and OOMs so far.
    fn curve(points: u64, of: impl Fn(u64) -> (u64, u64)) -> Vec<CurvePoint> {
        let mut curve = Curve::default();
        for n in 0..points {
            let (allocated, ooms) = of(n);
            // The step makes each point differ from the one before.
            let point = CurvePoint { ooms, allocated: Bytes(allocated), active: Some(Bytes(allocated)), step: n as u32, ..POINT };
            curve.push(point);
        }
        let kept = curve.into_points();
        assert!(kept.len() <= 6 * BUCKETS, "{} points", kept.len());
        assert!(kept.is_sorted_by(|a, b| a.at < b.at));
        assert_eq!((kept.first().map(|point| point.at), kept.last().map(|point| point.at)), (Some(0), Some(points - 1)));
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
        assert!(kept.iter().all(|point| point.allocated.0 == point.at), "each point was pushed");
        let widest = kept.windows(2).map(|pair| pair[1].at - pair[0].at).max();
        assert!(widest <= Some(2 * LONG / BUCKETS as u64), "{widest:?} consecutive points are missing");
    }

    #[test]
    fn every_part_of_a_comb_shows_its_extremes() {
        let kept = curve(LONG, |n| (if n % 16 == 0 { 1_000 } else { 1 }, 0));
        for part in kept.chunks(kept.len() / 64) {
            let (low, high) = (part.iter().map(|point| point.allocated.0).min(), part.iter().map(|point| point.allocated.0).max());
            assert_eq!((low, high), (Some(1), Some(1_000)), "from point {}", part[0].at);
        }
    }

    #[test]
    fn a_single_peak_in_a_long_run_is_kept() {
        let kept = curve(LONG, |n| (if n == 77_777 { 1_000_000 } else { n % 1_000 }, 0));
        assert!(kept.iter().any(|point| point.allocated == Bytes(1_000_000) && point.at == 77_777));
    }

    #[test]
    fn evenly_spread_ooms_stay_evenly_spread() {
        let every = 200;
        let kept = curve(LONG, |n| (n % 3, n / every));
        for eighth in 0..8 {
            let (from, to) = (LONG * eighth / 8, LONG * (eighth + 1) / 8);
            let inside: Vec<_> = kept.iter().filter(|point| (from..to).contains(&point.at)).collect();
            let seen = inside.last().map_or(0, |point| point.ooms) - inside.first().map_or(0, |point| point.ooms);
            let (expected, slack) = (LONG / 8 / every, 2 * (LONG / BUCKETS as u64) / every + 2);
            assert!(seen.abs_diff(expected) <= slack, "{seen} of {expected} OOMs in eighth {eighth}");
        }
    }
}
