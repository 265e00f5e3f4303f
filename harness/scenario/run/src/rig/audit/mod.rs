//! The audit: independent accounts of an allocator's operations, compared with the allocator's own
//! counters and with the device.
//!
//! It tracks live allocations ([`Audit::allocated`], [`Audit::freed`]) and compares the counters
//! with them after each operation. Usually it reads only the segment that an operation touched. It
//! reads the whole structure if counters or driver calls changed in a way that the operation does
//! not explain.
//!
//! Reading has a budget: each operation adds [`BLOCKS_PER_OPERATION`] blocks, and each step adds
//! [`BLOCKS_PER_STEP`]. If the budget is too small, only the counters are compared. The whole
//! structure is read when the budget allows it, at the latest at the end of the run. So small
//! structures are read after every operation, and an audit takes time linear in the operations for
//! any number of live blocks.
//!
//! If several programs share the device, each has its own audit. The device's memory is compared
//! with the sum of all programs: [`Audit::resume`] passes the memory of the others.

mod device;
mod structure;

use harness_allocator::allocator::{Allocation, Allocator, Request};
use harness_allocator::device::{DeviceCalls, DeviceMemory, DevicePtr, PoolMemory, TestDevice};
use harness_allocator::stats::{MemoryStats, SegmentInfo};
use harness_allocator::units::Bytes;

pub use self::device::Held;
use self::device::{DeviceAccount, Figures, account_pairs, check_order};
use self::structure::{Live, LiveAllocation, Structure};
use harness_record::Invariant;
use serde::{Deserialize, Serialize};

const BLOCKS_PER_OPERATION: u64 = 64;

const BLOCKS_PER_STEP: u64 = 1024;

/// The violated invariants of a check, if there are any.
pub(super) type AuditResult = Result<(), Vec<Finding>>;

fn passed_without(findings: Vec<Finding>) -> AuditResult {
    match findings.is_empty() {
        true => Ok(()),
        false => Err(findings),
    }
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Finding {
    pub invariant: Invariant,
    pub expected: String,
    pub seen: String,
}

impl Finding {
    pub(crate) fn new(
        invariant: Invariant,
        expected: impl Into<String>,
        seen: impl Into<String>,
    ) -> Self {
        Self {
            invariant,
            expected: expected.into(),
            seen: seen.into(),
        }
    }
}

/// Checks a structure with these live allocations, and the counters. Linear in blocks.
pub(crate) fn check_structure<'a>(
    granularity: Bytes,
    segments: Vec<SegmentInfo>,
    handed_out: impl Iterator<Item = &'a Allocation>,
    stats: &MemoryStats,
) -> Vec<Finding> {
    let live: Live = handed_out
        .map(|allocation| (allocation.ptr(), LiveAllocation::of(allocation)))
        .collect();
    let (mut structure, mut findings) = (Structure::new(granularity), Vec::new());
    structure.read_all(segments, &live, &mut findings);
    findings.extend(structure.missing_allocations(&live));
    structure.check_counters(stats, None, &mut findings);
    check_order(&account_pairs(stats), &mut findings);
    findings
}

#[derive(Debug)]
pub struct Audit {
    live: Live,
    live_bytes: u64,
    structure: Structure,
    /// True if the allocator changed since the structure was read.
    outdated: bool,
    /// The number of blocks that may be read now.
    budget: u64,
    /// True if it reads the structure only in full checks on request.
    when_asked: bool,
    /// True if it only tracks allocations, until [`Audit::wake`].
    asleep: bool,
    device: DeviceAccount,
    others: Held,
    last_stats: MemoryStats,
    last_calls: DeviceCalls,
    /// The memory of the driver's pool, if the allocator uses one. The structure then shows only
    /// live allocations, so the driver's figure replaces the sum over segments.
    pool: Option<PoolMemory>,
}

impl Audit {
    /// Starts before the first allocation, with the device's current memory.
    pub fn new(device: &dyn TestDevice, start: DeviceMemory) -> Self {
        let info = device.info();
        Self {
            live: Live::new(),
            live_bytes: 0,
            structure: Structure::new(info.granularity),
            outdated: false,
            budget: 0,
            when_asked: false,
            asleep: false,
            device: DeviceAccount::new(info, start),
            others: Held::NOTHING,
            last_stats: MemoryStats::default(),
            last_calls: device.calls(),
            pool: None,
        }
    }

    /// Restricts the audit to counters, except in full checks on request.
    pub fn when_asked(self) -> Self {
        Self {
            when_asked: true,
            ..self
        }
    }

    /// Stops all checks until [`Audit::wake`].
    pub const fn sleep(&mut self) {
        (self.asleep, self.outdated) = (true, true);
    }

    /// Resumes checks. The caller must run a full check next.
    pub const fn wake(&mut self) {
        self.asleep = false;
    }

    /// Starts the scenario: memory used until now does not belong to the allocator.
    pub fn begin(&mut self, start: DeviceMemory) {
        self.device.start = start;
    }

    /// Continues after other programs ran, whose memory is now `others`. The driver calls since
    /// then were theirs.
    pub fn resume(&mut self, device: &dyn TestDevice, others: Held) {
        self.others = others;
        self.last_calls = device.calls();
    }

    /// The program's device memory. Queries the driver's pool if there is one.
    pub fn held(&mut self, allocator: &dyn Allocator, device: &mut dyn TestDevice) -> Held {
        // An error is reported by the program's own next check.
        self.ask_pool(allocator, device, &mut Vec::new());
        self.held_now(&allocator.stats())
    }

    fn held_now(&self, stats: &MemoryStats) -> Held {
        match self.pool {
            Some(pool) => Held {
                reserved: pool.reserved.0,
                charged: Some(pool.reserved.0),
            },
            // The counter is compared with the structure at its next reading.
            None if self.outdated => Held {
                reserved: stats.reserved_bytes.all.current,
                charged: None,
            },
            None => Held {
                reserved: self.structure.reserved(),
                charged: Some(self.structure.charged()),
            },
        }
    }

    pub fn contention(&self) -> Option<&str> {
        self.device.contention.as_deref()
    }

    pub fn allocated(
        &mut self,
        allocator: &dyn Allocator,
        device: &mut dyn TestDevice,
        request: Request,
        allocation: &Allocation,
    ) -> AuditResult {
        let answered = Request {
            size: allocation.requested(),
            stream: allocation.stream(),
        };
        if answered != request || allocation.is_null() != (request.size == Bytes::ZERO) {
            let expected = format!(
                "{} for stream {}, as requested",
                request.size, request.stream.0
            );
            let seen = format!(
                "{} for stream {} at {} returned",
                answered.size,
                answered.stream.0,
                allocation.ptr()
            );
            return Err(vec![Finding::new(
                Invariant::AllocationsAreDisjoint,
                expected,
                seen,
            )]);
        }
        if allocation.is_null() {
            return Ok(());
        }
        let entry = LiveAllocation::of(allocation);
        let (start, end) = (allocation.ptr(), allocation.ptr().offset(allocation.size()));
        let before = self.live.range(..end).next_back();
        if let Some((address, other)) =
            before.filter(|(address, other)| address.offset(other.size) > start)
        {
            let expected = format!(
                "{start} to be free before {} are allocated there",
                entry.requested
            );
            let seen = format!(
                "{} on stream {} are still in use at {address}",
                other.requested, other.stream.0
            );
            return Err(vec![Finding::new(
                Invariant::AllocationsAreDisjoint,
                expected,
                seen,
            )]);
        }
        self.live.insert(start, entry);
        self.live_bytes += entry.size.0;
        self.after_operation(allocator, device, start, 1)
    }

    pub fn freed(
        &mut self,
        allocator: &dyn Allocator,
        device: &mut dyn TestDevice,
        address: DevicePtr,
    ) -> AuditResult {
        let Some(entry) = self.live.remove(&address) else {
            return Ok(());
        };
        self.live_bytes -= entry.size.0;
        self.after_operation(allocator, device, address, -1)
    }

    /// Checks that an OOM changed nothing except that cached memory was released.
    pub fn out_of_memory(
        &mut self,
        allocator: &dyn Allocator,
        device: &mut dyn TestDevice,
        counted: bool,
    ) -> AuditResult {
        if self.asleep {
            return Ok(());
        }
        let (before, after) = (&self.last_stats, allocator.stats());
        let allocated = |stats: &MemoryStats| stats.allocated_bytes.all.current;
        let reserved = |stats: &MemoryStats| stats.reserved_bytes.all.current;
        let mut findings = Vec::new();
        let mut note = |expected: String, seen: String| {
            findings.push(Finding::new(
                Invariant::OomChangesOnlyTheCache,
                expected,
                seen,
            ))
        };
        let wanted = before.num_ooms + u64::from(counted);
        if allocated(&after) != allocated(before) {
            note(
                bytes("allocated", allocated(before)),
                bytes("", allocated(&after)),
            );
        }
        if reserved(&after) > reserved(before) {
            note(
                bytes("reserved at most", reserved(before)),
                bytes("", reserved(&after)),
            );
        }
        if after.num_ooms != wanted {
            note(format!("num_ooms {wanted}"), after.num_ooms.to_string());
        }
        self.add_to_budget(BLOCKS_PER_OPERATION);
        findings.extend(
            self.check_within_budget(allocator, device)
                .err()
                .unwrap_or_default(),
        );
        passed_without(findings)
    }

    /// Runs a full check at the end of a step if the budget allows it.
    pub fn step_ended(
        &mut self,
        allocator: &dyn Allocator,
        device: &mut dyn TestDevice,
    ) -> AuditResult {
        if self.asleep {
            return Ok(());
        }
        self.add_to_budget(BLOCKS_PER_STEP);
        self.check_within_budget(allocator, device)
    }

    /// Called at the end of a step while the audit sleeps.
    pub fn may_check_everything(&mut self) -> bool {
        self.add_to_budget(BLOCKS_PER_OPERATION);
        self.all_blocks() <= self.budget
    }

    /// Reads the whole structure and queries the device. Linear in blocks.
    pub fn everything(
        &mut self,
        allocator: &dyn Allocator,
        device: &mut dyn TestDevice,
    ) -> AuditResult {
        if self.asleep {
            return Ok(());
        }
        let mut findings = Vec::new();
        self.ask_pool(allocator, device, &mut findings);
        self.outdated = false;
        self.structure.merges = allocator.merges_free_neighbours();
        self.structure
            .read_all(allocator.snapshot(), &self.live, &mut findings);
        findings.extend(self.structure.missing_allocations(&self.live));
        let stats = allocator.stats();
        self.structure
            .check_counters(&stats, self.pool, &mut findings);
        self.check_device(&stats, device, &mut findings);
        self.budget = self.budget.saturating_sub(self.structure.blocks());
        self.remember(&stats, device);
        passed_without(findings)
    }

    /// Adds to the budget, which never exceeds one full reading.
    fn add_to_budget(&mut self, blocks: u64) {
        self.budget = (self.budget + blocks).min(self.all_blocks().max(blocks));
    }

    /// The cost of a full reading in blocks. Recent allocations may be in blocks that are not known
    /// yet.
    fn all_blocks(&self) -> u64 {
        self.structure.blocks().max(self.live.len() as u64)
    }

    /// Runs a full check if the budget allows it, otherwise checks the counters only.
    fn check_within_budget(
        &mut self,
        allocator: &dyn Allocator,
        device: &mut dyn TestDevice,
    ) -> AuditResult {
        if self.all_blocks() <= self.budget && !self.when_asked {
            return self.everything(allocator, device);
        }
        self.check_without_reading(allocator, device)
    }

    /// Compares the counters with the live allocations and the device with the counters, without
    /// reading the structure.
    fn check_without_reading(
        &mut self,
        allocator: &dyn Allocator,
        device: &mut dyn TestDevice,
    ) -> AuditResult {
        self.outdated = true;
        let stats = allocator.stats();
        let mut findings = Vec::new();
        let handed_out = [
            (
                "allocation.all.current",
                self.live.len() as u64,
                stats.allocation.all.current,
            ),
            (
                "allocated_bytes.all.current",
                self.live_bytes,
                stats.allocated_bytes.all.current,
            ),
        ];
        for (name, summed, counted) in handed_out {
            if counted != summed {
                let expected = format!("{name} = {summed}, the sum of the live allocations");
                findings.push(Finding::new(
                    Invariant::CountersEqualStructure,
                    expected,
                    counted.to_string(),
                ));
            }
        }
        check_order(&account_pairs(&stats), &mut findings);
        if device.calls().memory_calls() != self.last_calls.memory_calls() {
            self.ask_pool(allocator, device, &mut findings);
            self.check_device(&stats, device, &mut findings);
        }
        self.remember(&stats, device);
        passed_without(findings)
    }

    /// Handles one more or one fewer live block at an address.
    fn after_operation(
        &mut self,
        allocator: &dyn Allocator,
        device: &mut dyn TestDevice,
        address: DevicePtr,
        change: i64,
    ) -> AuditResult {
        self.add_to_budget(BLOCKS_PER_OPERATION);
        if self.asleep {
            return Ok(());
        }
        let stats = allocator.stats();
        let before = &self.last_stats;
        let (calls_before, calls) = (&self.last_calls, device.calls());
        let made = stats.num_device_alloc - before.num_device_alloc;
        let gone = stats.num_device_free - before.num_device_free;
        let explained = stats.active.all.current as i64 - before.active.all.current as i64
            == change
            && made + gone <= 1
            && calls.malloc - calls_before.malloc == made
            && calls.free - calls_before.free == gone;
        if !explained || self.outdated || self.when_asked {
            return self.check_within_budget(allocator, device);
        }
        let to_read = self.structure.blocks_around(address);
        if to_read > self.budget {
            return self.check_without_reading(allocator, device);
        }
        self.budget -= to_read;
        let mut findings = Vec::new();
        self.ask_pool(allocator, device, &mut findings);
        self.structure.merges = allocator.merges_free_neighbours();
        let segment = allocator.segment_at(address);
        let serves_several = segment
            .as_ref()
            .is_some_and(|segment| segment.stream.is_none());
        match segment {
            Some(segment) => self
                .structure
                .read(segment, address, &self.live, &mut findings),
            None if gone == 1 || (change < 0 && self.pool.is_some()) => {
                self.structure.forget(address)
            }
            None => findings.push(Finding::new(
                Invariant::AllocationsAreDisjoint,
                format!("a segment around {address}"),
                "none",
            )),
        }
        self.structure
            .check_counters(&stats, self.pool, &mut findings);
        if serves_several && !findings.is_empty() {
            // One stream took over the free memory of another, which may merge blocks in any
            // segment. The whole structure shows whether that is a bug.
            return self.check_within_budget(allocator, device);
        }
        if made + gone > 0 || self.pool.is_some() {
            self.check_device(&stats, device, &mut findings);
        }
        self.remember(&stats, device);
        passed_without(findings)
    }

    fn ask_pool(
        &mut self,
        allocator: &dyn Allocator,
        device: &mut dyn TestDevice,
        findings: &mut Vec<Finding>,
    ) {
        let told = allocator
            .driver_pool()
            .and_then(|pool| device.pooled().map(|device| device.pool_memory(pool)));
        self.pool = told.transpose().unwrap_or_else(|error| {
            let expected = "the driver to report the memory of its pool";
            findings.push(Finding::new(
                Invariant::DeviceUsedFollowsReserved,
                expected,
                error.to_string(),
            ));
            None
        });
    }

    fn check_device(
        &mut self,
        stats: &MemoryStats,
        device: &mut dyn TestDevice,
        findings: &mut Vec<Finding>,
    ) {
        let look = Figures {
            stats,
            pool: self.pool,
            held: self.held_now(stats),
            others: self.others,
        };
        self.device.check(&look, device, findings);
    }

    fn remember(&mut self, stats: &MemoryStats, device: &dyn TestDevice) {
        self.last_stats = *stats;
        self.last_calls = device.calls();
    }
}

fn bytes(name: &str, amount: u64) -> String {
    format!("{name} {amount} B ({})", Bytes(amount))
        .trim_start()
        .to_owned()
}
