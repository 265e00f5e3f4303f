//! [`Which`] of a program's attempts to get device memory are made to fail.

use std::collections::BTreeSet;
use std::fmt;
use std::str::FromStr;

use harness_allocator::units::Bytes;

/// Up to so many attempts all are made to fail; of more, a sample of so many and the largest.
const ALL_UP_TO: usize = 64;
/// The largest that are made to fail beside a sample.
const LARGEST: usize = 16;

/// A choice of attempts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[allow(missing_docs, reason = "the names say what they are")]
pub enum Which {
    /// All where they are few, else a sample and the largest.
    #[default]
    Some,
    All,
    /// So many, evenly spread from the first to the last.
    Sample(usize),
    /// So many of the largest.
    Largest(usize),
}

/// Why a text is not a choice.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("`{0}` is not a choice of attempts: write `all`, `sample:N` or `largest:N`, with N from 1, as in `sample:20`")]
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
    /// The attempts chosen, counted from 1, in rising order.
    #[must_use]
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

    /// What was chosen of so many attempts, in words.
    #[must_use]
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

/// So many of `0..len`, evenly spread, the first and the last among them.
pub(crate) fn spread(len: usize, count: usize) -> impl Iterator<Item = usize> {
    let count = count.min(len);
    (0..count).map(move |at| if count == 1 { 0 } else { at * (len - 1) / (count - 1) })
}

/// The largest; of equal ones the first.
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
    fn few_attempts_all_fail_and_of_many_a_spread_sample_and_the_largest() {
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
    fn what_is_chosen_is_told() {
        assert_eq!(Which::Some.described(12), "all 12");
        assert_eq!(Which::Some.described(100), "64 evenly spread and the 16 largest of 100 (`--every-fault=all` for all)");
        assert_eq!(Which::Sample(5).described(100), "5 evenly spread of 100");
        assert_eq!(Which::Largest(5).described(4), "all 4");
    }

    #[test]
    fn a_choice_is_read_back_as_it_is_shown_and_others_are_refused() {
        for which in [Which::Some, Which::All, Which::Sample(3), Which::Largest(1)] {
            assert_eq!(which.to_string().parse(), Ok(which));
        }
        for text in ["", "sample", "sample:0", "largest:-1", "all:3", "every"] {
            assert_eq!(text.parse::<Which>(), Err(WhichError(text.to_owned())));
        }
    }

    proptest! {
        #[test]
        fn a_spread_sample_has_as_many_different_attempts_as_asked_for(len in 1_usize..500, count in 1_usize..600) {
            let chosen: BTreeSet<usize> = spread(len, count).collect();
            prop_assert_eq!(chosen.len(), count.min(len));
            prop_assert!(chosen.iter().all(|index| *index < len));
        }
    }
}
