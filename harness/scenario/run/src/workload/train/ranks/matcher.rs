//! Matches collectives like NCCL: the n-th call of each rank with the n-th call of every other
//! rank, whatever its purpose.
//!
//! A collective completes when every rank has called it with the same operation and byte count. If
//! they differ, the behavior is undefined and usually a hang
//! (<https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/usage/collectives.html>). Nothing
//! waits here: ranks report their calls, and [`Matcher::advance`] reports the first mismatch.

use std::{collections::VecDeque, fmt};

use derive_more::Display;
use harness_allocator::units::Bytes;
use harness_base::words::count;
use harness_scenario::model::ParameterId;

#[derive(Clone, Copy, Debug, PartialEq, Eq, Display)]
pub(super) enum Purpose {
    /// All ranks receive the parameters of rank 0.
    #[display("the broadcast of the parameters")]
    Parameters,
    /// All ranks receive the bucket order of rank 0.
    #[display("the broadcast of the order of buckets")]
    Buckets,
    /// All ranks receive the model buffers of rank 0, for example the running means of
    /// `batch_norm`.
    #[display("the broadcast of the model's buffers")]
    Buffers,
    /// Averages the gradients of a bucket.
    #[display("the all-reduce of bucket {_0}")]
    Bucket(usize),
    #[display("the all-reduce of the gradient of parameter {_0}")]
    Gradient(ParameterId),
    /// Agrees whether any rank ran out of memory.
    #[display("the all-reduce of the agreement")]
    Agreement,
}

impl Purpose {
    const fn is_broadcast(self) -> bool {
        matches!(self, Self::Parameters | Self::Buckets | Self::Buffers)
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Collective {
    pub(super) purpose: Purpose,
    pub(super) bytes: Bytes,
    /// Counted from 1; 0 before the first.
    pub(super) iteration: u64,
    /// The attempt at the iteration, counted from 1.
    pub(super) attempt: u64,
}

impl Collective {
    /// Returns whether NCCL matches the two calls.
    fn meets(&self, other: &Self) -> bool {
        (self.purpose.is_broadcast(), self.bytes) == (other.purpose.is_broadcast(), other.bytes)
    }

    /// Returns whether they have the same purpose.
    fn belongs_to(&self, other: &Self) -> bool {
        let attempt_counts = self.purpose == Purpose::Agreement;
        let is_same = (self.purpose, self.iteration) == (other.purpose, other.iteration);
        self.meets(other) && is_same && (!attempt_counts || self.attempt == other.attempt)
    }
}

impl fmt::Display for Collective {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            purpose,
            bytes,
            iteration,
            attempt,
        } = self;
        match iteration {
            0 => write!(f, "{purpose} ({bytes}, before the first iteration)"),
            _ => write!(
                f,
                "{purpose} ({bytes}, iteration {iteration}, attempt {attempt})"
            ),
        }
    }
}

#[derive(Clone, Debug, Default)]
struct Calls {
    waiting: VecDeque<Collective>,
    /// Why the rank stopped calling.
    ended: Option<String>,
}

#[derive(Clone, Debug)]
pub(super) struct Matcher {
    ranks: Vec<Calls>,
    /// The number of collectives that all ranks joined.
    pub(super) matched: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Trouble {
    /// Some rank waits forever.
    Hang,
    /// All ranks continue, but with a sum of unrelated data.
    Mixed,
}

/// The state of a rank at a mismatch.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Standing {
    /// It called a collective that these ranks do not join.
    Called(Collective, Vec<usize>),
    /// It stopped calling.
    Ended(String),
    Behind,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Mismatch {
    pub(super) trouble: Trouble,
    pub(super) number: u64,
    pub(super) ranks: Vec<Standing>,
}

impl Matcher {
    pub(super) fn new(ranks: usize) -> Self {
        Self {
            ranks: vec![Calls::default(); ranks],
            matched: 0,
        }
    }

    pub(super) fn call(&mut self, rank: usize, collective: Collective) {
        self.ranks[rank].waiting.push_back(collective);
    }

    pub(super) fn end(&mut self, rank: usize, why: String) {
        self.ranks[rank].ended.get_or_insert(why);
    }

    /// Completes the collectives that every rank has called.
    pub(super) fn advance(&mut self) -> Option<Mismatch> {
        loop {
            let fronts: Vec<Collective> = self
                .ranks
                .iter()
                .filter_map(|rank| rank.waiting.front().copied())
                .collect();
            let first = fronts.first()?;
            if fronts.len() < self.ranks.len() {
                let never_comes = self
                    .ranks
                    .iter()
                    .any(|rank| rank.waiting.is_empty() && rank.ended.is_some());
                return never_comes.then(|| self.mismatch(Trouble::Hang));
            }
            if !fronts.iter().all(|other| other.belongs_to(first)) {
                let meet = fronts.iter().all(|other| other.meets(first));
                return Some(self.mismatch(if meet { Trouble::Mixed } else { Trouble::Hang }));
            }
            for rank in &mut self.ranks {
                rank.waiting.pop_front();
            }
            self.matched += 1;
        }
    }

    fn mismatch(&self, trouble: Trouble) -> Mismatch {
        let standing = |calls: &Calls| match (calls.waiting.front(), &calls.ended) {
            (Some(own), _) => {
                let joins = |other: &Calls| {
                    other
                        .waiting
                        .front()
                        .is_some_and(|front| front.belongs_to(own))
                };
                let missing = self
                    .ranks
                    .iter()
                    .enumerate()
                    .filter(|(_, other)| !joins(other))
                    .map(|(rank, _)| rank);
                Standing::Called(*own, missing.collect())
            }
            (None, Some(why)) => Standing::Ended(why.clone()),
            (None, None) => Standing::Behind,
        };
        Mismatch {
            trouble,
            number: self.matched + 1,
            ranks: self.ranks.iter().map(standing).collect(),
        }
    }
}

/// `rank 1`, `ranks 0 and 2`.
fn names(ranks: &[usize]) -> String {
    let all: Vec<String> = ranks.iter().map(usize::to_string).collect();
    match all.as_slice() {
        [] => "no rank".to_owned(),
        [one] => format!("rank {one}"),
        [front @ .., last] => format!("ranks {} and {last}", front.join(", ")),
    }
}

impl fmt::Display for Mismatch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let before = count(self.number - 1, "collective");
        match self.trouble {
            Trouble::Hang => write!(f, "a hang after {before} that all ranks joined")?,
            Trouble::Mixed => {
                write!(
                    f,
                    "after {before} that all ranks joined, they call one with the same operation \
                     and byte count, so no rank waits, "
                )?;
                f.write_str("but it adds up unrelated data")?;
            }
        }
        for (rank, standing) in self.ranks.iter().enumerate() {
            match (standing, self.trouble) {
                (Standing::Called(collective, others), Trouble::Hang) => {
                    write!(
                        f,
                        "\nrank {rank} waits in {collective} for {}",
                        names(others)
                    )?;
                }
                (Standing::Called(collective, others), Trouble::Mixed) => {
                    write!(
                        f,
                        "\nrank {rank} is in {collective}, unlike {}",
                        names(others)
                    )?;
                }
                (Standing::Ended(why), _) => write!(f, "\nrank {rank} {why}")?,
                (Standing::Behind, _) => {
                    write!(f, "\nrank {rank} has not reached this collective")?
                }
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests;
