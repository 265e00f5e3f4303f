//! `record`, `wait` and `synchronize`: order between streams, and between a stream and the host.

use std::fmt;

use schemars::JsonSchema;
use serde::Deserialize;

use super::fields::StepFields;
use crate::checker::Checker;
use crate::metric::{EventName, StreamName};
use harness_language::error::Problem;
use harness_language::located::Position;
use harness_language::text::NameText;

/// An event to be recorded, checked.
#[derive(Clone, Debug, PartialEq)]
pub struct Record {
    /// Which one; it is made when it is recorded first.
    pub event: EventName,
    /// Behind the work of which stream.
    pub stream: StreamName,
}

/// A stream that waits for an event, checked.
#[derive(Clone, Debug, PartialEq)]
#[allow(missing_docs, reason = "the names say what they are")]
pub struct Wait {
    pub event: EventName,
    pub stream: StreamName,
}

/// What the host waits for, checked.
#[derive(Clone, Debug, PartialEq)]
pub enum Synchronize {
    /// All work of all streams.
    Device,
    /// All work of one stream.
    Stream(StreamName),
    /// An event's last record.
    Event(EventName),
}

impl fmt::Display for Record {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}, on {}", self.event, self.stream)
    }
}

impl fmt::Display for Wait {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "for {}, on {}", self.event, self.stream)
    }
}

impl fmt::Display for Synchronize {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Device => f.write_str("device"),
            Self::Stream(stream) => write!(f, "stream {stream}"),
            Self::Event(event) => write!(f, "event {event}"),
        }
    }
}

/// Queues an event behind all work of a stream so far. The first `record` makes the event; recording again forgets the earlier record.
#[derive(Clone, Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
#[schemars(rename = "record")]
pub(crate) struct RecordWire {
    /// The event.
    event: NameText,
    /// The stream: `default` if not given.
    stream: Option<NameText>,
}

/// Makes all later work of a stream wait for an event's last record. The scenario goes on at once.
#[derive(Clone, Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
#[schemars(rename = "wait")]
pub(crate) struct WaitWire {
    /// An event that was recorded.
    event: NameText,
    /// The stream: `default` if not given.
    stream: Option<NameText>,
}

/// Waits until work is done: that of the whole `device`, of one stream, or in front of an event's last record.
#[derive(Clone, Debug, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
#[schemars(rename = "synchronize")]
pub(crate) enum SynchronizeWire {
    /// All work of all streams.
    Device,
    /// All work of one stream.
    Stream(NameText),
    /// An event's last record.
    Event(NameText),
}

impl StepFields for RecordWire {
    type Checked = Record;

    const EXAMPLE: &'static str = "- record: { event: copied, stream: copy }";

    fn check(&self, _: Position, checker: &mut Checker<'_>) -> Result<Record, Problem> {
        Ok(Record { stream: checker.stream(self.stream.as_ref())?, event: checker.record_event(&self.event)? })
    }
}

impl StepFields for WaitWire {
    type Checked = Wait;

    const EXAMPLE: &'static str = "\
- record: { event: copied, stream: copy }
- wait: { event: copied, stream: side }";

    fn check(&self, _: Position, checker: &mut Checker<'_>) -> Result<Wait, Problem> {
        Ok(Wait { stream: checker.stream(self.stream.as_ref())?, event: checker.event(&self.event)? })
    }
}

impl StepFields for SynchronizeWire {
    type Checked = Synchronize;

    const EXAMPLE: &'static str = "\
- record: { event: copied, stream: copy }
- synchronize: { event: copied }
- synchronize: { stream: side }
- synchronize: device";

    fn check(&self, _: Position, checker: &mut Checker<'_>) -> Result<Synchronize, Problem> {
        Ok(match self {
            Self::Device => Synchronize::Device,
            Self::Stream(stream) => Synchronize::Stream(checker.stream(Some(stream))?),
            Self::Event(event) => Synchronize::Event(checker.event(event)?),
        })
    }
}
