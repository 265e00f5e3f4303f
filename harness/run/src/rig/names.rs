//! Names for reports: of streams, and of the buffers that pin segments.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

use super::Rig;
use harness_allocator::device::{DevicePtr, StreamId};
use harness_allocator::stats::{BlockInfo, BlockState, PoolKind, SegmentInfo};
use harness_allocator::units::Bytes;
use harness_record::{Holder, PinnedSegment, UnlistedSegments};

const MOST_SEGMENTS: usize = 10;
const MOST_HOLDERS: usize = 10;

/// The page size of expandable segments for small blocks: `kSmallBuffer` in PyTorch's allocator.
const SMALL_PAGE: Bytes = Bytes::mib(2);

/// The owner of memory: a buffer, or all buffers of a workload, and the line of its step.
#[derive(Debug)]
pub(super) struct Owner {
    pub(super) name: String,
    line: u32,
}

/// The owners of live memory. Empty in a timed run.
#[derive(Debug, Default)]
pub(super) struct Names {
    pub(super) streams: BTreeMap<u32, String>,
    /// The owner of the next allocations.
    pub(super) owner: Option<Arc<Owner>>,
    live: BTreeMap<DevicePtr, Arc<Owner>>,
}

impl Rig {
    pub fn name_stream(&mut self, stream: StreamId, name: &str) {
        self.names.streams.insert(stream.0, name.to_owned());
        if let Some(tracer) = &self.tracer {
            tracer.name_stream(stream, name);
        }
    }

    /// Sets the owner of the following allocations for reports: a buffer or workload, and the line of its step. Timed
    /// runs ignore it.
    pub fn name_buffers(&mut self, name: &dyn fmt::Display, line: u32) {
        if !self.is_timed() {
            let name = name.to_string();
            self.label_in_recording(&name);
            self.sites.iter_mut().for_each(|sites| sites.begin(&name, line));
            self.names.owner = Some(Arc::new(Owner { name, line }));
        }
    }
}

impl Names {
    pub(super) fn allocated(&mut self, address: DevicePtr) {
        if let Some(owner) = &self.owner {
            self.live.insert(address, Arc::clone(owner));
        }
    }

    pub(super) fn freed(&mut self, address: DevicePtr) {
        self.live.remove(&address);
    }

    /// The segments whose live blocks pin free memory, those with the most free memory first, and the sum of the
    /// unlisted ones. `page` is the page size of expandable segments for large blocks. Linear in blocks.
    pub(super) fn pinned(&self, segments: &[SegmentInfo], page: Bytes) -> (Vec<PinnedSegment>, UnlistedSegments) {
        let mut pinned: Vec<PinnedSegment> = segments.iter().filter_map(|segment| self.pinned_segment(segment, page)).collect();
        // A stable sort keeps equal segments in address order.
        pinned.sort_by_key(|segment| std::cmp::Reverse(segment.free));
        let rest = pinned.split_off(pinned.len().min(MOST_SEGMENTS));
        let unlisted = UnlistedSegments { count: rest.len() as u64, free: rest.iter().map(|segment| segment.free).sum() };
        (pinned, unlisted)
    }

    fn pinned_segment(&self, segment: &SegmentInfo, page: Bytes) -> Option<PinnedSegment> {
        let free = held_back(segment, page);
        let live: Vec<&BlockInfo> = segment.blocks.iter().filter(|block| block.state != BlockState::Inactive).collect();
        if free == Bytes::ZERO || live.is_empty() {
            return None;
        }
        let mut holders: Vec<Holder> = Vec::new();
        let mut unnamed = 0;
        for block in live {
            let Some(owner) = self.live.get(&block.address) else {
                unnamed += 1;
                continue;
            };
            match holders.iter().position(|holder| holder.line == owner.line && holder.name == owner.name) {
                Some(known) => {
                    (holders[known].blocks, holders[known].bytes) = (holders[known].blocks + 1, holders[known].bytes + block.size)
                }
                None if holders.len() == MOST_HOLDERS => unnamed += 1,
                None => holders.push(Holder { name: owner.name.clone(), line: owner.line, blocks: 1, bytes: block.size }),
            }
        }
        let pool = segment.stream.map(|_| segment.pool);
        Some(PinnedSegment {
            pool,
            stream: segment.stream.map(|stream| stream.0),
            size: segment.size,
            free,
            holders,
            other_blocks: unnamed,
        })
    }
}

/// The size of a driver release: the segment, or one of its pages. `page` is the page size for large blocks.
pub(crate) fn release_unit(segment: &SegmentInfo, page: Bytes) -> Bytes {
    match (segment.expandable, segment.pool) {
        (false, _) => segment.size,
        (true, PoolKind::Small) => SMALL_PAGE,
        (true, PoolKind::Large) => page,
    }
}

/// The free bytes of a segment that cannot be released while something in it is live.
pub(crate) fn held_back(segment: &SegmentInfo, page: Bytes) -> Bytes {
    let unit = release_unit(segment, page).0.max(1);
    let of = |block: &BlockInfo| {
        let start = block.address.0 - segment.address.0;
        let whole = ((start + block.size.0) / unit).saturating_sub(start.div_ceil(unit));
        block.size.saturating_sub(Bytes(whole * unit))
    };
    segment.blocks.iter().filter(|block| block.state == BlockState::Inactive).map(of).sum()
}
