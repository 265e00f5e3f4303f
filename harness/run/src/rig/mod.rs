//! The rig: one device, one allocator, and the accounts kept of them. Every operation of a scenario goes through here, so that each one is
//! timed on the device's clock, audited, and seen by the picture; nothing else in the harness touches a device.

mod audit;
mod curve;
mod samples;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use harness_allocator::allocator::{Allocation, Allocator, AllocatorError, MemoryFraction, OomCause, Request};
use harness_allocator::device::{
    Device, DeviceCalls, DeviceError, DeviceInfo, DeviceMemory, EventId, MemoryRange, Place, StreamId, Tag, TestDevice,
};
use harness_allocator::stats::{BlockState, MemoryStats, SegmentInfo};
use harness_allocator::units::{Bytes, Nanos};

pub use self::audit::{Audit, Finding};
use self::curve::Curve;
use self::samples::Reservoir;
use harness_record::Invariant;
use harness_record::{Accounts, CurvePoint, Lane, Pieces, Shortage, Timings};

/// Why a run cannot go on.
#[derive(Clone, Debug, PartialEq)]
pub enum Halt {
    /// An invariant does not hold.
    Violated(Vec<Finding>),
    /// The device, or the allocator, failed otherwise than for lack of memory.
    Device(DeviceError),
    /// Other processes disturbed the device: what they did, in words.
    Contended(String),
    /// The user wants it to stop.
    Interrupted,
}

impl From<DeviceError> for Halt {
    /// Wrong contents and races are violations: somebody was given memory that another still uses.
    fn from(error: DeviceError) -> Self {
        match error {
            DeviceError::Corrupted { .. } | DeviceError::Race { .. } => Self::Violated(vec![Finding {
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
    /// Whether another stream than its own was told to use it.
    shared: bool,
}

impl Buffer {
    /// What was asked for.
    #[must_use]
    pub const fn requested(&self) -> Bytes {
        self.allocation.requested()
    }

    /// What it is charged as.
    #[must_use]
    pub const fn size(&self) -> Bytes {
        self.allocation.size()
    }

    /// The stream it was made for.
    #[must_use]
    pub const fn stream(&self) -> StreamId {
        self.allocation.stream()
    }

    /// The bytes it may touch.
    #[must_use]
    pub const fn range(&self) -> MemoryRange {
        self.allocation.range()
    }
}

/// How a rig is run.
#[derive(Clone, Debug)]
pub struct RigOptions {
    /// Whether every operation is audited. Off only where the allocator's own speed is measured.
    pub audit: bool,
    /// For everything random inside the rig: which samples are kept of many.
    pub seed: u64,
    /// Set by somebody else when the run should stop.
    pub interrupt: Arc<AtomicBool>,
}

impl Default for RigOptions {
    fn default() -> Self {
        Self { audit: true, seed: 0, interrupt: Arc::default() }
    }
}

/// See the module.
pub struct Rig {
    device: Box<dyn TestDevice>,
    allocator: Box<dyn Allocator>,
    audit: Option<Audit>,
    interrupt: Arc<AtomicBool>,
    step: u32,
    tags: u64,
    /// Streams with queued `work` that nobody has waited for, or that wait for such a stream.
    working: Vec<StreamId>,
    /// Events that stand behind such work, by the stream that they were recorded on.
    behind_work: BTreeMap<EventId, StreamId>,
    findings: Vec<Finding>,
    curve: Curve,
    last_memory: DeviceMemory,
    last_calls: DeviceCalls,
    calls_at_start: DeviceCalls,
    allocate: Reservoir,
    free: Reservoir,
    empty_cache: Reservoir,
    lost_to_retry: Nanos,
    /// Time in the harness's own checks since the step began: not the scenario's.
    checking: Nanos,
    step_began: Nanos,
    scenario_time: Nanos,
}

impl Rig {
    /// Takes a device before the first allocation.
    ///
    /// # Errors
    /// [`DeviceError`] where the device cannot tell its memory.
    pub fn new(mut device: Box<dyn TestDevice>, allocator: Box<dyn Allocator>, options: &RigOptions) -> Result<Self, DeviceError> {
        let audit = if options.audit { Some(Audit::new(&mut *device)?) } else { None };
        let last_memory = device.memory()?;
        let calls = device.calls();
        let reservoir = |salt| Reservoir::new(options.seed ^ salt);
        Ok(Self {
            device,
            allocator,
            audit,
            interrupt: Arc::clone(&options.interrupt),
            step: 0,
            tags: 0,
            working: Vec::new(),
            behind_work: BTreeMap::new(),
            findings: Vec::new(),
            curve: Curve::default(),
            last_memory,
            last_calls: calls,
            calls_at_start: calls,
            allocate: reservoir(1),
            free: reservoir(2),
            empty_cache: reservoir(3),
            lost_to_retry: Nanos::ZERO,
            checking: Nanos::ZERO,
            step_began: Nanos::ZERO,
            scenario_time: Nanos::ZERO,
        })
    }

    /// Begins a step: its number is what a strict device names in its errors.
    pub fn begin_step(&mut self, number: u32) {
        self.step = number;
        self.device.set_place(Place(number));
        self.checking = Nanos::ZERO;
        self.step_began = self.device.now();
    }

    /// Ends a step: checks everything, and returns how long the step took, without the checks, and the accounts after it.
    ///
    /// # Errors
    /// [`Halt`].
    pub fn end_step(&mut self) -> Result<(Nanos, Accounts), Halt> {
        let duration = self.device.now().saturating_sub(self.step_began).saturating_sub(self.checking);
        self.scenario_time += duration;
        self.check_everything()?;
        let accounts = self.accounts()?;
        self.plot();
        Ok((duration, accounts))
    }

    /// Hands out memory. The inner error is the allocator's answer that there is none, which is data.
    ///
    /// # Errors
    /// [`Halt`].
    pub fn allocate(&mut self, request: Request) -> Result<Result<Buffer, AllocatorError>, Halt> {
        if self.is_interrupted() {
            return Err(Halt::Interrupted);
        }
        let retries = self.allocator.stats().num_alloc_retries;
        let start = self.device.now();
        let answer = self.allocator.allocate(&mut *self.device, request);
        let duration = self.device.now().saturating_sub(start);
        match answer {
            Ok(allocation) => {
                self.allocate.push(duration);
                if self.allocator.stats().num_alloc_retries > retries {
                    self.lost_to_retry += duration;
                }
                self.check(|audit, allocator, device| audit.handed_out(allocator, device, request, &allocation))?;
                Ok(Ok(Buffer { allocation, content: None, shared: false }))
            }
            Err(AllocatorError::Device(error)) => Err(error.into()),
            Err(answer @ (AllocatorError::OutOfMemory(_) | AllocatorError::TooLarge { .. })) => {
                let counted = matches!(answer, AllocatorError::OutOfMemory(_));
                self.check(|audit, allocator, device| audit.out_of_memory(allocator, device, counted))?;
                Ok(Err(answer))
            }
        }
    }

    /// Takes memory back. What it holds is checked first, unless that would wait for other work: on the buffer's own stream, where the
    /// memory is used next. Reading it on the stream that wrote it would wait for a stream that the program forgot to wait for.
    ///
    /// # Errors
    /// [`Halt`].
    pub fn free(&mut self, buffer: Buffer) -> Result<(), Halt> {
        if let Some((tag, writer)) = buffer.content
            && !buffer.shared
            && ![writer, buffer.stream()].iter().any(|stream| self.working.contains(stream))
        {
            self.checked(|rig| rig.device.verify(buffer.stream(), buffer.range(), tag))?;
        }
        let address = buffer.allocation.ptr();
        let start = self.device.now();
        self.allocator.free(&mut *self.device, buffer.allocation)?;
        let duration = self.device.now().saturating_sub(start);
        self.free.push(duration);
        self.check(|audit, allocator, device| audit.taken_back(allocator, device, address))
    }

    /// Writes a tag of its own to every byte of a buffer.
    ///
    /// # Errors
    /// [`Halt`].
    pub fn fill(&mut self, buffer: &mut Buffer, stream: StreamId) -> Result<(), Halt> {
        if buffer.allocation.is_null() {
            return Ok(());
        }
        self.tags += 1;
        // An odd factor spreads the counter over all eight bytes, so that no two tags look alike and none looks like zeroed memory.
        let tag = Tag(self.tags.wrapping_mul(0x9e37_79b9_7f4a_7c15));
        buffer.content = Some((tag, stream));
        Ok(self.device.fill(stream, buffer.range(), tag)?)
    }

    /// Reads every byte of a buffer on a stream and compares with what was written last. A buffer never written has nothing to compare.
    ///
    /// # Errors
    /// [`Halt`].
    pub fn verify(&mut self, buffer: &Buffer, stream: StreamId) -> Result<(), Halt> {
        let Some((tag, _)) = buffer.content else { return Ok(()) };
        self.device.verify(stream, buffer.range(), tag)?;
        self.working.retain(|&working| working != stream);
        Ok(())
    }

    /// Tells the allocator that another stream uses the buffer too.
    ///
    /// # Errors
    /// [`Halt`].
    pub fn use_on(&mut self, buffer: &mut Buffer, stream: StreamId) -> Result<(), Halt> {
        buffer.shared |= stream != buffer.stream();
        Ok(self.allocator.record_stream(&buffer.allocation, stream)?)
    }

    /// Keeps a stream busy.
    ///
    /// # Errors
    /// [`Halt`].
    pub fn work(&mut self, stream: StreamId, duration: Nanos) -> Result<(), Halt> {
        self.note_work(stream);
        Ok(self.device.busy(stream, duration)?)
    }

    /// Makes a stream.
    ///
    /// # Errors
    /// [`Halt`].
    pub fn create_stream(&mut self) -> Result<StreamId, Halt> {
        Ok(self.device.create_stream()?)
    }

    /// Makes an event.
    ///
    /// # Errors
    /// [`Halt`].
    pub fn create_event(&mut self) -> Result<EventId, Halt> {
        Ok(self.device.create_event()?)
    }

    /// Queues an event behind the stream's work.
    ///
    /// # Errors
    /// [`Halt`].
    pub fn record(&mut self, event: EventId, stream: StreamId) -> Result<(), Halt> {
        match self.working.contains(&stream) {
            true => drop(self.behind_work.insert(event, stream)),
            false => drop(self.behind_work.remove(&event)),
        }
        Ok(self.device.record_event(event, stream)?)
    }

    /// Makes a stream wait for an event.
    ///
    /// # Errors
    /// [`Halt`].
    pub fn wait(&mut self, stream: StreamId, event: EventId) -> Result<(), Halt> {
        if self.behind_work.get(&event).is_some_and(|worker| self.working.contains(worker)) {
            self.note_work(stream);
        }
        Ok(self.device.wait_event(stream, event)?)
    }

    /// Waits for an event.
    ///
    /// # Errors
    /// [`Halt`].
    pub fn synchronize_event(&mut self, event: EventId) -> Result<(), Halt> {
        Ok(self.device.synchronize_event(event)?)
    }

    /// Waits for a stream.
    ///
    /// # Errors
    /// [`Halt`].
    pub fn synchronize_stream(&mut self, stream: StreamId) -> Result<(), Halt> {
        self.working.retain(|&working| working != stream);
        Ok(self.device.synchronize_stream(stream)?)
    }

    /// Waits for everything.
    ///
    /// # Errors
    /// [`Halt`].
    pub fn synchronize(&mut self) -> Result<(), Halt> {
        self.working.clear();
        Ok(self.device.synchronize()?)
    }

    /// Gives the cache back to the driver, and says how many bytes went.
    ///
    /// # Errors
    /// [`Halt`].
    pub fn empty_cache(&mut self) -> Result<Bytes, Halt> {
        let before = self.allocator.stats().reserved_bytes.all.current;
        let start = self.device.now();
        self.allocator.empty_cache(&mut *self.device)?;
        let duration = self.device.now().saturating_sub(start);
        self.empty_cache.push(duration);
        self.check_everything()?;
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

    /// Makes others hold that much, and says what they hold now.
    ///
    /// # Errors
    /// [`Halt`].
    pub fn set_pressure(&mut self, held: Bytes) -> Result<Bytes, Halt> {
        let held = self.device.set_pressure(held)?;
        self.checked(Self::refresh_memory)?;
        self.plot();
        Ok(held)
    }

    /// Whether the user wants the run to stop.
    #[must_use]
    pub fn is_interrupted(&self) -> bool {
        self.interrupt.load(Ordering::Relaxed)
    }

    /// Notes a violation that does not keep the step from going on; [`Rig::take_findings`] returns it.
    pub fn note(&mut self, finding: Finding) {
        self.findings.push(finding);
    }

    /// The violations noted since the last call.
    pub fn take_findings(&mut self) -> Vec<Finding> {
        std::mem::take(&mut self.findings)
    }

    /// Adds to the time that would not have been spent without a failed request.
    pub fn count_lost(&mut self, lost: Nanos) {
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

    /// The device's clock, less the time that the harness's own checks have taken in this step: for durations within a step.
    pub fn scenario_clock(&mut self) -> Nanos {
        self.device.now().saturating_sub(self.checking)
    }

    /// The allocator's counters.
    #[must_use]
    pub fn stats(&self) -> MemoryStats {
        self.allocator.stats()
    }

    /// The allocator's structure.
    #[must_use]
    pub fn snapshot(&self) -> Vec<SegmentInfo> {
        self.allocator.snapshot()
    }

    /// The device's memory. The time of the answer, which may be NVML's, is not the scenario's.
    ///
    /// # Errors
    /// [`Halt`].
    pub fn memory(&mut self) -> Result<DeviceMemory, Halt> {
        self.checked(|rig| rig.device.memory())
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

    /// The room that a request could find: free on the device, and free in the cache.
    ///
    /// # Errors
    /// [`Halt`].
    pub fn room(&mut self) -> Result<Bytes, Halt> {
        let stats = self.allocator.stats();
        let cached = stats.reserved_bytes.all.current.saturating_sub(stats.active_bytes.all.current);
        Ok(self.device.free_memory()? + Bytes(cached))
    }

    /// The accounts now.
    ///
    /// # Errors
    /// [`Halt`].
    pub fn accounts(&mut self) -> Result<Accounts, Halt> {
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
            device: self.device.memory()?,
        })
    }

    /// What is known of a request that failed just now, for a report to say why. Linear in blocks.
    ///
    /// # Errors
    /// [`Halt`].
    pub fn shortage(&mut self, request: Request, error: &AllocatorError) -> Result<Shortage, Halt> {
        self.checked(|rig| {
            let (lacking, asked, limit) = match error {
                AllocatorError::OutOfMemory(oom) => match oom.cause {
                    OomCause::Fraction { limit } | OomCause::Limit { limit } => (oom.lacking, oom.segment, Some(limit)),
                    OomCause::Device { .. } => (oom.lacking, oom.segment, None),
                },
                AllocatorError::TooLarge { .. } | AllocatorError::Device(_) => (request.size, request.size, None),
            };
            let lanes = rig.allocator.driver_pool().is_none().then(|| lanes(&rig.allocator.snapshot()));
            let inactive_split = Bytes(rig.allocator.stats().inactive_split_bytes.all.current);
            let Request { size: requested, stream: StreamId(stream) } = request;
            Ok::<_, Halt>(Shortage { requested, stream, lacking, asked, limit, accounts: rig.accounts()?, inactive_split, lanes })
        })
    }

    /// The end, when everything was freed: the cache goes back, all that is free fits in one allocation, and nothing is left on the device.
    ///
    /// # Errors
    /// [`Halt`].
    pub fn finish(&mut self) -> Result<(), Halt> {
        self.device.synchronize()?;
        self.device.set_pressure(Bytes::ZERO)?;
        self.allocator.set_memory_fraction(&*self.device, MemoryFraction::ALL);
        self.allocator.empty_cache(&mut *self.device)?;
        let reserved = self.allocator.stats().reserved_bytes.all.current;
        if reserved != 0 {
            let segments = self.allocator.snapshot();
            let first =
                segments.first().map(|segment| format!(", the first of {} at {}", segment.size, segment.address)).unwrap_or_default();
            let seen = format!("{reserved} B ({}) reserved in {} segments{first}", Bytes(reserved), segments.len());
            return violated(Invariant::EverythingGoesBack, "0 B reserved after the last free and empty_cache", seen);
        }
        self.check_everything()?;
        self.check_whole_limit_fits()
    }

    /// Gives everything back, whatever state the run ended in.
    ///
    /// # Errors
    /// [`Halt`]: something could not be given back, or was left behind.
    pub fn close(mut self, streams: Vec<StreamId>, events: Vec<EventId>) -> Result<(), Halt> {
        self.device.synchronize()?;
        self.device.set_pressure(Bytes::ZERO)?;
        self.allocator.close(&mut *self.device)?;
        events.into_iter().try_for_each(|event| self.device.destroy_event(event))?;
        streams.into_iter().try_for_each(|stream| self.device.destroy_stream(stream))?;
        let leaks = self.device.leaks();
        if leaks.is_empty() { Ok(()) } else { violated(Invariant::NothingLeaks, "nothing left on the device", leaks.to_string()) }
    }

    /// What was measured, and the picture's points.
    #[must_use]
    pub fn take_measurements(&mut self) -> (Timings, Vec<CurvePoint>) {
        let take = |reservoir: &mut Reservoir| std::mem::replace(reservoir, Reservoir::new(0)).into_samples();
        let timings = Timings {
            allocate: take(&mut self.allocate),
            free: take(&mut self.free),
            empty_cache: take(&mut self.empty_cache),
            scenario: self.scenario_time,
            lost_to_retry: self.lost_to_retry,
        };
        (timings, std::mem::take(&mut self.curve).into_points())
    }

    fn note_work(&mut self, stream: StreamId) {
        if !self.working.contains(&stream) {
            self.working.push(stream);
        }
    }

    fn check_whole_limit_fits(&mut self) -> Result<(), Halt> {
        let free = self.device.free_memory()?;
        let whole = self.allocator.largest_request(&*self.device, free);
        match self.allocator.allocate(&mut *self.device, Request::new(whole)) {
            Ok(allocation) => self.allocator.free(&mut *self.device, allocation)?,
            Err(AllocatorError::Device(error)) => return Err(error.into()),
            Err(error) => {
                return violated(
                    Invariant::WholeLimitFitsAtTheEnd,
                    format!("all that is free, {whole}, in one allocation"),
                    error.to_string(),
                );
            }
        }
        Ok(self.allocator.empty_cache(&mut *self.device)?)
    }

    fn check_everything(&mut self) -> Result<(), Halt> {
        self.check(|audit, allocator, device| audit.everything(allocator, device))
    }

    /// Runs a check of the audit, keeping its time out of the scenario's, and adds a point to the picture.
    fn check(
        &mut self,
        check: impl FnOnce(&mut Audit, &dyn Allocator, &mut dyn TestDevice) -> Result<(), Vec<Finding>>,
    ) -> Result<(), Halt> {
        self.checked(|rig| {
            if let Some(audit) = &mut rig.audit {
                check(audit, &*rig.allocator, &mut *rig.device).map_err(Halt::Violated)?;
            }
            rig.plot_if_moved()
        })
    }

    fn checked<T, E: Into<Halt>>(&mut self, check: impl FnOnce(&mut Self) -> Result<T, E>) -> Result<T, Halt> {
        let start = self.device.now();
        let result = check(self).map_err(Into::into);
        self.checking += self.device.now().saturating_sub(start);
        result
    }

    fn plot_if_moved(&mut self) -> Result<(), Halt> {
        if self.device.calls().memory_calls() != self.last_calls.memory_calls() {
            self.refresh_memory()?;
        }
        self.plot();
        Ok(())
    }

    fn refresh_memory(&mut self) -> Result<(), Halt> {
        self.last_memory = self.device.memory()?;
        self.last_calls = self.device.calls();
        Ok(())
    }

    fn plot(&mut self) {
        let stats = self.allocator.stats();
        self.curve.push(CurvePoint {
            step: self.step,
            allocated: Bytes(stats.allocated_bytes.all.current),
            reserved: Bytes(stats.reserved_bytes.all.current),
            used: self.last_memory.used.saturating_sub(self.last_memory.context_overhead),
            ooms: stats.num_ooms,
            retries: stats.num_alloc_retries,
        });
    }
}

/// What is free in some segments, or waits to be, by pool and stream. A segment that serves several streams has blocks of all sizes.
fn lanes(segments: &[SegmentInfo]) -> Vec<Lane> {
    let mut lanes = BTreeMap::new();
    for segment in segments {
        let pool = segment.stream.map(|_| segment.pool);
        for block in segment.blocks.iter().filter(|block| block.state != BlockState::Allocated) {
            let lane = lanes.entry((pool, block.stream)).or_insert_with(|| Lane {
                pool,
                stream: block.stream.0,
                free: Pieces::default(),
                waiting: Pieces::default(),
            });
            match block.state {
                BlockState::Inactive => lane.free.add(block.size),
                BlockState::PendingFree => lane.waiting.add(block.size),
                BlockState::Allocated => {}
            }
        }
    }
    lanes.into_values().collect()
}

fn violated<T>(invariant: Invariant, expected: impl Into<String>, seen: impl Into<String>) -> Result<T, Halt> {
    Err(Halt::Violated(vec![Finding { invariant, expected: expected.into(), seen: seen.into() }]))
}
