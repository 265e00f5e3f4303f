//! Traced runs: a timeline of the steps, the driver calls, the stream work and the memory. Tracing
//! takes time, so a traced run is neither checked nor timed.
//!
//! The rig records steps and memory through [`Tracer`]. [`TracedDevice`] records driver calls and,
//! with events, the work of streams.

mod device;

use std::sync::{Arc, Mutex, MutexGuard};

use harness_allocator::sync::lock;
use harness_allocator::units::{Bytes, Nanos};
use harness_allocator::{device::StreamId, stats::MemoryStats};
use harness_record::timeline::{Timeline, TimelineEntry, Track};

pub use device::TracedDevice;

#[derive(Clone, Debug)]
pub struct Tracer(Arc<Mutex<State>>);

#[derive(Debug)]
struct State {
    timeline: Timeline,
    open: Vec<(String, Nanos)>,
    /// The last recorded allocated, active and reserved bytes.
    last: Option<[u64; 3]>,
}

impl Tracer {
    pub fn new(timeline: Timeline) -> Self {
        Self(Arc::new(Mutex::new(State {
            timeline,
            open: Vec::new(),
            last: None,
        })))
    }

    fn state(&self) -> MutexGuard<'_, State> {
        lock(&self.0)
    }

    fn push(&self, entry: TimelineEntry) {
        self.state().timeline.push(entry);
    }

    pub fn name_stream(&self, stream: StreamId, name: &str) {
        self.state()
            .timeline
            .streams
            .push((stream, name.to_owned()));
    }

    pub fn begin_step(&self, name: String, now: Nanos) {
        self.state().open.push((name, now));
    }

    pub fn end_step(&self, now: Nanos) {
        let mut state = self.state();
        if let Some((name, start)) = state.open.pop() {
            let span = TimelineEntry::Span {
                track: Track::Steps,
                name,
                start,
                duration: now.saturating_sub(start),
                size: None,
                failure: None,
            };
            state.timeline.push(span);
        }
    }

    pub fn memory(&self, stats: &MemoryStats, now: Nanos) {
        let values = [
            &stats.allocated_bytes,
            &stats.active_bytes,
            &stats.reserved_bytes,
        ]
        .map(|bytes| bytes.all.current);
        let mut state = self.state();
        if state.last.replace(values) != Some(values) {
            let [allocated, active, reserved] = values.map(Bytes);
            state.timeline.push(TimelineEntry::Memory {
                at: now,
                allocated,
                active,
                reserved,
            });
        }
    }

    pub fn refused(&self, size: Bytes, now: Nanos) {
        self.push(TimelineEntry::Refused { at: now, size });
    }

    /// The timeline so far, without unfinished steps.
    pub fn timeline(&self) -> Timeline {
        self.state().timeline.clone()
    }
}
