//! `process` and `kill`: steps of another process on the same device.

use std::fmt;

use schemars::JsonSchema;
use serde::Deserialize;

use super::fields::{Beside, Body, StepFields};
use super::{Action, Step, StepKind, check_steps};
use crate::checker::Checker;
use crate::metric::ProcessName;
use harness_base::words::count;
use harness_language::error::Problem;
use harness_language::located::Position;
use harness_language::text::NameText;

#[derive(Clone, Debug, PartialEq)]
pub struct Process {
    pub process: ProcessName,
    /// Never empty.
    pub steps: Vec<Step>,
}

#[derive(Clone, Debug, PartialEq)]
pub struct Kill {
    pub process: ProcessName,
}

impl fmt::Display for Process {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}, {}", self.process, count(self.steps.len(), "step"))
    }
}

impl fmt::Display for Kill {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.process.fmt(f)
    }
}

/// Runs steps in another process, which `processes:` declares. The process has its own context on the same device, its own allocator of the same
/// configuration, and its own audit. It starts with its first step and lives until the end of the run or until `kill`. One process acts at a
/// time, in the order of the file.
///
/// All processes share the memory that the scenario needs. Each process sees the memory of the others as in use by other processes. Buffers,
/// streams, events, ids and measures inside belong to the process, and so do the values in its `expect` steps. `start.…` is from before its first step.
/// Outside, `NAME.reserved` and the other counters of its allocator can be used, and `NAME.device.process`, the memory that NVML attributes to
/// it. Both have the values after its last step, even if the process was killed.
#[derive(Clone, Debug, JsonSchema)]
#[schemars(rename = "process", transparent)]
pub(crate) struct ProcessWire {
    name: NameText,
    #[schemars(skip)]
    body: Body,
}

/// Ends a process with SIGKILL. The process cannot release its memory, but the driver must reclaim it. A later `process` step with the same
/// name starts it again.
#[derive(Clone, Debug, Deserialize, JsonSchema)]
#[serde(transparent)]
#[schemars(rename = "kill")]
pub(crate) struct KillWire(NameText);

impl<'de> Deserialize<'de> for ProcessWire {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        NameText::deserialize(deserializer).map(|name| Self { name, body: Body::default() })
    }
}

impl StepFields for ProcessWire {
    type Checked = Process;

    const EXAMPLE: &'static str = "\
- process: helper
  steps:
    - alloc: { buffer: model, size: 3GiB }
    - expect: device.process - start.device.process == reserved +- 8MiB
- expect: helper.reserved == 3GiB
- alloc: { buffer: batch, size: 2GiB, expect: { oom: others_hold } }";

    const BESIDE: &'static [Beside] = &[Beside::Steps];

    with_body!();

    fn check(&self, at: Position, checker: &mut Checker<'_>) -> Result<Process, Problem> {
        self.body.has_steps(at, "process")?;
        let process = checker.declared_process(&self.name)?;
        if let Some(outer) = checker.process() {
            return Err(refused(StepKind::Process, outer, at, "the main process starts all others"));
        }
        let inside = |checker: &mut Checker<'_>| checker.in_process(&process, |checker| check_steps(self.body.steps(), checker));
        let steps = checker.nested(at, inside)?;
        Ok(Process { process, steps })
    }
}

impl StepFields for KillWire {
    type Checked = Kill;

    const EXAMPLE: &'static str = "\
- process: helper
  steps: [ alloc: { buffer: model, size: 3GiB } ]
- kill: helper
- eventually: device.used <= start.device.used";

    fn check(&self, at: Position, checker: &mut Checker<'_>) -> Result<Kill, Problem> {
        let process = checker.declared_process(&self.0)?;
        if let Some(outer) = checker.process() {
            return Err(refused(StepKind::Kill, outer, at, "the main process ends all others"));
        }
        if !checker.end_process(&process) {
            return Err(Problem::new(self.0.position(), format!("process `{process}` is not running here"))
                .help(format!("start it first: `- process: {process}` and below it `  steps: [reset_peak_stats]`")));
        }
        Ok(Kill { process })
    }
}

/// Rejects steps that a process cannot run.
pub(super) fn check_inside(
    action: &Action,
    at: Position,
    id: Option<&NameText>,
    meanwhile: Option<Position>,
    checker: &Checker<'_>,
) -> Result<(), Problem> {
    let Some(process) = checker.process() else { return Ok(()) };
    if let Some(why) = not_inside(action.kind()) {
        return Err(refused(action.kind(), process, at, why));
    }
    if let Some(at) = meanwhile {
        return Err(Problem::new(at, format!("`meanwhile` does not work in the process `{process}`"))
            .help("use `meanwhile` with a step of the main process"));
    }
    if action.is_block() && action.leak_check().is_some() {
        return Err(Problem::new(at, format!("`leak_check` does not work with a loop in the process `{process}`"))
            .help("use it with a loop of the main process, or with `train`"));
    }
    match id {
        Some(id) if action.is_block() => Err(Problem::new(id.position(), format!("a loop in the process `{process}` has no figures"))
            .help("give the `id` to a step inside the loop")),
        _ => Ok(()),
    }
}

fn refused(kind: StepKind, process: &ProcessName, at: Position, why: &str) -> Problem {
    Problem::new(at, format!("the process `{process}` cannot run `{kind}`")).help(why.to_owned())
}

/// Why a process cannot run steps of this kind.
const fn not_inside(kind: StepKind) -> Option<&'static str> {
    match kind {
        StepKind::Process => Some("the main process starts all others"),
        StepKind::Kill => Some("the main process ends all others"),
        StepKind::Exec => Some("move it out of the process: the main process starts programs"),
        StepKind::Program => Some("move it out of the process: other programs belong to the main process"),
        StepKind::ExternalMemory => Some("move it out of the process"),
        StepKind::PrivatePool | StepKind::ReleasePool => Some("move it out of the process: private pools belong to the main process"),
        StepKind::Eventually => Some("move it out of the process, as in `eventually: worker.active == 0`"),
        StepKind::Alloc
        | StepKind::Free
        | StepKind::RecordStream
        | StepKind::Fill
        | StepKind::Verify
        | StepKind::ReadAsync
        | StepKind::Busy
        | StepKind::Record
        | StepKind::Wait
        | StepKind::Synchronize
        | StepKind::EmptyCache
        | StepKind::ResetPeakStats
        | StepKind::SetMemoryFraction
        | StepKind::For
        | StepKind::Repeat
        | StepKind::Storm
        | StepKind::Pins
        | StepKind::Train
        | StepKind::Infer
        | StepKind::Replay
        | StepKind::Measure
        | StepKind::Compare
        | StepKind::Expect => None,
    }
}
