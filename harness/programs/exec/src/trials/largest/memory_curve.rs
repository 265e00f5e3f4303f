//! [`MemoryCurve`]: the memory of a program against the value of a parameter, by category.

use std::collections::BTreeMap;

use harness_allocator::units::Bytes;
use harness_explain::causes;
use harness_trace::program::{ReplaySetup, Scaled};
use harness_trace::snapshot::Snapshot;
use serde::Serialize;

/// The most values of a curve.
const MOST_POINTS: u64 = 16;

/// The peaks of one command, from its smallest value to the largest that fits on a GPU.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct MemoryCurve {
    /// The GPU whose recorded runs predict the points.
    pub gpu: String,
    /// The values of the other parameters.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub others: BTreeMap<String, u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub lever: Option<String>,
    pub points: Vec<MemoryPoint>,
}

/// What replays predict for a value.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct MemoryPoint {
    pub value: u64,
    pub peak_reserved: u64,
    /// The parts of the peak of allocated memory.
    pub categories: Vec<CategoryPeak>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct CategoryPeak {
    pub category: String,
    pub bytes: u64,
    /// The part whose category is inferred.
    pub inferred: u64,
}

/// Chooses these values, and the first and the last one, at even distances.
pub(super) fn spread(values: &[u64]) -> Vec<u64> {
    let (Some(first), Some(last)) = (values.first(), values.last()) else {
        return Vec::new();
    };
    let place = |part: u64| {
        let way = u128::from(last - first) * u128::from(part) / u128::from(MOST_POINTS - 1);
        let wanted = first + way as u64;
        let at = values.partition_point(|value| *value < wanted);
        values.get(at).copied()
    };
    let mut chosen: Vec<u64> = (0..MOST_POINTS - 1).filter_map(place).collect();
    chosen.push(*last);
    chosen.dedup();
    chosen
}

/// Predicts the memory of a program. `recorded` has the snapshot of each recording, and `setup`
/// says how to replay.
pub(super) fn point(
    requests: &Scaled,
    recorded: &BTreeMap<u64, Snapshot>,
    value: u64,
    setup: &ReplaySetup,
) -> Option<MemoryPoint> {
    let snapshot = recorded.get(&requests.base(value)?)?;
    let mut program = requests.at(value)?;
    program.memory = Some(setup.memory);
    let replayed = program.prepare().ok()?.replay(setup).ok()?;
    let written = program.to_snapshot(snapshot, setup.placement).ok()?;
    let categories = causes::categories(&written, program.device).ok()?;
    let categories = categories
        .into_iter()
        .filter(|category| category.peak_bytes > Bytes::ZERO)
        .map(|category| CategoryPeak {
            category: category.category,
            bytes: category.peak_bytes.0,
            inferred: category.inferred_peak_bytes.0,
        });
    Some(MemoryPoint {
        value,
        peak_reserved: replayed.stats.reserved_bytes.all.peak,
        categories: categories.collect(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_curve_begins_with_the_first_value_and_ends_with_the_last() {
        let all: Vec<u64> = (3..=4000).collect();
        let chosen = spread(&all);
        assert_eq!((chosen[0], chosen[chosen.len() - 1]), (3, 4000));
        assert_eq!(chosen.len() as u64, MOST_POINTS);
        assert_eq!(spread(&[512, 1024, 2048]), [512, 1024, 2048]);
        assert_eq!(spread(&[7]), [7]);
        assert!(spread(&[]).is_empty());
        let most = [1, u64::MAX];
        assert_eq!(spread(&most), most);
    }
}
