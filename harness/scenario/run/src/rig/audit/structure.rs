//! The allocator's structure as the audit last read it: the segments, and sums over their blocks
//! that must equal the counters.

use std::{collections::BTreeMap, ops::Range};

use harness_allocator::device::{DevicePtr, PoolMemory, StreamId};
use harness_allocator::stats::{
    BlockInfo, BlockState, MemoryStats, PoolKind, PooledStat, SegmentInfo,
};
use harness_allocator::{allocator::Allocation, units::Bytes};

use super::Finding;
use harness_base::words::count;
use harness_record::Invariant;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct LiveAllocation {
    pub(super) requested: Bytes,
    pub(super) size: Bytes,
    pub(super) stream: StreamId,
}

impl LiveAllocation {
    pub(super) fn of(allocation: &Allocation) -> Self {
        Self {
            requested: allocation.requested(),
            size: allocation.size(),
            stream: allocation.stream(),
        }
    }
}

pub(super) type Live = BTreeMap<DevicePtr, LiveAllocation>;

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Sums {
    requested: u64,
    allocated: u64,
    active: u64,
    reserved: u64,
    /// Reserved bytes in whole granules of the device.
    charged: u64,
    inactive_split: u64,
    allocations: u64,
    actives: u64,
    segments: u64,
    inactive_splits: u64,
}

impl Sums {
    fn of_segment(segment: &SegmentInfo, granularity: Bytes) -> Self {
        let charged = segment
            .size
            .checked_round_up(granularity)
            .unwrap_or(segment.size)
            .0;
        // PyTorch does not count expandable segments.
        let segments = u64::from(!segment.expandable);
        Self {
            reserved: segment.size.0,
            charged,
            segments,
            ..Self::default()
        }
    }

    fn of_blocks(segment: &SegmentInfo, blocks: &[BlockInfo]) -> Self {
        let mut sums = Self::default();
        let split = is_split(segment);
        blocks.iter().for_each(|block| sums.add_block(block, split));
        sums
    }

    #[inline(always)]
    fn add_block(&mut self, block: &BlockInfo, split: bool) {
        match block.state {
            BlockState::Inactive if split => {
                self.inactive_split += block.size.0;
                self.inactive_splits += 1;
            }
            BlockState::Inactive => {}
            BlockState::PendingFree | BlockState::Allocated => {
                self.requested += block.requested.0;
                self.active += block.size.0;
                self.actives += 1;
            }
        }
        if block.state == BlockState::Allocated {
            self.allocated += block.size.0;
            self.allocations += 1;
        }
    }

    fn combine(self, other: Self, op: impl Fn(u64, u64) -> u64) -> Self {
        Self {
            requested: op(self.requested, other.requested),
            allocated: op(self.allocated, other.allocated),
            active: op(self.active, other.active),
            reserved: op(self.reserved, other.reserved),
            charged: op(self.charged, other.charged),
            inactive_split: op(self.inactive_split, other.inactive_split),
            allocations: op(self.allocations, other.allocations),
            actives: op(self.actives, other.actives),
            segments: op(self.segments, other.segments),
            inactive_splits: op(self.inactive_splits, other.inactive_splits),
        }
    }
}

#[derive(Debug)]
struct KnownSegment {
    sums: Sums,
    read: SegmentInfo,
}

impl KnownSegment {
    fn blocks(&self) -> u64 {
        self.read.blocks.len() as u64
    }
}

/// Returns whether the segment's free bytes cannot be released to the driver.
fn is_split(segment: &SegmentInfo) -> bool {
    segment.blocks.len() > 1 && !segment.expandable
}

#[derive(Debug)]
pub(super) struct Structure {
    /// In address order. Segments rarely come and go compared with how often they are read.
    segments: Vec<KnownSegment>,
    small: Sums,
    large: Sums,
    blocks: u64,
    granularity: Bytes,
    /// [`Allocator::merges_free_neighbours`].
    pub(super) merges: bool,
}

impl Structure {
    pub(super) fn new(granularity: Bytes) -> Self {
        Self {
            segments: Vec::new(),
            small: Sums::default(),
            large: Sums::default(),
            blocks: 0,
            granularity,
            merges: true,
        }
    }

    pub(super) const fn blocks(&self) -> u64 {
        self.blocks
    }

    /// The number of blocks of the segment around an address; 1 if it is unknown.
    pub(super) fn blocks_around(&self, address: DevicePtr) -> u64 {
        self.around(address)
            .map_or(1, |place| self.segments[place].blocks())
    }

    /// The index of the last segment that starts at or before an address.
    fn around(&self, address: DevicePtr) -> Option<usize> {
        self.segments
            .partition_point(|known| known.read.address <= address)
            .checked_sub(1)
    }

    /// Compares the number of allocated blocks with the number of live allocations.
    pub(super) fn missing_allocations(&self, live: &Live) -> Option<Finding> {
        let seen = self.small.allocations + self.large.allocations;
        let expected = || format!("{} in the structure", count(live.len(), "allocation"));
        (seen != live.len() as u64).then(|| {
            Finding::new(
                Invariant::AllocationsAreDisjoint,
                expected(),
                seen.to_string(),
            )
        })
    }

    pub(super) const fn reserved(&self) -> u64 {
        self.small.reserved + self.large.reserved
    }

    /// Reserved bytes in whole granules of the device.
    pub(super) const fn charged(&self) -> u64 {
        self.small.charged + self.large.charged
    }

    pub(super) fn forget(&mut self, address: DevicePtr) {
        if let Some(place) = self.around(address) {
            let known = self.segments.remove(place);
            self.take_off(&known);
        }
    }

    fn take_off(&mut self, known: &KnownSegment) {
        let total = self.sums_mut(known.read.pool);
        *total = total.combine(known.sums, |sum, part| sum - part);
        self.blocks -= known.blocks();
    }

    /// Checks all segments, which are in address order, and replaces the known ones. Linear in
    /// blocks.
    pub(super) fn read_all(
        &mut self,
        segments: Vec<SegmentInfo>,
        live: &Live,
        findings: &mut Vec<Finding>,
    ) {
        *self = Self {
            merges: self.merges,
            ..Self::new(self.granularity)
        };
        let mut handed_out = live.iter();
        let mut upcoming = handed_out.next();
        let mut before: Option<(DevicePtr, Bytes)> = None;
        self.segments.reserve(segments.len());
        for segment in segments {
            let (start, end) = (segment.address, segment.address.offset(segment.size));
            while upcoming.is_some_and(|(address, _)| *address < start) {
                upcoming = handed_out.next();
            }
            let here = std::iter::from_fn(|| {
                let here = upcoming.filter(|(address, _)| **address < end)?;
                upcoming = handed_out.next();
                Some(here)
            });
            let read = BlocksRead::new(&segment, 0..segment.blocks.len(), self.merges, here);
            let reaches_in = before.filter(|(address, size)| address.offset(*size) > start);
            before = Some((start, segment.size));
            let overlap = reaches_in.map(|(address, size)| overlap(&segment, address, size));
            let sums = self.sums_of(&segment, read, overlap, findings);
            let of_this = KnownSegment {
                sums,
                read: segment,
            };
            self.add(&of_this);
            self.segments.push(of_this);
        }
    }

    /// Checks one segment in which an operation touched the block around an address, and updates
    /// the sums.
    pub(super) fn read(
        &mut self,
        segment: SegmentInfo,
        touched: DevicePtr,
        live: &Live,
        findings: &mut Vec<Finding>,
    ) {
        let place = self
            .segments
            .binary_search_by_key(&segment.address, |known| known.read.address);
        // A known segment may have other blocks. Their number decides whether free bytes count as
        // split.
        let about = |segment: &SegmentInfo| {
            (
                segment.size,
                segment.stream,
                segment.pool,
                segment.expandable,
                is_split(segment),
            )
        };
        let known = place
            .ok()
            .map(|place| &self.segments[place])
            .filter(|known| about(&known.read) == about(&segment));
        let sums = known.and_then(|known| self.changed(known, &segment, touched, live));
        let sums = sums.unwrap_or_else(|| {
            let here = live.range(segment.address..segment.address.offset(segment.size));
            let read = BlocksRead::new(&segment, 0..segment.blocks.len(), self.merges, here);
            self.sums_of(&segment, read, self.overlapping(&segment), findings)
        });
        let known = KnownSegment {
            sums,
            read: segment,
        };
        self.add(&known);
        match place {
            Ok(place) => {
                let before = std::mem::replace(&mut self.segments[place], known);
                self.take_off(&before);
            }
            Err(place) => self.segments.insert(place, known),
        }
    }

    /// The new sums of a known segment, if the changed blocks and the touched one are correct.
    fn changed(
        &self,
        known: &KnownSegment,
        segment: &SegmentInfo,
        touched: DevicePtr,
        live: &Live,
    ) -> Option<Sums> {
        let (before, now) = (&known.read.blocks[..], &segment.blocks[..]);
        let at = now
            .partition_point(|block| block.address <= touched)
            .checked_sub(1)?;
        let front = before
            .iter()
            .zip(now)
            .take(at)
            .take_while(|(before, now)| before == now)
            .count();
        let most = (before.len() - front).min(now.len() - at - 1);
        let back = before
            .iter()
            .rev()
            .zip(now.iter().rev())
            .take(most)
            .take_while(|(before, now)| before == now)
            .count();
        let (gone, new) = (&before[front..before.len() - back], front..now.len() - back);
        let start = now[front].address;
        let end = now.get(new.end).map_or_else(
            || segment.address.offset(segment.size),
            |block| block.address,
        );
        let live = live.range(start..end.max(start));
        let read = BlocksRead::new(segment, new, self.merges, live);
        let rest = known
            .sums
            .combine(Sums::of_blocks(&known.read, gone), |sum, part| sum - part);
        read.is_sound()
            .then(|| rest.combine(read.sums, |sum, part| sum + part))
    }

    fn add(&mut self, known: &KnownSegment) {
        self.blocks += known.blocks();
        let total = self.sums_mut(known.read.pool);
        *total = total.combine(known.sums, |sum, part| sum + part);
    }

    fn sums_mut(&mut self, pool: PoolKind) -> &mut Sums {
        match pool {
            PoolKind::Small => &mut self.small,
            PoolKind::Large => &mut self.large,
        }
    }

    /// The sums of a segment whose blocks were read. Reports every error.
    fn sums_of(
        &self,
        segment: &SegmentInfo,
        read: BlocksRead,
        overlap: Option<Finding>,
        findings: &mut Vec<Finding>,
    ) -> Sums {
        findings.extend(
            read.misplaced
                .into_iter()
                .chain(overlap)
                .chain(read.unowned),
        );
        Sums::of_segment(segment, self.granularity)
            .combine(read.sums, |of_segment, of_blocks| of_segment + of_blocks)
    }

    fn overlapping(&self, segment: &SegmentInfo) -> Option<Finding> {
        let (start, end) = (segment.address, segment.address.offset(segment.size));
        let (in_front, rest) = self.segments.split_at(
            self.segments
                .partition_point(|known| known.read.address < start),
        );
        let reaches_in = in_front
            .last()
            .filter(|known| known.read.address.offset(known.read.size) > start);
        let begins_in = || {
            rest.iter()
                .find(|known| known.read.address > start)
                .filter(|known| known.read.address < end)
        };
        reaches_in
            .or_else(begins_in)
            .map(|known| overlap(segment, known.read.address, known.read.size))
    }

    /// Compares the counters with the sums. A driver pool counts as the large pool.
    pub(super) fn check_counters(
        &self,
        stats: &MemoryStats,
        pool: Option<PoolMemory>,
        findings: &mut Vec<Finding>,
    ) {
        let pooled = pool.map(|pool| pool.reserved.0);
        let sum = self.small.combine(self.large, |small, large| small + large);
        let all = Sums {
            reserved: pooled.unwrap_or(sum.reserved),
            ..sum
        };
        let large = Sums {
            reserved: pooled.unwrap_or(self.large.reserved),
            ..self.large
        };
        let all = [&all, &self.small, &large];
        macro_rules! compare {
            ($($counter:ident: $sum:ident,)*) => {$(
                let summed = all.map(|sums| sums.$sum);
                compare_counter(stringify!($counter), &stats.$counter, summed, findings);
            )*};
        }
        compare! {
            allocated_bytes: allocated,
            reserved_bytes: reserved,
            active_bytes: active,
            requested_bytes: requested,
            inactive_split_bytes: inactive_split,
            allocation: allocations,
            segment: segments,
            active: actives,
            inactive_split: inactive_splits,
        }
    }
}

/// Compares a counter with its sums: of all segments, of small and of large ones.
fn compare_counter(
    name: &str,
    counted: &PooledStat,
    summed: [u64; 3],
    findings: &mut Vec<Finding>,
) {
    let pools = ["all", "small_pool", "large_pool"];
    let stats = [counted.all, counted.small_pool, counted.large_pool];
    for ((pool, stat), summed) in pools.into_iter().zip(stats).zip(summed) {
        let name = format!("{name}.{pool}");
        let (current, peak) = (stat.current, stat.peak);
        let (allocated, freed) = (stat.allocated, stat.freed);
        let mut finding = |expected, seen| {
            let invariant = Invariant::CountersEqualStructure;
            findings.push(Finding::new(invariant, expected, seen));
        };
        if current != summed {
            let expected = format!("{name}.current = {summed}, the sum over the structure");
            finding(expected, current.to_string());
        }
        if peak < current {
            let expected = format!("{name}.peak at least the current {current}");
            finding(expected, peak.to_string());
        }
        if allocated.checked_sub(freed) != Some(current) {
            let expected = format!("{name}.allocated − {name}.freed = the current {current}");
            finding(expected, format!("{allocated} − {freed}"));
        }
    }
}

fn overlap(segment: &SegmentInfo, other: DevicePtr, size: Bytes) -> Finding {
    let expected = format!(
        "the segment of {} at {} apart from all others",
        segment.size, segment.address
    );
    Finding::new(
        Invariant::BlocksTileSegments,
        expected,
        format!("one of {size} at {other}"),
    )
}

struct BlocksRead {
    sums: Sums,
    /// Blocks that do not tile the segment, belong to another stream, or are not merged.
    misplaced: Vec<Finding>,
    /// A block or a live allocation without its counterpart.
    unowned: Option<Finding>,
}

impl BlocksRead {
    /// Reads some blocks of a segment and checks them.
    fn new<'a>(
        segment: &SegmentInfo,
        which: Range<usize>,
        merges: bool,
        mut handed_out: impl Iterator<Item = (&'a DevicePtr, &'a LiveAllocation)>,
    ) -> Self {
        let split = is_split(segment);
        let after = |before: Option<&BlockInfo>| {
            before.map_or(segment.address, |before| before.address.offset(before.size))
        };
        let (mut misplaced, mut foreign, mut unmerged, mut unowned) = (None, None, None, None);
        let mut sums = Sums::default();
        let mut before = which
            .start
            .checked_sub(1)
            .and_then(|index| segment.blocks.get(index));
        // The block after the last one is checked for its address and for merging only.
        for (index, block) in segment
            .blocks
            .iter()
            .enumerate()
            .take(which.end + 1)
            .skip(which.start)
        {
            if misplaced.is_none() {
                misplaced = not_at(segment, block, after(before));
            }
            if merges && unmerged.is_none() {
                unmerged = before.and_then(|before| not_merged(before, block));
            }
            if index == which.end {
                break;
            }
            if foreign.is_none() {
                foreign = of_another_stream(segment, block);
            }
            if block.state == BlockState::Allocated && unowned.is_none() {
                unowned = not_handed_out(block, handed_out.next());
            }
            sums.add_block(block, split);
            before = Some(block);
        }
        let next = after(before);
        let is_complete =
            which.end < segment.blocks.len() || next == segment.address.offset(segment.size);
        let unowned = unowned.or_else(|| handed_out.next().map(without_block));
        let misplaced = match misplaced {
            Some(first) => vec![first],
            None => {
                let incomplete = (!is_complete).then(|| ends_at(segment, next));
                let found = [incomplete, foreign, unmerged];
                found.into_iter().flatten().collect()
            }
        };
        Self {
            sums,
            misplaced,
            unowned,
        }
    }

    const fn is_sound(&self) -> bool {
        self.misplaced.is_empty() && self.unowned.is_none()
    }
}

fn not_tiled(expected: String, seen: String) -> Finding {
    Finding::new(Invariant::BlocksTileSegments, expected, seen)
}

fn not_at(segment: &SegmentInfo, block: &BlockInfo, next: DevicePtr) -> Option<Finding> {
    (block.address != next || block.size == Bytes::ZERO).then(|| {
        not_tiled(
            format!("a block at {next} in the segment at {}", segment.address),
            format!("{} at {}", block.size, block.address),
        )
    })
}

fn ends_at(segment: &SegmentInfo, end: DevicePtr) -> Finding {
    let expected = format!(
        "blocks of {} in the segment at {}",
        segment.size, segment.address
    );
    not_tiled(expected, format!("they end at {end}"))
}

/// Returns a finding if both blocks are free and of the same stream. Free blocks of different
/// streams must stay apart until an event orders the streams.
fn not_merged(before: &BlockInfo, block: &BlockInfo) -> Option<Finding> {
    let free = |block: &BlockInfo| block.state == BlockState::Inactive;
    (free(before) && free(block) && before.stream == block.stream).then(|| {
        let expected = format!(
            "the free block at {} merged with its neighbour",
            before.address
        );
        let seen = format!("{} and {} side by side", before.size, block.size);
        Finding::new(Invariant::FreeNeighboursAreMerged, expected, seen)
    })
}

fn of_another_stream(segment: &SegmentInfo, block: &BlockInfo) -> Option<Finding> {
    let stream = segment.stream.filter(|stream| *stream != block.stream)?;
    let expected = format!(
        "blocks of stream {} in the segment at {}",
        stream.0, segment.address
    );
    let seen = format!(
        "{} of stream {} at {}",
        block.size, block.stream.0, block.address
    );
    Some(not_tiled(expected, seen))
}

fn without_block((address, owner): (&DevicePtr, &LiveAllocation)) -> Finding {
    let expected = format!(
        "{} at {address} to have its own allocated block",
        owner.requested
    );
    let seen = "its block is not allocated";
    Finding::new(Invariant::AllocationsAreDisjoint, expected, seen)
}

/// Compares an allocated block with the live allocation that should be in it.
fn not_handed_out(
    block: &BlockInfo,
    owner: Option<(&DevicePtr, &LiveAllocation)>,
) -> Option<Finding> {
    let is_of = |(&address, owner): (&DevicePtr, &LiveAllocation)| {
        let same = address == block.address
            && owner.size == block.size
            && owner.requested == block.requested;
        same && owner.requested <= owner.size && owner.stream == block.stream
    };
    if owner.is_some_and(is_of) {
        return None;
    }
    let what = format!(
        "{} for {} on stream {}",
        block.size, block.requested, block.stream.0
    );
    let expected = format!(
        "the allocated block at {} ({what}) to match a live allocation",
        block.address
    );
    let seen = owner.map_or_else(
        || "no allocation was returned there".to_owned(),
        |(address, owner)| {
            format!(
                "{} for {} on stream {} at {address}",
                owner.size, owner.requested, owner.stream.0
            )
        },
    );
    Some(Finding::new(
        Invariant::AllocationsAreDisjoint,
        expected,
        seen,
    ))
}
