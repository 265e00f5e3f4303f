//! Names for reports: of streams, of the buffers that pin segments, and of the sites that hold
//! memory.
//!
//! The bytes of sites are tracked only if a step needs them ([`Rig::watch_sites`]). A timed run
//! names nothing.

use std::{collections::BTreeMap, fmt, sync::Arc};

use super::Rig;
use harness_allocator::device::{DevicePtr, StreamId};
use harness_allocator::stats::{BlockInfo, BlockState, PoolKind, SegmentInfo};
use harness_allocator::units::Bytes;
use harness_record::{Holder, PinnedSegment, UnlistedSegments};

const MOST_SEGMENTS: usize = 10;
const MOST_HOLDERS: usize = 10;

/// The page size of expandable segments for small blocks: `kSmallBuffer` in PyTorch's allocator.
const SMALL_PAGE: Bytes = Bytes::mib(2);

/// A site of a scenario: a step's line with its buffer's name and, in a workload, the purpose of
/// the memory. Numbered buffers of a step share a site.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct BufferSite {
    line: u32,
    name: String,
    /// The purpose of the memory, or empty.
    purpose: &'static str,
}

impl fmt::Display for BufferSite {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.purpose {
            "" => write!(f, "{} (line {})", self.name, self.line),
            purpose => write!(f, "{purpose} of {} (line {})", self.name, self.line),
        }
    }
}

/// The owner of memory: a buffer, or all buffers of a workload.
#[derive(Clone, Debug)]
pub(super) struct Owner {
    pub(super) name: String,
    site: BufferSite,
}

#[derive(Debug, Default)]
struct Sites {
    numbers: BTreeMap<BufferSite, usize>,
    /// Allocated bytes, by site number.
    bytes: Vec<u64>,
}

#[derive(Debug)]
struct Owned {
    owner: Arc<Owner>,
    size: Bytes,
    /// The number of its site, if sites are tracked.
    site: Option<usize>,
}

/// The owners of live memory. Empty in a timed run.
#[derive(Debug, Default)]
pub(super) struct Names {
    pub(super) streams: BTreeMap<u32, String>,
    pub(super) owner: Option<Arc<Owner>>,
    live: BTreeMap<DevicePtr, Owned>,
    sites: Option<Sites>,
}

impl Rig {
    pub fn name_stream(&mut self, stream: StreamId, name: &str) {
        self.names.streams.insert(stream.0, name.to_owned());
        if let Some(tracer) = &self.tracer {
            tracer.name_stream(stream, name);
        }
    }

    /// Sets the owner of the following allocations for reports: a buffer or workload, and the line
    /// of its step.
    pub fn name_buffers(&mut self, name: &dyn fmt::Display, line: u32) {
        if !self.is_timed() {
            let name = name.to_string();
            self.recorder
                .iter()
                .for_each(|recorder| recorder.set_label(Some(&name)));
            let site = BufferSite {
                line,
                name: name.split('[').next().unwrap_or_default().to_owned(),
                purpose: "",
            };
            self.names.owner = Some(Arc::new(Owner { name, site }));
        }
    }

    pub fn name_purpose(&mut self, purpose: &'static str) {
        if let Names {
            owner: Some(owner),
            sites: Some(_),
            ..
        } = &mut self.names
        {
            Arc::make_mut(owner).site.purpose = purpose;
        }
    }

    /// Tracks the bytes of each site from now on, except in timed runs.
    pub fn watch_sites(&mut self) {
        self.names.sites = (!self.is_timed()).then(Sites::default);
    }

    /// The allocated bytes of all sites by number; `None` if sites are not tracked. Later sites
    /// have higher numbers.
    pub fn site_bytes(&self) -> Option<&[u64]> {
        self.names
            .sites
            .as_ref()
            .map(|sites| sites.bytes.as_slice())
    }

    pub fn sites(&self) -> Vec<&BufferSite> {
        let mut all: Vec<(&BufferSite, &usize)> = self
            .names
            .sites
            .iter()
            .flat_map(|sites| &sites.numbers)
            .collect();
        all.sort_by_key(|(_, number)| **number);
        all.into_iter().map(|(site, _)| site).collect()
    }
}

impl Names {
    pub(super) fn allocated(&mut self, address: DevicePtr, size: Bytes) {
        let Some(owner) = self.owner.clone() else {
            return;
        };
        let site = self.sites.as_mut().map(|sites| {
            let number = *sites
                .numbers
                .entry(owner.site.clone())
                .or_insert(sites.bytes.len());
            sites.bytes.resize(sites.bytes.len().max(number + 1), 0);
            sites.bytes[number] += size.0;
            number
        });
        self.live.insert(address, Owned { owner, size, site });
    }

    pub(super) fn freed(&mut self, address: DevicePtr) {
        if let Some(Owned {
            size,
            site: Some(number),
            ..
        }) = self.live.remove(&address)
            && let Some(sites) = &mut self.sites
        {
            sites.bytes[number] -= size.0;
        }
    }

    /// The segments whose live blocks pin free memory, those with the most free memory first, and
    /// the sum of the unlisted ones.
    pub(super) fn pinned(
        &self,
        segments: &[SegmentInfo],
        page: Bytes,
    ) -> (Vec<PinnedSegment>, UnlistedSegments) {
        let mut pinned: Vec<PinnedSegment> = segments
            .iter()
            .filter_map(|segment| self.pinned_segment(segment, page))
            .collect();
        // A stable sort keeps equal segments in address order.
        pinned.sort_by_key(|segment| std::cmp::Reverse(segment.free));
        let rest = pinned.split_off(pinned.len().min(MOST_SEGMENTS));
        let unlisted = UnlistedSegments {
            count: rest.len() as u64,
            free: rest.iter().map(|segment| segment.free).sum(),
        };
        (pinned, unlisted)
    }

    fn pinned_segment(&self, segment: &SegmentInfo, page: Bytes) -> Option<PinnedSegment> {
        let free = held_back(segment, page);
        let live: Vec<&BlockInfo> = segment
            .blocks
            .iter()
            .filter(|block| block.state != BlockState::Inactive)
            .collect();
        if free == Bytes::ZERO || live.is_empty() {
            return None;
        }
        let mut holders: Vec<Holder> = Vec::new();
        let mut unnamed = 0;
        for block in live {
            let Some(Owned { owner, .. }) = self.live.get(&block.address) else {
                unnamed += 1;
                continue;
            };
            let (name, line, is_full) =
                (&owner.name, owner.site.line, holders.len() == MOST_HOLDERS);
            match holders
                .iter_mut()
                .find(|holder| holder.line == line && holder.name == *name)
            {
                Some(known) => {
                    (known.blocks, known.bytes) = (known.blocks + 1, known.bytes + block.size)
                }
                None if is_full => unnamed += 1,
                None => holders.push(Holder {
                    name: name.clone(),
                    line,
                    blocks: 1,
                    bytes: block.size,
                }),
            }
        }
        Some(PinnedSegment {
            pool: segment.stream.map(|_| segment.pool),
            stream: segment.stream.map(|stream| stream.0),
            size: segment.size,
            free,
            holders,
            other_blocks: unnamed,
        })
    }
}

/// The size of a driver release: the segment, or one of its pages. `page` is the page size for
/// large blocks.
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
    segment
        .blocks
        .iter()
        .filter(|block| block.state == BlockState::Inactive)
        .map(of)
        .sum()
}
