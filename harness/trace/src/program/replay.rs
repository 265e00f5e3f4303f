//! Replays a program with any settings, allocator and memory. [`Prepared`] is a program that can run many times.

use std::collections::HashMap;
use std::ops::ControlFlow;

use harness_allocator::allocator::caching::{CachingAllocator, Config};
use harness_allocator::allocator::{Allocation, Allocator, AllocatorError, AllocatorSpec, Request};
use harness_allocator::device::sim::{CostModel, GRANULARITY, SimConfig, SimDevice};
use harness_allocator::device::{Device as _, DeviceCalls, DeviceError, DevicePtr, MappedDevice as _, MemoryRange, StreamId, TestDevice};
use harness_allocator::stats::{BlockInfo, BlockState, MemoryStats, SegmentInfo};
use harness_allocator::units::{Bytes, Nanos};

use super::watch::{AddressLog, Logged, Step};
use super::{Ended, ProgramError, RecordedProgram};
use crate::execute::{ByHandle, Executor, Kind, Observer, Outcome, Stopped};
use crate::snapshot::{Segment, StackId};
use crate::trace::TraceEvent;

/// A program that can run many times, also on several threads. Each run takes memory for the live blocks, not for the operations.
#[derive(Debug)]
pub struct Prepared<'a> {
    program: &'a RecordedProgram,
    executor: Executor<Allocation>,
    start: Vec<SegmentInfo>,
}

/// The allocator and device of a replay.
#[derive(Clone, Debug, PartialEq)]
pub struct Setup {
    pub allocator: AllocatorSpec,
    /// The memory available to the program.
    pub memory: Bytes,
    pub placement: Placement,
}

/// The addresses of new segments.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Placement {
    /// Rising addresses, without reuse.
    Rising,
    /// The recorded addresses in order.
    Recorded,
}

/// The result of a replay.
#[derive(Clone, Debug, PartialEq)]
pub struct Replayed {
    /// The request that stopped the replay: it succeeded in the recording, or it is the recording's final OOM.
    pub oom: Option<Refused>,
    /// Requests that failed both here and in the recording, which continued.
    pub survived_ooms: u64,
    /// Statistics at the end. Peaks and totals include the state at the start.
    pub stats: MemoryStats,
    /// Device calls, without those for the state at the start.
    pub calls: DeviceCalls,
    /// The modeled time of the driver calls.
    pub driver_time: Nanos,
    /// The most memory that was reserved but not allocated directly after a driver call: free memory that did not fit.
    pub peak_unused: Bytes,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Refused {
    /// Counted from 0.
    pub operation: usize,
    /// The index of its event in the snapshot.
    pub event: u32,
    pub requested: Bytes,
}

impl RecordedProgram {
    /// Prepares the program. Fails if it has more streams than a replay supports.
    pub fn prepare(&self) -> Result<Prepared<'_>, ProgramError> {
        let made_up = self.operations.iter().filter_map(|operation| match *operation {
            TraceEvent::RecordStream { stream, .. } => Some(stream.0),
            _ => None,
        });
        let streams = made_up.max().map_or(0, |last| last + 1).max(self.streams.len() as u32);
        let streams: Vec<StreamId> = (0..streams).map(StreamId).collect();
        // All simulated devices number streams the same way.
        let mut device = SimDevice::new(SimConfig::replay(Bytes::gib(1)));
        let executor = Executor::with_live(0..self.live_at_start(), &streams, &self.operations, &mut device)?;
        Ok(Prepared { program: self, executor, start: self.start_for_allocator() })
    }

    /// The segments at the start, in the allocator's format.
    pub fn start_for_allocator(&self) -> Vec<SegmentInfo> {
        self.start.iter().map(|segment| self.for_allocator(segment)).collect()
    }

    fn for_allocator(&self, segment: &Segment) -> SegmentInfo {
        let stream = self.stream_number(segment.stream);
        let blocks = segment.blocks.iter().map(|block| BlockInfo {
            address: DevicePtr(block.address),
            size: block.size,
            stream,
            requested: block.requested,
            state: block.state,
        });
        SegmentInfo {
            address: DevicePtr(segment.address),
            size: segment.size,
            stream: Some(stream),
            pool: segment.pool,
            private_pool: self.pools.iter().position(|&pool| pool == segment.private_pool).map(|pool| pool as u32),
            expandable: segment.expandable,
            blocks: blocks.collect(),
        }
    }

    /// Converts an allocator's segment for a snapshot. `stacks` maps block addresses to stacks. A segment with several streams
    /// gets the stream of its first block.
    pub fn for_snapshot(&self, segment: &SegmentInfo, stacks: &HashMap<u64, StackId>) -> Segment {
        let stream = segment.stream.or_else(|| segment.blocks.first().map(|block| block.stream)).unwrap_or_default();
        let stream = self.streams.get(stream.0 as usize).copied().unwrap_or_default();
        let private_pool = segment.private_pool.and_then(|pool| self.pools.get(pool as usize)).copied().unwrap_or_default();
        let stack = |address| stacks.get(&address).copied().unwrap_or_default();
        Segment { device: self.device, ..Segment::of(segment, stream, private_pool, stack) }
    }

    /// The number of a stream, given its handle.
    pub fn stream_number(&self, handle: u64) -> StreamId {
        StreamId(self.streams.binary_search(&handle).unwrap_or(0) as u32)
    }
}

impl Prepared<'_> {
    pub const fn program(&self) -> &RecordedProgram {
        self.program
    }

    /// Replays the program up to its end, or up to the first request that fails but succeeded in the recording.
    ///
    /// PyTorch's allocator starts in the recorded state, with any settings. Other allocators first allocate the blocks that were
    /// live, in address order.
    pub fn replay(&self, setup: &Setup) -> Result<Replayed, ProgramError> {
        let mut device = self.device(setup)?;
        match setup.allocator.effective() {
            Some(config) => {
                let (mut allocator, live) = self.restore(config, &mut device, setup.placement)?;
                self.run(&mut device, &mut allocator, live, |_, _, _| ControlFlow::Continue(()))
            }
            None => {
                let mut allocator = setup.allocator.build();
                let live = self.allocate_start(&mut *allocator, &mut device, setup)?;
                self.run(&mut device, &mut allocator, live, |_, _, _| ControlFlow::Continue(()))
            }
        }
    }

    /// Replays like [`Prepared::replay`] and shows each operation to `watch`, which can stop the replay.
    pub fn watch(&self, setup: &Setup, mut watch: impl FnMut(&Step<'_>) -> ControlFlow<()>) -> Result<Replayed, ProgramError> {
        let mut device = self.device(setup)?;
        let (allocator, live): (Box<dyn Allocator>, _) = match setup.allocator.effective() {
            Some(config) => {
                let (allocator, live) = self.restore(config, &mut device, setup.placement)?;
                (Box::new(allocator), live)
            }
            None => {
                let mut allocator = setup.allocator.build();
                let live = self.allocate_start(&mut *allocator, &mut device, setup)?;
                (allocator, live)
            }
        };
        let (mut device, log) = Logged::new(device, &self.start);
        let mut allocator = AddressLog::new(allocator);
        self.run(&mut device, &mut allocator, live, |operation, outcome, allocator| {
            let driver = log.take();
            let (address, allocator) = (allocator.take_address(), allocator.allocator());
            watch(&Step { operation, outcome, address, driver: &driver, allocator })
        })
    }

    /// The segments after an operation, counted from 0, or after an earlier request that stops the replay. In address order, with
    /// the stacks of the blocks.
    pub fn segments_after(&self, setup: &Setup, operation: usize) -> Result<(Replayed, Vec<Segment>), ProgramError> {
        let restored = setup.allocator.effective().is_some();
        let at_start = self.program.allocations.iter().take(if restored { self.program.live_at_start() as usize } else { 0 });
        let mut stacks: HashMap<u64, StackId> = at_start.filter_map(|allocation| Some((allocation.address?, allocation.stack))).collect();
        let mut segments = if restored { self.start.clone() } else { Vec::new() };
        let replayed = self.watch(setup, |step| {
            if let (Some(address), TraceEvent::Allocate { id, .. }) = (step.address, self.program.operations[step.operation]) {
                stacks.insert(address.0, self.program.allocations[id as usize].stack);
            }
            let stops = step.operation == operation || step.operation + 1 == self.program.operations.len();
            if stops || step.outcome == Outcome::OutOfMemory {
                segments = step.allocator.snapshot();
            }
            if stops { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
        })?;
        Ok((replayed, segments.iter().map(|segment| self.program.for_snapshot(segment, &stacks)).collect()))
    }

    pub(super) fn device(&self, setup: &Setup) -> Result<SimDevice, ProgramError> {
        let held = self.program.reserved_at_start();
        if held > setup.memory {
            return Err(ProgramError::TooLittleMemory { memory: setup.memory, held });
        }
        Ok(SimDevice::new(SimConfig { cost: CostModel::PUBLISHED, ..SimConfig::replay(setup.memory) }))
    }

    /// Restores PyTorch's allocator in the recorded state and reserves its memory on the device.
    fn restore(
        &self,
        config: Config,
        device: &mut SimDevice,
        placement: Placement,
    ) -> Result<(CachingAllocator, Vec<Allocation>), ProgramError> {
        hold(device, &self.start, &self.program.reserved_at_start).map_err(|source| ProgramError::Replay { operation: 0, source })?;
        if placement == Placement::Recorded {
            device.place_allocations(self.program.driver.iter().map(|range| DevicePtr(range.address)));
            device.place_reservations(self.program.reservations.iter().map(|&start| DevicePtr(start)));
        }
        Ok(CachingAllocator::restore(config, &self.start, &self.program.reserved_at_start)?)
    }

    /// Allocates the blocks that are live at the start.
    fn allocate_start(
        &self,
        allocator: &mut dyn Allocator,
        device: &mut SimDevice,
        setup: &Setup,
    ) -> Result<Vec<Allocation>, ProgramError> {
        let live = self.start.iter().flat_map(|segment| &segment.blocks).filter(|block| block.state == BlockState::Allocated);
        live.map(|block| match allocator.allocate(device, Request { size: block.requested, stream: block.stream }) {
            Ok(allocation) => Ok(allocation),
            Err(AllocatorError::Device(source)) => Err(ProgramError::Replay { operation: 0, source }),
            Err(_) => Err(ProgramError::TooLittleMemory { memory: setup.memory, held: self.program.reserved_at_start() }),
        })
        .collect()
    }

    pub(super) fn run<A: Allocator>(
        &self,
        device: &mut dyn TestDevice,
        allocator: &mut A,
        live: Vec<Allocation>,
        each: impl FnMut(usize, Outcome, &mut A) -> ControlFlow<()>,
    ) -> Result<Replayed, ProgramError> {
        let (calls, start) = (device.calls(), device.now());
        let mut executor = self.executor.for_device(device)?;
        executor.start_with(live);
        let mut follow =
            Follow { program: self.program, each, calls: calls.memory_calls(), oom: None, survived_ooms: 0, peak_unused: Bytes::ZERO };
        match executor.run(&mut ByHandle { device, allocator }, &mut follow) {
            Ok(_) | Err(Stopped::Observer(Stop)) => {}
            Err(Stopped::Device { operation, source }) => return Err(ProgramError::Replay { operation, source }),
        }
        Ok(Replayed {
            oom: follow.oom,
            survived_ooms: follow.survived_ooms,
            stats: allocator.stats(),
            calls: device.calls().since(&calls),
            driver_time: device.now().saturating_sub(start),
            peak_unused: follow.peak_unused,
        })
    }
}

/// Reserves the memory of these segments on a device. Maps expandable segments in the smallest pages, which can be unmapped in
/// any order.
pub(super) fn hold(device: &mut SimDevice, segments: &[SegmentInfo], reservations: &[MemoryRange]) -> Result<(), DeviceError> {
    device.place_allocations(segments.iter().filter(|segment| !segment.expandable).map(|segment| segment.address));
    device.place_reservations(reservations.iter().map(|range| range.start));
    for range in reservations {
        device.reserve(range.len)?;
    }
    for segment in segments {
        if segment.expandable {
            device.map(MemoryRange::new(segment.address, segment.size), GRANULARITY)?;
        } else {
            device.malloc(segment.size)?;
        }
    }
    Ok(())
}

/// Observes a run: the failed request, and unused memory at driver calls.
struct Follow<'a, F> {
    program: &'a RecordedProgram,
    each: F,
    /// The number of driver calls up to the last operation.
    calls: u64,
    oom: Option<Refused>,
    survived_ooms: u64,
    peak_unused: Bytes,
}

/// Ends a run.
struct Stop;

impl<A: Allocator, F: FnMut(usize, Outcome, &mut A) -> ControlFlow<()>> Observer<ByHandle<'_, A>> for Follow<'_, F> {
    type Error = Stop;

    #[inline]
    fn after(&mut self, index: usize, kind: Kind, outcome: Outcome, target: &mut ByHandle<'_, A>) -> Result<(), Stop> {
        if kind == Kind::Allocate {
            let calls = target.device.calls().memory_calls();
            if calls != self.calls {
                self.calls = calls;
                self.look_at_unused(target.allocator);
            }
        }
        let flow = (self.each)(index, outcome, target.allocator);
        let goes_on = outcome != Outcome::OutOfMemory || self.goes_on_after(index);
        if flow.is_break() || !goes_on { Err(Stop) } else { Ok(()) }
    }
}

impl<F> Follow<'_, F> {
    /// Updates the peak of unused memory after a driver call.
    #[cold]
    fn look_at_unused(&mut self, allocator: &impl Allocator) {
        let stats = allocator.stats();
        let unused = stats.reserved_bytes.all.current.saturating_sub(stats.allocated_bytes.all.current);
        self.peak_unused = self.peak_unused.max(Bytes(unused));
    }

    /// Records a failed request. Returns whether the recording shows how the program continued.
    #[cold]
    fn goes_on_after(&mut self, index: usize) -> bool {
        let TraceEvent::Allocate { id, .. } = self.program.operations[index] else { return true };
        let allocation = self.program.allocations[id as usize];
        let ends = matches!(self.program.ended, Ended::Oom { operation, .. } if operation == index);
        if allocation.refused && !ends {
            self.survived_ooms += 1;
        } else {
            self.oom = Some(Refused { operation: index, event: self.program.origin[index], requested: allocation.requested });
        }
        allocation.refused
    }
}
