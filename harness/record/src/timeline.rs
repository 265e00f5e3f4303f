//! What a traced run did and when, for viewers of timelines: plain data, rendered by the reports.

use harness_allocator::device::{Clock, StreamId};
use harness_allocator::units::{Bytes, Nanos};

/// Most entries that a timeline keeps: viewers become slow with more, and memory must not grow with the length of a run.
pub const MAX_ENTRIES: usize = 250_000;

/// One run, from its first step to its last. Times are the device's own.
#[derive(Clone, Debug, PartialEq)]
#[allow(missing_docs, reason = "the names say what they are")]
pub struct Timeline {
    pub scenario: String,
    pub allocator: String,
    /// Counted from 0.
    pub repetition: u32,
    pub device: String,
    /// Whose clock the times are of.
    pub clock: Clock,
    /// Streams with their names, as far as they have one.
    pub streams: Vec<(StreamId, String)>,
    /// In the order in which they ended; at most [`MAX_ENTRIES`].
    pub entries: Vec<Entry>,
    /// Later entries, which were not kept.
    pub left_out: u64,
}

/// Something that a timeline shows.
#[derive(Clone, Debug, PartialEq)]
#[allow(missing_docs, reason = "the names say what they are")]
pub enum Entry {
    /// Something that took its time.
    Span {
        /// Where it is shown.
        track: Track,
        name: String,
        start: Nanos,
        /// How long it took.
        duration: Nanos,
        /// What it was about in bytes, if anything.
        size: Option<Bytes>,
        /// Why it failed, if it did.
        failure: Option<String>,
    },
    /// The main program's memory from this moment on.
    Memory {
        at: Nanos,
        /// Rounded bytes handed out.
        allocated: Bytes,
        /// Handed out, or freed but waiting for an event.
        active: Bytes,
        /// Held from the driver.
        reserved: Bytes,
    },
    /// A request that was refused.
    Refused {
        at: Nanos,
        /// What it asked for.
        size: Bytes,
    },
}

/// The row of a timeline that a span belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Track {
    /// Steps of the scenario, one inside another.
    Steps,
    /// Calls to the driver, on the host's side.
    Calls,
    /// Work of a stream, on the device's side.
    Stream(StreamId),
}

impl Timeline {
    /// Adds an entry, or counts it where there is no room.
    pub fn push(&mut self, entry: Entry) {
        if self.entries.len() < MAX_ENTRIES {
            self.entries.push(entry);
        } else {
            self.left_out += 1;
        }
    }
}
