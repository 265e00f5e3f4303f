//! What reducing a trace and reducing a scenario have in common: delta debugging (A. Zeller, R. Hildebrandt: Simplifying and Isolating
//! Failure-Inducing Input, IEEE Transactions on Software Engineering 28, 2002). Parts are left out, and stay out where the rest still fails; sizes
//! become smaller and rounder in the same manner. What a part is and whether the rest still fails, the callers say.

use std::ops::{ControlFlow, Range};

use harness_allocator::units::Bytes;

/// Goes on with a value, or breaks off because there is no more time.
pub(crate) type Flow<T = ()> = ControlFlow<(), T>;

/// Sizes are rounded up to a multiple of the largest of these that leaves the failure as it is.
const ROUND: [Bytes; 8] =
    [Bytes::gib(1), Bytes::mib(256), Bytes::mib(64), Bytes::mib(16), Bytes::mib(4), Bytes::mib(2), Bytes::mib(1), Bytes::kib(64)];

/// Leaves out what can be left out of so many parts: first in large pieces, then in smaller ones, down to single parts.
///
/// `without` tries to leave out the parts of a range. Where the rest still fails it tells how many parts there are now.
pub(crate) fn leave_out(mut count: usize, without: &mut dyn FnMut(Range<usize>) -> Flow<Option<usize>>) -> Flow {
    let mut size = count.div_ceil(2);
    while size > 0 {
        let mut end = count;
        // From the end: what comes last stands closest to the failure, and what comes first is often needed by nothing behind it.
        while end > 0 {
            let start = end.saturating_sub(size);
            count = without(start..end)?.unwrap_or(count);
            end = start.min(count);
        }
        size /= 2;
    }
    Flow::Continue(())
}

/// The least number above `low` that still fails, by bisection. `high` is known to fail, and tried numbers that fail are kept by `fails`.
pub(crate) fn least(mut low: u64, mut high: u64, fails: &mut dyn FnMut(u64) -> Flow<bool>) -> Flow<u64> {
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

/// Makes a size smaller, and then rounder, which may be larger than it was. `take` tries a size, and tells whether the failure is still there.
pub(crate) fn simpler_size(mut size: Bytes, take: &mut dyn FnMut(Bytes) -> Flow<bool>) -> Flow {
    while size > Bytes::mib(1) && take(Bytes(size.0 / 2))? {
        size = Bytes(size.0 / 2);
    }
    for unit in ROUND {
        let Some(round) = size.checked_round_up(unit) else { continue };
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
mod tests {
    use super::*;

    #[test]
    fn what_the_failure_needs_is_left_wherever_it_stands() {
        for needed in [vec![0], vec![99], vec![3, 50, 51], (20..40).collect()] {
            let mut parts: Vec<usize> = (0..100).collect();
            let done = leave_out(parts.len(), &mut |range| {
                let rest: Vec<usize> = [&parts[..range.start], &parts[range.end..]].concat();
                let fails = needed.iter().all(|part| rest.contains(part));
                if fails {
                    parts = rest;
                }
                Flow::Continue(fails.then_some(parts.len()))
            });
            assert_eq!((done, parts), (Flow::Continue(()), needed));
        }
    }

    #[test]
    fn the_least_number_that_fails_is_found() {
        for wanted in [1, 2, 7, 99, 100] {
            assert_eq!(least(0, 100, &mut |number| Flow::Continue(number >= wanted)), Flow::Continue(wanted));
        }
    }

    #[test]
    fn a_size_becomes_small_and_then_round() {
        let mut size = Bytes(60_000_000);
        let done = simpler_size(size, &mut |new| {
            let fails = new >= Bytes(5_000_000);
            if fails {
                size = new;
            }
            Flow::Continue(fails)
        });
        assert_eq!((done, size), (Flow::Continue(()), Bytes::mib(8)));
    }
}
