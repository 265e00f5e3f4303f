//! Reconstructs the segments and blocks before the recording.
//!
//! A snapshot contains the final state and the events before it, so undoing the events from the end
//! gives the segments. A block was live if the recording frees it without allocating it, or if it
//! is live at the end and was not allocated. All other memory was free.
//!
//! A block of the large pool can exceed its requested size by up to 1 MiB, because smaller
//! remainders are not split off. So a gap of at most 1 MiB after a live block belongs to the block.
//! In a larger gap, the first later allocation shows where the free block started.

use std::collections::{BTreeMap, HashMap, HashSet};

use harness_allocator::stats::{BlockState, PoolKind};
use harness_allocator::{allocator::caching::Config, units::Bytes};

use super::ProgramError;
use crate::snapshot::{Action, Block, Event, ExtraId, MempoolId, Segment, Snapshot, StackId};

/// The largest remainder that stays with a large block.
pub const LARGEST_REMAINDER: u64 = 1 << 20;
const SMALL_SEGMENT: Bytes = Bytes::mib(2);

#[derive(Debug, Default)]
pub(super) struct Start {
    /// In address order. Blocks are allocated or free.
    pub(super) segments: Vec<Segment>,
    /// Live blocks that were freed but waited for other streams.
    pub(super) pending: HashSet<u64>,
}

impl Start {
    pub(super) fn find(
        snapshot: &Snapshot,
        device: u32,
        events: &[Event],
        config: &Config,
    ) -> Result<Self, ProgramError> {
        let (mut live, pending) = live_before(snapshot.segments_of(device), events, config);
        let (mut earlier, pools) = (
            EarlierSegments::new(device, snapshot.segments_of(device)),
            UnmappedPools::find(events, config),
        );
        events.iter().rev().for_each(|event| {
            earlier.undo(event, &pools, || {
                snapshot.pool_of(event).unwrap_or_default()
            })
        });
        let mut segments: Vec<Segment> = earlier.by_address.into_values().collect();
        let mut gaps = Gaps::default();
        for segment in &segments {
            if segment.pool == PoolKind::Large && !segment.expandable {
                gaps.look_at(segment, &live, config);
            }
        }
        gaps.settle(events, &mut live);
        for segment in &mut segments {
            let (address, mut at) = (segment.address, segment.address);
            let inside = live
                .range(address..address + segment.size.0)
                .map(|(_, block)| *block);
            for block in inside.clone() {
                if block.address < at
                    || block.size > Bytes(address + segment.size.0 - block.address)
                {
                    return Err(ProgramError::Inconsistent {
                        address,
                        why: "blocks that were live before the recording overlap",
                    });
                }
                at = block.address + block.size.0;
            }
            segment.fill(inside);
        }
        Ok(Self { segments, pending })
    }
}

/// Finds the blocks that were live before the recording, and those of them that were already freed.
fn live_before<'s>(
    last: impl Iterator<Item = &'s Segment>,
    events: &[Event],
    config: &Config,
) -> (BTreeMap<u64, Block>, HashSet<u64>) {
    let blocks = last
        .flat_map(|segment| &segment.blocks)
        .filter(|block| block.state != BlockState::Inactive);
    let mut live: BTreeMap<u64, Block> = blocks
        .map(|block| {
            (
                block.address,
                Block {
                    extra: ExtraId::NONE,
                    ..*block
                },
            )
        })
        .collect();
    for &Event {
        action,
        address,
        size: requested,
        ..
    } in events.iter().rev()
    {
        let state = match action {
            Action::FreeRequested => BlockState::Allocated,
            Action::FreeCompleted => BlockState::PendingFree,
            Action::Alloc => {
                live.remove(&address);
                continue;
            }
            _ => continue,
        };
        let size = config.round(requested.0).map_or(requested, Bytes);
        let freed = || Block {
            address,
            size,
            requested,
            state,
            stack: StackId::EMPTY,
            extra: ExtraId::NONE,
        };
        live.entry(address).or_insert_with(freed).state = state;
    }
    let pending = live
        .values()
        .filter(|block| block.state == BlockState::PendingFree)
        .map(|block| block.address)
        .collect();
    live.values_mut()
        .for_each(|block| block.state = BlockState::Allocated);
    (live, pending)
}

/// Finds the pools of unmapped ranges of expandable segments, which a recording does not contain.
#[derive(Clone, Debug)]
pub struct UnmappedPools {
    /// The pool of each recorded block by address. Empty if nothing was unmapped.
    of_blocks: BTreeMap<u64, PoolKind>,
    large_page: u64,
}

impl UnmappedPools {
    pub fn find(events: &[Event], config: &Config) -> Self {
        let is_unmapped = events
            .iter()
            .any(|event| event.action == Action::SegmentUnmap);
        let is_block = |event: &&Event| {
            matches!(
                event.action,
                Action::Alloc | Action::FreeRequested | Action::FreeCompleted
            )
        };
        let pool = |event: &Event| {
            PoolKind::of_block(Bytes(config.round(event.size.0).unwrap_or(event.size.0)))
        };
        let blocks = events.iter().filter(|_| is_unmapped).filter(is_block);
        Self {
            of_blocks: blocks.map(|event| (event.address, pool(event))).collect(),
            large_page: config.page(PoolKind::Large),
        }
    }

    /// The pool of a [`Action::SegmentUnmap`] event, from a block in the range or else from the
    /// page size.
    fn of(&self, event: &Event) -> PoolKind {
        let inside = self
            .of_blocks
            .range(event.address..event.address.saturating_add(event.size.0))
            .next();
        let is_large = event.size.0.is_multiple_of(self.large_page);
        inside.map_or(
            if is_large {
                PoolKind::Large
            } else {
                PoolKind::Small
            },
            |(_, &pool)| pool,
        )
    }
}

/// The segments of a device at an earlier moment: the final ones, from which events are undone,
/// last to first.
pub struct EarlierSegments {
    device: u32,
    pub by_address: BTreeMap<u64, Segment>,
}

impl EarlierSegments {
    pub fn new<'s>(device: u32, last: impl IntoIterator<Item = &'s Segment>) -> Self {
        let without_blocks = |segment: &Segment| {
            let blocks = Vec::new();
            (segment.address, Segment { blocks, ..*segment })
        };
        Self {
            device,
            by_address: last.into_iter().map(without_blocks).collect(),
        }
    }

    /// Undoes an event. `private_pool` returns the private pool of a released segment.
    pub fn undo(
        &mut self,
        event: &Event,
        pools: &UnmappedPools,
        private_pool: impl FnOnce() -> MempoolId,
    ) {
        let device = self.device;
        let released = |pool| Segment {
            device,
            address: event.address,
            size: event.size,
            stream: event.stream,
            pool,
            private_pool: private_pool(),
            expandable: event.action == Action::SegmentUnmap,
            stack: StackId::EMPTY,
            blocks: Vec::new(),
            extra: ExtraId::NONE,
        };
        match event.action {
            Action::SegmentAlloc => _ = self.by_address.remove(&event.address),
            Action::SegmentFree => {
                let pool = if event.size == SMALL_SEGMENT {
                    PoolKind::Small
                } else {
                    PoolKind::Large
                };
                self.by_address.insert(event.address, released(pool));
            }
            Action::SegmentMap => self.unmap(event),
            Action::SegmentUnmap => self.map(released(pools.of(event))),
            _ => {}
        }
    }

    fn map(&mut self, mut range: Segment) {
        let stream = range.stream;
        let joins = |other: &Segment| other.expandable && other.stream == stream;
        let end = range.address + range.size.0;
        if self.by_address.get(&end).is_some_and(joins)
            && let Some(after) = self.by_address.remove(&end)
        {
            range = Segment {
                address: range.address,
                size: range.size + after.size,
                ..after
            };
        }
        match self.by_address.range_mut(..range.address).next_back() {
            Some((_, before))
                if joins(before) && before.address + before.size.0 == range.address =>
            {
                before.size += range.size
            }
            _ => _ = self.by_address.insert(range.address, range),
        }
    }

    fn unmap(&mut self, event: &Event) {
        let (start, end) = (event.address, event.address + event.size.0);
        let Some((&address, around)) = self.by_address.range_mut(..=start).next_back() else {
            return;
        };
        let around_end = address + around.size.0;
        let rest = (end < around_end).then(|| Segment {
            address: end,
            size: Bytes(around_end - end),
            ..around.clone()
        });
        around.size = Bytes(start.min(around_end) - address);
        if around.size == Bytes::ZERO {
            self.by_address.remove(&address);
        }
        self.by_address.extend(rest.map(|rest| (end, rest)));
    }
}

/// Gaps after live blocks of the large pool whose owner is unknown.
#[derive(Default)]
struct Gaps {
    /// By start address: the end, and the address of the block before the gap.
    open: BTreeMap<u64, (u64, u64)>,
    /// The start of the gap after each block.
    behind: HashMap<u64, u64>,
    /// The address and final size of each resolved block.
    settled: Vec<(u64, u64)>,
}

impl Gaps {
    fn look_at(&mut self, segment: &Segment, live: &BTreeMap<u64, Block>, config: &Config) {
        let end = segment.address + segment.size.0;
        let mut blocks = live.range(segment.address..end).peekable();
        while let Some((&address, block)) = blocks.next() {
            let gap = address + block.size.0;
            let gap_end = blocks.peek().map_or(end, |&(&next, _)| next);
            let uncut = config.max_split_size.is_some_and(|max| block.size >= max);
            if gap >= gap_end {
            } else if uncut || gap_end - gap <= LARGEST_REMAINDER {
                self.settled.push((address, gap_end - address));
            } else {
                self.open.insert(gap, (gap_end, address));
                self.behind.insert(address, gap);
            }
        }
    }

    /// Resolves each gap by the first allocation in it while the block before it is live.
    fn settle(mut self, events: &[Event], live: &mut BTreeMap<u64, Block>) {
        for event in events {
            if self.open.is_empty() {
                break;
            }
            match event.action {
                Action::Alloc => {
                    let around = self.open.range(..=event.address).next_back();
                    let Some((&gap, &(end, block))) =
                        around.filter(|&(_, &(end, _))| event.address < end)
                    else {
                        continue;
                    };
                    self.open.remove(&gap);
                    if event.address - gap <= LARGEST_REMAINDER && event.address < end {
                        self.settled.push((block, event.address - block));
                    }
                }
                Action::FreeRequested => {
                    if let Some(gap) = self.behind.get(&event.address) {
                        self.open.remove(gap);
                    }
                }
                _ => {}
            }
        }
        for (block, size) in self.settled {
            if let Some(before) = live.get_mut(&block) {
                before.size = Bytes(size);
            }
        }
    }
}
