//! How much memory would have been enough: [`least_memory`].

use harness_allocator::units::Bytes;

/// What a bisection found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Least {
    /// The least memory that was seen to be enough.
    pub enough: Bytes,
    /// The most that was seen not to be; zero where everything tried was enough.
    pub too_little: Bytes,
    /// Whether some memory between these two bounds of the search and above `enough` was tried and was too little: then more memory hurts here, and
    /// other amounts below `enough` may do as well.
    pub is_monotonic: bool,
}

/// The least memory that is enough, by bisection between `low`, which need not be enough, and `high`, which is, down to a difference of `step`.
///
/// A bisection takes for granted that more memory never hurts. That is not certain: an allocator that finds memory takes it, and what it takes
/// may be in the way later. So a few amounts above the answer are tried too.
///
/// # Errors
/// What `is_enough` says.
pub fn least_memory<E>(low: Bytes, high: Bytes, step: Bytes, mut is_enough: impl FnMut(Bytes) -> Result<bool, E>) -> Result<Least, E> {
    let unit = step.0.max(1);
    // In units; `enough` is, `too_little` is not, or is below the range.
    let (mut too_little, mut enough) = ((low.0 / unit).saturating_sub(1), high.0.div_ceil(unit));
    let mut seen = None;
    while enough - too_little > 1 {
        let middle = too_little.midpoint(enough);
        if is_enough(Bytes(middle * unit))? {
            enough = middle;
        } else {
            too_little = middle;
            seen = Some(middle);
        }
    }
    let mut is_monotonic = true;
    for above in [1, 2, 4] {
        let more = enough + above;
        is_monotonic &= more * unit >= high.0 || is_enough(Bytes(more * unit))?;
    }
    let found = Bytes(enough * unit).min(Bytes(high.0.div_ceil(unit) * unit));
    Ok(Least { enough: found, too_little: Bytes(seen.unwrap_or(0) * unit), is_monotonic })
}

#[cfg(test)]
mod tests {
    use std::convert::Infallible;

    use super::*;

    fn search(low: u64, high: u64, enough: impl Fn(u64) -> bool) -> Least {
        let answer: Result<Least, Infallible> =
            least_memory(Bytes::mib(low), Bytes::mib(high), Bytes::mib(2), |memory| Ok(enough(memory.0 >> 20)));
        match answer {
            Ok(least) => least,
            Err(never) => match never {},
        }
    }

    #[test]
    fn the_least_that_is_enough_is_found_to_the_step() {
        for limit in [10, 64, 100, 999] {
            let least = search(2, 1000, |memory| memory >= limit);
            assert_eq!((least.enough, least.is_monotonic), (Bytes::mib(limit.next_multiple_of(2)), true));
            assert!(least.too_little < Bytes::mib(limit));
        }
        assert_eq!(search(2, 1000, |_| true), Least { enough: Bytes::mib(2), too_little: Bytes::ZERO, is_monotonic: true });
        assert_eq!(search(600, 600, |_| true).enough, Bytes::mib(600));
    }

    #[test]
    fn more_memory_that_hurts_is_noticed() {
        assert!(!search(2, 1000, |memory| memory >= 500 && memory != 504).is_monotonic);
    }
}
