//! Shards of work for several machines. A name alone determines its shard, so machines need not
//! communicate, and a new scenario does not move others.

use std::{hash::Hasher as _, str::FromStr};

use derive_more::Display;
use harness_allocator::hash::{Mixer, fnv1a};
use serde::{Deserialize, Serialize};

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, Display)]
#[display("{index}/{count}")]
pub struct Shard {
    /// Counted from 1.
    pub index: u32,
    /// At least 1.
    pub count: u32,
}

impl Shard {
    /// Returns whether the name belongs to this shard. Each name belongs to exactly one shard of a
    /// count.
    pub fn has(self, name: &str) -> bool {
        Self::with(name, self.count) == self
    }

    /// The shard of this count to which the name belongs.
    pub fn with(name: &str, count: u32) -> Self {
        // The mixer spreads the low bits, in which equal pairs of digits cancel, as in
        // `rank3-gpu3`.
        let mut mixer = Mixer::default();
        mixer.write_u64(fnv1a(name.as_bytes()));
        let index = (mixer.finish() % u64::from(count.max(1))) as u32 + 1;
        Self { index, count }
    }
}

/// Returns the shards of the same run that are missing. Fails if the numbers of shards differ or
/// one appears twice.
pub fn missing(shards: &[Shard]) -> Result<Vec<Shard>, String> {
    let Some(first) = shards.first() else {
        return Err("no shards are given".to_owned());
    };
    if let Some(other) = shards.iter().find(|shard| shard.count != first.count) {
        return Err(format!("shards {first} and {other} differ in their number"));
    }
    if let Some(twice) = shards
        .iter()
        .enumerate()
        .find(|(index, shard)| shards[..*index].contains(shard))
    {
        return Err(format!("shard {} appears twice", twice.1));
    }
    Ok((1..=first.count)
        .map(|index| Shard {
            index,
            count: first.count,
        })
        .filter(|shard| !shards.contains(shard))
        .collect())
}

pub fn named(missing: &[Shard]) -> String {
    format!(
        "missing: shard {}",
        missing
            .iter()
            .map(ToString::to_string)
            .collect::<Vec<_>>()
            .join(", ")
    )
}

#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}write the shard and the number of shards, as in `1/2` and `2/2`")]
pub struct ShardError(String);

impl FromStr for Shard {
    type Err = ShardError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let parts = text.split_once('/').and_then(|(index, count)| {
            Some(Self {
                index: index.parse().ok()?,
                count: count.parse().ok()?,
            })
        });
        match parts {
            None => Err(ShardError(String::new())),
            Some(Self { count: 0, .. }) => {
                Err(ShardError("the number of shards is 0: ".to_owned()))
            }
            Some(Self { index, count }) if !(1..=count).contains(&index) => {
                Err(ShardError(format!(
                    "shard {index} of {count} does not exist: shards are numbered from 1 to \
                     {count}; "
                )))
            }
            Some(shard) => Ok(shard),
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn a_shard_is_a_part_that_there_is() {
        assert_eq!("2/3".parse(), Ok(Shard { index: 2, count: 3 }));
        for wrong in ["0/3", "4/3", "1/0", "1", "a/b", "-1/2", "1/2/3"] {
            assert!(wrong.parse::<Shard>().is_err(), "{wrong}");
        }
        let error = "4/3".parse::<Shard>().expect_err("3 shards have no fourth");
        insta::assert_snapshot!(error, @"shard 4 of 3 does not exist: shards are numbered from 1 \
             to 3; write the shard and the number of shards, as in `1/2` and `2/2`");
    }

    #[test]
    fn names_with_equal_pairs_of_digits_are_in_both_halves() {
        let half = Shard { index: 1, count: 2 };
        let in_half = (0..8)
            .filter(|rank| half.has(&format!("job-rank{rank}-gpu{rank}.pickle")))
            .count();
        assert!((1..8).contains(&in_half), "{in_half} of 8");
    }

    proptest! {
        #[test]
        fn every_name_belongs_to_exactly_one_part(name in ".*", count in 1_u32..20) {
            prop_assert_eq!(
                (1..=count).filter(|&index| Shard { index, count }.has(&name)).count(),
                1
            );
        }
    }
}
