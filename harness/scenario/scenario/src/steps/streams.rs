//! `record`, `wait`, `synchronize`, `busy` and `record_stream`: the work of streams and its order.
//!
//! A step in the file and a checked step have the same fields, of different types.

use derive_more::Display;
use harness_allocator::units::Nanos;
use harness_language::schema::JsonSchema;
use serde::Deserialize;

use super::{StepWire, fields::StepFields};
use crate::checker::Checker;
use crate::metric::{BufferRef, EventName, StreamName};
use harness_language::text::{BufferText, DurationText, NameText, duration};
use harness_language::{error::Problem, located::Located};

/// Records an event after all work of a stream so far. The first `record` creates the event.
/// Recording it again replaces the earlier record.
#[derive(Clone, Debug, PartialEq, Deserialize, JsonSchema, Display)]
#[serde(deny_unknown_fields, rename = "record")]
#[display("{event}, on {stream}")]
pub struct RecordEvent<E = EventName, S = StreamName> {
    /// The event.
    pub event: E,
    /// The stream. Default: `default`.
    pub stream: S,
}

pub(crate) type RecordWire = RecordEvent<NameText, Option<NameText>>;

/// Makes all later work of a stream wait for the last record of an event. The next step starts
/// immediately.
#[derive(Clone, Debug, PartialEq, Deserialize, JsonSchema, Display)]
#[serde(deny_unknown_fields, rename = "wait")]
#[display("for {event}, on {stream}")]
pub struct WaitEvent<E = EventName, S = StreamName> {
    /// A recorded event.
    pub event: E,
    /// The stream. Default: `default`.
    pub stream: S,
}

pub(crate) type WaitWire = WaitEvent<NameText, Option<NameText>>;

/// Waits for all work of the `device`, for all work of one stream, or for the last record of an
/// event.
#[derive(Clone, Debug, PartialEq, Deserialize, JsonSchema, Display)]
#[serde(rename_all = "snake_case", rename = "synchronize")]
pub enum Synchronize<E = EventName, S = StreamName> {
    /// All work of all streams.
    #[display("device")]
    Device,
    /// All work of one stream.
    #[display("stream {_0}")]
    Stream(S),
    /// The last record of an event.
    #[display("event {_0}")]
    Event(E),
}

pub(crate) type SynchronizeWire = Synchronize<NameText, NameText>;

impl StepFields<RecordEvent> for RecordWire {
    const EXAMPLE: &'static str = "- record: { event: copied, stream: copy }";

    fn check(
        &self,
        _: &Located<StepWire>,
        checker: &mut Checker<'_>,
    ) -> Result<RecordEvent, Problem> {
        Ok(RecordEvent {
            stream: checker.stream(self.stream.as_ref())?,
            event: checker.record_event(&self.event)?,
        })
    }
}

impl StepFields<WaitEvent> for WaitWire {
    const EXAMPLE: &'static str = "\
- record: { event: copied, stream: copy }
- wait: { event: copied, stream: side }";

    fn check(
        &self,
        _: &Located<StepWire>,
        checker: &mut Checker<'_>,
    ) -> Result<WaitEvent, Problem> {
        Ok(WaitEvent {
            stream: checker.stream(self.stream.as_ref())?,
            event: checker.event(&self.event)?,
        })
    }
}

impl StepFields<Synchronize> for SynchronizeWire {
    const EXAMPLE: &'static str = "\
- record: { event: copied, stream: copy }
- synchronize: { event: copied }
- synchronize: { stream: side }
- synchronize: device";

    fn check(
        &self,
        _: &Located<StepWire>,
        checker: &mut Checker<'_>,
    ) -> Result<Synchronize, Problem> {
        Ok(match self {
            Self::Device => Synchronize::Device,
            Self::Stream(stream) => Synchronize::Stream(checker.stream(Some(stream))?),
            Self::Event(event) => Synchronize::Event(checker.event(event)?),
        })
    }
}

/// Queues work that keeps a stream busy for some time. The next step starts immediately.
#[derive(Clone, Debug, PartialEq, Deserialize, JsonSchema, Display)]
#[serde(deny_unknown_fields, rename = "busy")]
#[display("{duration} on {stream}")]
pub struct Busy<S = StreamName, D = Nanos> {
    /// The stream. Default: `default`.
    pub stream: S,
    /// How long the work takes.
    pub duration: D,
}

pub(crate) type BusyWire = Busy<Option<NameText>, DurationText>;

impl StepFields<Busy> for BusyWire {
    const EXAMPLE: &'static str = "- busy: { stream: side, duration: 5ms }";

    fn check(&self, _: &Located<StepWire>, checker: &mut Checker<'_>) -> Result<Busy, Problem> {
        Ok(Busy {
            stream: checker.stream(self.stream.as_ref())?,
            duration: duration(&self.duration)?,
        })
    }
}

/// Marks a buffer as used by another stream, as `Tensor.record_stream` does. After `free`, its
/// memory is not reused until the work of that stream is done.
#[derive(Clone, Debug, PartialEq, Deserialize, JsonSchema, Display)]
#[serde(deny_unknown_fields, rename = "record_stream")]
#[display("{buffer}, on {stream}")]
pub struct RecordStream<B = BufferRef, S = StreamName> {
    /// A live buffer.
    pub buffer: B,
    /// The other stream.
    pub stream: S,
}

pub(crate) type RecordStreamWire = RecordStream<BufferText, NameText>;

impl StepFields<RecordStream> for RecordStreamWire {
    const EXAMPLE: &'static str = "\
- alloc: { buffer: batch, size: 4MiB }
- record_stream: { buffer: batch, stream: copy }";

    fn check(
        &self,
        _: &Located<StepWire>,
        checker: &mut Checker<'_>,
    ) -> Result<RecordStream, Problem> {
        Ok(RecordStream {
            buffer: checker.live_buffer(&self.buffer)?,
            stream: checker.stream(Some(&self.stream))?,
        })
    }
}
