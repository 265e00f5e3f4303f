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
use harness_record::{FailedRequest, Invariant, Outcome, Recovery, Rule, Table};
use harness_scenario::{Position, Readings, ReportKey};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::rig::Finding;
use crate::step_result::{StepResult, Unmet};

/// A message of the main process.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum Order {
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
pub(crate) struct Start {
    /// Its name in the scenario.
    pub(crate) process: String,
    /// The text and the path of the scenario.
    pub(crate) source: String,
    pub(crate) path: PathBuf,
    pub(crate) parameters: BTreeMap<String, String>,
    /// The memory of all processes together.
    pub(crate) memory: Bytes,
    pub(crate) allocator: String,
    pub(crate) seed: u64,
    /// True if every operation is audited.
    pub(crate) audit: bool,
    /// The command line arguments that select the device.
    pub(crate) device: Vec<OsString>,
    pub(crate) ledger: PathBuf,
    /// The number of the step that starts it.
    pub(crate) step: u32,
    /// The faults of its device, if the run has faults.
    pub(crate) faults: Option<InjectorState>,
}

/// A step, by its number in the scenario.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Do {
    /// The number of the step in the run.
    pub(crate) number: u32,
    pub(crate) step: usize,
    /// The loops around it: their step numbers and completed iterations.
    pub(crate) loops: Vec<(usize, u64)>,
}

/// A message of a process.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Answer {
    pub(crate) reply: Reply,
    /// The calls and faults since the last answer, if the run has faults.
    pub(crate) faults: Option<InjectorState>,
}

/// The result of an order.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum Reply {
    /// The process cannot start.
    Refused(String),
    Done(Box<Done>),
    /// The process cannot continue because of violated invariants or a failure.
    Stopped {
        findings: Vec<(Invariant, String, String)>,
        failed: Option<Failed>,
    },
    /// Everything was released.
    Closed,
}

/// A failure in a process.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Failed {
    pub(crate) rule: Rule,
    pub(crate) expected: String,
    pub(crate) seen: String,
    /// The index of the injected fault that caused it, if any.
    pub(crate) fault: Option<usize>,
}

/// The result of a step and the process's readings.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Done {
    outcome: Outcome,
    reports: BTreeMap<String, u64>,
    notes: Vec<String>,
    tables: Vec<Table>,
    /// The line, column and length of each failed expectation, its text, and the actual result.
    unmet: Vec<((u32, u32, u32), String, String)>,
    failed_request: Option<Box<FailedRequest>>,
    size: Option<Bytes>,
    recovery: Option<Recovery>,
    pub(crate) findings: Vec<(Invariant, String, String)>,
    stats: MemoryStats,
    memory: Option<DeviceMemory>,
    calls: DeviceCalls,
}

impl Done {
    pub(crate) fn new(result: StepResult, findings: Vec<Finding>, readings: &Readings) -> Self {
        let StepResult { outcome, reports, notes, tables, unmet, failed_request, size, recovery } = result;
        let place = |at: Position| (at.line, at.column, at.length);
        Self {
            outcome,
            reports: reports.into_iter().map(|(key, value)| (key.name().to_owned(), value)).collect(),
            notes,
            tables,
            unmet: unmet.into_iter().map(|Unmet { at, expected, seen }| (place(at), expected, seen)).collect(),
            failed_request: failed_request.map(Box::new),
            size,
            recovery,
            findings: findings.into_iter().map(of_finding).collect(),
            stats: readings.stats,
            memory: readings.memory,
            calls: readings.calls,
        }
    }

    /// The readings of the process. Its clock is not comparable with others.
    pub(crate) const fn readings(&self) -> Readings {
        Readings { stats: self.stats, memory: self.memory, calls: self.calls, now: Nanos::ZERO }
    }

    pub(crate) fn into_result(self) -> StepResult {
        let unmet = |((line, column, length), expected, seen)| Unmet { at: Position { line, column, length }, expected, seen };
        StepResult {
            outcome: self.outcome,
            reports: self.reports.into_iter().filter_map(|(name, value)| Some((ReportKey::from_name(&name)?, value))).collect(),
            notes: self.notes,
            tables: self.tables,
            unmet: self.unmet.into_iter().map(unmet).collect(),
            failed_request: self.failed_request.map(|failed_request| *failed_request),
            size: self.size,
            recovery: self.recovery,
        }
    }
}

pub(crate) fn of_finding(Finding { invariant, expected, seen }: Finding) -> (Invariant, String, String) {
    (invariant, expected, seen)
}

pub(crate) fn send(to: &mut impl Write, message: &impl Serialize) -> io::Result<()> {
    let mut line = serde_json::to_vec(message)?;
    line.push(b'\n');
    to.write_all(&line)
}

pub(crate) fn read<T: DeserializeOwned>(line: &[u8]) -> io::Result<T> {
    Ok(serde_json::from_slice(line)?)
}
