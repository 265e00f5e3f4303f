//! The accounts over time for a picture, in bounded memory.

use harness_record::CurvePoint;

/// Points are thinned when there are this many.
const MOST: usize = 4096;
/// Of each stretch of this many points up to five stay: where it begins, where it ends, and its extremes.
const STRETCH: usize = 16;

/// Collects points and thins them, keeping the extremes of each stretch, so that no peak is lost.
#[derive(Clone, Debug, Default)]
pub(super) struct Curve {
    points: Vec<CurvePoint>,
}

impl Curve {
    /// Adds a point, unless nothing has changed since the last one.
    pub(super) fn push(&mut self, point: CurvePoint) {
        if self.points.last() == Some(&point) {
            return;
        }
        self.points.push(point);
        if self.points.len() >= MOST {
            self.points = self.points.chunks(STRETCH).flat_map(extremes).collect();
        }
    }

    pub(super) fn into_points(self) -> Vec<CurvePoint> {
        self.points
    }
}

/// The points of a stretch that a picture needs, in order.
fn extremes(stretch: &[CurvePoint]) -> Vec<CurvePoint> {
    let position = |key: fn(&CurvePoint) -> u64| (0..stretch.len()).max_by_key(|&index| key(&stretch[index])).unwrap_or_default();
    let mut kept = [
        0,
        stretch.len() - 1,
        position(|point| point.allocated.0),
        position(|point| u64::MAX - point.allocated.0),
        position(|point| point.reserved.0.max(point.used.0)),
    ];
    kept.sort_unstable();
    let mut points: Vec<CurvePoint> = kept.into_iter().map(|index| stretch[index]).collect();
    points.dedup();
    points
}

#[cfg(test)]
mod tests {
    use harness_allocator::units::Bytes;

    use super::*;

    #[test]
    fn thinning_keeps_the_bound_the_order_and_the_highest_point() {
        let mut curve = Curve::default();
        for n in 0..100_000_u64 {
            let allocated = Bytes(if n == 77_777 { 1_000_000 } else { n % 1000 });
            curve.push(CurvePoint { step: n as u32, allocated, reserved: Bytes(5), used: Bytes(5), ooms: 0, retries: 0 });
        }
        let points = curve.into_points();
        assert!(points.len() < MOST);
        assert!(points.is_sorted_by_key(|point| point.step));
        assert!(points.iter().any(|point| point.allocated == Bytes(1_000_000)));
    }
}
