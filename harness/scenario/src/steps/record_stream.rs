//! `record_stream`: marks a buffer as used by another stream.

use std::fmt;

use schemars::JsonSchema;
use serde::Deserialize;

use super::fields::StepFields;
use crate::checker::Checker;
use crate::metric::{BufferRef, StreamName};
use harness_language::error::Problem;
use harness_language::located::Position;
use harness_language::text::{BufferText, NameText};

#[derive(Clone, Debug, PartialEq)]
pub struct RecordStream {
    pub buffer: BufferRef,
    pub stream: StreamName,
}

impl fmt::Display for RecordStream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}, on {}", self.buffer, self.stream)
    }
}

/// Marks a buffer as used by another stream, as `Tensor.record_stream` does. After `free`, its memory is not reused until the work of that stream is done.
#[derive(Clone, Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
#[schemars(rename = "record_stream")]
pub(crate) struct RecordStreamWire {
    /// A live buffer.
    buffer: BufferText,
    /// The other stream.
    stream: NameText,
}

impl StepFields for RecordStreamWire {
    type Checked = RecordStream;

    const EXAMPLE: &'static str = "\
- alloc: { buffer: batch, size: 4MiB }
- record_stream: { buffer: batch, stream: copy }";

    fn check(&self, _: Position, checker: &mut Checker<'_>) -> Result<RecordStream, Problem> {
        Ok(RecordStream { buffer: checker.live_buffer(&self.buffer)?, stream: checker.stream(Some(&self.stream))? })
    }
}
