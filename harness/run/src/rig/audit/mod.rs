//! The audit: a second account of everything that an allocator does, kept apart from its own, and compared with it and with the device.
//!
//! It remembers what was handed out ([`Audit::handed_out`], [`Audit::taken_back`]) and compares the allocator's counters with that after each
//! operation. Of the structure it reads the one segment that an operation touched, or all of it when counters or driver calls moved otherwise
//! than the operation explains.
//!
//! Reading has a budget: each operation adds [`BLOCKS_PER_OPERATION`] blocks to it, each step [`BLOCKS_PER_STEP`]. Where the budget is too small
//! for a reading, the counters alone are compared, and the whole structure is read when the budget allows it, at the latest at the end of the
//! run. So small structures are read after every operation, and the audit of a run takes time linear in its operations, however many blocks
//! live.
//!
//! Where several programs share the device, each has an audit of its own. The device's memory is compared with what all of them hold together:
//! [`Audit::resume`] tells an audit what the others hold.

mod device;
mod structure;

use harness_allocator::allocator::{Allocation, Allocator, Request};
use harness_allocator::device::{DeviceCalls, DeviceMemory, DevicePtr, PoolMemory, TestDevice};
use harness_allocator::stats::{MemoryStats, SegmentInfo};
use harness_allocator::units::Bytes;

pub use self::device::Held;
use self::device::{DeviceAccount, Look, account_pairs, check_order};
use self::structure::{HandedOut, Live, Structure};
use harness_record::Invariant;

/// Blocks that each operation adds to the budget.
const BLOCKS_PER_OPERATION: u64 = 64;

/// Blocks that the end of each step adds to the budget.
const BLOCKS_PER_STEP: u64 = 1024;

/// An invariant that does not hold, before anybody knows in which step.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Finding {
    /// The invariant that it is about.
    pub invariant: Invariant,
    /// What should have been seen, in words or figures.
    pub expected: String,
    /// What was seen instead.
    pub seen: String,
}

impl Finding {
    fn new(invariant: Invariant, expected: impl Into<String>, seen: impl Into<String>) -> Self {
        Self { invariant, expected: expected.into(), seen: seen.into() }
    }
}

/// What does not hold of a structure in which these are handed out, and of the counters beside it. Linear in blocks.
pub(crate) fn check_structure<'a>(
    granularity: Bytes,
    segments: Vec<SegmentInfo>,
    handed_out: impl Iterator<Item = &'a Allocation>,
    stats: &MemoryStats,
) -> Vec<Finding> {
    let live: Live = handed_out.map(|allocation| (allocation.ptr(), HandedOut::of(allocation))).collect();
    let (mut structure, mut findings) = (Structure::new(granularity), Vec::new());
    structure.read_all(segments, &live, &mut findings);
    findings.extend(structure.lacks(&live));
    structure.check_counters(stats, None, &mut findings);
    check_order(&account_pairs(stats), &mut findings);
    findings
}

/// Of an allocator's counters those that are compared with what they were.
#[derive(Debug, Default)]
struct Counted {
    allocated: u64,
    reserved: u64,
    actives: u64,
    ooms: u64,
    device_allocs: u64,
    device_frees: u64,
}

impl Counted {
    const fn of(stats: &MemoryStats) -> Self {
        Self {
            allocated: stats.allocated_bytes.all.current,
            reserved: stats.reserved_bytes.all.current,
            actives: stats.active.all.current,
            ooms: stats.num_ooms,
            device_allocs: stats.num_device_alloc,
            device_frees: stats.num_device_free,
        }
    }
}

/// See the module.
#[derive(Debug)]
pub struct Audit {
    live: Live,
    /// The sizes of what is handed out, added up.
    live_bytes: u64,
    structure: Structure,
    /// Whether the allocator changed since the structure was read.
    outdated: bool,
    /// Blocks that may be read now.
    budget: u64,
    /// Whether it reads the structure only when it is asked to check everything.
    when_asked: bool,
    /// Whether it only notes what is handed out, until [`Audit::wake`].
    asleep: bool,
    device: DeviceAccount,
    /// What the other programs on the device hold.
    others: Held,
    last_counted: Counted,
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
            live: Live::new(),
            live_bytes: 0,
            structure: Structure::new(info.granularity),
            outdated: false,
            budget: 0,
            when_asked: false,
            asleep: false,
            device: DeviceAccount::new(info, start),
            others: Held::NOTHING,
            last_counted: Counted::default(),
            last_calls: device.calls(),
            pool: None,
        }
    }

    /// The same, but it reads the structure only when it is asked to check everything.
    #[must_use]
    pub fn when_asked(self) -> Self {
        Self { when_asked: true, ..self }
    }

    /// Checks nothing until [`Audit::wake`].
    pub const fn sleep(&mut self) {
        (self.asleep, self.outdated) = (true, true);
    }

    /// Checks from now on. Whoever wakes it has it check everything.
    pub const fn wake(&mut self) {
        self.asleep = false;
    }

    /// The scenario begins: what its streams took of the device does not belong to the allocator.
    pub fn begin(&mut self, start: DeviceMemory) {
        self.device.begin(start);
    }

    /// The program goes on after others ran, which hold so much now. Driver calls made meanwhile were theirs.
    pub fn resume(&mut self, device: &dyn TestDevice, others: Held) {
        self.others = others;
        self.last_calls = device.calls();
    }

    /// What the program holds from the device. A pool of the driver is asked.
    #[must_use]
    pub fn held(&mut self, allocator: &dyn Allocator, device: &mut dyn TestDevice) -> Held {
        // A pool that does not answer fails the program's own next check.
        self.ask_pool(allocator, device, &mut Vec::new());
        self.held_now(&allocator.stats())
    }

    fn held_now(&self, stats: &MemoryStats) -> Held {
        match self.pool {
            Some(pool) => Held { reserved: pool.reserved.0, charged: Some(pool.reserved.0) },
            // The counter is compared with the structure when that is read again.
            None if self.outdated => Held { reserved: stats.reserved_bytes.all.current, charged: None },
            None => Held { reserved: self.structure.reserved(), charged: Some(self.structure.charged()) },
        }
    }

    /// What other processes did on the device during the run, in words, where that moved its figures.
    #[must_use]
    pub fn contention(&self) -> Option<&str> {
        self.device.contention()
    }

    /// Notes what was handed out for a request and checks that it answers the request, and what it touched.
    ///
    /// # Errors
    /// Each invariant that does not hold.
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
        let entry = HandedOut::of(allocation);
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
    /// Each invariant that does not hold.
    pub fn taken_back(&mut self, allocator: &dyn Allocator, device: &mut dyn TestDevice, address: DevicePtr) -> Result<(), Vec<Finding>> {
        let Some(entry) = self.live.remove(&address) else { return Ok(()) };
        self.live_bytes -= entry.size.0;
        self.after_operation(allocator, device, address, -1)
    }

    /// Checks that an out-of-memory changed nothing but cached memory given back.
    ///
    /// # Errors
    /// Each invariant that does not hold.
    pub fn out_of_memory(&mut self, allocator: &dyn Allocator, device: &mut dyn TestDevice, counted: bool) -> Result<(), Vec<Finding>> {
        if self.asleep {
            return Ok(());
        }
        let (before, after) = (&self.last_counted, Counted::of(&allocator.stats()));
        let mut findings = Vec::new();
        let mut note = |expected: String, seen: String| findings.push(Finding::new(Invariant::OomChangesOnlyTheCache, expected, seen));
        let wanted = before.ooms + u64::from(counted);
        if after.allocated != before.allocated {
            note(bytes("allocated", before.allocated), bytes("", after.allocated));
        }
        if after.reserved > before.reserved {
            note(bytes("reserved at most", before.reserved), bytes("", after.reserved));
        }
        if after.ooms != wanted {
            note(format!("num_ooms {wanted}"), after.ooms.to_string());
        }
        self.add_to_budget(BLOCKS_PER_OPERATION);
        findings.extend(self.check_within_budget(allocator, device).err().unwrap_or_default());
        if findings.is_empty() { Ok(()) } else { Err(findings) }
    }

    /// Checks at the end of a step: everything, if the budget allows it.
    ///
    /// # Errors
    /// Each invariant that does not hold.
    pub fn step_ended(&mut self, allocator: &dyn Allocator, device: &mut dyn TestDevice) -> Result<(), Vec<Finding>> {
        if self.asleep {
            return Ok(());
        }
        self.add_to_budget(BLOCKS_PER_STEP);
        self.check_within_budget(allocator, device)
    }

    /// A step ends while this is asleep. Whether the operations since it checked everything, and the steps, have added enough to its budget to do that again.
    pub fn may_check_everything(&mut self) -> bool {
        self.add_to_budget(BLOCKS_PER_OPERATION);
        self.all_blocks() <= self.budget
    }

    /// Reads the whole structure and asks the device. Linear in blocks.
    ///
    /// # Errors
    /// Each invariant that does not hold.
    pub fn everything(&mut self, allocator: &dyn Allocator, device: &mut dyn TestDevice) -> Result<(), Vec<Finding>> {
        if self.asleep {
            return Ok(());
        }
        let mut findings = Vec::new();
        self.ask_pool(allocator, device, &mut findings);
        self.outdated = false;
        self.structure.read_all(allocator.snapshot(), &self.live, &mut findings);
        findings.extend(self.structure.lacks(&self.live));
        let stats = allocator.stats();
        self.structure.check_counters(&stats, self.pool, &mut findings);
        self.check_device(&stats, device, &mut findings);
        self.budget = self.budget.saturating_sub(self.structure.blocks());
        self.remember(&stats, device);
        if findings.is_empty() { Ok(()) } else { Err(findings) }
    }

    /// The budget never grows beyond one reading of everything.
    fn add_to_budget(&mut self, blocks: u64) {
        self.budget = (self.budget + blocks).min(self.all_blocks().max(blocks));
    }

    /// Blocks that a reading of everything costs. What was handed out since the last one may be in blocks that are not known yet.
    fn all_blocks(&self) -> u64 {
        self.structure.blocks().max(self.live.len() as u64)
    }

    /// Checks everything if the budget allows it, and otherwise the counters alone.
    fn check_within_budget(&mut self, allocator: &dyn Allocator, device: &mut dyn TestDevice) -> Result<(), Vec<Finding>> {
        if self.all_blocks() <= self.budget && !self.when_asked {
            return self.everything(allocator, device);
        }
        self.check_without_reading(allocator, device)
    }

    /// Compares the counters with what was handed out, and the device with the counters. The structure is not read.
    fn check_without_reading(&mut self, allocator: &dyn Allocator, device: &mut dyn TestDevice) -> Result<(), Vec<Finding>> {
        self.outdated = true;
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
        self.remember(&stats, device);
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
        self.add_to_budget(BLOCKS_PER_OPERATION);
        if self.asleep {
            return Ok(());
        }
        let stats = allocator.stats();
        let (before, after) = (&self.last_counted, Counted::of(&stats));
        let (calls_before, calls) = (&self.last_calls, device.calls());
        let made = after.device_allocs - before.device_allocs;
        let gone = after.device_frees - before.device_frees;
        let explained = after.actives as i64 - before.actives as i64 == change
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
        let segment = allocator.segment_at(address);
        let serves_several = segment.as_ref().is_some_and(|segment| segment.stream.is_none());
        match segment {
            Some(segment) => self.structure.read(segment, address, &self.live, &mut findings),
            None if gone == 1 || (change < 0 && self.pool.is_some()) => self.structure.forget(address),
            None => findings.push(Finding::new(Invariant::AllocationsAreDisjoint, format!("a segment around {address}"), "none")),
        }
        self.structure.check_counters(&stats, self.pool, &mut findings);
        if serves_several && !findings.is_empty() {
            // One stream took over what was free for another, which may merge blocks in any segment. The whole structure shows whether that
            // is a mistake.
            return self.check_within_budget(allocator, device);
        }
        if made + gone > 0 || self.pool.is_some() {
            self.check_device(&stats, device, &mut findings);
        }
        self.remember(&stats, device);
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

    fn check_device(&mut self, stats: &MemoryStats, device: &mut dyn TestDevice, findings: &mut Vec<Finding>) {
        let look = Look { stats, pool: self.pool, held: self.held_now(stats), others: self.others };
        self.device.check(&look, device, findings);
    }

    fn remember(&mut self, stats: &MemoryStats, device: &dyn TestDevice) {
        self.last_counted = Counted::of(stats);
        self.last_calls = device.calls();
    }
}

fn bytes(name: &str, amount: u64) -> String {
    format!("{name} {amount} B ({})", Bytes(amount)).trim_start().to_owned()
}
