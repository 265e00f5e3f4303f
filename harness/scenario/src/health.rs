//! `health_check`: full checks during long runs.

use schemars::JsonSchema;
use serde::Deserialize;

use crate::checker::{Checker, MAX_OPERATIONS};
use harness_language::error::Problem;
use harness_language::text::CountText;

/// Runs a full check every N steps. It checks all always-checked invariants against the whole structure of each allocator and the device's
/// counters, and verifies every live buffer and the live blocks of storms. A violation names the step. It is for runs without the audit
/// (`--skip-checks`), which otherwise find errors only when a buffer is freed or at the end. With the audit it adds the contents. Timed runs skip it.
#[derive(Clone, Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
#[schemars(rename = "health_check")]
pub(crate) struct HealthCheckWire {
    /// Steps from one check to the next, from 1 to 10000000. Steps in loops and operations of `storm`, `replay`, `train` and `infer` count.
    every: CountText,
}

impl HealthCheckWire {
    pub(crate) fn check(&self, checker: &Checker<'_>) -> Result<u64, Problem> {
        checker.whole(&self.every, "every", 1..=MAX_OPERATIONS)
    }
}
