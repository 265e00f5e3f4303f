//! `measure`: keeps all counters under a name.

use std::fmt;

use schemars::JsonSchema;
use serde::Deserialize;

use super::fields::StepFields;
use crate::checker::Checker;
use crate::metric::MeasureName;
use harness_language::error::Problem;
use harness_language::located::Position;
use harness_language::text::NameText;

#[derive(Clone, Debug, PartialEq)]
pub struct Measure {
    /// A later iteration of a loop replaces the values of the earlier one.
    pub name: MeasureName,
}

impl fmt::Display for Measure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.name.fmt(f)
    }
}

/// Keeps the current value of every counter under a name. Later steps use `NAME.reserved_bytes.all.current`, `NAME.device.used` or `NAME.time.now`.
#[derive(Clone, Debug, Deserialize, JsonSchema)]
#[serde(transparent)]
#[schemars(rename = "measure")]
pub(crate) struct MeasureWire(NameText);

impl MeasureWire {
    pub(crate) const fn name(&self) -> &NameText {
        &self.0
    }
}

impl StepFields for MeasureWire {
    type Checked = Measure;

    const EXAMPLE: &'static str = "\
- measure: before
- alloc: { buffer: a, size: 400MiB }
- expect: device.used - before.device.used == 400MiB";

    fn check(&self, _: Position, checker: &mut Checker<'_>) -> Result<Measure, Problem> {
        Ok(Measure { name: checker.declare_measure(&self.0)? })
    }
}
