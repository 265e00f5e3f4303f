//! Converts an allocation trace into a recorded program.

use std::collections::{BTreeMap, BTreeSet};

use harness_allocator::allocator::{PrivatePoolId, caching::Config};
use harness_allocator::device::StreamId;

use super::{ProgramError, RecordedAllocation, RecordedProgram};
use crate::snapshot::{MempoolId, StackId};
use crate::{execute::PrepareError, trace::TraceEvent};

impl RecordedProgram {
    /// Converts an allocation trace to a program without addresses. Renumbers allocations, streams
    /// and private pools in order.
    pub fn from_trace(events: &[TraceEvent], config: Config) -> Result<Self, ProgramError> {
        let (streams, pools) = names(events);
        let mut ids: BTreeMap<u64, u64> = BTreeMap::new();
        let mut allocations = Vec::new();
        let (mut operations, mut origin) = (
            Vec::with_capacity(events.len()),
            Vec::with_capacity(events.len()),
        );
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
                        return Err(PrepareError::IdReused {
                            operation: index + 1,
                            id: *id,
                        }
                        .into());
                    }
                    *id = number;
                    let (requested, stream, stack) = (*size, *stream, StackId::EMPTY);
                    allocations.push(RecordedAllocation {
                        address: None,
                        refused: false,
                        requested,
                        stream,
                        stack,
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
        let pools = pools
            .into_iter()
            .map(|pool| MempoolId(0, u64::from(pool.0) + 1))
            .collect();
        Ok(Self {
            operations,
            origin,
            allocations,
            streams,
            pools,
            config,
            ..Self::default()
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
mod tests;
