//! [`Doubt`]: why the figures of a run may differ from those on a GPU.

use std::fmt;

use harness_base::words::count;
use serde::{Deserialize, Serialize};

use crate::errors::ErrorFrame;
use crate::record::{Process, Record};

/// More lines are only counted.
const LINES: usize = 8;

/// A reason, with the lines of the program that cause it. A run has each kind once at most.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum Doubt {
    /// The program read values that nothing had computed.
    UncomputedReads {
        reads: u64,
        at: Vec<String>,
        /// Only operations of torch can be computed.
        has_torch: bool,
    },
    /// Peaks depend on the timing of the GPU.
    Timing {
        /// How often freed memory waited for another stream.
        waits: u64,
        /// The lines that asked whether the GPU had finished.
        at: Vec<String>,
    },
    /// CUDA graphs requested memory, by assumed rules.
    GraphMemory { requests: u64 },
}

impl Doubt {
    /// Returns the doubts about a run.
    pub(crate) fn of(record: &Record) -> Vec<Self> {
        [
            Self::reads(record),
            Self::timing(record),
            Self::graph_memory(record),
        ]
        .into_iter()
        .flatten()
        .collect()
    }

    pub(crate) fn reads(record: &Record) -> Option<Self> {
        let processes = record.processes.iter();
        let reads = processes.map(|process| process.uncomputed_reads).sum();
        (reads > 0).then(|| Self::UncomputedReads {
            reads,
            at: lines(record.processes.iter(), |process| {
                &process.uncomputed_reads_at
            }),
            has_torch: record.has_torch(),
        })
    }

    pub(crate) fn timing(record: &Record) -> Option<Self> {
        record.depends_on_timing().then(|| Self::Timing {
            waits: record.waits_of_frees(),
            at: lines(record.used(), |process| &process.polled_at),
        })
    }

    pub(crate) fn graph_memory(record: &Record) -> Option<Self> {
        let requests = record.used().map(|process| process.graph_requests).sum();
        (requests > 0).then_some(Self::GraphMemory { requests })
    }

    /// Returns the doubts about several runs, as [`Self::add`] joins them.
    pub fn of_all<'a>(runs: impl IntoIterator<Item = &'a Vec<Self>>) -> Vec<Self> {
        let mut all = Vec::new();
        runs.into_iter()
            .for_each(|doubts| Self::add(&mut all, doubts));
        all
    }

    /// Adds the doubts about another run of the program. Those of the same kind become one, with
    /// all lines and the highest number of a run.
    pub fn add(doubts: &mut Vec<Self>, others: &[Self]) {
        for other in others {
            if !doubts.iter_mut().any(|doubt| doubt.includes(other)) {
                doubts.push(other.clone());
            }
        }
    }

    /// Includes a doubt of the same kind. Returns whether it is one.
    fn includes(&mut self, other: &Self) -> bool {
        let (number, at, (more, others)) = match (self, other) {
            (Self::GraphMemory { requests }, Self::GraphMemory { requests: more }) => {
                *requests = *more.max(requests);
                return true;
            }
            (
                Self::UncomputedReads { reads, at, .. },
                Self::UncomputedReads {
                    reads: more,
                    at: others,
                    ..
                },
            ) => (reads, at, (more, others)),
            (
                Self::Timing { waits, at },
                Self::Timing {
                    waits: more,
                    at: others,
                },
            ) => (waits, at, (more, others)),
            _ => return false,
        };
        *number = *more.max(number);
        for line in others {
            if !at.contains(line) {
                at.push(line.clone());
            }
        }
        true
    }

    /// Its sentence. `times` says how often memory waited.
    pub(crate) fn sentence(&self, times: &str) -> String {
        match self {
            Self::UncomputedReads {
                reads,
                at,
                has_torch,
            } => format!(
                "the program read values that nothing computed ({}{}): branches on them may have \
                 gone the other way{}",
                count(*reads, "read"),
                match listed(at).strip_prefix(' ') {
                    Some(at) => format!(", {at}"),
                    None => String::new(),
                },
                if *has_torch {
                    "; `--values cpu` decides them"
                } else {
                    ""
                }
            ),
            Self::Timing { waits, at } => {
                let waited = format!("freed memory waited{times} for another stream");
                let polled = format!(
                    "the program asked whether the GPU had finished{}",
                    listed(at)
                );
                match (*waits > 0, at.is_empty()) {
                    (true, true) => format!("{waited}, so peaks depend on timing"),
                    (false, _) => format!("{polled}, so peaks can depend on timing"),
                    (true, false) => format!("{waited}, and {polled}, so peaks depend on timing"),
                }
            }
            Self::GraphMemory { requests } => format!(
                "CUDA graphs requested memory ({}): how much a GPU takes for them is assumed",
                count(*requests, "request")
            ),
        }
    }
}

impl fmt::Display for Doubt {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.sentence(""))
    }
}

/// The lines that read values which nothing has computed, as in ` at train.py:12`. Empty if they
/// are unknown.
pub fn lines_of_reads(record: &Record) -> String {
    listed(&lines(record.processes.iter(), |process| {
        &process.uncomputed_reads_at
    }))
}

fn lines<'a>(
    processes: impl Iterator<Item = &'a Process>,
    of: impl Fn(&'a Process) -> &'a Vec<ErrorFrame>,
) -> Vec<String> {
    let mut lines: Vec<String> = Vec::new();
    for line in processes.flat_map(of).map(ErrorFrame::short) {
        if !lines.contains(&line) {
            lines.push(line);
        }
    }
    lines
}

fn listed(lines: &[String]) -> String {
    let more = if lines.len() > LINES {
        format!(" and {} more", lines.len() - LINES)
    } else {
        String::new()
    };
    if lines.is_empty() {
        String::new()
    } else {
        format!(" at {}{more}", lines[..lines.len().min(LINES)].join(", "))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn doubts_of_several_runs_become_one_with_all_lines_and_the_highest_number() {
        let reads = |reads, at: &[&str]| Doubt::UncomputedReads {
            reads,
            at: at.iter().map(|line| (*line).to_owned()).collect(),
            has_torch: false,
        };
        let timing = |waits, at: &[&str]| Doubt::Timing {
            waits,
            at: at.iter().map(|line| (*line).to_owned()).collect(),
        };
        let doubts = Doubt::of_all(&[
            vec![reads(3, &["a.py:12"])],
            vec![],
            vec![reads(2, &["a.py:12", "a.py:30"]), timing(0, &["a.py:7"])],
            vec![timing(4, &[]), Doubt::GraphMemory { requests: 2 }],
            vec![Doubt::GraphMemory { requests: 1 }],
        ]);
        let sentences: Vec<String> = doubts.iter().map(ToString::to_string).collect();
        assert_eq!(
            sentences,
            [
                "the program read values that nothing computed (3 reads, at a.py:12, a.py:30): \
                 branches on them may have gone the other way",
                "freed memory waited for another stream, and the program asked whether the GPU \
                 had finished at a.py:7, so peaks depend on timing",
                "CUDA graphs requested memory (2 requests): how much a GPU takes for them is \
                 assumed",
            ]
        );
    }
}
