//! Finds blocks that keep free memory from being released. A segment can be released only if it is
//! entirely free; a page of an expandable segment, if the whole page is free. `list` names the
//! oldest live block of each.

use std::collections::BTreeMap;

use harness_allocator::stats::{BlockState, PoolKind};
use harness_allocator::{allocator::caching::Config, units::Bytes};
use harness_trace::snapshot::{Block, MempoolId, Segment};
use serde::Serialize;

use crate::{sites::SiteId, view::View};

/// A partly free segment that cannot be released. In expandable segments, one free part of pages
/// that also contain live blocks.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct SegmentPin {
    pub address: u64,
    pub size: Bytes,
    /// Free memory that cannot be released.
    pub free: Bytes,
    pub stream: u64,
    pub pool: PoolKind,
    #[serde(skip_serializing_if = "MempoolId::is_default")]
    pub private_pool: MempoolId,
    pub expandable: bool,
    /// The number of blocks that are allocated or wait for other streams.
    pub live_blocks: u64,
    pub live_bytes: Bytes,
    pub by: Pin,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Pin {
    pub address: u64,
    pub size: Bytes,
    pub site: String,
    pub id: SiteId,
    pub allocated_at: Option<u32>,
    /// The block's age in microseconds of the recording.
    pub age_us: Option<u64>,
}

/// A free block, divided into memory that can be released and memory that cannot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Piece<'a> {
    /// The part that consists of whole segments or whole pages.
    pub(crate) whole: Bytes,
    pub(crate) pinned: Bytes,
    /// The index among the blocks of the segment.
    index: usize,
    segment: &'a Segment,
}

pub(crate) fn pieces<'a>(segment: &'a Segment, config: &Config) -> impl Iterator<Item = Piece<'a>> {
    let page = if segment.expandable {
        config.page(segment.pool)
    } else {
        segment.size.get()
    }
    .max(1);
    let free = segment
        .blocks
        .iter()
        .enumerate()
        .filter(|(_, block)| block.state == BlockState::Inactive);
    free.map(move |(index, block)| {
        let (start, end) = (
            block.address - segment.address,
            block.address - segment.address + block.size.get(),
        );
        let whole = Bytes((end / page * page).saturating_sub(start.next_multiple_of(page)));
        Piece {
            whole,
            pinned: block.size - whole,
            index,
            segment,
        }
    })
}

pub(crate) struct Pinner<'a> {
    view: &'a View<'a>,
    oldest: Option<&'a Block>,
}

impl<'a> Pinner<'a> {
    /// Linear in the blocks of the segment.
    pub(crate) fn new(view: &'a View<'a>, segment: &'a Segment) -> Self {
        let live = segment
            .blocks
            .iter()
            .filter(|block| block.state != BlockState::Inactive);
        Self {
            view,
            oldest: live.min_by_key(|block| view.age_key(block)),
        }
    }

    /// The older neighbor in expandable segments, or else the oldest block of the segment.
    pub(crate) fn of(&self, piece: &Piece<'a>) -> Option<&'a Block> {
        if !piece.segment.expandable {
            return self.oldest;
        }
        neighbours(piece)
            .min_by_key(|block| self.view.age_key(block))
            .or(self.oldest)
    }
}

fn neighbours<'a>(piece: &Piece<'a>) -> impl Iterator<Item = &'a Block> + use<'a> {
    let blocks = &piece.segment.blocks;
    let before = piece
        .index
        .checked_sub(1)
        .and_then(|index| blocks.get(index));
    [before, blocks.get(piece.index + 1)].into_iter().flatten()
}

impl View<'_> {
    fn age_key(&self, block: &Block) -> (Option<u32>, u64) {
        (self.state.origin(block.address).allocated, block.address)
    }

    fn pin(&self, block: &Block) -> Pin {
        let allocated_at = self.state.origin(block.address).allocated;
        let began = allocated_at.and_then(|event| self.history.events()[event as usize].time_us);
        let id = self.site_of(block);
        Pin {
            address: block.address,
            size: block.size,
            site: self.sites.get(id).name.clone(),
            id,
            allocated_at,
            age_us: began.and_then(|began| self.moment.time_us?.checked_sub(began)),
        }
    }
}

/// All pinned memory, most free bytes first.
pub(crate) fn list(view: &View<'_>) -> Vec<SegmentPin> {
    let mut pinned: Vec<SegmentPin> = view
        .state
        .segments
        .iter()
        .flat_map(|segment| of_segment(view, segment))
        .collect();
    pinned.sort_by(|a, b| b.free.cmp(&a.free).then(a.address.cmp(&b.address)));
    pinned
}

fn of_segment(view: &View<'_>, segment: &Segment) -> Vec<SegmentPin> {
    let pinner = Pinner::new(view, segment);
    let pieces = pieces(segment, view.config).filter(|piece| piece.pinned > Bytes::ZERO);
    let entry = |address, size, free, live: (u64, Bytes), by: &Block| SegmentPin {
        address,
        size,
        free,
        stream: segment.stream,
        pool: segment.pool,
        private_pool: segment.private_pool,
        expandable: segment.expandable,
        live_blocks: live.0,
        live_bytes: live.1,
        by: view.pin(by),
    };
    let sum = |blocks: &mut dyn Iterator<Item = &Block>| {
        blocks.fold((0, Bytes::ZERO), |(n, bytes), block| {
            (n + 1, bytes + block.size)
        })
    };
    if segment.expandable {
        let of_piece = |piece: Piece<'_>| {
            let by = pinner.of(&piece)?;
            let address = segment.blocks[piece.index].address;
            Some(entry(
                address,
                piece.pinned,
                piece.pinned,
                sum(&mut neighbours(&piece)),
                by,
            ))
        };
        return pieces.filter_map(of_piece).collect();
    }
    let free: Bytes = pieces.map(|piece| piece.pinned).sum();
    let live = sum(&mut segment
        .blocks
        .iter()
        .filter(|block| block.state != BlockState::Inactive));
    let by = pinner.oldest.filter(|_| free > Bytes::ZERO);
    by.map(|by| entry(segment.address, segment.size, free, live, by))
        .into_iter()
        .collect()
}

#[derive(Clone, Debug)]
pub struct PinnedBySite<'a> {
    pub id: SiteId,
    pub free: Bytes,
    /// Never empty. Most free bytes first.
    pub segments: Vec<&'a SegmentPin>,
}

impl PinnedBySite<'_> {
    pub fn are_single(&self) -> bool {
        self.segments.iter().all(|segment| segment.live_blocks == 1)
    }

    /// Describes the block: `one block of 2 MiB`, or `one block of at most 2 MiB` if sizes differ.
    pub fn one_block(&self) -> String {
        let sizes = || self.segments.iter().map(|segment| segment.by.size);
        match (
            sizes().min().unwrap_or_default(),
            sizes().max().unwrap_or_default(),
        ) {
            (least, largest) if least == largest => format!("one block of {largest}"),
            (_, largest) => format!("one block of at most {largest}"),
        }
    }

    /// The largest age of a block in microseconds. `None` if a block is from before the recording.
    pub fn oldest_us(&self) -> Option<u64> {
        let ages: Option<Vec<u64>> = self
            .segments
            .iter()
            .map(|segment| segment.by.age_us)
            .collect();
        ages?.into_iter().max()
    }
}

/// Groups pinned segments by the site of the pinning block, most free bytes first.
pub fn by_site<'a>(segments: impl IntoIterator<Item = &'a SegmentPin>) -> Vec<PinnedBySite<'a>> {
    let mut by_site: BTreeMap<SiteId, PinnedBySite<'_>> = BTreeMap::new();
    for segment in segments {
        let id = segment.by.id;
        let of_site = by_site.entry(id).or_insert_with(|| PinnedBySite {
            id,
            free: Bytes::ZERO,
            segments: Vec::new(),
        });
        of_site.segments.push(segment);
        of_site.free += segment.free;
    }
    let mut groups: Vec<PinnedBySite<'_>> = by_site.into_values().collect();
    groups.sort_by(|a, b| {
        b.free
            .cmp(&a.free)
            .then_with(|| a.segments[0].by.site.cmp(&b.segments[0].by.site))
    });
    groups
}
