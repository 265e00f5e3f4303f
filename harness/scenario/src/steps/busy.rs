//! `busy`: keeps a stream busy.

use std::fmt;

use harness_allocator::units::Nanos;
use schemars::JsonSchema;
use serde::Deserialize;

use super::fields::StepFields;
use crate::checker::Checker;
use crate::metric::StreamName;
use harness_language::error::Problem;
use harness_language::located::Position;
use harness_language::text::{DurationText, NameText, duration};

#[derive(Clone, Debug, PartialEq)]
pub struct Busy {
    pub stream: StreamName,
    pub duration: Nanos,
}

impl fmt::Display for Busy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} on {}", self.duration, self.stream)
    }
}

/// Queues work that keeps a stream busy for some time. The next step starts immediately.
#[derive(Clone, Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
#[schemars(rename = "busy")]
pub(crate) struct BusyWire {
    /// The stream. Default: `default`.
    stream: Option<NameText>,
    /// How long the work takes.
    duration: DurationText,
}

impl StepFields for BusyWire {
    type Checked = Busy;

    const EXAMPLE: &'static str = "- busy: { stream: side, duration: 5ms }";

    fn check(&self, _: Position, checker: &mut Checker<'_>) -> Result<Busy, Problem> {
        Ok(Busy { stream: checker.stream(self.stream.as_ref())?, duration: duration(&self.duration)? })
    }
}
