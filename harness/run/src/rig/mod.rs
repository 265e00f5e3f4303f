//! The rig: one device, one allocator, and the accounts kept of them. Every operation of a run goes through here; nothing else in the harness
//! touches the device while a scenario runs.
//!
//! A run is either checked or timed ([`Checks`]), never both. Checks ask the driver and NVML and read memory, and work that is queued on the
//! device goes on meanwhile: taking the time of the checks off leaves that work out, and leaving it in counts the checks. So a timed run makes
//! the scenario's own calls to the device, from its first step to its last, and no others.

mod audit;
mod curve;
mod names;
mod samples;
mod shortage;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use harness_allocator::allocator::{Allocation, Allocator, AllocatorError, MemoryFraction, OomCause, Request};
use harness_allocator::device::{
    DeviceCalls, DeviceError, DeviceInfo, DeviceMemory, DevicePtr, EventId, MemoryRange, Place, StreamId, Tag, TestDevice,
};
use harness_allocator::stats::{BlockState, MemoryStats, SegmentInfo};
use harness_allocator::units::{Bytes, Nanos};

pub use self::audit::{Audit, Finding};
use self::curve::Curve;
use self::names::Names;
pub(crate) use self::names::{held_back, release_unit};
use self::samples::Reservoir;
use crate::control::{Call, Control};
use harness_record::Invariant;
use harness_record::{Accounts, CurvePoint, Timings};

/// Why a run cannot go on.
#[derive(Clone, Debug, PartialEq)]
pub enum Stop {
    /// An invariant does not hold.
    Violated(Vec<Finding>),
    /// The device, or the allocator, failed otherwise than for lack of memory.
    Device(DeviceError),
    /// It is to stop: the user wants it, or a step has run past its time limit.
    Interrupted,
}

impl From<DeviceError> for Stop {
    /// Wrong contents and races are violations: somebody was given memory that another still uses.
    fn from(error: DeviceError) -> Self {
        match error {
            DeviceError::Corrupted { .. } | DeviceError::Race { .. } | DeviceError::InUse { .. } => Self::Violated(vec![Finding {
                invariant: Invariant::ContentsAreIntact,
                expected: "what was written, ordered behind what was written before".to_owned(),
                seen: error.to_string(),
            }]),
            error => Self::Device(error),
        }
    }
}

/// Memory that a scenario or a workload holds.
#[derive(Debug)]
#[must_use = "a buffer goes back by `Rig::free`"]
pub struct Buffer {
    allocation: Allocation,
    /// What was written last, and on which stream.
    content: Option<(Tag, StreamId)>,
    /// Whether the allocator was told that another stream uses it.
    shared: bool,
}

impl Buffer {
    /// What was asked for.
    #[must_use]
    pub const fn requested(&self) -> Bytes {
        self.allocation.requested()
    }

    /// What it is charged as: at least what was asked for.
    #[must_use]
    pub const fn size(&self) -> Bytes {
        self.allocation.size()
    }

    /// The stream it was made for.
    #[must_use]
    pub const fn stream(&self) -> StreamId {
        self.allocation.stream()
    }

    /// The bytes that may be touched.
    #[must_use]
    pub const fn range(&self) -> MemoryRange {
        self.allocation.range()
    }
}

/// What a run does besides the scenario's own calls.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Checks {
    /// Accounts are kept, buffers are verified when they are freed, and every operation is audited. Nothing is timed.
    #[default]
    Audit,
    /// The same without the audit, for programs whose audit takes too long.
    Accounts,
    /// Nothing. Operations and steps are timed.
    Timing,
}

/// How a rig is run.
#[derive(Clone, Debug, Default)]
pub struct RigOptions {
    /// What it does besides the scenario's own calls.
    pub checks: Checks,
    /// For the choice of samples that are kept of many.
    pub seed: u64,
    /// Says when the run should stop, and is told which call begins.
    pub control: Arc<Control>,
}

/// What is known at the end of a step. A checked run knows the accounts, a timed run the duration.
#[derive(Clone, Copy, Debug, Default)]
pub struct StepEnd {
    /// How long the step took.
    pub duration: Option<Nanos>,
    /// The accounts behind it.
    pub accounts: Option<Accounts>,
}

/// What a request meets: the allocator's blocks, and what is free on the device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MemoryState {
    /// Each block with its address, size, stream and state.
    blocks: Vec<(DevicePtr, Bytes, StreamId, BlockState)>,
    /// Free on the device.
    pub device_free: Bytes,
}

/// See the module.
pub struct Rig {
    device: Box<dyn TestDevice>,
    allocator: Box<dyn Allocator>,
    checks: Checks,
    audit: Option<Audit>,
    control: Arc<Control>,
    step: u32,
    tags: u64,
    /// Streams with queued `work` that nobody has waited for, or that wait for such a stream.
    working: BTreeSet<StreamId>,
    /// Events that stand behind such work, by the stream that they were recorded on.
    behind_work: BTreeMap<EventId, StreamId>,
    findings: Vec<Finding>,
    names: Names,
    curve: Curve,
    /// Device used when the scenario began: its streams are part of it.
    used_at_start: Bytes,
    last_memory: DeviceMemory,
    /// Calls when the device was asked for its memory last, or in a timed run when the allocator was asked for its counters last.
    last_calls: DeviceCalls,
    calls_at_start: DeviceCalls,
    retries: u64,
    peak_reserved: Bytes,
    unused_at_peak: Bytes,
    allocate: Reservoir,
    free: Reservoir,
    empty_cache: Reservoir,
    lost_to_retry: Nanos,
    step_began: Nanos,
    scenario_time: Nanos,
}

impl Rig {
    /// Takes a device before the first allocation.
    ///
    /// # Errors
    /// [`DeviceError`] where the device does not tell its memory.
    pub fn new(mut device: Box<dyn TestDevice>, allocator: Box<dyn Allocator>, options: &RigOptions) -> Result<Self, DeviceError> {
        let last_memory = device.memory()?;
        let audit = (options.checks == Checks::Audit).then(|| Audit::new(&*device, last_memory));
        let calls = device.calls();
        let reservoir = |salt| Reservoir::new(options.seed ^ salt);
        Ok(Self {
            device,
            allocator,
            checks: options.checks,
            audit,
            control: Arc::clone(&options.control),
            step: 0,
            tags: 0,
            working: BTreeSet::new(),
            behind_work: BTreeMap::new(),
            findings: Vec::new(),
            names: Names::default(),
            curve: Curve::default(),
            used_at_start: last_memory.context_overhead,
            last_memory,
            last_calls: calls,
            calls_at_start: calls,
            retries: 0,
            peak_reserved: Bytes::ZERO,
            unused_at_peak: Bytes::ZERO,
            allocate: reservoir(1),
            free: reservoir(2),
            empty_cache: reservoir(3),
            lost_to_retry: Nanos::ZERO,
            step_began: Nanos::ZERO,
            scenario_time: Nanos::ZERO,
        })
    }

    /// Whether this run is timed, and so makes no calls of its own to the device.
    #[must_use]
    pub fn is_timed(&self) -> bool {
        self.checks == Checks::Timing
    }

    /// The scenario begins: what its streams take of the device belongs to the context overhead, and not to the allocator.
    ///
    /// # Errors
    /// [`Stop::Device`] where the device does not tell its memory.
    pub fn begin_scenario(&mut self) -> Result<(), Stop> {
        self.control.calls(Call::Memory);
        let memory = self.device.memory()?;
        self.used_at_start = memory.used;
        self.last_memory = self.with_streams(memory);
        if let Some(audit) = &mut self.audit {
            audit.begin(self.last_memory);
        }
        Ok(())
    }

    /// Begins a step. A strict device names its number in errors.
    pub fn begin_step(&mut self, number: u32) {
        self.step = number;
        self.device.set_place(Place(number));
        if self.is_timed() {
            self.step_began = self.device.now();
        }
    }

    /// Ends a step: a checked run checks everything and takes the accounts, a timed run takes the time.
    ///
    /// # Errors
    /// [`Stop`].
    pub fn end_step(&mut self) -> Result<StepEnd, Stop> {
        if self.is_timed() {
            let duration = self.device.now().saturating_sub(self.step_began);
            self.scenario_time += duration;
            return Ok(StepEnd { duration: Some(duration), accounts: None });
        }
        self.check(|audit, allocator, device| audit.step_ended(allocator, device))?;
        let accounts = self.accounts()?;
        self.last_memory = accounts.device;
        self.plot();
        Ok(StepEnd { duration: None, accounts: Some(accounts) })
    }

    /// Hands out memory. The inner error is the allocator's answer that there is none, which is data.
    ///
    /// # Errors
    /// [`Stop`].
    pub fn allocate(&mut self, request: Request) -> Result<Result<Buffer, AllocatorError>, Stop> {
        if self.is_interrupted() {
            return Err(Stop::Interrupted);
        }
        let start = self.start();
        self.control.calls(Call::Allocate);
        let answer = self.allocator.allocate(&mut *self.device, request);
        let duration = self.since(start);
        match answer {
            Ok(allocation) => {
                self.timed_allocate(duration);
                if !self.is_timed() && !allocation.is_null() {
                    self.names.handed_out(allocation.ptr());
                }
                self.check(|audit, allocator, device| audit.handed_out(allocator, device, request, &allocation))?;
                Ok(Ok(Buffer { allocation, content: None, shared: false }))
            }
            Err(AllocatorError::Device(error)) => Err(error.into()),
            Err(answer @ (AllocatorError::OutOfMemory(_) | AllocatorError::TooLarge { .. })) => {
                let counted = matches!(answer, AllocatorError::OutOfMemory(_));
                self.retries = self.allocator.stats().num_alloc_retries;
                self.check(|audit, allocator, device| audit.out_of_memory(allocator, device, counted))?;
                Ok(Err(answer))
            }
        }
    }

    /// Takes memory back. A checked run verifies its contents first, on the buffer's own stream, where the memory is used next: reading it on
    /// the stream that wrote it would wait for a stream that the program forgot to wait for. It does not verify where that would wait for
    /// queued `work`, which would put streams in an order that the program did not ask for.
    ///
    /// # Errors
    /// [`Stop`].
    pub fn free(&mut self, buffer: Buffer) -> Result<(), Stop> {
        if let Some((tag, writer)) = buffer.content
            && !self.is_timed()
            && !buffer.shared
            && ![writer, buffer.stream()].iter().any(|stream| self.working.contains(stream))
        {
            self.control.calls(Call::Verify);
            self.device.verify(buffer.stream(), buffer.range(), tag)?;
        }
        let address = buffer.allocation.ptr();
        let start = self.start();
        self.control.calls(Call::Free);
        self.allocator.free(&mut *self.device, buffer.allocation)?;
        let duration = self.since(start);
        if self.is_timed() {
            self.free.push(duration);
        } else {
            self.names.taken_back(address);
        }
        self.check(|audit, allocator, device| audit.taken_back(allocator, device, address))
    }

    /// Writes a tag of its own to every byte of a buffer.
    ///
    /// # Errors
    /// [`Stop`].
    pub fn fill(&mut self, buffer: &mut Buffer, stream: StreamId) -> Result<(), Stop> {
        if buffer.allocation.is_null() {
            return Ok(());
        }
        self.tags += 1;
        // An odd factor spreads the counter over all eight bytes, so that no two tags look alike and none looks like zeroed memory.
        let tag = Tag(self.tags.wrapping_mul(0x9e37_79b9_7f4a_7c15));
        buffer.content = Some((tag, stream));
        self.control.calls(Call::Fill);
        Ok(self.device.fill(stream, buffer.range(), tag)?)
    }

    /// Reads every byte of a buffer on a stream and compares with what was written last. A buffer never written has nothing to compare.
    ///
    /// # Errors
    /// [`Stop`].
    pub fn verify(&mut self, buffer: &Buffer, stream: StreamId) -> Result<(), Stop> {
        let Some((tag, _)) = buffer.content else { return Ok(()) };
        self.control.calls(Call::Verify);
        self.device.verify(stream, buffer.range(), tag)?;
        self.working.remove(&stream);
        Ok(())
    }

    /// Tells the allocator that another stream uses the buffer too.
    ///
    /// # Errors
    /// [`Stop`].
    pub fn record_stream(&mut self, buffer: &mut Buffer, stream: StreamId) -> Result<(), Stop> {
        buffer.shared |= stream != buffer.stream();
        Ok(self.allocator.record_stream(&buffer.allocation, stream)?)
    }

    /// Keeps a stream busy.
    ///
    /// # Errors
    /// [`Stop`].
    pub fn work(&mut self, stream: StreamId, duration: Nanos) -> Result<(), Stop> {
        self.working.insert(stream);
        self.control.calls(Call::Work);
        Ok(self.device.busy(stream, duration)?)
    }

    /// Makes a stream.
    ///
    /// # Errors
    /// [`Stop`].
    pub fn create_stream(&mut self) -> Result<StreamId, Stop> {
        Ok(self.device.create_stream()?)
    }

    /// Tells the name of a stream, for reports.
    pub fn name_stream(&mut self, stream: StreamId, name: &str) {
        self.names.name_stream(stream, name);
    }

    /// Tells whose the following allocations are, for reports: the name of a buffer or of a workload, and the line of its step. A timed run
    /// keeps no names.
    pub fn name_buffers(&mut self, name: &dyn std::fmt::Display, line: u32) {
        if !self.is_timed() {
            self.names.set_owner(name.to_string(), line);
        }
    }

    /// Makes an event.
    ///
    /// # Errors
    /// [`Stop`].
    pub fn create_event(&mut self) -> Result<EventId, Stop> {
        Ok(self.device.create_event()?)
    }

    /// Queues an event behind the stream's work.
    ///
    /// # Errors
    /// [`Stop`].
    pub fn record(&mut self, event: EventId, stream: StreamId) -> Result<(), Stop> {
        match self.working.contains(&stream) {
            true => drop(self.behind_work.insert(event, stream)),
            false => drop(self.behind_work.remove(&event)),
        }
        self.control.calls(Call::Event);
        Ok(self.device.record_event(event, stream)?)
    }

    /// Makes a stream wait for an event.
    ///
    /// # Errors
    /// [`Stop`].
    pub fn wait(&mut self, stream: StreamId, event: EventId) -> Result<(), Stop> {
        if self.behind_work.get(&event).is_some_and(|worker| self.working.contains(worker)) {
            self.working.insert(stream);
        }
        self.control.calls(Call::Event);
        Ok(self.device.wait_event(stream, event)?)
    }

    /// Waits for an event.
    ///
    /// # Errors
    /// [`Stop`].
    pub fn synchronize_event(&mut self, event: EventId) -> Result<(), Stop> {
        self.control.calls(Call::Synchronize);
        Ok(self.device.synchronize_event(event)?)
    }

    /// Waits for a stream.
    ///
    /// # Errors
    /// [`Stop`].
    pub fn synchronize_stream(&mut self, stream: StreamId) -> Result<(), Stop> {
        self.working.remove(&stream);
        self.control.calls(Call::Synchronize);
        Ok(self.device.synchronize_stream(stream)?)
    }

    /// Waits for everything.
    ///
    /// # Errors
    /// [`Stop`].
    pub fn synchronize(&mut self) -> Result<(), Stop> {
        self.working.clear();
        self.control.calls(Call::Synchronize);
        Ok(self.device.synchronize()?)
    }

    /// Gives the cache back to the driver, and returns how many bytes went.
    ///
    /// # Errors
    /// [`Stop`].
    pub fn empty_cache(&mut self) -> Result<Bytes, Stop> {
        let before = self.allocator.stats().reserved_bytes.all.current;
        let start = self.start();
        self.control.calls(Call::EmptyCache);
        self.allocator.empty_cache(&mut *self.device)?;
        let duration = self.since(start);
        if self.is_timed() {
            self.empty_cache.push(duration);
        } else {
            self.check(|audit, allocator, device| audit.everything(allocator, device))?;
            // A pool of the driver gives memory back without a call that is counted.
            self.refresh_memory()?;
            self.plot();
        }
        Ok(Bytes(before.saturating_sub(self.allocator.stats().reserved_bytes.all.current)))
    }

    /// Makes the present values the high-water marks.
    pub fn reset_peaks(&mut self) {
        self.allocator.reset_peaks();
    }

    /// Limits what the allocator may hold.
    pub fn set_memory_fraction(&mut self, fraction: MemoryFraction) {
        self.allocator.set_memory_fraction(&*self.device, fraction);
    }

    /// Makes others hold that much, and returns what they hold now.
    ///
    /// # Errors
    /// [`Stop`].
    pub fn set_pressure(&mut self, held: Bytes) -> Result<Bytes, Stop> {
        self.control.calls(Call::Pressure);
        let held = self.device.set_pressure(held)?;
        if !self.is_timed() {
            self.refresh_memory()?;
            self.plot();
        }
        Ok(held)
    }

    /// Whether the run should stop: the user wants it, or a step has run past its time limit.
    #[must_use]
    pub fn is_interrupted(&self) -> bool {
        self.control.should_stop()
    }

    /// Notes a violation that does not keep the step from going on; [`Rig::take_findings`] returns it.
    pub fn note(&mut self, finding: Finding) {
        if !self.findings.contains(&finding) {
            self.findings.push(finding);
        }
    }

    /// The violations noted since the last call, each once.
    pub fn take_findings(&mut self) -> Vec<Finding> {
        std::mem::take(&mut self.findings)
    }

    /// Why what others do on the device makes the accounts of this run worthless, if they do.
    #[must_use]
    pub fn contention(&self) -> Option<&str> {
        self.audit.as_ref().and_then(Audit::contention)
    }

    /// Adds to the time that would not have been spent without a failed request.
    pub fn add_lost_time(&mut self, lost: Nanos) {
        self.lost_to_retry += lost;
    }

    /// Time so far that would not have been spent without a failed request.
    #[must_use]
    pub const fn lost_to_retry(&self) -> Nanos {
        self.lost_to_retry
    }

    /// The device's clock.
    pub fn now(&mut self) -> Nanos {
        self.device.now()
    }

    /// The allocator's counters.
    #[must_use]
    pub fn stats(&self) -> MemoryStats {
        self.allocator.stats()
    }

    /// The allocator's structure. Linear in blocks.
    #[must_use]
    pub fn snapshot(&self) -> Vec<SegmentInfo> {
        self.allocator.snapshot()
    }

    /// The device's memory. What the scenario's streams take is part of the context overhead.
    ///
    /// # Errors
    /// [`Stop::Device`].
    pub fn memory(&mut self) -> Result<DeviceMemory, Stop> {
        self.control.calls(Call::Memory);
        let memory = self.device.memory()?;
        Ok(self.with_streams(memory))
    }

    /// What is free on the device, as the driver alone tells it.
    ///
    /// # Errors
    /// [`Stop::Device`].
    pub fn free_memory(&mut self) -> Result<Bytes, Stop> {
        Ok(self.device.free_memory()?)
    }

    /// What a request would meet now. Linear in blocks.
    ///
    /// # Errors
    /// [`Stop::Device`].
    pub fn memory_state(&mut self) -> Result<MemoryState, Stop> {
        let device_free = self.device.free_memory()?;
        let segments = self.allocator.snapshot();
        let blocks = segments.iter().flat_map(|segment| &segment.blocks);
        Ok(MemoryState { blocks: blocks.map(|block| (block.address, block.size, block.stream, block.state)).collect(), device_free })
    }

    /// What the device is.
    #[must_use]
    pub fn info(&self) -> &DeviceInfo {
        self.device.info()
    }

    /// What the allocator takes from the device for a large request comes in whole multiples of this.
    #[must_use]
    pub fn reserve_unit(&self) -> Bytes {
        self.allocator.reserve_unit(&*self.device)
    }

    /// Calls made to the device since the rig took it.
    #[must_use]
    pub fn calls(&self) -> DeviceCalls {
        let (now, start) = (self.device.calls(), self.calls_at_start);
        DeviceCalls {
            malloc: now.malloc - start.malloc,
            malloc_failures: now.malloc_failures - start.malloc_failures,
            free: now.free - start.free,
            create: now.create - start.create,
            release: now.release - start.release,
            malloc_async: now.malloc_async - start.malloc_async,
            free_async: now.free_async - start.free_async,
            event_record: now.event_record - start.event_record,
            event_query: now.event_query - start.event_query,
            synchronize: now.synchronize - start.synchronize,
        }
    }

    /// The accounts now.
    ///
    /// # Errors
    /// [`Stop::Device`].
    pub fn accounts(&mut self) -> Result<Accounts, Stop> {
        let stats = self.allocator.stats();
        Ok(Accounts {
            requested: Bytes(stats.requested_bytes.all.current),
            allocated: Bytes(stats.allocated_bytes.all.current),
            active: Bytes(stats.active_bytes.all.current),
            reserved: Bytes(stats.reserved_bytes.all.current),
            peak_allocated: Bytes(stats.allocated_bytes.all.peak),
            peak_reserved: Bytes(stats.reserved_bytes.all.peak),
            retries: stats.num_alloc_retries,
            ooms: stats.num_ooms,
            device: self.memory()?,
        })
    }

    /// The end, when everything was freed: the cache goes back, all that is free fits in one allocation, and nothing is left on the device.
    ///
    /// # Errors
    /// [`Stop`].
    pub fn finish(&mut self) -> Result<(), Stop> {
        self.control.calls(Call::Synchronize);
        self.device.synchronize()?;
        self.control.calls(Call::Pressure);
        self.device.set_pressure(Bytes::ZERO)?;
        self.allocator.set_memory_fraction(&*self.device, MemoryFraction::ALL);
        self.control.calls(Call::EmptyCache);
        self.allocator.empty_cache(&mut *self.device)?;
        let reserved = self.allocator.stats().reserved_bytes.all.current;
        if reserved != 0 {
            let segments = self.allocator.snapshot();
            let first =
                segments.first().map(|segment| format!(", the first of {} at {}", segment.size, segment.address)).unwrap_or_default();
            let seen = format!("{reserved} B ({}) reserved in {} segments{first}", Bytes(reserved), segments.len());
            return violated(Invariant::EverythingGoesBack, "0 B reserved after the last free and empty_cache", seen);
        }
        self.check(|audit, allocator, device| audit.everything(allocator, device))?;
        if self.is_timed() { Ok(()) } else { self.check_whole_limit_fits() }
    }

    /// Gives everything back, whatever state the run ended in.
    ///
    /// # Errors
    /// [`Stop`]: something could not be given back, or was left behind.
    pub fn close(mut self, streams: Vec<StreamId>, events: Vec<EventId>) -> Result<(), Stop> {
        self.control.calls(Call::Synchronize);
        self.device.synchronize()?;
        self.control.calls(Call::Pressure);
        self.device.set_pressure(Bytes::ZERO)?;
        self.allocator.close(&mut *self.device)?;
        events.into_iter().try_for_each(|event| self.device.destroy_event(event))?;
        streams.into_iter().try_for_each(|stream| self.device.destroy_stream(stream))?;
        let leaks = self.device.leaks();
        if leaks.is_empty() { Ok(()) } else { violated(Invariant::NothingLeaks, "nothing left on the device", leaks.to_string()) }
    }

    /// The points of the picture: none of a timed run.
    #[must_use]
    pub fn take_curve(&mut self) -> Vec<CurvePoint> {
        std::mem::take(&mut self.curve).into_points()
    }

    /// The durations: all zero but of a timed run.
    #[must_use]
    pub fn take_timings(&mut self) -> Timings {
        let take = |reservoir: &mut Reservoir| std::mem::replace(reservoir, Reservoir::new(0)).into_samples();
        if !self.is_timed() {
            return Timings::default();
        }
        Timings {
            allocate: take(&mut self.allocate),
            free: take(&mut self.free),
            empty_cache: take(&mut self.empty_cache),
            scenario: self.scenario_time,
            lost_to_retry: self.lost_to_retry,
        }
    }

    /// What was reserved and not allocated when reserved was at its first peak. Only a timed run keeps it.
    #[must_use]
    pub const fn unused_at_peak(&self) -> Bytes {
        self.unused_at_peak
    }

    /// The clock in a timed run. A checked run has no use for it.
    fn start(&mut self) -> Nanos {
        if self.is_timed() { self.device.now() } else { Nanos::ZERO }
    }

    /// Time since [`Rig::start`].
    fn since(&mut self, start: Nanos) -> Nanos {
        if self.is_timed() { self.device.now().saturating_sub(start) } else { Nanos::ZERO }
    }

    /// A request was served. The allocator's counters are read only where the driver was called, so that a cache hit costs no more than it must.
    fn timed_allocate(&mut self, duration: Nanos) {
        if !self.is_timed() {
            return;
        }
        self.allocate.push(duration);
        let calls = self.device.calls();
        if calls.memory_calls() == self.last_calls.memory_calls() {
            return;
        }
        self.last_calls = calls;
        let stats = self.allocator.stats();
        if stats.num_alloc_retries > self.retries {
            self.retries = stats.num_alloc_retries;
            self.lost_to_retry += duration;
        }
        let (reserved, allocated) = (Bytes(stats.reserved_bytes.all.current), Bytes(stats.allocated_bytes.all.current));
        if reserved > self.peak_reserved {
            self.peak_reserved = reserved;
            self.unused_at_peak = reserved.saturating_sub(allocated);
        }
    }

    /// One allocation of all that is free, in whole units of what the allocator takes.
    fn check_whole_limit_fits(&mut self) -> Result<(), Stop> {
        let free = self.device.free_memory()?;
        let whole = self.allocator.largest_request(&*self.device, free);
        self.control.calls(Call::Allocate);
        match self.allocator.allocate(&mut *self.device, Request::new(whole)) {
            Ok(allocation) => self.allocator.free(&mut *self.device, allocation)?,
            Err(AllocatorError::Device(error)) => return Err(error.into()),
            // Somebody else has taken it meanwhile.
            Err(AllocatorError::OutOfMemory(oom)) if matches!(oom.cause, OomCause::Device { free: left } if left < free) => {}
            Err(error) => {
                return violated(
                    Invariant::WholeLimitFitsAtTheEnd,
                    format!("all that is free, {whole}, in one allocation"),
                    error.to_string(),
                );
            }
        }
        self.control.calls(Call::EmptyCache);
        Ok(self.allocator.empty_cache(&mut *self.device)?)
    }

    /// Runs a check of the audit and adds a point to the picture. A timed run does neither.
    fn check(
        &mut self,
        check: impl FnOnce(&mut Audit, &dyn Allocator, &mut dyn TestDevice) -> Result<(), Vec<Finding>>,
    ) -> Result<(), Stop> {
        if self.is_timed() {
            return Ok(());
        }
        if let Some(audit) = &mut self.audit {
            check(audit, &*self.allocator, &mut *self.device).map_err(Stop::Violated)?;
        }
        if self.device.calls().memory_calls() != self.last_calls.memory_calls() {
            self.refresh_memory()?;
        }
        self.plot();
        Ok(())
    }

    fn refresh_memory(&mut self) -> Result<(), Stop> {
        self.last_memory = self.memory()?;
        self.last_calls = self.device.calls();
        Ok(())
    }

    /// The same with what the scenario's streams take in the context overhead.
    fn with_streams(&self, memory: DeviceMemory) -> DeviceMemory {
        DeviceMemory { context_overhead: self.used_at_start, ..memory }
    }

    fn plot(&mut self) {
        let stats = self.allocator.stats();
        self.curve.push(CurvePoint {
            at: 0,
            step: self.step,
            allocated: Bytes(stats.allocated_bytes.all.current),
            active: Some(Bytes(stats.active_bytes.all.current)),
            reserved: Bytes(stats.reserved_bytes.all.current),
            used: self.last_memory.used.saturating_sub(self.last_memory.context_overhead),
            ooms: stats.num_ooms,
            retries: stats.num_alloc_retries,
        });
    }
}

fn violated<T>(invariant: Invariant, expected: impl Into<String>, seen: impl Into<String>) -> Result<T, Stop> {
    Err(Stop::Violated(vec![Finding { invariant, expected: expected.into(), seen: seen.into() }]))
}
