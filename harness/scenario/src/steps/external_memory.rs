//! `external_memory`: memory in use by other processes.

use std::fmt;

use schemars::JsonSchema;
use serde::Deserialize;

use super::fields::StepFields;
use crate::checker::Checker;
use crate::metric::Amount;
use harness_language::error::Problem;
use harness_language::located::Position;
use harness_language::text::AmountText;

#[derive(Clone, Debug, PartialEq)]
pub struct ExternalMemory {
    /// Memory that others use from now on.
    pub held: Amount,
}

impl fmt::Display for ExternalMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.held.fmt(f)
    }
}

/// Sets how much memory of the device is in use by other processes, at most the free memory. `0B` releases all of it.
#[derive(Clone, Debug, Deserialize, JsonSchema)]
#[serde(transparent)]
#[schemars(rename = "external_memory")]
pub(crate) struct ExternalMemoryWire(AmountText);

impl StepFields for ExternalMemoryWire {
    type Checked = ExternalMemory;

    const EXAMPLE: &'static str = "\
- external_memory: 200MiB
- external_memory: 0B";

    fn check(&self, _: Position, checker: &mut Checker<'_>) -> Result<ExternalMemory, Problem> {
        Ok(ExternalMemory { held: checker.amount(&self.0)? })
    }
}
