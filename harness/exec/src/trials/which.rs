//! [`Which`] selects the device allocation attempts that fail.

use std::collections::BTreeSet;
use std::fmt;
use std::str::FromStr;

use harness_allocator::units::Bytes;

/// Up to this many attempts, all are selected; beyond it, a sample of this size and the largest.
const ALL_UP_TO: usize = 64;
/// Number of the largest attempts that join a sample.
const LARGEST: usize = 16;

/// A selection of attempts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Which {
    /// All attempts if there are few, otherwise a sample and the largest.
    #[default]
    Some,
    All,
    /// This many, evenly spread.
    Sample(usize),
    /// This many of the largest.
    Largest(usize),
}

/// Why a text is not a selection.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("`{0}` does not select attempts: write `all`, `sample:N` or `largest:N` with N of at least 1, such as `sample:20`")]
pub struct WhichError(String);

impl FromStr for Which {
    type Err = WhichError;

    fn from_str(text: &str) -> Result<Self, WhichError> {
        let number = |text: &str| text.parse().ok().filter(|number| *number > 0);
        let parsed = match text.split_once(':') {
            None if text == "some" => Some(Self::Some),
            None if text == "all" => Some(Self::All),
            Some(("sample", count)) => number(count).map(Self::Sample),
            Some(("largest", count)) => number(count).map(Self::Largest),
            _ => None,
        };
        parsed.ok_or_else(|| WhichError(text.to_owned()))
    }
}

impl Which {
    /// Returns the selected attempts, counted from 1, in ascending order.
    pub fn choose(self, sizes: &[Bytes]) -> Vec<u64> {
        let chosen: BTreeSet<usize> = match self {
            Self::Some if sizes.len() <= ALL_UP_TO => (0..sizes.len()).collect(),
            Self::Some => spread(sizes.len(), ALL_UP_TO).chain(largest(sizes, LARGEST)).collect(),
            Self::All => (0..sizes.len()).collect(),
            Self::Sample(count) => spread(sizes.len(), count).collect(),
            Self::Largest(count) => largest(sizes, count).collect(),
        };
        chosen.into_iter().map(|index| index as u64 + 1).collect()
    }

    /// Describes the selection from this many attempts.
    pub fn described(self, attempts: usize) -> String {
        let of =
            |count: usize, what: &str| if count >= attempts { format!("all {attempts}") } else { format!("{count} {what} of {attempts}") };
        match self {
            Self::Some if attempts > ALL_UP_TO => {
                format!("{ALL_UP_TO} evenly spread and the {LARGEST} largest of {attempts} (`--every-fault=all` for all)")
            }
            Self::Some | Self::All => format!("all {attempts}"),
            Self::Sample(count) => of(count, "evenly spread"),
            Self::Largest(count) => of(count, "largest"),
        }
    }
}

impl fmt::Display for Which {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Some => f.write_str("some"),
            Self::All => f.write_str("all"),
            Self::Sample(count) => write!(f, "sample:{count}"),
            Self::Largest(count) => write!(f, "largest:{count}"),
        }
    }
}

/// Returns `count` indexes of `0..len`, evenly spread, including the first and the last.
pub(crate) fn spread(len: usize, count: usize) -> impl Iterator<Item = usize> {
    let count = count.min(len);
    (0..count).map(move |at| if count == 1 { 0 } else { at * (len - 1) / (count - 1) })
}

/// Returns the indexes of the largest sizes; among equal ones, the first.
fn largest(sizes: &[Bytes], count: usize) -> impl Iterator<Item = usize> {
    let mut order: Vec<usize> = (0..sizes.len()).collect();
    order.sort_by_key(|index| std::cmp::Reverse(sizes[*index]));
    order.into_iter().take(count)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn sizes(sizes: &[u64]) -> Vec<Bytes> {
        sizes.iter().map(|size| Bytes::mib(*size)).collect()
    }

    #[test]
    fn few_attempts_are_all_selected_and_many_are_sampled() {
        assert_eq!(Which::Some.choose(&sizes(&[2; 64])), (1..=64).collect::<Vec<_>>());
        let mut many = vec![2; 1000];
        many[500] = 400;
        let chosen = Which::Some.choose(&sizes(&many));
        assert!(chosen.contains(&1) && chosen.contains(&1000) && chosen.contains(&501), "{chosen:?}");
        assert!((64..=80).contains(&chosen.len()) && chosen.is_sorted());
        assert_eq!(Which::Largest(2).choose(&sizes(&[2, 20, 4, 20, 20])), [2, 4]);
        assert_eq!(Which::Sample(3).choose(&sizes(&[2; 9])), [1, 5, 9]);
        assert_eq!(Which::Some.choose(&[]), Vec::<u64>::new());
    }

    #[test]
    fn the_selection_is_described() {
        assert_eq!(Which::Some.described(12), "all 12");
        assert_eq!(Which::Some.described(100), "64 evenly spread and the 16 largest of 100 (`--every-fault=all` for all)");
        assert_eq!(Which::Sample(5).described(100), "5 evenly spread of 100");
        assert_eq!(Which::Largest(5).described(4), "all 4");
    }

    #[test]
    fn a_selection_round_trips_and_invalid_ones_are_refused() {
        for which in [Which::Some, Which::All, Which::Sample(3), Which::Largest(1)] {
            assert_eq!(which.to_string().parse(), Ok(which));
        }
        for text in ["", "sample", "sample:0", "largest:-1", "all:3", "every"] {
            assert_eq!(text.parse::<Which>(), Err(WhichError(text.to_owned())));
        }
    }

    proptest! {
        #[test]
        fn a_spread_sample_has_the_requested_number_of_distinct_attempts(len in 1_usize..500, count in 1_usize..600) {
            let chosen: BTreeSet<usize> = spread(len, count).collect();
            prop_assert_eq!(chosen.len(), count.min(len));
            prop_assert!(chosen.iter().all(|index| *index < len));
        }
    }
}
