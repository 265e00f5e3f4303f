//! `program`, `private_pool` and `release_pool`: steps that use another allocator, or another pool.

use std::fmt;

use schemars::JsonSchema;
use serde::Deserialize;

use super::fields::{Beside, Body, StepFields};
use super::{Step, check_steps};
use crate::checker::Checker;
use crate::metric::{PoolName, ProgramName};
use harness_base::words::count;
use harness_language::error::Problem;
use harness_language::located::Position;
use harness_language::text::NameText;

#[derive(Clone, Debug, PartialEq)]
pub struct Program {
    pub program: ProgramName,
    /// Never empty.
    pub steps: Vec<Step>,
}

#[derive(Clone, Debug, PartialEq)]
pub struct PrivatePool {
    /// Created by its first use.
    pub pool: PoolName,
    /// Never empty.
    pub steps: Vec<Step>,
}

#[derive(Clone, Debug, PartialEq)]
pub struct ReleasePool {
    pub pool: PoolName,
}

impl fmt::Display for Program {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}, {}", self.program, count(self.steps.len(), "step"))
    }
}

impl fmt::Display for PrivatePool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}, {}", self.pool, count(self.steps.len(), "step"))
    }
}

impl fmt::Display for ReleasePool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.pool.fmt(f)
    }
}

/// Runs steps as another program on the same device, with its own allocator. `programs:` declares it. The main program sees its memory as in use by
/// other processes. `NAME.reserved` and the other counters of its allocator work everywhere. Inside the block, `reserved` belongs to the program.
#[derive(Clone, Debug, JsonSchema)]
#[schemars(rename = "program", transparent)]
pub(crate) struct ProgramWire {
    name: NameText,
    #[schemars(skip)]
    body: Body,
}

/// Runs steps whose requests are served from a private pool of the allocator, as PyTorch does for a CUDA graph or `torch.cuda.MemPool`.
/// Memory of the pool serves no other request until `release_pool` names it. Allocators without private pools fail here.
#[derive(Clone, Debug, JsonSchema)]
#[schemars(rename = "private_pool", transparent)]
pub(crate) struct PrivatePoolWire {
    name: NameText,
    #[schemars(skip)]
    body: Body,
}

/// Releases a private pool. After its last block is freed, `empty_cache` and a retry can release its segments to the driver.
#[derive(Clone, Debug, Deserialize, JsonSchema)]
#[serde(transparent)]
#[schemars(rename = "release_pool")]
pub(crate) struct ReleasePoolWire(NameText);

impl<'de> Deserialize<'de> for ProgramWire {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        NameText::deserialize(deserializer).map(|name| Self { name, body: Body::default() })
    }
}

impl<'de> Deserialize<'de> for PrivatePoolWire {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        NameText::deserialize(deserializer).map(|name| Self { name, body: Body::default() })
    }
}

impl StepFields for ProgramWire {
    type Checked = Program;

    const EXAMPLE: &'static str = "\
- program: server
  steps:
    - alloc: { buffer: model, size: 3GiB }
- expect: server.reserved == 3GiB
- alloc: { buffer: batch, size: 2GiB, expect: { oom: others_hold } }";

    const BESIDE: &'static [Beside] = &[Beside::Steps];

    with_body!();

    fn check(&self, at: Position, checker: &mut Checker<'_>) -> Result<Program, Problem> {
        self.body.has_steps(at, "program")?;
        let program = checker.program(&self.name)?;
        Ok(Program { program, steps: checker.nested(at, |checker| check_steps(self.body.steps(), checker))? })
    }
}

impl StepFields for PrivatePoolWire {
    type Checked = PrivatePool;

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

    const BESIDE: &'static [Beside] = &[Beside::Steps];

    with_body!();

    fn check(&self, at: Position, checker: &mut Checker<'_>) -> Result<PrivatePool, Problem> {
        self.body.has_steps(at, "private_pool")?;
        let pool = checker.use_pool(&self.name)?;
        Ok(PrivatePool { pool, steps: checker.nested(at, |checker| check_steps(self.body.steps(), checker))? })
    }
}

impl StepFields for ReleasePoolWire {
    type Checked = ReleasePool;

    const EXAMPLE: &'static str = "\
- private_pool: graph
  steps: [ alloc: { buffer: captured, size: 64MiB } ]
- release_pool: graph";

    fn check(&self, _: Position, checker: &mut Checker<'_>) -> Result<ReleasePool, Problem> {
        Ok(ReleasePool { pool: checker.pool(&self.0)? })
    }
}
