//! The messages between the main process and another one: one line of JSON each, over a socket that is the other one's
//! standard input.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::io::{self, Write};
use std::path::PathBuf;

use harness_allocator::device::faulty::InjectorState;
use harness_allocator::device::{DeviceCalls, DeviceMemory};
use harness_allocator::stats::MemoryStats;
use harness_allocator::units::{Bytes, Nanos};
use harness_record::{Invariant, Outcome, Recovery, Rule, Shortage, Table};
use harness_scenario::{Position, Readings, ReportKey};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::rig::Finding;
use crate::step_result::{StepResult, Unmet};

/// A message of the main process.
#[derive(Debug, Serialize, Deserialize)]
pub(super) enum Order {
    /// Sent first, and only once.
    Start(Box<Start>),
    Do(Do),
    /// Frees everything and checks the final state, as the step with this number.
    Finish(u32),
    /// Releases everything in any state, then exits.
    Close,
}

/// The parameters of a process.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Start {
    /// Its name in the scenario.
    pub(super) process: String,
    /// The text and the path of the scenario.
    pub(super) source: String,
    pub(super) path: PathBuf,
    pub(super) parameters: BTreeMap<String, String>,
    /// The memory of all processes together.
    pub(super) memory: Bytes,
    pub(super) allocator: String,
    pub(super) seed: u64,
    /// True if every operation is audited.
    pub(super) audit: bool,
    /// The command line arguments that select the device.
    pub(super) device: Vec<OsString>,
    pub(super) ledger: PathBuf,
    /// The number of the step that starts it.
    pub(super) step: u32,
    /// The faults of its device, if the run has faults.
    pub(super) faults: Option<InjectorState>,
}

/// A step, by its number in the scenario.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Do {
    /// The number of the step in the run.
    pub(super) number: u32,
    pub(super) step: usize,
    /// The loops around it: their step numbers and completed iterations.
    pub(super) loops: Vec<(usize, u64)>,
}

/// A message of a process.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Answer {
    pub(super) reply: Reply,
    /// The calls and faults since the last answer, if the run has faults.
    pub(super) faults: Option<InjectorState>,
}

/// The result of an order.
#[derive(Debug, Serialize, Deserialize)]
pub(super) enum Reply {
    /// The process cannot start.
    Refused(String),
    Done(Box<Done>),
    /// The process cannot continue because of violated invariants or a failure.
    Stopped { findings: Vec<(Invariant, String, String)>, failed: Option<Failed> },
    /// Everything was released.
    Closed,
}

/// A failure in a process.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Failed {
    pub(super) rule: Rule,
    pub(super) expected: String,
    pub(super) seen: String,
    /// The index of the injected fault that caused it, if any.
    pub(super) fault: Option<usize>,
}

/// The result of a step and the process's readings.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Done {
    outcome: Outcome,
    reports: BTreeMap<String, u64>,
    notes: Vec<String>,
    tables: Vec<Table>,
    /// The line, column and length of each failed expectation, its text, and the actual result.
    unmet: Vec<((u32, u32, u32), String, String)>,
    shortage: Option<Box<Shortage>>,
    size: Option<Bytes>,
    recovery: Option<Recovery>,
    pub(super) findings: Vec<(Invariant, String, String)>,
    stats: MemoryStats,
    memory: Option<DeviceMemory>,
    calls: DeviceCalls,
}

impl Done {
    pub(super) fn new(result: StepResult, findings: Vec<Finding>, readings: &Readings) -> Self {
        let StepResult { outcome, reports, notes, tables, unmet, shortage, size, recovery } = result;
        let place = |at: Position| (at.line, at.column, at.length);
        Self {
            outcome,
            reports: reports.into_iter().map(|(key, value)| (key.name().to_owned(), value)).collect(),
            notes,
            tables,
            unmet: unmet.into_iter().map(|Unmet { at, expected, seen }| (place(at), expected, seen)).collect(),
            shortage: shortage.map(Box::new),
            size,
            recovery,
            findings: findings.into_iter().map(of_finding).collect(),
            stats: readings.stats,
            memory: readings.memory,
            calls: readings.calls,
        }
    }

    /// The readings of the process. Its clock is not comparable with others.
    pub(super) const fn readings(&self) -> Readings {
        Readings { stats: self.stats, memory: self.memory, calls: self.calls, now: Nanos::ZERO }
    }

    pub(super) fn into_result(self) -> StepResult {
        let unmet = |((line, column, length), expected, seen)| Unmet { at: Position { line, column, length }, expected, seen };
        StepResult {
            outcome: self.outcome,
            reports: self.reports.into_iter().filter_map(|(name, value)| Some((ReportKey::from_name(&name)?, value))).collect(),
            notes: self.notes,
            tables: self.tables,
            unmet: self.unmet.into_iter().map(unmet).collect(),
            shortage: self.shortage.map(|shortage| *shortage),
            size: self.size,
            recovery: self.recovery,
        }
    }
}

pub(super) fn of_finding(Finding { invariant, expected, seen }: Finding) -> (Invariant, String, String) {
    (invariant, expected, seen)
}

pub(super) fn send(to: &mut impl Write, message: &impl Serialize) -> io::Result<()> {
    let mut line = serde_json::to_vec(message)?;
    line.push(b'\n');
    to.write_all(&line)
}

pub(super) fn read<T: DeserializeOwned>(line: &[u8]) -> io::Result<T> {
    Ok(serde_json::from_slice(line)?)
}
