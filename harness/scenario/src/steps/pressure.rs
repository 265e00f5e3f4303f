//! `pressure`: memory held by others.

use std::fmt;

use schemars::JsonSchema;
use serde::Deserialize;

use super::fields::StepFields;
use crate::checker::Checker;
use crate::metric::Amount;
use harness_language::error::Problem;
use harness_language::located::Position;
use harness_language::text::AmountText;

/// Memory held by others, checked.
#[derive(Clone, Debug, PartialEq)]
pub struct Pressure {
    /// How much they hold from now on.
    pub held: Amount,
}

impl fmt::Display for Pressure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.held.fmt(f)
    }
}

/// Others hold this much of the device from now on, at most what is free; `0B` gives all of it back.
#[derive(Clone, Debug, Deserialize, JsonSchema)]
#[serde(transparent)]
#[schemars(rename = "pressure")]
pub(crate) struct PressureWire(AmountText);

impl StepFields for PressureWire {
    type Checked = Pressure;

    const EXAMPLE: &'static str = "\
- pressure: 200MiB
- pressure: 0B";

    fn check(&self, _: Position, checker: &mut Checker<'_>) -> Result<Pressure, Problem> {
        Ok(Pressure { held: checker.amount(&self.0)? })
    }
}
