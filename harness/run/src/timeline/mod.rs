//! Traced runs: what the device, the allocator and the steps do, and when. Recording that takes time of its own, so a traced run is neither checked nor timed.
//!
//! The rig tells steps and memory ([`Tracer`]); [`TracedDevice`] tells calls to the driver, and work of streams by events around it.

mod device;

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use harness_allocator::device::StreamId;
use harness_allocator::stats::MemoryStats;
use harness_allocator::units::{Bytes, Nanos};
use harness_record::timeline::{Entry, Timeline, Track};

pub use device::TracedDevice;

/// A timeline that several write to.
#[derive(Clone, Debug)]
pub struct Tracer(Arc<Mutex<State>>);

#[derive(Debug)]
struct State {
    timeline: Timeline,
    /// Steps that have begun and not ended, the innermost last.
    open: Vec<(String, Nanos)>,
    /// Allocated, active and reserved when they were noted last.
    last: Option<[u64; 3]>,
}

impl Tracer {
    /// Adds to this timeline, which says of which run it is.
    #[must_use]
    pub fn new(timeline: Timeline) -> Self {
        Self(Arc::new(Mutex::new(State { timeline, open: Vec::new(), last: None })))
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // Entries are whole whatever happened while one was added.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn push(&self, entry: Entry) {
        self.state().timeline.push(entry);
    }

    /// A stream has this name.
    pub fn name_stream(&self, stream: StreamId, name: &str) {
        self.state().timeline.streams.push((stream, name.to_owned()));
    }

    /// A step begins inside of those that are open.
    pub fn begin_step(&self, name: String, now: Nanos) {
        self.state().open.push((name, now));
    }

    /// The innermost step ends.
    pub fn end_step(&self, now: Nanos) {
        let mut state = self.state();
        if let Some((name, start)) = state.open.pop() {
            let span = Entry::Span { track: Track::Steps, name, start, duration: now.saturating_sub(start), size: None, failure: None };
            state.timeline.push(span);
        }
    }

    /// The allocator's counters are these from now on.
    pub fn memory(&self, stats: &MemoryStats, now: Nanos) {
        let values = [&stats.allocated_bytes, &stats.active_bytes, &stats.reserved_bytes].map(|bytes| bytes.all.current);
        let mut state = self.state();
        if state.last.replace(values) != Some(values) {
            let [allocated, active, reserved] = values.map(Bytes);
            state.timeline.push(Entry::Memory { at: now, allocated, active, reserved });
        }
    }

    /// A request was refused.
    pub fn refused(&self, size: Bytes, now: Nanos) {
        self.push(Entry::Refused { at: now, size });
    }

    /// The timeline so far, without steps that have not ended.
    #[must_use]
    pub fn timeline(&self) -> Timeline {
        self.state().timeline.clone()
    }
}
