//! `fill` and `verify`: what buffers hold.

use std::fmt;

use schemars::JsonSchema;
use serde::Deserialize;

use super::fields::StepFields;
use crate::checker::Checker;
use crate::metric::{BufferName, StreamName};
use harness_language::error::Problem;
use harness_language::located::Position;
use harness_language::text::NameText;

/// A buffer to be written, checked.
#[derive(Clone, Debug, PartialEq)]
pub struct Fill {
    /// Which one.
    pub buffer: BufferName,
    /// On which stream.
    pub stream: StreamName,
}

/// A buffer to be read, checked.
#[derive(Clone, Debug, PartialEq)]
pub struct Verify {
    /// Which one.
    pub buffer: BufferName,
    /// On which stream.
    pub stream: StreamName,
}

impl fmt::Display for Fill {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}, on {}", self.buffer, self.stream)
    }
}

impl fmt::Display for Verify {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}, on {}", self.buffer, self.stream)
    }
}

/// Queues work on a stream that writes a fresh tag to every byte of the buffer. A buffer of no bytes is left alone.
#[derive(Clone, Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
#[schemars(rename = "fill")]
pub(crate) struct FillWire {
    /// A live buffer.
    buffer: NameText,
    /// The stream: `default` if not given.
    stream: Option<NameText>,
}

/// Reads every byte of the buffer on a stream and waits: it must still hold its last `fill`.
#[derive(Clone, Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
#[schemars(rename = "verify")]
pub(crate) struct VerifyWire {
    /// A live buffer that was filled.
    buffer: NameText,
    /// The stream: `default` if not given.
    stream: Option<NameText>,
}

impl StepFields for FillWire {
    type Checked = Fill;

    const EXAMPLE: &'static str = "\
- alloc: { buffer: batch, size: 4MiB }
- fill: { buffer: batch }";

    fn check(&self, _: Position, checker: &mut Checker<'_>) -> Result<Fill, Problem> {
        Ok(Fill { stream: checker.stream(self.stream.as_ref())?, buffer: checker.fill(&self.buffer)? })
    }
}

impl StepFields for VerifyWire {
    type Checked = Verify;

    const EXAMPLE: &'static str = "\
- alloc: { buffer: batch, size: 4MiB }
- fill: { buffer: batch }
- verify: { buffer: batch }";

    fn check(&self, _: Position, checker: &mut Checker<'_>) -> Result<Verify, Problem> {
        Ok(Verify { stream: checker.stream(self.stream.as_ref())?, buffer: checker.verify(&self.buffer)? })
    }
}
