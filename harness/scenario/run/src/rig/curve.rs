//! The history of the accounts for a chart: exact over the whole run, in bounded memory.
//!
//! Points are collected in buckets. Each bucket keeps its first point, its last point and its
//! extremes. So no peak is lost, and the counters at the bucket's ends are exact. If there are too
//! many buckets, neighbors are merged in pairs, and each new bucket takes twice as many points. So
//! all buckets cover the same number of points: a longer run gets a coarser chart, evenly over its
//! length.

use harness_record::CurvePoint;

/// With more buckets than this, neighbors are merged.
const BUCKETS: usize = 1024;

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
        Self {
            first: point,
            last: point,
            lowest: point,
            highest: point,
            most_active: point,
            most_held: point,
        }
    }

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

    fn points(&self) -> Vec<CurvePoint> {
        let mut points = vec![
            self.first,
            self.lowest,
            self.highest,
            self.most_active,
            self.most_held,
            self.last,
        ];
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
        Self {
            buckets: Vec::new(),
            width: 1,
            filled: 0,
            pushed: 0,
        }
    }
}

impl Curve {
    pub(super) fn push(&mut self, point: CurvePoint) {
        let point = CurvePoint {
            at: self.pushed,
            ..point
        };
        if self.buckets.last().is_some_and(|bucket| {
            CurvePoint {
                at: point.at,
                ..bucket.last
            } == point
        }) {
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
mod tests;
