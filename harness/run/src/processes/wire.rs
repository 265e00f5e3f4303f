//! What the main process and another one say to each other: a line of JSON each, over a socket that is the other one's standard input.

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

/// What the main process wants.
#[derive(Debug, Serialize, Deserialize)]
pub(super) enum Order {
    /// Comes first, and once.
    Start(Box<Start>),
    /// A step.
    Do(Do),
    /// Everything is freed, and the end is checked, in the step with this number.
    Finish(u32),
    /// Everything is given back, whatever state the process is in, and it ends.
    Close,
}

/// What a process is to be.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Start {
    /// Its name in the scenario.
    pub(super) process: String,
    /// The text of the scenario, and the file that it is from.
    pub(super) source: String,
    pub(super) path: PathBuf,
    /// The values of its parameters.
    pub(super) parameters: BTreeMap<String, String>,
    /// What all processes have together.
    pub(super) memory: Bytes,
    /// The arm, by its name.
    pub(super) allocator: String,
    pub(super) seed: u64,
    /// Whether each operation is audited.
    pub(super) audit: bool,
    /// The arguments of the command line that choose the device.
    pub(super) device: Vec<OsString>,
    pub(super) ledger: PathBuf,
    /// The number of the step that starts it.
    pub(super) step: u32,
    /// What goes wrong on its device, where anything does in the run.
    pub(super) faults: Option<InjectorState>,
}

/// A step, by its number in the scenario.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Do {
    /// The number of the step in the run.
    pub(super) number: u32,
    pub(super) step: usize,
    /// The loops around it, by their numbers, with their complete iterations.
    pub(super) loops: Vec<(usize, u64)>,
}

/// What a process answers.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Answer {
    pub(super) reply: Reply,
    /// What has become of its calls since its last answer, where the run has faults.
    pub(super) faults: Option<InjectorState>,
}

/// What has become of an order.
#[derive(Debug, Serialize, Deserialize)]
pub(super) enum Reply {
    /// It cannot start.
    Refused(String),
    /// It has done what was ordered.
    Done(Box<Done>),
    /// It cannot go on: invariants that do not hold, or what failed.
    Stopped { findings: Vec<(Invariant, String, String)>, failed: Option<Failed> },
    /// It has given everything back.
    Closed,
}

/// What failed in a process.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Failed {
    pub(super) rule: Rule,
    pub(super) expected: String,
    pub(super) seen: String,
    /// The fault that it comes from, by its place among those of the process.
    pub(super) fault: Option<usize>,
}

/// What a step left behind, and where the process stands.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Done {
    outcome: Outcome,
    reports: BTreeMap<String, u64>,
    notes: Vec<String>,
    tables: Vec<Table>,
    /// Line, column and length of the place, what was expected, and what was seen.
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

    /// Where the process stands. Its clock is nobody else's.
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

/// Says something.
pub(super) fn send(to: &mut impl Write, message: &impl Serialize) -> io::Result<()> {
    let mut line = serde_json::to_vec(message)?;
    line.push(b'\n');
    to.write_all(&line)
}

/// Understands a line.
pub(super) fn read<T: DeserializeOwned>(line: &[u8]) -> io::Result<T> {
    Ok(serde_json::from_slice(line)?)
}
