//! The audit: a second account of everything, kept apart from the allocator's own, and compared with it and with the device.
//!
//! It remembers what was handed out ([`Audit::handed_out`], [`Audit::taken_back`]) and compares the allocator's counters with that after each
//! operation. Of the structure it reads the one segment that an operation touched, or all of it when counters or driver calls moved otherwise
//! than the operation explains.
//!
//! Reading is paid for: each operation pays for [`BLOCKS_PER_OPERATION`] blocks, each step for [`BLOCKS_PER_STEP`]. What is not paid for yet is
//! read later, all at once, and at the latest when the run ends. So small structures are read after every operation, and a run with many live
//! blocks is audited in time linear in its operations.

use std::collections::BTreeMap;

use harness_allocator::allocator::{Allocation, Allocator, Request};
use harness_allocator::device::{Clock, DeviceCalls, DeviceMemory, DevicePtr, PoolMemory, StreamId, TestDevice};
use harness_allocator::stats::{BlockInfo, BlockState, MemoryStats, PoolKind, PooledStat, SegmentInfo, Stat};
use harness_allocator::units::Bytes;

use harness_record::Invariant;

/// Blocks that each operation pays for.
const BLOCKS_PER_OPERATION: u64 = 64;

/// Blocks that the end of each step pays for.
const BLOCKS_PER_STEP: u64 = 1024;

/// An invariant that does not hold, before anybody knows in which step.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Finding {
    /// Which.
    pub invariant: Invariant,
    /// What should be.
    pub expected: String,
    /// What is.
    pub seen: String,
}

impl Finding {
    fn new(invariant: Invariant, expected: impl Into<String>, seen: impl Into<String>) -> Self {
        Self { invariant, expected: expected.into(), seen: seen.into() }
    }
}

/// What was handed out at an address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct HandedOut {
    requested: Bytes,
    size: Bytes,
    stream: StreamId,
}

/// Sums over blocks, of one pool.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Sums {
    requested: u64,
    allocated: u64,
    active: u64,
    reserved: u64,
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

/// See the module.
#[derive(Debug)]
pub struct Audit {
    live: BTreeMap<DevicePtr, HandedOut>,
    /// Their sizes together.
    live_bytes: u64,
    segments: BTreeMap<DevicePtr, KnownSegment>,
    small: Sums,
    large: Sums,
    /// Blocks of all known segments.
    blocks: u64,
    /// Blocks that may be read.
    credit: u64,
    /// Whether something was touched that was not read.
    stale: bool,
    granularity: Bytes,
    tolerance: Bytes,
    /// Whether nobody else can be on the device.
    simulated: bool,
    contention: Option<String>,
    /// The device's memory before the first allocation.
    start: DeviceMemory,
    last_stats: MemoryStats,
    last_calls: DeviceCalls,
    /// What the driver's pool holds, where the allocator's memory comes from one: the structure shows only what is handed out of it, so
    /// the driver's figure takes the place of the sum over segments.
    pool: Option<PoolMemory>,
}

impl Audit {
    /// Begins before the first allocation, with the device's memory at that moment.
    #[must_use]
    pub fn new(device: &dyn TestDevice, start: DeviceMemory) -> Self {
        let info = device.info();
        Self {
            live: BTreeMap::new(),
            live_bytes: 0,
            segments: BTreeMap::new(),
            small: Sums::default(),
            large: Sums::default(),
            blocks: 0,
            credit: 0,
            stale: false,
            granularity: info.granularity,
            tolerance: info.used_tolerance,
            simulated: info.clock == Clock::Simulated,
            contention: None,
            start,
            last_stats: MemoryStats::default(),
            last_calls: device.calls(),
            pool: None,
        }
    }

    /// The scenario begins: what its streams took of the device is none of the allocator's.
    pub fn begin(&mut self, start: DeviceMemory) {
        self.start = start;
    }

    /// What others did on the device during the run that its figures cannot be told apart from, in words.
    #[must_use]
    pub fn contention(&self) -> Option<&str> {
        self.contention.as_deref()
    }

    /// Notes what was handed out for a request and checks that it answers the request, and what it touched.
    ///
    /// # Errors
    /// The findings.
    pub fn handed_out(
        &mut self,
        allocator: &dyn Allocator,
        device: &mut dyn TestDevice,
        request: Request,
        allocation: &Allocation,
    ) -> Result<(), Vec<Finding>> {
        let answered = Request { size: allocation.requested(), stream: allocation.stream() };
        if answered != request || allocation.is_null() != (request.size == Bytes::ZERO) {
            let expected = format!("{} for stream {}, as was asked for", request.size, request.stream.0);
            let seen = format!("{} for stream {} at {} handed out", answered.size, answered.stream.0, allocation.ptr());
            return Err(vec![Finding::new(Invariant::AllocationsAreDisjoint, expected, seen)]);
        }
        if allocation.is_null() {
            return Ok(());
        }
        let entry = HandedOut { requested: allocation.requested(), size: allocation.size(), stream: allocation.stream() };
        let (start, end) = (allocation.ptr(), allocation.ptr().offset(allocation.size()));
        let before = self.live.range(..end).next_back();
        if let Some((address, other)) = before.filter(|(address, other)| address.offset(other.size) > start) {
            let expected = format!("{start} free when {} are handed out there", entry.requested);
            let seen = format!("{} on stream {} are still in use at {address}", other.requested, other.stream.0);
            return Err(vec![Finding::new(Invariant::AllocationsAreDisjoint, expected, seen)]);
        }
        self.live.insert(start, entry);
        self.live_bytes += entry.size.0;
        self.after_operation(allocator, device, start, 1)
    }

    /// Forgets what was taken back and checks what it touched.
    ///
    /// # Errors
    /// The findings.
    pub fn taken_back(&mut self, allocator: &dyn Allocator, device: &mut dyn TestDevice, address: DevicePtr) -> Result<(), Vec<Finding>> {
        let Some(entry) = self.live.remove(&address) else { return Ok(()) };
        self.live_bytes -= entry.size.0;
        self.after_operation(allocator, device, address, -1)
    }

    /// Checks that an out-of-memory changed nothing but cached memory given back.
    ///
    /// # Errors
    /// The findings.
    pub fn out_of_memory(&mut self, allocator: &dyn Allocator, device: &mut dyn TestDevice, counted: bool) -> Result<(), Vec<Finding>> {
        let (before, after) = (self.last_stats, allocator.stats());
        let mut findings = Vec::new();
        let mut expect = |holds: bool, expected: String, seen: String| {
            if !holds {
                findings.push(Finding::new(Invariant::OomChangesOnlyTheCache, expected, seen));
            }
        };
        let allocated = |stats: &MemoryStats| stats.allocated_bytes.all.current;
        let reserved = |stats: &MemoryStats| stats.reserved_bytes.all.current;
        let wanted = before.num_ooms + u64::from(counted);
        expect(allocated(&after) == allocated(&before), bytes("allocated", allocated(&before)), bytes("", allocated(&after)));
        expect(reserved(&after) <= reserved(&before), bytes("reserved at most", reserved(&before)), bytes("", reserved(&after)));
        expect(after.num_ooms == wanted, format!("num_ooms {wanted}"), after.num_ooms.to_string());
        self.earn(BLOCKS_PER_OPERATION);
        findings.extend(self.everything_if_paid(allocator, device).err().unwrap_or_default());
        if findings.is_empty() { Ok(()) } else { Err(findings) }
    }

    /// Checks at the end of a step: everything, if it is paid for.
    ///
    /// # Errors
    /// The findings.
    pub fn step_ended(&mut self, allocator: &dyn Allocator, device: &mut dyn TestDevice) -> Result<(), Vec<Finding>> {
        self.earn(BLOCKS_PER_STEP);
        self.everything_if_paid(allocator, device)
    }

    /// Reads the whole structure and asks the device. Linear in blocks.
    ///
    /// # Errors
    /// The findings.
    pub fn everything(&mut self, allocator: &dyn Allocator, device: &mut dyn TestDevice) -> Result<(), Vec<Finding>> {
        let mut findings = Vec::new();
        self.ask_pool(allocator, device, &mut findings);
        self.segments.clear();
        (self.small, self.large, self.blocks, self.stale) = (Sums::default(), Sums::default(), 0, false);
        let snapshot = allocator.snapshot();
        for segment in &snapshot {
            self.check_segment(segment, &mut findings);
        }
        let seen = self.small.allocations + self.large.allocations;
        if seen != self.live.len() as u64 {
            let expected = format!("{} allocations in the structure", self.live.len());
            findings.push(Finding::new(Invariant::AllocationsAreDisjoint, expected, seen.to_string()));
        }
        self.check_counters(&allocator.stats(), &mut findings);
        self.check_device(&allocator.stats(), device, &mut findings);
        self.credit = self.credit.saturating_sub(self.blocks);
        self.remember(allocator, device);
        if findings.is_empty() { Ok(()) } else { Err(findings) }
    }

    /// An operation pays for so many blocks. What is saved is enough to read everything once.
    fn earn(&mut self, blocks: u64) {
        self.credit = (self.credit + blocks).min(self.all_blocks().max(blocks));
    }

    /// Blocks that a reading of everything costs. What was handed out since the last one may be in blocks that are not known yet.
    fn all_blocks(&self) -> u64 {
        self.blocks.max(self.live.len() as u64)
    }

    /// Reads everything if it is paid for, and otherwise compares what needs no reading.
    fn everything_if_paid(&mut self, allocator: &dyn Allocator, device: &mut dyn TestDevice) -> Result<(), Vec<Finding>> {
        if self.all_blocks() <= self.credit {
            return self.everything(allocator, device);
        }
        self.without_reading(allocator, device)
    }

    /// Compares the counters with what was handed out, and the device with the counters: what needs no reading.
    fn without_reading(&mut self, allocator: &dyn Allocator, device: &mut dyn TestDevice) -> Result<(), Vec<Finding>> {
        self.stale = true;
        let stats = allocator.stats();
        let mut findings = Vec::new();
        let handed_out = [
            ("allocation.all.current", self.live.len() as u64, stats.allocation.all.current),
            ("allocated_bytes.all.current", self.live_bytes, stats.allocated_bytes.all.current),
        ];
        for (name, summed, counted) in handed_out {
            if counted != summed {
                let expected = format!("{name} = {summed}, the sum of what was handed out");
                findings.push(Finding::new(Invariant::CountersEqualStructure, expected, counted.to_string()));
            }
        }
        check_order(&account_pairs(&stats), &mut findings);
        if device.calls().memory_calls() != self.last_calls.memory_calls() {
            self.ask_pool(allocator, device, &mut findings);
            self.check_device(&stats, device, &mut findings);
        }
        self.remember(allocator, device);
        if findings.is_empty() { Ok(()) } else { Err(findings) }
    }

    /// One more or one less live block at an address: reads its segment only, unless counters or calls moved otherwise than that explains.
    fn after_operation(
        &mut self,
        allocator: &dyn Allocator,
        device: &mut dyn TestDevice,
        address: DevicePtr,
        change: i64,
    ) -> Result<(), Vec<Finding>> {
        self.earn(BLOCKS_PER_OPERATION);
        let (before, after) = (self.last_stats, allocator.stats());
        let (calls_before, calls) = (self.last_calls, device.calls());
        let made = after.num_device_alloc - before.num_device_alloc;
        let gone = after.num_device_free - before.num_device_free;
        let actives = |stats: &MemoryStats| stats.active.all.current as i64;
        let explained = actives(&after) - actives(&before) == change
            && made + gone <= 1
            && calls.malloc - calls_before.malloc == made
            && calls.free - calls_before.free == gone;
        if !explained || self.stale {
            return self.everything_if_paid(allocator, device);
        }
        let to_read = self.segments.range(..=address).next_back().map_or(1, |(_, known)| known.blocks);
        if to_read > self.credit {
            return self.without_reading(allocator, device);
        }
        self.credit -= to_read;
        let mut findings = Vec::new();
        self.ask_pool(allocator, device, &mut findings);
        let segment = allocator.segment_at(address);
        let serves_several = segment.as_ref().is_some_and(|segment| segment.stream.is_none());
        match segment {
            Some(segment) => self.check_segment(&segment, &mut findings),
            None if gone == 1 || (change < 0 && self.pool.is_some()) => self.forget_segment(address),
            None => findings.push(Finding::new(Invariant::AllocationsAreDisjoint, format!("a segment around {address}"), "none")),
        }
        self.check_counters(&after, &mut findings);
        if serves_several && !findings.is_empty() {
            // One stream took over what was free for another, which may merge blocks in any segment. The whole structure shows whether that
            // is a mistake.
            return self.everything_if_paid(allocator, device);
        }
        if made + gone > 0 || self.pool.is_some() {
            self.check_device(&after, device, &mut findings);
        }
        self.remember(allocator, device);
        if findings.is_empty() { Ok(()) } else { Err(findings) }
    }

    /// Asks the driver for its pool, if the allocator uses one.
    fn ask_pool(&mut self, allocator: &dyn Allocator, device: &mut dyn TestDevice, findings: &mut Vec<Finding>) {
        let told = allocator.driver_pool().and_then(|pool| device.pooled().map(|device| device.pool_memory(pool)));
        self.pool = told.transpose().unwrap_or_else(|error| {
            let expected = "the driver tells what its pool holds";
            findings.push(Finding::new(Invariant::DeviceUsedFollowsReserved, expected, error.to_string()));
            None
        });
    }

    /// What is reserved, by another account than the allocator's counters.
    fn reserved(&self) -> u64 {
        self.pool.map_or(self.small.reserved + self.large.reserved, |pool| pool.reserved.0)
    }

    /// Takes a segment that went back to the driver out of the sums.
    fn forget_segment(&mut self, address: DevicePtr) {
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

    fn remember(&mut self, allocator: &dyn Allocator, device: &dyn TestDevice) {
        self.last_stats = allocator.stats();
        self.last_calls = device.calls();
    }

    /// Checks one segment and replaces what was known of it in the sums.
    fn check_segment(&mut self, segment: &SegmentInfo, findings: &mut Vec<Finding>) {
        check_tiling(segment, findings);
        self.check_apart(segment, findings);
        self.check_owners(segment, findings);
        let sums = Sums::of(segment, self.granularity);
        let known = KnownSegment { pool: segment.pool, sums, blocks: segment.blocks.len() as u64 };
        if let Some(old) = self.segments.insert(segment.address, known) {
            self.take_off(old);
        }
        self.blocks += known.blocks;
        let total = self.sums_mut(segment.pool);
        *total = total.combine(sums, |sum, part| sum + part);
    }

    fn sums_mut(&mut self, pool: PoolKind) -> &mut Sums {
        match pool {
            PoolKind::Small => &mut self.small,
            PoolKind::Large => &mut self.large,
        }
    }

    /// Every allocated block was handed out as it stands, and everything handed out in this segment is an allocated block.
    fn check_owners(&self, segment: &SegmentInfo, findings: &mut Vec<Finding>) {
        let mut handed_out = self.live.range(segment.address..segment.address.offset(segment.size));
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

    /// No other segment reaches into this one.
    fn check_apart(&self, segment: &SegmentInfo, findings: &mut Vec<Finding>) {
        let before = self.segments.range(..segment.address).next_back();
        let end = segment.address.offset(segment.size);
        let after = self.segments.range(segment.address.offset(Bytes(1))..end).next();
        let overlapping = before.filter(|(start, known)| start.0 + known.sums.reserved > segment.address.0).or(after);
        if let Some((start, known)) = overlapping {
            let expected = format!("the segment of {} at {} apart from all others", segment.size, segment.address);
            let seen = format!("one of {} at {start}", Bytes(known.sums.reserved));
            findings.push(Finding::new(Invariant::BlocksTileSegments, expected, seen));
        }
    }

    fn check_counters(&self, stats: &MemoryStats, findings: &mut Vec<Finding>) {
        let all = Sums { reserved: self.reserved(), ..self.small.combine(self.large, |small, large| small + large) };
        // What a pool of the driver holds is counted in the large pool.
        let large = Sums { reserved: self.pool.map_or(self.large.reserved, |pool| pool.reserved.0), ..self.large };
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

    /// Compares the accounts with the device. Looks twice before it blames the allocator or other processes: NVML's figures follow the
    /// driver's calls with a delay, and not all at one moment.
    fn check_device(&mut self, stats: &MemoryStats, device: &mut dyn TestDevice, findings: &mut Vec<Finding>) {
        let mut pairs = account_pairs(stats);
        if let Some(pool) = self.pool {
            let handed_out = ("used of the driver's pool", pool.used.0);
            pairs.extend([(allocated(stats), handed_out), (handed_out, reserved(stats))]);
        }
        check_order(&pairs, findings);
        let mut reading = device.memory();
        if reading.as_ref().is_ok_and(|&memory| self.is_unexpected(stats, memory)) {
            reading = device.memory();
        }
        match reading {
            Ok(memory) => {
                let contention = self.others_moved(memory);
                self.contention = self.contention.take().or(contention);
                findings.append(&mut self.compare_with_device(stats, memory));
            }
            Err(error) => {
                let expected = "the device tells its memory";
                findings.push(Finding::new(Invariant::DeviceUsedFollowsReserved, expected, error.to_string()));
            }
        }
    }

    /// Whether a reading of the device's memory has to be looked at again.
    fn is_unexpected(&self, stats: &MemoryStats, memory: DeviceMemory) -> bool {
        let others_moved = self.contention.is_none() && self.others_moved(memory).is_some();
        others_moved || !self.device_differences(stats, memory).is_empty()
    }

    /// Where other processes took memory or gave it back since the start: how much.
    fn others_moved(&self, memory: DeviceMemory) -> Option<String> {
        let others = |memory: &DeviceMemory| memory.process.map(|process| memory.used.saturating_sub(process));
        let (before, now) = (others(&self.start)?, others(&memory)?);
        let moved = !self.simulated && now.0.abs_diff(before.0) > self.tolerance.0;
        moved.then(|| format!("other processes held {before} of the device when the run began, and {now} later"))
    }

    /// How far the device's figures moved since the start, others' pressure apart. The first figure is that of this process, where the device
    /// tells it; otherwise that of the whole device, which other processes move too.
    fn moved(&self, memory: DeviceMemory) -> i128 {
        let moved = |now: Bytes, before: Bytes| i128::from(now.0) - i128::from(before.0);
        let pressure = moved(memory.pressure, self.start.pressure);
        match (memory.process, self.start.process) {
            // A real device makes pressure by allocations of this process.
            (Some(now), Some(before)) if !self.simulated => moved(now, before) - pressure,
            _ => moved(memory.used, self.start.used) - pressure,
        }
    }

    /// What is wrong between the accounts and the device. Where nothing tells whose memory moved, that is contention and no finding.
    fn compare_with_device(&mut self, stats: &MemoryStats, memory: DeviceMemory) -> Vec<Finding> {
        let findings = self.device_differences(stats, memory);
        let is_known = self.simulated || (memory.process.is_some() && self.start.process.is_some());
        if is_known || findings.is_empty() {
            return findings;
        }
        // Another process may have moved it, so it is no ground to accuse the allocator.
        let (moved, reserved) = (self.moved(memory), reserved(stats).1);
        let why = format!("device used moved by {moved} B while {reserved} B were reserved, and NVML does not tell whose memory it is");
        self.contention.get_or_insert(why);
        Vec::new()
    }

    /// What the segments are charged, against how far the device's figures moved.
    fn device_differences(&self, stats: &MemoryStats, memory: DeviceMemory) -> Vec<Finding> {
        let mut findings = Vec::new();
        let (moved, tolerance) = (self.moved(memory), i128::from(self.tolerance.0));
        let held = u64::try_from(moved + tolerance).unwrap_or(0);
        check_order(&[(reserved(stats), ("device used − context overhead − pressure", held))], &mut findings);
        // The structure may be out of date. The counter is compared with it when it is read.
        let counted = stats.reserved_bytes.all.current;
        let (reserved, charged) = match self.pool {
            Some(pool) => (pool.reserved.0, pool.reserved.0),
            None if self.stale => (counted, u64::MAX),
            None => (self.reserved(), self.small.charged + self.large.charged),
        };
        if moved < i128::from(reserved) - tolerance || moved > i128::from(charged).saturating_add(tolerance) {
            let charge = if charged == reserved || self.stale { String::new() } else { format!(" (charged as {charged})") };
            let expected = format!("device used moved by the {reserved} B reserved{charge}, within {}", self.tolerance);
            let seen = format!("it moved by {moved} B, {:+} B off", moved - i128::from(reserved));
            findings.push(Finding::new(Invariant::DeviceUsedFollowsReserved, expected, seen));
        }
        findings
    }
}

type NamedAmount = (&'static str, u64);

const fn allocated(stats: &MemoryStats) -> NamedAmount {
    ("allocated", stats.allocated_bytes.all.current)
}

const fn reserved(stats: &MemoryStats) -> NamedAmount {
    ("reserved", stats.reserved_bytes.all.current)
}

/// Accounts of which the first is never larger than the second. A block that waits for events is still charged to its request, though not
/// allocated any more: requested is part of active.
fn account_pairs(stats: &MemoryStats) -> Vec<(NamedAmount, NamedAmount)> {
    let (requested, active) = (("requested", stats.requested_bytes.all.current), ("active", stats.active_bytes.all.current));
    vec![(requested, active), (allocated(stats), active), (active, reserved(stats))]
}

fn check_order(pairs: &[(NamedAmount, NamedAmount)], findings: &mut Vec<Finding>) {
    for ((lower_name, lower), (upper_name, upper)) in pairs {
        if lower > upper {
            let expected = format!("{lower_name} ≤ {upper_name}");
            let seen = format!("{lower} B ({}) > {upper} B ({})", Bytes(*lower), Bytes(*upper));
            findings.push(Finding::new(Invariant::AccountsAreOrdered, expected, seen));
        }
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

fn bytes(name: &str, amount: u64) -> String {
    format!("{name} {amount} B ({})", Bytes(amount)).trim_start().to_owned()
}
