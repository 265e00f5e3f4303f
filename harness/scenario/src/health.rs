//! `health_check`: how often a long run is looked at as a whole.

use schemars::JsonSchema;
use serde::Deserialize;

use crate::checker::{Checker, MAX_OPERATIONS};
use harness_language::error::Problem;
use harness_language::text::CountText;

/// Looks at everything from time to time: all always-checked invariants from the whole structure of each allocator and the device's own word, and the contents of every live buffer and
/// of the live blocks of storms. A finding names the step. It is for runs without the audit (`--skip-checks`), which else see mistakes only when a buffer is freed or at the end; with
/// the audit it adds the contents. A timed run does none of it.
#[derive(Clone, Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
#[schemars(rename = "health_check")]
pub(crate) struct HealthCheckWire {
    /// After each so many steps, those in loops and the operations of a `storm`, a `replay`, a `train` or an `infer` included, from 1 to 10000000.
    every: CountText,
}

impl HealthCheckWire {
    /// After how many steps and operations.
    pub(crate) fn check(&self, checker: &Checker<'_>) -> Result<u64, Problem> {
        checker.whole(&self.every, "every", 1..=MAX_OPERATIONS)
    }
}
