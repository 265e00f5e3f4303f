//! [`Which`] selects the device allocation attempts that fail.

use std::{collections::BTreeSet, fmt, str::FromStr};

use harness_allocator::units::Bytes;

/// Up to this many attempts, all are selected; beyond it, a sample of this size and the largest.
const ALL_UP_TO: usize = 64;
const LARGEST: usize = 16;

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Which {
    /// All attempts if there are few, otherwise a sample and the largest.
    #[default]
    Some,
    All,
    /// This many, evenly spread.
    Sample(usize),
    Largest(usize),
}

#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "`{0}` does not select attempts: write `all`, `sample:N` or `largest:N` with N of at least 1, \
     such as `sample:20`"
)]
pub struct WhichError(String);

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
    pub fn choose(self, sizes: &[Bytes]) -> Vec<u64> {
        let chosen: BTreeSet<usize> = match self {
            Self::Some if sizes.len() <= ALL_UP_TO => (0..sizes.len()).collect(),
            Self::Some => spread(sizes.len(), ALL_UP_TO)
                .chain(largest(sizes, LARGEST))
                .collect(),
            Self::All => (0..sizes.len()).collect(),
            Self::Sample(count) => spread(sizes.len(), count).collect(),
            Self::Largest(count) => largest(sizes, count).collect(),
        };
        chosen.into_iter().map(|index| index as u64 + 1).collect()
    }

    /// Describes the selection from this many attempts.
    pub fn described(self, attempts: usize) -> String {
        let of = |count: usize, what: &str| {
            if count >= attempts {
                format!("all {attempts}")
            } else {
                format!("{count} {what} of {attempts}")
            }
        };
        match self {
            Self::Some if attempts > ALL_UP_TO => {
                format!(
                    "{ALL_UP_TO} evenly spread and the {LARGEST} largest of {attempts} \
                     (`--every-fault=all` for all)"
                )
            }
            Self::Some | Self::All => format!("all {attempts}"),
            Self::Sample(count) => of(count, "evenly spread"),
            Self::Largest(count) => of(count, "largest"),
        }
    }
}

/// Returns `count` indexes of `0..len`, evenly spread, including the first and the last.
pub(crate) fn spread(len: usize, count: usize) -> impl Iterator<Item = usize> {
    let count = count.min(len);
    (0..count).map(move |at| {
        if count == 1 {
            0
        } else {
            at * (len - 1) / (count - 1)
        }
    })
}

/// Returns the indexes of the largest sizes; among equal ones, the first.
fn largest(sizes: &[Bytes], count: usize) -> impl Iterator<Item = usize> {
    let mut order: Vec<usize> = (0..sizes.len()).collect();
    order.sort_by_key(|index| std::cmp::Reverse(sizes[*index]));
    order.into_iter().take(count)
}

#[cfg(test)]
mod tests;
