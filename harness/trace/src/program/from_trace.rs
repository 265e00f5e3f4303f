//! Converts an allocation trace into a recorded program.

use std::collections::{BTreeMap, BTreeSet};

use harness_allocator::allocator::PrivatePoolId;
use harness_allocator::allocator::caching::Config;
use harness_allocator::device::StreamId;

use super::{Allocation, Ended, ProgramError, RecordedProgram};
use crate::execute::PrepareError;
use crate::snapshot::{PoolId, StackId};
use crate::trace::TraceEvent;

impl RecordedProgram {
    /// Converts an allocation trace. The program starts with no memory and has no addresses. Allocations, streams and private
    /// pools are renumbered in order.
    pub fn from_trace(events: &[TraceEvent], config: Config) -> Result<Self, ProgramError> {
        let (streams, pools) = names(events);
        let mut ids: BTreeMap<u64, u64> = BTreeMap::new();
        let mut allocations = Vec::new();
        let (mut operations, mut origin) = (Vec::with_capacity(events.len()), Vec::with_capacity(events.len()));
        for (index, &(mut operation)) in events.iter().enumerate() {
            if let Some(stream) = operation.stream_mut() {
                *stream = StreamId(streams.binary_search(&u64::from(stream.0)).unwrap_or(0) as u32);
            }
            if let Some(pool) = operation.pool_mut() {
                *pool = PrivatePoolId(pools.binary_search(pool).unwrap_or(0) as u32);
            }
            match &mut operation {
                TraceEvent::Allocate { id, size, stream } => {
                    let number = allocations.len() as u64;
                    if ids.insert(*id, number).is_some() {
                        return Err(PrepareError::IdReused { operation: index + 1, id: *id }.into());
                    }
                    *id = number;
                    allocations.push(Allocation {
                        address: None,
                        refused: false,
                        requested: *size,
                        stream: *stream,
                        stack: StackId::EMPTY,
                    });
                }
                // An operation on an id that is not live has no effect.
                TraceEvent::Free { id } => match ids.remove(id) {
                    Some(number) => *id = number,
                    None => continue,
                },
                TraceEvent::RecordStream { id, .. } => match ids.get(id) {
                    Some(&number) => *id = number,
                    None => continue,
                },
                _ => {}
            }
            operations.push(operation);
            origin.push(index as u32);
        }
        Ok(Self {
            device: 0,
            start: Vec::new(),
            operations,
            origin,
            allocations,
            driver: Vec::new(),
            reserved_at_start: Vec::new(),
            reservations: Vec::new(),
            streams,
            pools: pools.into_iter().map(|pool| PoolId(0, u64::from(pool.0) + 1)).collect(),
            config,
            memory: None,
            memory_at_most: None,
            ended: Ended::Well,
            notes: Vec::new(),
        })
    }
}

/// The trace's streams, whose numbers serve as handles, and its private pools, both in order.
fn names(events: &[TraceEvent]) -> (Vec<u64>, Vec<PrivatePoolId>) {
    let (mut streams, mut pools) = (BTreeSet::from([0]), BTreeSet::new());
    for &(mut event) in events {
        streams.extend(event.stream_mut().map(|stream| u64::from(stream.0)));
        pools.extend(event.pool_mut().copied());
    }
    (streams.into_iter().collect(), pools.into_iter().collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::program::{Placement, Setup};
    use crate::trace;
    use harness_allocator::allocator::AllocatorSpec;
    use harness_allocator::units::Bytes;

    fn program(text: &str) -> RecordedProgram {
        RecordedProgram::from_trace(&trace::parse(text).expect("a trace"), Config::default()).expect("a program")
    }

    #[test]
    fn ids_streams_and_pools_are_renumbered_in_order() {
        let program = program("a 70 512 9\nf 3\ng+ 5\na 7 1024 3000000000\ng- 5\nr 70 4\nf 70\ns 4\na 70 5 0\n");
        let text: Vec<String> = program.operations.iter().map(TraceEvent::to_string).collect();
        assert_eq!(text, ["a 0 512 2", "g+ 0", "a 1 1024 3", "g- 0", "r 0 1", "f 0", "s 1", "a 2 5 0"]);
        assert_eq!(program.origin, [0, 2, 3, 4, 5, 6, 7, 8], "the free of what is not live is left out");
        assert_eq!(program.streams, [0, 4, 9, 3_000_000_000]);
    }

    #[test]
    fn a_trace_runs_out_of_memory_on_a_small_device() {
        let program = program("a 1 31457280 0\na 2 20971520 0\nf 1\na 3 31457280 0\n");
        let prepared = program.prepare().expect("it can run");
        let setup =
            |mib| Setup { allocator: AllocatorSpec::caching(Config::default()), memory: Bytes::mib(mib), placement: Placement::Rising };
        let replayed = prepared.replay(&setup(50)).expect("it runs");
        assert_eq!((replayed.oom, replayed.stats.reserved_bytes.all.peak), (None, 50 << 20));
        let refused = prepared.replay(&setup(40)).expect("it runs").oom.expect("40 MiB are too little");
        assert_eq!((refused.operation, refused.event, refused.requested), (1, 1, Bytes::mib(20)));
    }
}
