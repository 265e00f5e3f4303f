//! Delta debugging for traces and scenarios (A. Zeller, R. Hildebrandt: Simplifying and Isolating
//! Failure-Inducing Input, IEEE Transactions on Software Engineering 28, 2002). Parts are removed
//! while the failure persists, and sizes become smaller and rounder. The callers define the parts
//! and the failure.

use std::ops::{ControlFlow, Range};

use harness_allocator::{allocator::caching::Config, units::Bytes};

pub(crate) type Flow<T = ()> = ControlFlow<(), T>;

/// Sizes are rounded up to a multiple of the largest of these that preserves the failure.
const ROUND: [Bytes; 8] = [
    Bytes::gib(1),
    Bytes::mib(256),
    Bytes::mib(64),
    Bytes::mib(16),
    Bytes::mib(4),
    Bytes::mib(2),
    Bytes::mib(1),
    Bytes::kib(64),
];

/// Each function resets one setting to PyTorch's default, and the settings that depend on it.
pub(crate) const SETTINGS: [fn(&mut Config); 6] = [
    |config| {
        (config.max_split_size, config.max_non_split_rounding) = (None, config.large_segment_size);
    },
    |config| config.roundup_power2_divisions = [0; 16],
    |config| config.garbage_collection_threshold = None,
    |config| config.memory_fraction = Config::default().memory_fraction,
    |config| config.expandable_segments = false,
    |config| {
        if config.max_split_size.is_none() {
            let Config {
                large_segment_size,
                max_non_split_rounding,
                ..
            } = Config::default();
            (config.large_segment_size, config.max_non_split_rounding) =
                (large_segment_size, max_non_split_rounding);
        }
    },
];

/// Removes as many parts as possible: large ranges first, then smaller ones, down to single parts.
///
/// `without` tries to remove a range. If the failure persists, it returns the new number of parts.
pub(crate) fn leave_out(
    mut count: usize,
    without: &mut dyn FnMut(Range<usize>) -> Flow<Option<usize>>,
) -> Flow {
    let mut size = count.div_ceil(2);
    while size > 0 {
        let mut end = count;
        // Starts from the end: the last parts are closest to the failure, and later parts may
        // depend on the first ones.
        while end > 0 {
            let start = end.saturating_sub(size);
            count = without(start..end)?.unwrap_or(count);
            end = start.min(count);
        }
        size /= 2;
    }
    Flow::Continue(())
}

/// Finds the least failing number above `low` by bisection. `high` fails. `fails` stores each
/// failing candidate.
pub(crate) fn least(
    mut low: u64,
    mut high: u64,
    fails: &mut dyn FnMut(u64) -> Flow<bool>,
) -> Flow<u64> {
    while low + 1 < high {
        let middle = low.midpoint(high);
        if fails(middle)? {
            high = middle;
        } else {
            low = middle;
        }
    }
    Flow::Continue(high)
}

/// Makes a size smaller, then rounder, which may enlarge it. `take` tries a size and returns
/// whether the failure persists.
pub(crate) fn simpler_size(mut size: Bytes, take: &mut dyn FnMut(Bytes) -> Flow<bool>) -> Flow {
    while size > Bytes::mib(1) && take(Bytes(size.0 / 2))? {
        size = Bytes(size.0 / 2);
    }
    for unit in ROUND {
        let Some(round) = size.checked_round_up(unit) else {
            continue;
        };
        if round == size {
            break;
        }
        let is_near = round.0 <= size.0.saturating_mul(2) || round <= Bytes::mib(2);
        if is_near && take(round)? {
            break;
        }
    }
    Flow::Continue(())
}

#[cfg(test)]
mod tests;
