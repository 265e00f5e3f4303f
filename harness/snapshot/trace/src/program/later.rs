//! The requests of a program whose frees complete later than in the recording, because other
//! streams use the blocks for longer.

use std::collections::BTreeMap;

use harness_allocator::device::StreamId;

use super::RecordedProgram;
use crate::trace::TraceEvent;

/// Synthetic streams: frees that complete together wait for the same.
#[derive(Debug)]
struct Streams {
    /// By the allocation event before which they complete; the last ones never do.
    open: BTreeMap<u32, StreamId>,
    idle: Vec<StreamId>,
    next: u32,
}

impl Streams {
    fn until(&mut self, end: Option<u32>) -> StreamId {
        *self.open.entry(end.unwrap_or(u32::MAX)).or_insert_with(|| {
            self.idle.pop().unwrap_or_else(|| {
                self.next += 1;
                StreamId(self.next - 1)
            })
        })
    }

    /// The streams whose work has ended before an allocation event.
    fn ended(&mut self, event: u32) -> Vec<StreamId> {
        let later = self.open.split_off(&event.saturating_add(1));
        let ended: Vec<StreamId> = std::mem::replace(&mut self.open, later)
            .into_values()
            .collect();
        self.idle.extend(&ended);
        ended
    }
}

impl RecordedProgram {
    /// Returns the program with later ends of some frees. `ends` has the free events, each with the
    /// allocation event before which it completes; `None` if it never does. Returns `None` if the
    /// recording does not have one of these frees, or if private pools defer frees too.
    pub fn with_later_frees(&self, ends: &BTreeMap<u32, Option<u32>>) -> Option<Self> {
        let is_pool = |operation: &TraceEvent| matches!(operation, TraceEvent::BeginPool(_));
        if self.operations.iter().any(is_pool) {
            return None;
        }
        let used = self.operations.iter().map(|operation| match operation {
            TraceEvent::RecordStream { stream, .. } => stream.0 + 1,
            _ => 0,
        });
        let mut streams = Streams {
            open: BTreeMap::new(),
            idle: Vec::new(),
            next: used
                .max()
                .unwrap_or_default()
                .max(self.streams.len() as u32),
        };
        let (mut operations, mut origin, mut found) = (Vec::new(), Vec::new(), 0);
        for (&operation, &event) in self.operations.iter().zip(&self.origin) {
            let end = ends.get(&event);
            match operation {
                // What the recording shows of its end is replaced.
                TraceEvent::RecordStream { stream, .. }
                    if end.is_some() && self.is_synthetic(stream) =>
                {
                    continue;
                }
                TraceEvent::Free { id } => {
                    if let Some(end) = end {
                        let stream = streams.until(*end);
                        operations.push(TraceEvent::RecordStream { id, stream });
                        origin.push(event);
                        found += 1;
                    }
                }
                TraceEvent::Allocate { .. } => {
                    for stream in streams.ended(event) {
                        operations.push(TraceEvent::SynchronizeStream(stream));
                        origin.push(event);
                    }
                }
                _ => {}
            }
            operations.push(operation);
            origin.push(event);
        }
        (found == ends.len()).then(|| Self {
            operations,
            origin,
            ..self.clone()
        })
    }
}

#[cfg(test)]
mod tests {
    use harness_allocator::allocator::AllocatorSpec;
    use harness_allocator::device::sim::AddressOrder;
    use harness_allocator::units::Bytes;

    use super::*;
    use crate::program::{Placement, RecordedAllocation, ReplaySetup};
    use crate::snapshot::StackId;

    /// Four blocks of 20 MiB, each freed before the next. Event 3 n allocates, and 3 n + 1 frees.
    fn program() -> RecordedProgram {
        let mut program = RecordedProgram {
            streams: vec![0],
            ..RecordedProgram::default()
        };
        let (size, stream) = (Bytes::mib(20), StreamId::DEFAULT);
        for id in 0..4 {
            let allocate = TraceEvent::Allocate { id, size, stream };
            program
                .operations
                .extend([allocate, TraceEvent::Free { id }]);
            program.origin.extend([3 * id as u32, 3 * id as u32 + 1]);
            program.allocations.push(RecordedAllocation {
                address: None,
                refused: false,
                requested: size,
                stream,
                stack: StackId::default(),
            });
        }
        program
    }

    fn peak(program: &RecordedProgram) -> Bytes {
        let setup = ReplaySetup {
            allocator: AllocatorSpec::caching(program.config.clone()),
            memory: Bytes::gib(1),
            placement: Placement::InOrder(AddressOrder::Linux),
        };
        let replayed = program.prepare().expect("few streams").replay(&setup);
        Bytes(replayed.expect("replays").stats.reserved_bytes.all.peak)
    }

    #[test]
    fn later_frees_keep_their_blocks_until_their_end() {
        let program = program();
        assert_eq!(peak(&program), Bytes::mib(20));
        for (ends, expected) in [
            (vec![(1, Some(3))], 20),
            (vec![(1, None)], 40),
            (vec![(1, None), (4, None), (7, None), (10, None)], 80),
            (vec![(1, Some(6)), (4, Some(9)), (7, None)], 40),
            (vec![(1, Some(9)), (4, Some(9))], 60),
        ] {
            let later = program.with_later_frees(&ends.iter().copied().collect());
            assert_eq!(
                later.as_ref().map(peak),
                Some(Bytes::mib(expected)),
                "{ends:?}"
            );
            // Again: what the first has added is replaced.
            let later = later.expect("has all frees");
            let again = later.with_later_frees(&ends.iter().copied().collect());
            assert_eq!(again.as_ref().map(peak), Some(Bytes::mib(expected)));
        }
    }

    #[test]
    fn frees_that_the_recording_lacks_are_refused() {
        let ends = BTreeMap::from([(2, None)]);
        assert_eq!(program().with_later_frees(&ends), None);
    }
}
