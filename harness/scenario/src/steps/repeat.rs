//! `repeat`: steps that run several times.

use std::fmt;

use schemars::JsonSchema;
use serde::Deserialize;

use super::fields::StepFields;
use super::{Step, StepWire, check_steps};
use crate::checker::Checker;
use harness_language::error::Problem;
use harness_language::located::{Located, Position};
use harness_language::text::bounded;

/// Most iterations of one `repeat`.
pub const MAX_TIMES: u64 = 1_000_000;

/// Steps that run several times, checked.
#[derive(Clone, Debug, PartialEq)]
pub struct Repeat {
    /// How often.
    pub times: u64,
    /// What.
    pub steps: Vec<Step>,
}

impl fmt::Display for Repeat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} steps, {} times", self.steps.len(), self.times)
    }
}

/// Runs steps several times. What one iteration leaves must suit the next. It may be nested 4 deep.
#[derive(Clone, Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
#[schemars(rename = "repeat")]
pub(crate) struct RepeatWire {
    /// How often, from 1 to 1000000; a scenario does at most 10000000 operations in all.
    #[schemars(range(min = 1, max = MAX_TIMES))]
    times: Located<u64>,
    /// What, in order.
    #[schemars(length(min = 1))]
    pub(super) steps: Vec<Located<StepWire>>,
}

impl StepFields for RepeatWire {
    type Checked = Repeat;

    const EXAMPLE: &'static str = "\
- repeat:
    times: 10
    steps:
      - alloc: { buffer: batch, size: 4MiB }
      - free: batch";

    fn check(&self, at: Position, checker: &mut Checker<'_>) -> Result<Repeat, Problem> {
        let times = bounded(&self.times, "times", 1..=MAX_TIMES)?;
        if self.steps.is_empty() {
            return Err(Problem::new(at, "`repeat` has no steps").help("as in `repeat: { times: 3, steps: [reset_peaks] }`"));
        }
        Ok(Repeat { times, steps: checker.repeat(at, times, |checker| check_steps(&self.steps, checker))? })
    }
}
