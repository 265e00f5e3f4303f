//! [`Scaled`]: the requests of a program as a function of one of its parameters, such as the batch
//! size, from recordings with a few values.

use harness_allocator::stats::PoolKind;
use harness_allocator::units::Bytes;

use super::RecordedProgram;
use crate::trace::TraceEvent;

/// Recordings of one program with different values.
#[derive(Clone, Debug, Default)]
pub struct Scaled {
    /// In the order of the values, which differ.
    recordings: Vec<(u64, RecordedProgram)>,
}

impl Scaled {
    /// Adds a recording. A second one with the same value changes nothing.
    pub fn add(&mut self, value: u64, recording: RecordedProgram) {
        if let Err(place) = self.recordings.binary_search_by_key(&value, |(at, _)| *at) {
            self.recordings.insert(place, (value, recording));
        }
    }

    pub const fn is_empty(&self) -> bool {
        self.recordings.is_empty()
    }

    pub const fn len(&self) -> usize {
        self.recordings.len()
    }

    /// Returns the smallest value of a recording.
    pub fn smallest(&self) -> Option<u64> {
        self.recordings.first().map(|(value, _)| *value)
    }

    /// Returns the recordings of another GPU, whose small sizes and workspaces differ as in this
    /// recording of that GPU. `workspaces` are all their sizes. Returns `None` if other sizes
    /// differ: one recording does not show how they depend on the value. Small requests share
    /// segments with each other only, so an error of their sizes hardly changes the peak.
    pub fn shifted(
        &self,
        value: u64,
        recording: &RecordedProgram,
        workspaces: &[Bytes],
    ) -> Option<Self> {
        let own = self.at(value).filter(|own| has_shape_of(own, recording))?;
        let mut shifted = Self::default();
        shifted.add(value, recording.clone());
        let alike = self
            .recordings
            .iter()
            .filter(|(_, other)| has_shape_of(other, recording));
        for (at, other) in alike {
            let mut other = other.clone();
            let moved = |size: Bytes, from: Bytes, to: Bytes| {
                let are_small = from.max(to) <= PoolKind::LARGEST_SMALL;
                let is_workspace =
                    size == from && [from, to].iter().all(|size| workspaces.contains(size));
                let is_known = from == to || are_small || is_workspace;
                is_known.then(|| (size + to).saturating_sub(from))
            };
            for (index, operation) in other.operations.iter_mut().enumerate() {
                if let TraceEvent::Allocate { size, .. } = operation {
                    let [from, to] = [&own, recording].map(|of| size_of(&of.operations[index]));
                    *size = moved(*size, from, to)?;
                }
            }
            for (index, allocation) in other.allocations.iter_mut().enumerate() {
                let [from, to] = [&own, recording].map(|of| of.allocations[index].requested);
                allocation.requested = moved(allocation.requested, from, to)?;
            }
            shifted.add(*at, other);
        }
        Some(shifted)
    }

    /// Returns whether the program with this value makes these requests.
    pub fn explains(&self, value: u64, recording: &RecordedProgram) -> bool {
        self.at(value)
            .is_some_and(|own| has_shape_of(&own, recording) && sizes(&own).eq(sizes(recording)))
    }

    /// Returns whether the function that explains this value explains all recordings.
    pub fn is_regular(&self, value: u64) -> bool {
        let near = self.near(value).unwrap_or_default();
        let near = Self {
            recordings: near.into_iter().cloned().collect(),
        };
        let explained = |(at, recording): &(u64, RecordedProgram)| near.explains(*at, recording);
        self.recordings.iter().all(explained)
    }

    /// Returns whether the parameter has no effect: all recordings are equal, and there are
    /// several.
    pub fn is_constant(&self) -> bool {
        let sizes = |recording: &RecordedProgram| sizes(recording).collect::<Vec<_>>();
        self.recordings.len() > 1
            && self
                .recordings
                .windows(2)
                .all(|pair| sizes(&pair[0].1) == sizes(&pair[1].1))
    }

    /// Returns the program with this value. Each size is a polynomial through the nearest
    /// recordings with the same requests: a line if that explains them, otherwise a parabola, as
    /// for attention scores. Of two recordings, a size that grows with the square of the value is
    /// such a parabola. Returns `None` if no two recordings have the same requests, except for
    /// their sizes.
    pub fn at(&self, value: u64) -> Option<RecordedProgram> {
        self.at_with(value, |constant| constant)
    }

    /// As [`Scaled::at`], with other sizes in place of those that all these recordings share.
    pub fn at_with(
        &self,
        value: u64,
        replaced: impl Fn(Bytes) -> Bytes,
    ) -> Option<RecordedProgram> {
        let near = self.near(value)?;
        let mut program = near[0].1.clone();
        let scaled = |of: &dyn Fn(&RecordedProgram) -> Bytes| {
            let points: Vec<(u64, u64)> = near
                .iter()
                .map(|(at, recording)| (*at, of(recording).0))
                .collect();
            let (_, first) = points[0];
            match points.iter().all(|(_, size)| *size == first) {
                true => replaced(Bytes(first)),
                false => Bytes(interpolated(&points, value)),
            }
        };
        for (index, operation) in program.operations.iter_mut().enumerate() {
            if let TraceEvent::Allocate { size, .. } = operation {
                *size = scaled(&|recording| size_of(&recording.operations[index]));
            }
        }
        for (index, allocation) in program.allocations.iter_mut().enumerate() {
            allocation.requested = scaled(&|recording| recording.allocations[index].requested);
        }
        // The recorded addresses are those of other sizes.
        program.driver.clear();
        program.reservations.clear();
        Some(program)
    }

    /// Returns the value of the recording whose stacks [`Scaled::at`] has.
    pub fn base(&self, value: u64) -> Option<u64> {
        self.near(value).map(|near| near[0].0)
    }

    /// Returns the nearest recordings with the same requests: two or three.
    fn near(&self, value: u64) -> Option<Vec<&(u64, RecordedProgram)>> {
        let mut near: Vec<&(u64, RecordedProgram)> = self.recordings.iter().collect();
        near.sort_by_key(|(at, _)| at.abs_diff(value));
        // Some requests begin at a certain value, as the workspace of a large reduction.
        let alike = |one: &(u64, RecordedProgram)| {
            let alike = near.iter().filter(|other| has_shape_of(&one.1, &other.1));
            alike.take(3).copied().collect::<Vec<_>>()
        };
        near.iter()
            .map(|one| alike(one))
            .find(|alike| alike.len() > 1)
    }
}

const fn size_of(operation: &TraceEvent) -> Bytes {
    match operation {
        TraceEvent::Allocate { size, .. } => *size,
        _ => Bytes::ZERO,
    }
}

fn sizes(recording: &RecordedProgram) -> impl Iterator<Item = Bytes> {
    recording.operations.iter().map(size_of)
}

fn has_shape_of(one: &RecordedProgram, other: &RecordedProgram) -> bool {
    let shape = |program: &RecordedProgram| {
        let operations = program.operations.iter().map(|operation| match *operation {
            TraceEvent::Allocate { id, stream, .. } => TraceEvent::Allocate {
                id,
                size: Bytes::ZERO,
                stream,
            },
            other => other,
        });
        operations.collect::<Vec<_>>()
    };
    one.start.is_empty()
        && other.start.is_empty()
        && one.streams.len() == other.streams.len()
        && one.pools.len() == other.pools.len()
        && one.config == other.config
        && shape(one) == shape(other)
}

/// Returns the value at `at` of the line through the first two points if it meets a third,
/// otherwise of the parabola through the three, or of the parabola through the origin that two
/// points have. A result below zero is zero.
fn interpolated(points: &[(u64, u64)], at: u64) -> u64 {
    let wide = |(x, y): (u64, u64)| (i128::from(x), i128::from(y));
    let line = |x: i128| {
        let [(x0, y0), (x1, y1)] = [points[0], points[1]].map(wide);
        y0 + ((y1 - y0) * (x - x0)).div_euclid(x1 - x0)
    };
    let at = i128::from(at);
    let is_square = || {
        let [(x0, y0), (x1, y1)] = [points[0], points[1]].map(wide);
        let scaled = |y: i128, x: i128| y.checked_mul(x)?.checked_mul(x);
        x0 * x1 != 0 && y0 != y1 && scaled(y0, x1).is_some_and(|y| Some(y) == scaled(y1, x0))
    };
    let value = match points.get(2).map(|point| wide(*point)) {
        None if is_square() => {
            let (x, y) = wide(points[0]);
            let scaled = y.checked_mul(at).and_then(|y| y.checked_mul(at));
            scaled.map_or_else(|| line(at), |y| y / (x * x))
        }
        Some((x2, y2)) if line(x2) != y2 => {
            let [(x0, y0), (x1, y1)] = [points[0], points[1]].map(wide);
            let terms = [
                (y0, (at - x1) * (at - x2), (x0 - x1) * (x0 - x2)),
                (y1, (at - x0) * (at - x2), (x1 - x0) * (x1 - x2)),
                (y2, (at - x0) * (at - x1), (x2 - x0) * (x2 - x1)),
            ];
            let common = terms.iter().try_fold(1_i128, |product, (.., divisor)| {
                product.checked_mul(*divisor)
            });
            let sum = common.and_then(|common| {
                let term = |(y, factor, divisor): &(i128, i128, i128)| {
                    y.checked_mul(*factor)?.checked_mul(common / divisor)
                };
                let sum = terms
                    .iter()
                    .map(term)
                    .try_fold(0_i128, |sum, term| sum.checked_add(term?));
                sum.map(|sum| sum.div_euclid(common))
            });
            sum.unwrap_or_else(|| line(at))
        }
        _ => line(at),
    };
    u64::try_from(value.max(0)).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::program::RecordedAllocation;
    use harness_allocator::device::StreamId;

    fn program(sizes: &[u64]) -> RecordedProgram {
        let allocation = |size: &u64| RecordedAllocation {
            address: None,
            refused: false,
            requested: Bytes(*size),
            stream: StreamId(0),
            stack: Default::default(),
        };
        let allocate = |(id, size): (usize, &u64)| TraceEvent::Allocate {
            id: id as u64,
            size: Bytes(*size),
            stream: StreamId(0),
        };
        RecordedProgram {
            operations: sizes.iter().enumerate().map(allocate).collect(),
            allocations: sizes.iter().map(allocation).collect(),
            ..RecordedProgram::default()
        }
    }

    /// Weights, activations and attention scores.
    fn of(value: u64) -> RecordedProgram {
        program(&[4096, 1000 + 12 * value, 16 * value * value + 3])
    }

    fn scaled(values: &[u64], program: impl Fn(u64) -> RecordedProgram) -> Scaled {
        let mut scaled = Scaled::default();
        for value in values {
            scaled.add(*value, program(*value));
        }
        scaled
    }

    #[test]
    fn three_recordings_give_constant_linear_and_quadratic_sizes() {
        for known in [[1, 2, 7], [64, 8, 512]] {
            for value in [1, 3, 100, 4096] {
                assert_eq!(scaled(&known, of).at(value), Some(of(value)), "{known:?}");
            }
        }
    }

    #[test]
    fn two_recordings_give_linear_sizes_and_one_gives_none() {
        let linear = |value: u64| program(&[4096, 7 * value]);
        assert_eq!(scaled(&[3], linear).at(5), None);
        let two = scaled(&[3, 6], linear);
        assert_eq!(two.at(50), Some(linear(50)));
        assert!(!two.is_constant() && scaled(&[3, 6], |_| linear(1)).is_constant());
    }

    #[test]
    fn two_recordings_give_sizes_that_grow_with_the_square() {
        let square = |value: u64| program(&[4096, 7 * value, 16 * value * value]);
        assert_eq!(scaled(&[1, 8], square).at(300), Some(square(300)));
        assert_eq!(
            scaled(&[0, 8], |value| program(&[value])).at(4),
            Some(program(&[4]))
        );
    }

    #[test]
    fn recordings_with_other_requests_explain_the_values_near_them() {
        let stepped = |value: u64| match value {
            ..100 => program(&[4096, 7 * value]),
            _ => program(&[4096, 1024, 7 * value]),
        };
        let few = scaled(&[1, 2, 200], stepped);
        assert_eq!(few.at(300), Some(program(&[4096, 2100])));
        // That of 200 has other requests.
        assert_eq!((few.base(300), few.base(1)), (Some(2), Some(1)));
        let known = scaled(&[1, 2, 200, 201], stepped);
        assert_eq!(known.at(300), Some(stepped(300)));
        assert_eq!(known.at(50), Some(stepped(50)));
    }

    #[test]
    fn a_size_that_all_recordings_share_can_be_replaced() {
        // With the value 2, the second request has the size of the first one.
        let of = |first: u64| move |value: u64| program(&[first, 8 * value]);
        let doubled = |size: Bytes| Bytes(size.0 * 2);
        let scaled = scaled(&[1, 2, 9], of(16));
        assert_eq!(scaled.at_with(2, doubled), Some(of(32)(2)));
    }

    #[test]
    fn one_recording_of_another_gpu_shows_its_workspace() {
        let with_workspace =
            |workspace: u64| move |value: u64| program(&[workspace, 7 * value, value * value]);
        let one = scaled(&[1, 2, 9], with_workspace(32 << 20));
        let recording = with_workspace(8 << 20)(40);
        let sizes = [Bytes::mib(8), Bytes::mib(32)];
        let other = one.shifted(40, &recording, &sizes).expect("a workspace");
        assert_eq!(other.at(300), Some(with_workspace(8 << 20)(300)));
        assert!(one.shifted(40, &program(&[1]), &sizes).is_none());
        let small = |more: u64| move |value: u64| program(&[more + 12 * value, value << 20]);
        let another = scaled(&[1, 9], small(0)).shifted(40, &small(512)(40), &sizes);
        assert_eq!(
            another.expect("a small size").at(300),
            Some(small(512)(300))
        );
        let unknown = with_workspace(9 << 20)(40);
        assert!(one.shifted(40, &unknown, &sizes).is_none());
        assert!(one.explains(40, &with_workspace(32 << 20)(40)));
        assert!(!one.explains(40, &recording) && !one.explains(40, &program(&[1])));
    }

    #[test]
    fn one_recording_does_not_show_how_another_slope_depends_on_the_value() {
        let with_slope = |slope: u64| move |value: u64| program(&[100, (slope * value) << 20]);
        let one = scaled(&[1, 8, 50], with_slope(9));
        assert!(one.shifted(40, &with_slope(8)(40), &[]).is_none());
        let same = one
            .shifted(40, &with_slope(9)(40), &[])
            .expect("nothing differs");
        assert_eq!(same.at(300), Some(with_slope(9)(300)));
    }

    #[test]
    fn large_values_without_an_exact_parabola_follow_a_line() {
        let rounded = |value: u64| program(&[value / 3 * 4 + 100]);
        let known = scaled(&[1 << 22, 1 << 25, 1 << 29], rounded);
        for value in [1 << 22, 1 << 28, 1 << 29, 1 << 30] {
            let size = size_of(&known.at(value).expect("it is known").operations[0]).0;
            assert!(
                size.abs_diff(value / 3 * 4) <= 108 + (value >> 10),
                "{value}: {size}"
            );
        }
    }

    #[test]
    fn sizes_that_would_be_negative_are_zero() {
        let falling = scaled(&[1, 2], |value| program(&[100 - 50 * value]));
        assert_eq!(falling.at(10), Some(program(&[0])));
    }
}
