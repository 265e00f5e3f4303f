//! The facts about a request that has just failed, from which reports derive the causes.

use std::collections::BTreeMap;

use harness_allocator::allocator::{AllocatorError, OomCause, Request};
use harness_allocator::device::faulty::Injector;
use harness_allocator::stats::{BlockInfo, BlockState, SegmentInfo};
use harness_allocator::units::Bytes;

use super::{Rig, Stop};
use harness_record::{FailedRequest, Pieces, RefusedCall, StreamPool};

impl Rig {
    /// Collects the facts about a request of the current program that has just failed. `None` in a
    /// timed run and while operations are not checked, because no report uses them. To this
    /// program, the memory of other programs counts as used by other processes. Linear in blocks.
    /// Fails with [`Stop::Device`] if the device cannot report its memory.
    pub fn failed_request(
        &mut self,
        request: Request,
        error: &AllocatorError,
    ) -> Result<Option<FailedRequest>, Stop> {
        if self.is_timed() || self.is_asleep() {
            return Ok(None);
        }
        let (lacking, asked, cause) = match error {
            AllocatorError::OutOfMemory(oom) => (oom.missing, oom.segment, Some(oom.cause)),
            AllocatorError::TooLarge { .. } | AllocatorError::Device(_) => {
                (request.size, request.size, None)
            }
        };
        let (limit, allocator_limit) = limits(cause);
        let open = self.program().open_pools.last().map(|pool| pool.0);
        let (segments, closed): (Vec<_>, Vec<_>) = self
            .snapshot()
            .into_iter()
            .partition(|segment| segment.private_pool == open);
        let has_segments = self.program().allocator.driver_pool().is_none();
        let segments = has_segments.then_some(segments);
        let mut other_private_pools = Pieces::default();
        let free = closed
            .iter()
            .flat_map(|segment| &segment.blocks)
            .filter(|block| block.state == BlockState::Inactive);
        free.for_each(|block| other_private_pools.add(block.size));
        let lanes = segments.as_deref().map(lanes);
        let is_limited = limit.or(allocator_limit).is_some();
        let keeps_free_segments = !is_limited && self.keeps_any(segments.as_deref());
        let (pinned, pinned_unlisted) = self
            .names
            .pinned(&segments.unwrap_or_default(), self.reserve_unit());
        let streams = self.names.streams.clone();
        let inactive_split = Bytes(self.stats().inactive_split_bytes.all.current);
        let refused = self.faults.as_ref().and_then(Injector::refused);
        let injected = refused.map(|made| RefusedCall {
            process: None,
            call: made.call.name().to_owned(),
            number: made.number,
        });
        let mut accounts = self.accounts_of(self.entered())?;
        accounts.device.external_memory += self.charged_to_other_programs()
            + accounts
                .device
                .processes
                .saturating_sub(accounts.device.process_contexts);
        Ok(Some(FailedRequest {
            requested: request.size,
            stream: request.stream.0,
            lacking,
            asked,
            limit,
            allocator_limit,
            program_limit: None,
            injected,
            accounts,
            inactive_split,
            lanes,
            other_private_pools,
            is_pool_inferred: false,
            streams,
            pinned,
            pinned_unlisted,
            keeps_free_segments,
        }))
    }

    /// Returns whether the allocator of the current program keeps a free segment of these although
    /// the driver refuses a request.
    fn keeps_any(&self, segments: Option<&[SegmentInfo]>) -> bool {
        !self.program().allocator.releases_before_failure()
            && segments.unwrap_or_default().iter().any(is_free)
    }
}

/// The memory fraction and the allocator's own limit, whichever refused the request.
const fn limits(cause: Option<OomCause>) -> (Option<Bytes>, Option<Bytes>) {
    match cause {
        Some(OomCause::Fraction { limit }) => (Some(limit), None),
        Some(OomCause::Allocator { limit }) => (None, Some(limit)),
        Some(OomCause::Device { .. }) | None => (None, None),
    }
}

fn is_free(segment: &SegmentInfo) -> bool {
    let mut blocks = segment.blocks.iter();
    blocks.all(|block| block.state == BlockState::Inactive)
}

/// The free and pending memory in these segments, by pool and stream. A segment that serves several
/// streams contains blocks of all sizes.
fn lanes(segments: &[SegmentInfo]) -> Vec<StreamPool> {
    let mut lanes = BTreeMap::new();
    for segment in segments {
        let pool = segment.stream.map(|_| segment.pool);
        let freed = |block: &&BlockInfo| block.state != BlockState::Allocated;
        for block in segment.blocks.iter().filter(freed) {
            lanes
                .entry((pool, block.stream))
                .or_insert_with(|| StreamPool::new(pool, block.stream.0))
                .add(block.state, block.size);
        }
    }
    lanes.into_values().collect()
}
