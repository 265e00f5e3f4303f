//! The messages between the main process and another one: one line of JSON each, over a socket that
//! is the other one's standard input.

use std::io::{self, Write};
use std::{collections::BTreeMap, ffi::OsString, path::PathBuf};

use harness_allocator::{device::faulty::InjectorState, units::Bytes};
use harness_record::{CurvePoint, Rule};
use harness_scenario::Readings;
use serde::{Deserialize, Serialize, de::DeserializeOwned};

use crate::{rig::Finding, step_result::StepResult};

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
    pub(crate) audit: bool,
    /// The command line arguments that select the device.
    pub(crate) device: Vec<OsString>,
    pub(crate) ledger: PathBuf,
    pub(crate) step: u32,
    /// The faults of its device, if the run has faults.
    pub(crate) faults: Option<InjectorState>,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Do {
    pub(crate) number: u32,
    pub(crate) step: usize,
    /// The loops around it: their step numbers and completed iterations.
    pub(crate) loops: Vec<(usize, u64)>,
}

#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Answer {
    pub(crate) reply: Reply,
    /// The calls and faults since the last answer, if the run has faults.
    pub(crate) faults: Option<InjectorState>,
}

#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum Reply {
    Refused(String),
    Done(Box<Done>),
    /// The process cannot continue because of violated invariants.
    Violated(Vec<Finding>),
    /// The process cannot continue because of a failure.
    Failed {
        rule: Rule,
        expected: String,
        seen: String,
        /// The index of the injected fault that caused it, if any.
        fault: Option<usize>,
    },
    Closed,
}

/// The result of a step and the process's readings. The time in them is 0, because clocks of
/// processes are not comparable.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Done {
    pub(crate) result: StepResult,
    pub(crate) findings: Vec<Finding>,
    pub(crate) readings: Readings,
    /// The process's memory during the step.
    pub(crate) curve: Vec<CurvePoint>,
}

pub(crate) fn send(to: &mut impl Write, message: &impl Serialize) -> io::Result<()> {
    let mut line = serde_json::to_vec(message)?;
    line.push(b'\n');
    to.write_all(&line)
}

pub(crate) fn read<T: DeserializeOwned>(line: &[u8]) -> io::Result<T> {
    Ok(serde_json::from_slice(line)?)
}
