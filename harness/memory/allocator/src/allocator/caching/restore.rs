//! Restores an allocator from its segments: the inverse of [`Allocator::snapshot`].

use super::{CachingAllocator, config::Config};
use crate::allocator::blocks::State;
use crate::allocator::ids::{BlockId, StreamPoolId};
use crate::allocator::{Allocation, PrivatePoolId, Request};
use crate::device::{DevicePtr, MemoryRange};
use crate::stats::{BlockState, PoolKind, SegmentInfo};
use crate::units::Bytes;

/// The segments are not a possible state of a caching allocator.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RestoreError {
    /// Order the segments by address. They must not overlap.
    #[error("the segment at {at} starts before the end of the previous one")]
    SegmentsOverlap { at: DevicePtr },
    /// Blocks have at least one byte, follow each other without gaps, and add up to their segment.
    #[error("the blocks of the segment at {segment} leave a gap or overlap at {at}")]
    BlocksDoNotTile { segment: DevicePtr, at: DevicePtr },
    /// Merge them.
    #[error("two adjacent blocks at {at} are both free")]
    FreeNeighbours { at: DevicePtr },
    /// Restore it as allocated, call [`record_stream`](crate::allocator::Allocator::record_stream)
    /// for the streams it waits for, and free it.
    #[error("the block at {at} waits for an event, which segments do not describe")]
    PendingFree { at: DevicePtr },
    /// Pass the reserved addresses around it.
    #[error("the expandable segment at {at} is in none of the reservations")]
    NotReserved { at: DevicePtr },
    /// Each segment of this allocator serves one stream.
    #[error("the segment at {at} has no stream")]
    NoStream { at: DevicePtr },
}

impl CachingAllocator {
    /// Makes an allocator with these segments, in address order as [`Allocator::snapshot`] returns
    /// them. For expandable segments they are the mapped ranges, and `reservations` has the
    /// reserved addresses around them. The device must have the memory already; no device call is
    /// made. Returns the allocations of the allocated blocks in address order. Statistics start
    /// with the values of this state; driver calls count from 0.
    ///
    /// Linear in blocks and logarithmic in segments.
    /// Fails with [`RestoreError`] if an allocator cannot have this state.
    ///
    /// [`Allocator::snapshot`]: crate::allocator::Allocator::snapshot
    pub fn restore(
        config: Config,
        segments: &[SegmentInfo],
        reservations: &[MemoryRange],
    ) -> Result<(Self, Vec<Allocation>), RestoreError> {
        let mut allocator = Self::new(config);
        let mut allocations = Vec::new();
        let mut end = DevicePtr::NULL;
        // The unmapped rest of the last segment's reservation.
        let mut rest: Option<(MemoryRange, BlockId)> = None;
        for segment in segments {
            if segment.address < end {
                return Err(RestoreError::SegmentsOverlap {
                    at: segment.address,
                });
            }
            end = segment.address.offset(segment.size);
            check(segment)?;
            let stream_pool = allocator.stream_pool_of(segment)?;
            let first = if segment.expandable {
                let inside =
                    |range: &MemoryRange| range.start <= segment.address && end <= range.end();
                let range = *reservations.iter().find(|range| inside(range)).ok_or(
                    RestoreError::NotReserved {
                        at: segment.address,
                    },
                )?;
                let unmapped = match rest.filter(|(of, _)| *of == range) {
                    Some((_, unmapped)) => unmapped,
                    None => allocator.add_reservation(range, stream_pool, segment.pool),
                };
                let (mapped, behind) = allocator.cut_mapped(unmapped, segment);
                rest = behind.map(|behind| (range, behind));
                mapped
            } else {
                let range = MemoryRange::new(segment.address, segment.size);
                allocator.pools.segment_added(stream_pool);
                allocator.counters.segments.increase(segment.pool, 1);
                allocator
                    .blocks
                    .add_segment(range, stream_pool, segment.pool, false)
            };
            allocator
                .counters
                .reserved_bytes
                .increase(segment.pool, segment.size.0);
            allocator.fill(first, stream_pool, segment, &mut allocations);
        }
        Ok((allocator, allocations))
    }

    /// The reserved addresses of all expandable segments, in address order, for
    /// [`CachingAllocator::restore`].
    pub fn reservations(&self) -> Vec<MemoryRange> {
        self.blocks.reservations()
    }

    fn stream_pool_of(&mut self, segment: &SegmentInfo) -> Result<StreamPoolId, RestoreError> {
        let stream = segment.stream.ok_or(RestoreError::NoStream {
            at: segment.address,
        })?;
        let pool = match segment.private_pool.map(PrivatePoolId) {
            None => self.pools.route(segment.pool),
            Some(id) => self.pools.private(id, segment.pool),
        };
        Ok(self.pools.stream_pool(pool, stream))
    }

    /// A reservation without mapped memory.
    fn add_reservation(
        &mut self,
        range: MemoryRange,
        stream_pool: StreamPoolId,
        kind: PoolKind,
    ) -> BlockId {
        let unmapped = self.blocks.add_segment(range, stream_pool, kind, true);
        self.pools.segment_added(stream_pool);
        self.remember_unmapped(unmapped);
        unmapped
    }

    /// Cuts a mapped range out of the unmapped block that contains it. Returns it as one free block
    /// outside the index, and the unmapped block after it.
    fn cut_mapped(
        &mut self,
        unmapped: BlockId,
        segment: &SegmentInfo,
    ) -> (BlockId, Option<BlockId>) {
        self.forget_unmapped(unmapped);
        let mut mapped = unmapped;
        let before = segment.address.0 - self.blocks[unmapped].address;
        if before > 0 {
            mapped = self.blocks.split_off(unmapped, before);
            self.remember_unmapped(unmapped);
        }
        let behind = (self.blocks[mapped].size > segment.size.0).then(|| {
            let behind = self.blocks.split_off(mapped, segment.size.0);
            self.remember_unmapped(behind);
            behind
        });
        self.blocks[mapped].state = State::Free;
        (mapped, behind)
    }

    /// Splits a free block that spans a range into the blocks of a segment.
    fn fill(
        &mut self,
        first: BlockId,
        stream_pool: StreamPoolId,
        segment: &SegmentInfo,
        allocations: &mut Vec<Allocation>,
    ) {
        let mut id = first;
        for (index, block) in segment.blocks.iter().enumerate() {
            let rest =
                (index + 1 < segment.blocks.len()).then(|| self.blocks.split_off(id, block.size.0));
            self.blocks[id].requested = block.requested.0;
            if block.state == BlockState::Allocated {
                self.blocks[id].state = State::Allocated;
                self.counters
                    .handed_out(segment.pool, block.size.0, block.requested.0);
                let stream = self.pools.owner(stream_pool).stream;
                allocations.push(self.allocation(
                    id,
                    Request {
                        size: block.requested,
                        stream,
                    },
                ));
            } else {
                if !segment.expandable && segment.blocks.len() > 1 {
                    self.counters.piece_was_there(segment.pool, block.size.0);
                }
                self.put_into_pool(stream_pool, id);
            }
            id = rest.unwrap_or(id);
        }
    }
}

/// Checks whether a caching allocator can have these blocks in a segment.
fn check(segment: &SegmentInfo) -> Result<(), RestoreError> {
    let mut at = segment.address;
    let mut free = false;
    for block in &segment.blocks {
        if block.address != at || block.size == Bytes::ZERO {
            return Err(RestoreError::BlocksDoNotTile {
                segment: segment.address,
                at,
            });
        }
        match block.state {
            BlockState::PendingFree => return Err(RestoreError::PendingFree { at }),
            BlockState::Inactive if free => return Err(RestoreError::FreeNeighbours { at }),
            BlockState::Inactive | BlockState::Allocated => {
                free = block.state == BlockState::Inactive
            }
        }
        at = at.offset(block.size);
    }
    if at == segment.address.offset(segment.size) {
        Ok(())
    } else {
        Err(RestoreError::BlocksDoNotTile {
            segment: segment.address,
            at,
        })
    }
}

#[cfg(test)]
mod tests;
