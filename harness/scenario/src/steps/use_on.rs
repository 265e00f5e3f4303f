//! `use_on`: another stream uses a buffer.

use std::fmt;

use schemars::JsonSchema;
use serde::Deserialize;

use super::StepFields;
use crate::check::Checker;
use crate::metric::{BufferName, StreamName};
use harness_language::error::Problem;
use harness_language::located::Position;
use harness_language::text::NameText;

/// Another stream uses a buffer, checked.
#[derive(Clone, Debug, PartialEq)]
pub struct UseOn {
    /// What is used.
    pub buffer: BufferName,
    /// Where.
    pub stream: StreamName,
}

impl fmt::Display for UseOn {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}, on {}", self.buffer, self.stream)
    }
}

/// Tells the allocator that work on another stream uses the buffer too (`record_stream`): after `free` its memory waits for that work.
#[derive(Clone, Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
#[schemars(rename = "use_on")]
pub(crate) struct UseOnWire {
    /// A live buffer.
    buffer: NameText,
    /// The stream.
    stream: NameText,
}

impl StepFields for UseOnWire {
    type Checked = UseOn;

    const EXAMPLE: &'static str = "\
- alloc: { buffer: batch, size: 4MiB }
- use_on: { buffer: batch, stream: copy }";

    fn check(&self, _: Position, checker: &mut Checker<'_>) -> Result<UseOn, Problem> {
        Ok(UseOn { buffer: checker.live_buffer(&self.buffer)?, stream: checker.stream(Some(&self.stream))? })
    }
}
