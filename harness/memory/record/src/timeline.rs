//! The timeline of a traced run. Reports render it for trace viewers.

use harness_allocator::device::{Clock, StreamId};
use harness_allocator::units::{Bytes, Nanos};

/// Maximum number of entries. Viewers become slow beyond it, and the limit bounds memory.
pub const MAX_ENTRIES: usize = 250_000;

/// One run, from its first step to its last. Times are on the device's clock.
#[derive(Clone, Debug, PartialEq)]
pub struct Timeline {
    pub scenario: String,
    pub allocator: String,
    /// Counted from 0.
    pub repetition: u32,
    pub device: String,
    pub clock: Clock,
    /// Streams with names.
    pub streams: Vec<(StreamId, String)>,
    /// Entries in the order in which they ended, at most [`MAX_ENTRIES`].
    pub entries: Vec<TimelineEntry>,
    /// Number of later entries that were dropped.
    pub left_out: u64,
}

#[derive(Clone, Debug, PartialEq)]
pub enum TimelineEntry {
    /// An interval. `size`: the bytes concerned, if any.
    Span {
        track: Track,
        name: String,
        start: Nanos,
        duration: Nanos,
        size: Option<Bytes>,
        failure: Option<String>,
    },
    /// The main program's memory from this moment on. `active` includes freed blocks that wait for
    /// an event.
    Memory {
        at: Nanos,
        allocated: Bytes,
        active: Bytes,
        reserved: Bytes,
    },
    /// A request that failed.
    Refused { at: Nanos, size: Bytes },
}

/// The row of a timeline that shows a span.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Track {
    /// Steps of the scenario; nested steps are nested spans.
    Steps,
    /// Driver calls on the host.
    Calls,
    /// Work that a stream executes.
    Stream(StreamId),
}

impl Timeline {
    /// Adds an entry, or counts it if the timeline is full.
    pub fn push(&mut self, entry: TimelineEntry) {
        if self.entries.len() < MAX_ENTRIES {
            self.entries.push(entry);
        } else {
            self.left_out += 1;
        }
    }
}
