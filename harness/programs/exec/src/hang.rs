//! [`Hang`]: ranks that wait for each other, or for ranks that never come. `detector` finds it from
//! outside of the program: in the files of its communicators, and in the stacks of idle
//! `processes`.

pub(crate) mod detector;
pub(crate) mod processes;

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::{fs, io};

use harness_base::words::joined;
use nix::sys::signal::Signal;
use serde::{Deserialize, Serialize};

use crate::errors::ErrorFrame;
use crate::process::End;

/// The exit code of a run that was stopped because its ranks hang, as that of `timeout`.
pub const EXIT_CODE: u8 = 124;
/// The file of a run with its hang.
const FILE: &str = "hang.json";

#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Hang {
    /// The ranks that wait and those that they wait for.
    pub ranks: Vec<HangingRank>,
}

#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct HangingRank {
    /// In the largest communicator of its process.
    pub rank: usize,
    pub pid: Option<u32>,
    #[serde(flatten)]
    pub state: RankState,
    /// Where PyTorch raised its last OutOfMemoryError.
    pub out_of_memory: Option<ErrorFrame>,
}

#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(tag = "state", rename_all = "snake_case")]
pub enum RankState {
    Waits {
        /// The name of the collective, `receive`, or a function that meets other ranks outside of
        /// communicators, such as `init_process_group`.
        collective: String,
        /// Counted from 1 in its communicator, or among the messages of the sender. `None` outside
        /// of communicators.
        number: Option<u32>,
        elements: Option<usize>,
        element_type: Option<String>,
        root: Option<usize>,
        /// The number of the communicator in this hang, from 1.
        communicator: Option<usize>,
        /// The number of its ranks.
        size: usize,
        waits_for: Vec<usize>,
        /// The call stack without PyTorch's own frames, innermost first.
        stack: Vec<ErrorFrame>,
    },
    /// Its process has ended, with the last line of its traceback if an exception ended it. The
    /// rest is `None` if the system does not report it.
    Ended {
        error: Option<String>,
        exit_code: Option<u8>,
        signal: Option<u8>,
    },
    /// It destroyed its communicator.
    Left,
    /// It never joined the others.
    Missing,
    /// It goes on, after a call that the others do not expect.
    Continues,
}

impl RankState {
    fn ended(error: Option<String>, end: Option<End>) -> Self {
        let exit_code = end.filter(|end| end.signal().is_none()).map(End::exit_code);
        Self::Ended {
            error,
            exit_code,
            signal: end.and_then(End::signal),
        }
    }
}

impl Hang {
    pub(crate) fn read(run: &Path) -> io::Result<Option<Self>> {
        match fs::read(run.join(FILE)) {
            Ok(bytes) => Ok(serde_json::from_slice(&bytes).ok()),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error),
        }
    }

    pub(crate) fn is_in(run: &Path) -> bool {
        run.join(FILE).exists()
    }

    /// A line per group of ranks with the same state.
    pub fn lines(&self) -> Vec<String> {
        let mut groups: BTreeMap<(&RankState, &Option<ErrorFrame>), Vec<usize>> = BTreeMap::new();
        for rank in &self.ranks {
            groups
                .entry((&rank.state, &rank.out_of_memory))
                .or_default()
                .push(rank.rank);
        }
        let mut groups: Vec<_> = groups.into_iter().collect();
        groups.sort_by_key(|((state, _), ranks)| {
            (!matches!(state, RankState::Waits { .. }), ranks[0])
        });
        let is_several = self.ranks.iter().any(|rank| {
            matches!(
                rank.state,
                RankState::Waits {
                    communicator: Some(2..),
                    ..
                }
            )
        });
        groups
            .into_iter()
            .map(|((state, out_of_memory), ranks)| {
                line(state, out_of_memory.as_ref(), &ranks, is_several)
            })
            .collect()
    }
}

/// The exit code and the error, as in ` with exit code 1`.
fn with(exit_code: Option<u8>, error: Option<String>) -> String {
    let code = exit_code.map(|code| format!("exit code {code}"));
    match (code, error) {
        (Some(code), Some(error)) => format!(" with {code} and {error}"),
        (Some(with), None) | (None, Some(with)) => format!(" with {with}"),
        (None, None) => String::new(),
    }
}

fn line(
    state: &RankState,
    out_of_memory: Option<&ErrorFrame>,
    ranks: &[usize],
    names_communicator: bool,
) -> String {
    let (who, is_one) = (named(ranks), ranks.len() == 1);
    let at = |frame: &ErrorFrame| format!(" at {}", frame.short());
    let place = out_of_memory.map_or_else(String::new, at);
    let after = match out_of_memory {
        Some(_) => format!(" after an OutOfMemoryError{place}"),
        None => String::new(),
    };
    let has = if is_one { "has" } else { "have" };
    match state {
        RankState::Waits {
            collective,
            number,
            elements,
            element_type,
            root,
            waits_for,
            stack,
            communicator,
            ..
        } => {
            let size = elements
                .zip(element_type.as_ref())
                .map_or_else(String::new, |(count, of)| format!(" of {count} {of}"));
            let root = root.map_or_else(String::new, |root| format!(" with root {root}"));
            let at = stack.first().map_or_else(String::new, at);
            let verb = if is_one { "waits" } else { "wait" };
            let of = communicator
                .filter(|_| names_communicator)
                .map_or_else(String::new, |of| format!(" of communicator {of}"));
            let number =
                number.map_or_else(String::new, |number| format!(" (number {number}{of})"));
            format!(
                "{who} {verb} in {collective}{size}{root}{number}{at} for {}{after}",
                named(waits_for)
            )
        }
        RankState::Ended {
            signal: Some(signal),
            ..
        } => {
            let name = Signal::try_from(i32::from(*signal))
                .map_or_else(|_| format!("signal {signal}"), |signal| signal.to_string());
            let was = if is_one { "was" } else { "were" };
            format!("{who} {was} killed by {name}{after}")
        }
        RankState::Ended {
            error, exit_code, ..
        } => {
            let (error, after) = match error {
                Some(error) if error.contains("OutOfMemoryError") => {
                    (Some(format!("OutOfMemoryError{place}")), String::new())
                }
                error => (error.as_ref().map(|error| format!("`{error}`")), after),
            };
            format!("{who} {has} ended{}{after}", with(*exit_code, error))
        }
        RankState::Left => format!("{who} {has} destroyed the communicator{after}"),
        RankState::Missing => format!("{who} {has} not joined"),
        RankState::Continues => {
            let continues = if is_one { "continues" } else { "continue" };
            format!("{who} {continues}{after}")
        }
    }
}

/// Names ranks, as in `ranks 0-2 and 5`.
fn named(ranks: &[usize]) -> String {
    let sorted: BTreeSet<usize> = ranks.iter().copied().collect();
    let mut spans: Vec<[usize; 2]> = Vec::new();
    for rank in sorted {
        match spans.last_mut() {
            Some([_, last]) if *last + 1 == rank => *last = rank,
            _ => spans.push([rank; 2]),
        }
    }
    let texts: Vec<String> = spans
        .iter()
        .map(|[first, last]| {
            if first == last {
                first.to_string()
            } else {
                format!("{first}-{last}")
            }
        })
        .collect();
    format!(
        "{} {}",
        if ranks.len() == 1 { "rank" } else { "ranks" },
        joined(texts, ", ")
    )
}

#[cfg(test)]
mod tests;
