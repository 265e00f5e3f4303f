//! Reads and writes allocation traces, version 1. Each line is one operation; `#` starts a comment.
//!
//! ```text
//! a ID SIZE STREAM   allocate               f ID   free          r ID STREAM   record_stream s
//! STREAM           synchronize a stream   d      synchronize   e             empty_cache m
//! FRACTION         memory fraction        p      reset peaks   x BYTES       external memory:
//! positive takes, negative releases g+ POOL  g- POOL   enter and leave a private pool             
//!  gr POOL       release a private pool
//! ```

use std::{fmt, str::FromStr};

use harness_allocator::allocator::{MemoryFraction, PrivatePoolId};
use harness_allocator::{device::StreamId, units::Bytes};

#[derive(Clone, Copy, Debug, PartialEq)]
pub enum TraceEvent {
    /// Ids are never reused. After an out-of-memory error, the id is not live. A size of zero
    /// returns a null pointer.
    Allocate {
        id: u64,
        size: Bytes,
        stream: StreamId,
    },
    /// Ignored if the id is not live.
    Free {
        id: u64,
    },
    /// Another stream also uses the block.
    RecordStream {
        id: u64,
        stream: StreamId,
    },
    SynchronizeStream(StreamId),
    Synchronize,
    EmptyCache,
    /// Limits the allocator to a fraction of the device memory.
    SetFraction(MemoryFraction),
    ResetPeaks,
    BeginPool(PrivatePoolId),
    EndPool(PrivatePoolId),
    ReleasePool(PrivatePoolId),
    /// Another process takes memory, at most the free memory. A negative amount releases memory
    /// that it took.
    ExternalMemory(i64),
}

impl TraceEvent {
    pub const fn stream_mut(&mut self) -> Option<&mut StreamId> {
        match self {
            Self::Allocate { stream, .. }
            | Self::RecordStream { stream, .. }
            | Self::SynchronizeStream(stream) => Some(stream),
            _ => None,
        }
    }

    pub(crate) const fn pool_mut(&mut self) -> Option<&mut PrivatePoolId> {
        match self {
            Self::BeginPool(pool) | Self::EndPool(pool) | Self::ReleasePool(pool) => Some(pool),
            _ => None,
        }
    }
}

impl fmt::Display for TraceEvent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Self::Allocate { id, size, stream } => write!(f, "a {id} {} {}", size.0, stream.0),
            Self::Free { id } => write!(f, "f {id}"),
            Self::RecordStream { id, stream } => write!(f, "r {id} {}", stream.0),
            Self::SynchronizeStream(stream) => write!(f, "s {}", stream.0),
            Self::Synchronize => write!(f, "d"),
            Self::EmptyCache => write!(f, "e"),
            Self::SetFraction(fraction) => write!(f, "m {}", fraction.get()),
            Self::ResetPeaks => write!(f, "p"),
            Self::BeginPool(pool) => write!(f, "g+ {}", pool.0),
            Self::EndPool(pool) => write!(f, "g- {}", pool.0),
            Self::ReleasePool(pool) => write!(f, "gr {}", pool.0),
            Self::ExternalMemory(bytes) => write!(f, "x {bytes}"),
        }
    }
}

/// A line that is not a valid operation.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("line {line}: `{text}` is not an operation of an allocation trace: {expected}")]
pub struct TraceError {
    /// Counted from 1.
    pub line: usize,
    pub text: String,
    pub expected: &'static str,
}

pub fn parse(text: &str) -> Result<Vec<TraceEvent>, TraceError> {
    parse_lines(text.lines())
}

/// Reads a trace from its lines. Fails at the first line that is not an operation.
pub fn parse_lines<'a>(
    lines: impl IntoIterator<Item = &'a str>,
) -> Result<Vec<TraceEvent>, TraceError> {
    let mut events = Vec::new();
    for (index, full) in lines.into_iter().enumerate() {
        let text = full.split('#').next().unwrap_or_default().trim();
        if text.is_empty() {
            continue;
        }
        let event = parse_event(text).map_err(|expected| TraceError {
            line: index + 1,
            text: text.to_owned(),
            expected,
        })?;
        events.push(event);
    }
    Ok(events)
}

fn parse_event(text: &str) -> Result<TraceEvent, &'static str> {
    let words: Vec<&str> = text.split_ascii_whitespace().collect();
    match words[..] {
        ["a", id, size, stream] => {
            const FORM: &str = "expected `a ID SIZE STREAM`, three whole numbers";
            let (id, size) = (number(id, FORM)?, Bytes(number(size, FORM)?));
            Ok(TraceEvent::Allocate {
                id,
                size,
                stream: StreamId(number(stream, FORM)?),
            })
        }
        ["f", id] => Ok(TraceEvent::Free {
            id: number(id, "expected `f ID`")?,
        }),
        ["r", id, stream] => {
            const FORM: &str = "expected `r ID STREAM`, two whole numbers";
            Ok(TraceEvent::RecordStream {
                id: number(id, FORM)?,
                stream: StreamId(number(stream, FORM)?),
            })
        }
        ["s", stream] => Ok(TraceEvent::SynchronizeStream(StreamId(number(
            stream,
            "expected `s STREAM`",
        )?))),
        ["d"] => Ok(TraceEvent::Synchronize),
        ["e"] => Ok(TraceEvent::EmptyCache),
        ["m", fraction] => {
            const FORM: &str = "expected `m FRACTION`, a number from 0 to 1";
            MemoryFraction::new(number(fraction, FORM)?)
                .map(TraceEvent::SetFraction)
                .ok_or(FORM)
        }
        ["p"] => Ok(TraceEvent::ResetPeaks),
        ["g+", pool] => Ok(TraceEvent::BeginPool(PrivatePoolId(number(
            pool,
            "expected `g+ POOL`",
        )?))),
        ["g-", pool] => Ok(TraceEvent::EndPool(PrivatePoolId(number(
            pool,
            "expected `g- POOL`",
        )?))),
        ["gr", pool] => Ok(TraceEvent::ReleasePool(PrivatePoolId(number(
            pool,
            "expected `gr POOL`",
        )?))),
        ["x", bytes] => Ok(TraceEvent::ExternalMemory(number(
            bytes,
            "expected `x BYTES`, a whole number, negative to release memory",
        )?)),
        _ => Err("expected one of a, f, r, s, d, e, m, p, g+, g-, gr, x with its operands"),
    }
}

fn number<T: FromStr>(word: &str, expected: &'static str) -> Result<T, &'static str> {
    word.parse().map_err(|_| expected)
}

#[cfg(test)]
mod tests;
