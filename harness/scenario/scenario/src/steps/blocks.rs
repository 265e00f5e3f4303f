use derive_more::Display;
use harness_base::words::count;
use harness_language::schema::JsonSchema;
use serde::Deserialize;

use super::fields::{STEPS, StepFields, steps_inside};
use super::{Action, Step, StepKind, StepWire, check_steps};
use crate::checker::Checker;
use crate::metric::{PoolName, ProcessName, ProgramName};
use harness_language::located::{Located, Position};
use harness_language::{error::Problem, text::NameText};

/// Steps that run in another program, process or pool. The first use of a pool creates it.
#[derive(Clone, Debug, PartialEq, Display)]
#[display("{name}, {}", count(steps.len(), "step"))]
pub struct StepBlock<N> {
    pub name: N,
    pub steps: Vec<Step>,
}

/// Runs steps as another program on the same device, with its own allocator. `programs:` declares
/// it. The main program sees its memory as in use by other processes. `NAME.reserved` and the other
/// counters of its allocator work everywhere. Inside the block, `reserved` belongs to the program.
#[derive(Clone, Debug, Deserialize, JsonSchema)]
#[serde(transparent, rename = "program")]
pub(crate) struct ProgramWire(NameText);

/// Runs steps whose requests are served from a private pool of the allocator, as PyTorch does for a
/// CUDA graph or `torch.cuda.MemPool`. Memory of the pool serves no other request until
/// `release_pool` names it. Allocators without private pools fail here.
#[derive(Clone, Debug, Deserialize, JsonSchema)]
#[serde(transparent, rename = "private_pool")]
pub(crate) struct PrivatePoolWire(NameText);

/// Releases a private pool. After its last block is freed, `empty_cache` and a retry can release
/// its segments to the driver.
#[derive(Clone, Debug, Deserialize, JsonSchema)]
#[serde(transparent, rename = "release_pool")]
pub(crate) struct ReleasePoolWire(NameText);

impl StepFields<StepBlock<ProgramName>> for ProgramWire {
    const NOT_IN_PROCESSES: Option<&'static str> =
        Some("move it out of the process: other programs belong to the main process");

    const EXAMPLE: &'static str = "\
- program: server
  steps:
    - alloc: { buffer: model, size: 3GiB }
- expect: server.reserved == 3GiB
- alloc: { buffer: batch, size: 2GiB, expect: { oom: others_hold } }";

    const BESIDE: &'static [&'static str] = &[STEPS];

    fn check(
        &self,
        step: &Located<StepWire>,
        checker: &mut Checker<'_>,
    ) -> Result<StepBlock<ProgramName>, Problem> {
        let (steps, name) = (steps_inside(step, "program")?, checker.program(&self.0)?);
        Ok(StepBlock {
            name,
            steps: checker.nested(step.at, |checker| check_steps(steps, checker))?,
        })
    }
}

impl StepFields<StepBlock<PoolName>> for PrivatePoolWire {
    const NOT_IN_PROCESSES: Option<&'static str> =
        Some("move it out of the process: private pools belong to the main process");

    const EXAMPLE: &'static str = "\
- private_pool: graph
  steps:
    - alloc: { buffer: captured, size: 64MiB }
- free: captured
- alloc: { buffer: eager, size: 64MiB }
- expect: reserved == 128MiB
- release_pool: graph
- empty_cache
- expect: reserved == 64MiB";

    const BESIDE: &'static [&'static str] = &[STEPS];

    fn check(
        &self,
        step: &Located<StepWire>,
        checker: &mut Checker<'_>,
    ) -> Result<StepBlock<PoolName>, Problem> {
        let (steps, name) = (
            steps_inside(step, "private_pool")?,
            checker.use_pool(&self.0)?,
        );
        Ok(StepBlock {
            name,
            steps: checker.nested(step.at, |checker| check_steps(steps, checker))?,
        })
    }
}

impl StepFields<PoolName> for ReleasePoolWire {
    const NOT_IN_PROCESSES: Option<&'static str> =
        Some("move it out of the process: private pools belong to the main process");

    const EXAMPLE: &'static str = "\
- private_pool: graph
  steps: [ alloc: { buffer: captured, size: 64MiB } ]
- release_pool: graph";

    fn check(&self, _: &Located<StepWire>, checker: &mut Checker<'_>) -> Result<PoolName, Problem> {
        checker.pool(&self.0)
    }
}

/// Runs steps in another process, which `processes:` declares. The process has its own context on
/// the same device, its own allocator of the same configuration, and its own audit. It starts with
/// its first step and lives until the end of the run or until `kill`. One process acts at a time,
/// in the order of the file.
///
/// All processes share the memory that the scenario needs. Each process sees the memory of the
/// others as in use by other processes. Buffers, streams, events, ids and measures inside belong to
/// the process, and so do the values in its `expect` steps. `start.…` is from before its first
/// step. Outside, `NAME.reserved` and the other counters of its allocator can be used, and
/// `NAME.device.process`, the memory that NVML attributes to it. Both have the values after its
/// last step, even if the process was killed.
#[derive(Clone, Debug, Deserialize, JsonSchema)]
#[serde(transparent, rename = "process")]
pub(crate) struct ProcessWire(NameText);

/// Ends a process with SIGKILL. The process cannot release its memory, but the driver must reclaim
/// it. A later `process` step with the same name starts it again.
#[derive(Clone, Debug, Deserialize, JsonSchema)]
#[serde(transparent, rename = "kill")]
pub(crate) struct KillWire(NameText);

impl StepFields<StepBlock<ProcessName>> for ProcessWire {
    const NOT_IN_PROCESSES: Option<&'static str> = Some("the main process starts all others");

    const EXAMPLE: &'static str = "\
- process: helper
  steps:
    - alloc: { buffer: model, size: 3GiB }
    - expect: device.process - start.device.process == reserved +- 8MiB
- expect: helper.reserved == 3GiB
- alloc: { buffer: batch, size: 2GiB, expect: { oom: others_hold } }";

    const BESIDE: &'static [&'static str] = &[STEPS];

    fn check(
        &self,
        step: &Located<StepWire>,
        checker: &mut Checker<'_>,
    ) -> Result<StepBlock<ProcessName>, Problem> {
        let (steps, name) = (
            steps_inside(step, "process")?,
            checker.declared_process(&self.0)?,
        );
        check_main(StepKind::Process, step.at, checker)?;
        let inside = |checker: &mut Checker<'_>| {
            checker.in_process(&name, |checker| check_steps(steps, checker))
        };
        Ok(StepBlock {
            steps: checker.nested(step.at, inside)?,
            name,
        })
    }
}

impl StepFields<ProcessName> for KillWire {
    const NOT_IN_PROCESSES: Option<&'static str> = Some("the main process ends all others");

    const EXAMPLE: &'static str = "\
- process: helper
  steps: [ alloc: { buffer: model, size: 3GiB } ]
- kill: helper
- eventually: device.used <= start.device.used";

    fn check(
        &self,
        step: &Located<StepWire>,
        checker: &mut Checker<'_>,
    ) -> Result<ProcessName, Problem> {
        let process = checker.declared_process(&self.0)?;
        check_main(StepKind::Kill, step.at, checker)?;
        if !checker.end_process(&process) {
            return Err(Problem::new(
                self.0.at,
                format!("process `{process}` is not running here"),
            )
            .help(format!(
                "start it first: `- process: {process}` and below it `  steps: [reset_peak_stats]`"
            )));
        }
        Ok(process)
    }
}

pub(super) fn check_inside(
    action: &Action,
    at: Position,
    id: Option<&NameText>,
    meanwhile: Option<Position>,
    checker: &Checker<'_>,
) -> Result<(), Problem> {
    let Some(process) = &checker.process else {
        return Ok(());
    };
    check_main(action.kind(), at, checker)?;
    if let Some(at) = meanwhile {
        return Err(Problem::new(
            at,
            format!("`meanwhile` does not work in the process `{process}`"),
        )
        .help("use `meanwhile` with a step of the main process"));
    }
    if action.is_block() && action.leak_check().is_some() {
        return Err(Problem::new(
            at,
            format!("`leak_check` does not work with a loop in the process `{process}`"),
        )
        .help("use it with a loop of the main process, or with `train`"));
    }
    match id {
        Some(id) if action.is_block() => Err(Problem::new(
            id.at,
            format!("a loop in the process `{process}` has no figures"),
        )
        .help("give the `id` to a step inside the loop")),
        _ => Ok(()),
    }
}

/// Rejects a step of a kind that only the main process can run.
fn check_main(kind: StepKind, at: Position, checker: &Checker<'_>) -> Result<(), Problem> {
    match (&checker.process, kind.not_in_processes()) {
        (Some(process), Some(why)) => {
            Err(Problem::new(at, format!("the process `{process}` cannot run `{kind}`")).help(why))
        }
        _ => Ok(()),
    }
}
