//! The structure of an allocator as the audit read it last: its segments, and the sums over their blocks that its counters must equal.

use std::collections::BTreeMap;

use harness_allocator::device::{DevicePtr, PoolMemory, StreamId};
use harness_allocator::stats::{BlockInfo, BlockState, MemoryStats, PoolKind, PooledStat, SegmentInfo, Stat};
use harness_allocator::units::Bytes;

use super::Finding;
use harness_record::Invariant;

/// What was handed out at an address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct HandedOut {
    pub(super) requested: Bytes,
    pub(super) size: Bytes,
    pub(super) stream: StreamId,
}

/// What is handed out, by address.
pub(super) type Live = BTreeMap<DevicePtr, HandedOut>;

/// Sums over blocks, of one pool.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Sums {
    requested: u64,
    allocated: u64,
    active: u64,
    reserved: u64,
    /// Reserved bytes as the device charges them: each segment in whole granules.
    charged: u64,
    inactive_split: u64,
    allocations: u64,
    actives: u64,
    segments: u64,
    inactive_splits: u64,
}

impl Sums {
    fn of(segment: &SegmentInfo, granularity: Bytes) -> Self {
        let charged = segment.size.checked_round_up(granularity).unwrap_or(segment.size).0;
        // PyTorch counts no segments where they are expandable.
        let segments = u64::from(!segment.expandable);
        let mut sums = Self { reserved: segment.size.0, charged, segments, ..Self::default() };
        let split = segment.blocks.len() > 1 && !segment.expandable;
        for block in &segment.blocks {
            match block.state {
                BlockState::Inactive if split => {
                    sums.inactive_split += block.size.0;
                    sums.inactive_splits += 1;
                }
                BlockState::Inactive => {}
                BlockState::PendingFree | BlockState::Allocated => {
                    sums.requested += block.requested.0;
                    sums.active += block.size.0;
                    sums.actives += 1;
                }
            }
            if block.state == BlockState::Allocated {
                sums.allocated += block.size.0;
                sums.allocations += 1;
            }
        }
        sums
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

/// A segment as it was read last.
#[derive(Clone, Copy, Debug)]
struct KnownSegment {
    pool: PoolKind,
    sums: Sums,
    blocks: u64,
}

impl KnownSegment {
    fn of(segment: &SegmentInfo, granularity: Bytes) -> Self {
        Self { pool: segment.pool, sums: Sums::of(segment, granularity), blocks: segment.blocks.len() as u64 }
    }
}

#[derive(Debug)]
pub(super) struct Structure {
    segments: BTreeMap<DevicePtr, KnownSegment>,
    small: Sums,
    large: Sums,
    /// Blocks of all segments.
    blocks: u64,
    granularity: Bytes,
}

impl Structure {
    /// That of an allocator that holds nothing. The device charges whole multiples of `granularity`.
    pub(super) fn new(granularity: Bytes) -> Self {
        Self { segments: BTreeMap::new(), small: Sums::default(), large: Sums::default(), blocks: 0, granularity }
    }

    /// Blocks of all segments.
    pub(super) const fn blocks(&self) -> u64 {
        self.blocks
    }

    /// Blocks of the segment around an address; of one that was not read yet, one.
    pub(super) fn blocks_around(&self, address: DevicePtr) -> u64 {
        self.segments.range(..=address).next_back().map_or(1, |(_, known)| known.blocks)
    }

    /// Blocks that are handed out, of all segments.
    pub(super) const fn allocations(&self) -> u64 {
        self.small.allocations + self.large.allocations
    }

    /// Bytes of all segments.
    pub(super) const fn reserved(&self) -> u64 {
        self.small.reserved + self.large.reserved
    }

    /// The same as the device charges them.
    pub(super) const fn charged(&self) -> u64 {
        self.small.charged + self.large.charged
    }

    /// Takes a segment that went back to the driver out of the sums.
    pub(super) fn forget(&mut self, address: DevicePtr) {
        let start = self.segments.range(..=address).next_back().map(|(&start, _)| start);
        if let Some(known) = start.and_then(|start| self.segments.remove(&start)) {
            self.take_off(known);
        }
    }

    fn take_off(&mut self, known: KnownSegment) {
        let total = self.sums_mut(known.pool);
        *total = total.combine(known.sums, |sum, part| sum - part);
        self.blocks -= known.blocks;
    }

    /// Checks all segments, which are in the order of addresses, and forgets what was known before. Linear in blocks.
    pub(super) fn read_all(&mut self, segments: &[SegmentInfo], live: &Live, findings: &mut Vec<Finding>) {
        *self = Self::new(self.granularity);
        let mut live = live.iter().peekable();
        let mut before: Option<&SegmentInfo> = None;
        let mut known = Vec::with_capacity(segments.len());
        for segment in segments {
            check_tiling(segment, findings);
            let end = segment.address.offset(segment.size);
            if let Some(before) = before.filter(|before| before.address.offset(before.size) > segment.address) {
                findings.push(overlap(segment, before.address, before.size));
            }
            while live.next_if(|(address, _)| **address < segment.address).is_some() {}
            check_owners(segment, std::iter::from_fn(|| live.next_if(|(address, _)| **address < end)), findings);
            let of_this = KnownSegment::of(segment, self.granularity);
            self.add(of_this);
            known.push((segment.address, of_this));
            before = Some(segment);
        }
        // From a list in order, which costs less than one insertion after the other.
        self.segments = known.into_iter().collect();
    }

    /// Checks one segment and replaces what was known of it in the sums.
    pub(super) fn read(&mut self, segment: &SegmentInfo, live: &Live, findings: &mut Vec<Finding>) {
        check_tiling(segment, findings);
        self.check_apart(segment, findings);
        check_owners(segment, live.range(segment.address..segment.address.offset(segment.size)), findings);
        let known = KnownSegment::of(segment, self.granularity);
        if let Some(old) = self.segments.insert(segment.address, known) {
            self.take_off(old);
        }
        self.add(known);
    }

    fn add(&mut self, known: KnownSegment) {
        self.blocks += known.blocks;
        let total = self.sums_mut(known.pool);
        *total = total.combine(known.sums, |sum, part| sum + part);
    }

    fn sums_mut(&mut self, pool: PoolKind) -> &mut Sums {
        match pool {
            PoolKind::Small => &mut self.small,
            PoolKind::Large => &mut self.large,
        }
    }

    /// No other segment reaches into this one.
    fn check_apart(&self, segment: &SegmentInfo, findings: &mut Vec<Finding>) {
        let before = self.segments.range(..segment.address).next_back();
        let end = segment.address.offset(segment.size);
        let after = self.segments.range(segment.address.offset(Bytes(1))..end).next();
        let overlapping = before.filter(|(start, known)| start.0 + known.sums.reserved > segment.address.0).or(after);
        findings.extend(overlapping.map(|(start, known)| overlap(segment, *start, Bytes(known.sums.reserved))));
    }

    /// Compares the counters with the sums. What a pool of the driver holds is counted in the large pool.
    pub(super) fn check_counters(&self, stats: &MemoryStats, pool: Option<PoolMemory>, findings: &mut Vec<Finding>) {
        let pooled = pool.map(|pool| pool.reserved.0);
        let sum = self.small.combine(self.large, |small, large| small + large);
        let all = Sums { reserved: pooled.unwrap_or(sum.reserved), ..sum };
        let large = Sums { reserved: pooled.unwrap_or(self.large.reserved), ..self.large };
        let mut compare = |name: &str, counted: &PooledStat, of: fn(&Sums) -> u64| {
            let parts = [
                ("all", counted.all, of(&all)),
                ("small_pool", counted.small_pool, of(&self.small)),
                ("large_pool", counted.large_pool, of(&large)),
            ];
            for (pool, Stat { current, peak, allocated, freed }, summed) in parts {
                let mut finding = |expected, seen| findings.push(Finding::new(Invariant::CountersEqualStructure, expected, seen));
                if current != summed {
                    finding(format!("{name}.{pool}.current = {summed}, the sum over the structure"), current.to_string());
                }
                if peak < current {
                    finding(format!("{name}.{pool}.peak at least the current {current}"), peak.to_string());
                }
                if allocated.checked_sub(freed) != Some(current) {
                    let expected = format!("{name}.{pool}.allocated − {name}.{pool}.freed = the current {current}");
                    finding(expected, format!("{allocated} − {freed}"));
                }
            }
        };
        compare("allocated_bytes", &stats.allocated_bytes, |sums| sums.allocated);
        compare("reserved_bytes", &stats.reserved_bytes, |sums| sums.reserved);
        compare("active_bytes", &stats.active_bytes, |sums| sums.active);
        compare("requested_bytes", &stats.requested_bytes, |sums| sums.requested);
        compare("inactive_split_bytes", &stats.inactive_split_bytes, |sums| sums.inactive_split);
        compare("allocation", &stats.allocation, |sums| sums.allocations);
        compare("segment", &stats.segment, |sums| sums.segments);
        compare("active", &stats.active, |sums| sums.actives);
        compare("inactive_split", &stats.inactive_split, |sums| sums.inactive_splits);
    }
}

/// The segment reaches into another one.
fn overlap(segment: &SegmentInfo, other: DevicePtr, size: Bytes) -> Finding {
    let expected = format!("the segment of {} at {} apart from all others", segment.size, segment.address);
    Finding::new(Invariant::BlocksTileSegments, expected, format!("one of {size} at {other}"))
}

/// Every allocated block was handed out as it stands, and everything that was handed out in this segment is an allocated block.
fn check_owners<'a>(
    segment: &SegmentInfo,
    mut handed_out: impl Iterator<Item = (&'a DevicePtr, &'a HandedOut)>,
    findings: &mut Vec<Finding>,
) {
    for block in segment.blocks.iter().filter(|block| block.state == BlockState::Allocated) {
        let owner = handed_out.next();
        let fits = owner.is_some_and(|(&address, owner)| {
            let same = address == block.address && owner.size == block.size && owner.requested == block.requested;
            same && owner.requested <= owner.size && owner.stream == block.stream
        });
        if !fits {
            let what = format!("{} for {} on stream {}", block.size, block.requested, block.stream.0);
            let expected = format!("the allocated block at {} ({what}) handed out as such", block.address);
            let seen = owner.map_or_else(
                || "nothing was handed out there".to_owned(),
                |(address, owner)| format!("{} for {} on stream {} at {address}", owner.size, owner.requested, owner.stream.0),
            );
            findings.push(Finding::new(Invariant::AllocationsAreDisjoint, expected, seen));
            return;
        }
    }
    if let Some((address, owner)) = handed_out.next() {
        let expected = format!("{} at {address} in an allocated block of its own", owner.requested);
        findings.push(Finding::new(Invariant::AllocationsAreDisjoint, expected, "its block is not allocated"));
    }
}

fn check_tiling(segment: &SegmentInfo, findings: &mut Vec<Finding>) {
    let mut next = segment.address;
    for block in &segment.blocks {
        if block.address != next || block.size == Bytes::ZERO {
            let expected = format!("a block at {next} in the segment at {}", segment.address);
            let seen = format!("{} at {}", block.size, block.address);
            findings.push(Finding::new(Invariant::BlocksTileSegments, expected, seen));
            return;
        }
        next = next.offset(block.size);
    }
    if next != segment.address.offset(segment.size) {
        let expected = format!("blocks of {} in the segment at {}", segment.size, segment.address);
        findings.push(Finding::new(Invariant::BlocksTileSegments, expected, format!("they end at {next}")));
    }
    let foreign = |block: &&BlockInfo| segment.stream.is_some_and(|stream| stream != block.stream);
    if let (Some(stream), Some(block)) = (segment.stream, segment.blocks.iter().find(foreign)) {
        let expected = format!("blocks of stream {} in the segment at {}", stream.0, segment.address);
        let seen = format!("{} of stream {} at {}", block.size, block.stream.0, block.address);
        findings.push(Finding::new(Invariant::BlocksTileSegments, expected, seen));
    }
    // What is free for different streams has to stay apart until something orders the two.
    let free = |block: &BlockInfo| block.state == BlockState::Inactive;
    let mergeable = |pair: &&[BlockInfo]| free(&pair[0]) && free(&pair[1]) && pair[0].stream == pair[1].stream;
    if let Some(pair) = segment.blocks.windows(2).find(mergeable) {
        let expected = format!("the free block at {} merged with its neighbour", pair[0].address);
        let seen = format!("{} and {} side by side", pair[0].size, pair[1].size);
        findings.push(Finding::new(Invariant::FreeNeighboursAreMerged, expected, seen));
    }
}
