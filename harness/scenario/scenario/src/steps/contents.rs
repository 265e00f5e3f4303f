use derive_more::Display;
use harness_base::words::joined;
use harness_language::schema::JsonSchema;
use serde::Deserialize;

use super::{StepWire, fields::StepFields};
use crate::checker::Checker;
use crate::metric::{BufferRef, StreamName};
use harness_language::error::Problem;
use harness_language::located::{ListOr, Located, Position};
use harness_language::text::{BufferText, NameText};

/// Buffers that work on a stream uses.
#[derive(Clone, Debug, PartialEq, Display)]
#[display("{}, on {stream}", joined(buffers, ", "))]
pub struct Use {
    /// In order; never empty.
    pub buffers: Vec<BufferRef>,
    pub stream: StreamName,
}

/// A buffer, a list of buffers, or a map with a stream.
type UseWire = Located<ListOr<BufferText, OnStreamWire>>;

/// A buffer, and the stream whose work uses it.
#[derive(Clone, Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, rename = "use_on_stream")]
struct OnStreamWire {
    /// A live buffer.
    buffer: BufferText,
    /// The stream. Default: `default`.
    stream: Option<NameText>,
}

fn check_use(
    wire: &UseWire,
    at: Position,
    step: &str,
    checker: &mut Checker<'_>,
    check: impl Fn(&mut Checker<'_>, &BufferText) -> Result<BufferRef, Problem>,
) -> Result<Use, Problem> {
    let (names, stream) = match wire.texts() {
        Ok(names) => (names, None),
        Err(OnStreamWire { buffer, stream }) => (vec![buffer.clone()], stream.as_ref()),
    };
    if names.is_empty() {
        return Err(Problem::new(at, format!("`{step}` has an empty list"))
            .help(format!("as in `- {step}: a` or `- {step}: [a, b]`")));
    }
    let stream = checker.stream(stream)?;
    Ok(Use {
        buffers: names
            .iter()
            .map(|name| check(checker, name))
            .collect::<Result<_, _>>()?,
        stream,
    })
}

/// Declares the steps. They differ in their documentation and in the check of their buffers.
macro_rules! uses {
    ($($wire:ident, $name:literal, $check:expr, $example:literal, $about:literal;)*) => {$(
        #[doc = $about]
        #[derive(Clone, Debug, Deserialize, JsonSchema)]
        #[serde(transparent, rename = $name)]
        pub(crate) struct $wire(UseWire);

        impl StepFields<Use> for $wire {
            const EXAMPLE: &'static str = $example;

            fn check(
                &self,
                step: &Located<StepWire>,
                checker: &mut Checker<'_>,
            ) -> Result<Use, Problem> {
                check_use(&self.0, step.at, $name, checker, $check)
            }
        }
    )*};
}

uses! {
    FillWire, "fill", |checker, buffer| checker.fill(buffer),
        "- alloc: { buffer: batch, size: 4MiB }\n- fill: batch\n- synchronize: device\n- fill: { \
         buffer: batch, stream: side }\n- synchronize: { stream: side }",
        "Queues work on a stream that writes a new pattern to every byte of a buffer. A buffer of \
         0 bytes is skipped.";
    VerifyWire, "verify", |checker, buffer| checker.verify(buffer),
        "- alloc: { buffer: batch, size: 4MiB }\n- fill: batch\n- verify: batch",
        "Reads every byte of a buffer on a stream, waits, and checks that the buffer contains the \
         pattern of its last `fill`.";
    ReadAsyncWire, "read_async", |checker, buffer| checker.verify(buffer),
        "- alloc: { buffer: batch, size: 4MiB }\n- fill: batch\n- synchronize: device\n- \
         read_async: { buffer: batch, stream: copy }\n- synchronize: { stream: copy }",
        "Queues work on a stream that reads every byte of a buffer, without waiting. The bytes \
         must be the pattern of the last `fill` before the read. They are checked at the next wait \
         for the stream, or at the end of the run.";
}
