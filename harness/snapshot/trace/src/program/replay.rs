//! Replays a program with any settings, allocator and memory. [`PreparedReplay`] is a program that
//! can run many times.

use std::{collections::HashMap, ops::ControlFlow};

use harness_allocator::allocator::{
    Allocation, Allocator, AllocatorError, AllocatorSpec, Request, caching::CachingAllocator,
};
use harness_allocator::device::sim::{AddressOrder, CostModel, GRANULARITY, SimConfig, SimDevice};
use harness_allocator::device::{
    Device as _, DeviceCalls, DeviceError, DevicePtr, MappedDevice as _, MemoryRange, StreamId,
};
use harness_allocator::stats::{BlockInfo, BlockState, MemoryStats, SegmentInfo};
use harness_allocator::units::{Bytes, Nanos};

use super::watch::{Logged, ReplayStep, Watched};
use super::{ProgramError, RecordedEnd, RecordedProgram};
use crate::execute::{ByHandle, Executor, Kind, OperationOutcome, PassStopped, Target};
use crate::snapshot::{Segment, StackId};
use crate::trace::TraceEvent;

/// Addresses of native Linux are above this in all recordings known, those of WSL below.
const LOWEST_ON_LINUX: u64 = 0x7000_0000_0000;

/// A program that can run many times, also on several threads. Each run takes memory for the live
/// blocks, not for the operations.
#[derive(Debug)]
pub struct PreparedReplay<'a> {
    program: &'a RecordedProgram,
    executor: Executor<Allocation>,
    start: Vec<SegmentInfo>,
}

#[derive(Clone, Debug, PartialEq)]
pub struct ReplaySetup {
    pub allocator: AllocatorSpec,
    pub memory: Bytes,
    pub placement: Placement,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Placement {
    Recorded,
    InOrder(AddressOrder),
}

#[derive(Clone, Debug, PartialEq)]
pub struct Replayed {
    /// The request that stopped the replay: it succeeded in the recording, or it is the recording's
    /// final OOM.
    pub oom: Option<RefusedReplay>,
    /// Requests that failed both here and in the recording, which continued.
    pub survived_ooms: u64,
    /// Statistics at the end. Peaks and totals include the state at the start.
    pub stats: MemoryStats,
    /// Device calls, without those for the state at the start.
    pub calls: DeviceCalls,
    pub driver_time: Nanos,
    /// The most memory that was reserved but not allocated directly after a driver call: free
    /// memory that did not fit.
    pub peak_unused: Bytes,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RefusedReplay {
    /// Counted from 0.
    pub operation: usize,
    pub event: u32,
    pub requested: Bytes,
}

impl RecordedProgram {
    pub fn recorded_setup(&self) -> ReplaySetup {
        let allocator = AllocatorSpec::caching(self.config.clone());
        ReplaySetup {
            allocator,
            memory: self.device_memory(),
            placement: Placement::Recorded,
        }
    }

    /// The order of addresses of the recorded driver: Linux has high addresses, WSL has low ones.
    pub fn address_order(&self) -> AddressOrder {
        let first = self
            .start
            .first()
            .map(|segment| segment.address)
            .or_else(|| self.driver.first().map(|range| range.address));
        if first.is_some_and(|address| address < LOWEST_ON_LINUX) {
            AddressOrder::Reuse
        } else {
            AddressOrder::Linux
        }
    }

    /// Prepares the program. Fails if it has more streams than a replay supports.
    pub fn prepare(&self) -> Result<PreparedReplay<'_>, ProgramError> {
        let made_up = self.operations.iter().map(|operation| match *operation {
            TraceEvent::RecordStream { stream, .. } => stream.0 + 1,
            _ => 0,
        });
        let streams = made_up
            .max()
            .unwrap_or_default()
            .max(self.streams.len() as u32);
        let streams: Vec<StreamId> = (0..streams).map(StreamId).collect();
        // All simulated devices number streams the same way.
        let mut device = SimDevice::new(SimConfig::replay(Bytes::gib(1)));
        let executor = Executor::with_live(
            0..self.live_at_start(),
            &streams,
            &self.operations,
            &mut device,
        )?;
        Ok(PreparedReplay {
            program: self,
            executor,
            start: self.start_for_allocator(),
        })
    }

    pub fn start_for_allocator(&self) -> Vec<SegmentInfo> {
        self.start
            .iter()
            .map(|segment| self.for_allocator(segment))
            .collect()
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
            private_pool: self
                .pools
                .iter()
                .position(|&pool| pool == segment.private_pool)
                .map(|pool| pool as u32),
            expandable: segment.expandable,
            blocks: blocks.collect(),
        }
    }

    /// Converts an allocator's segment for a snapshot. `stacks` maps block addresses to stacks. A
    /// segment with several streams gets the stream of its first block.
    pub fn for_snapshot(&self, segment: &SegmentInfo, stacks: &HashMap<u64, StackId>) -> Segment {
        let stream = segment
            .stream
            .or_else(|| segment.blocks.first().map(|block| block.stream))
            .unwrap_or_default();
        let stream = self
            .streams
            .get(stream.0 as usize)
            .copied()
            .unwrap_or_default();
        let private_pool = segment
            .private_pool
            .and_then(|pool| self.pools.get(pool as usize))
            .copied()
            .unwrap_or_default();
        let stack = |address| stacks.get(&address).copied().unwrap_or_default();
        Segment {
            device: self.device,
            ..Segment::of(segment, stream, private_pool, stack)
        }
    }

    pub fn stream_number(&self, handle: u64) -> StreamId {
        StreamId(self.streams.binary_search(&handle).unwrap_or(0) as u32)
    }
}

impl PreparedReplay<'_> {
    pub const fn program(&self) -> &RecordedProgram {
        self.program
    }

    /// Replays the program up to its end, or up to the first request that fails but succeeded in
    /// the recording.
    ///
    /// PyTorch's allocator starts in the recorded state, with any settings. Other allocators first
    /// allocate the blocks that were live, in address order.
    pub fn replay(&self, setup: &ReplaySetup) -> Result<Replayed, ProgramError> {
        let mut device = self.device(setup)?;
        let (mut allocator, live) = self.allocator(setup, &mut device)?;
        let mut target = ByHandle {
            device: &mut device,
            allocator: &mut *allocator,
        };
        let replayed = self.run(&mut target, live, |_, _, _| ControlFlow::Continue(()))?;
        match allocator.construction_failure() {
            Some(why) => Err(ProgramError::NotConstructed { why }),
            None => Ok(replayed),
        }
    }

    /// Replays like [`PreparedReplay::replay`] and shows each operation to `watch`, which can stop
    /// the replay.
    pub fn watch(
        &self,
        setup: &ReplaySetup,
        mut watch: impl FnMut(&ReplayStep<'_>) -> ControlFlow<()>,
    ) -> Result<Replayed, ProgramError> {
        let mut device = self.device(setup)?;
        let (allocator, live) = self.allocator(setup, &mut device)?;
        let mut target = Watched {
            device: Logged::new(device, &self.start),
            allocator,
            address: None,
        };
        self.run(
            &mut target,
            live,
            |operation,
             outcome,
             Watched {
                 device,
                 allocator,
                 address,
             }| {
                watch(&ReplayStep {
                    operation,
                    outcome,
                    address: address.take(),
                    driver: &device.take_log(),
                    allocator: &**allocator,
                })
            },
        )
    }

    pub(super) fn device(&self, setup: &ReplaySetup) -> Result<SimDevice, ProgramError> {
        let held = self.program.reserved_at_start();
        if held > setup.memory {
            return Err(ProgramError::TooLittleMemory {
                memory: setup.memory,
                held,
            });
        }
        let addresses = match setup.placement {
            Placement::Recorded => self.program.address_order(),
            Placement::InOrder(order) => order,
        };
        Ok(SimDevice::new(SimConfig {
            cost: CostModel::PUBLISHED,
            addresses,
            ..SimConfig::replay(setup.memory)
        }))
    }

    /// The allocator with the blocks that are live at the start.
    fn allocator(
        &self,
        setup: &ReplaySetup,
        device: &mut SimDevice,
    ) -> Result<(Box<dyn Allocator>, Vec<Allocation>), ProgramError> {
        if let Some(config) = setup.allocator.effective() {
            let reservations = &self.program.reserved_at_start;
            hold(device, &self.start, reservations).map_err(|source| ProgramError::Replay {
                operation: 0,
                source,
            })?;
            if setup.placement == Placement::Recorded {
                device.place_allocations(
                    self.program
                        .driver
                        .iter()
                        .map(|range| DevicePtr(range.address)),
                );
                device.place_reservations(
                    self.program
                        .reservations
                        .iter()
                        .map(|&start| DevicePtr(start)),
                );
            }
            let (allocator, live) = CachingAllocator::restore(config, &self.start, reservations)?;
            return Ok((Box::new(allocator), live));
        }
        let mut allocator = setup.allocator.build();
        let live = self
            .start
            .iter()
            .flat_map(|segment| &segment.blocks)
            .filter(|block| block.state == BlockState::Allocated);
        let live = live.map(|block| {
            match allocator.allocate(
                device,
                Request {
                    size: block.requested,
                    stream: block.stream,
                },
            ) {
                Ok(allocation) => Ok(allocation),
                Err(AllocatorError::Device(source)) => Err(ProgramError::Replay {
                    operation: 0,
                    source,
                }),
                Err(_) => Err(ProgramError::DoNotFit {
                    memory: setup.memory,
                }),
            }
        });
        let live = live.collect::<Result<_, _>>()?;
        Ok((allocator, live))
    }

    pub(super) fn run<T: Target<Live = Allocation>>(
        &self,
        target: &mut T,
        live: Vec<Allocation>,
        mut each: impl FnMut(usize, OperationOutcome, &mut T) -> ControlFlow<()>,
    ) -> Result<Replayed, ProgramError> {
        let (calls, start) = target.with_device(|device| (device.calls(), device.now()));
        let mut executor = target.with_device(|device| self.executor.for_device(device))?;
        executor.start_with(live);
        let (mut oom, mut survived_ooms, mut peak_unused) = (None, 0, Bytes::ZERO);
        let mut calls_before = calls.memory_calls();
        let mut follow = |index: usize, kind: Kind, outcome: OperationOutcome, target: &mut T| {
            if kind == Kind::Allocate {
                let calls = target.with_device(|device| device.calls().memory_calls());
                if calls != calls_before {
                    calls_before = calls;
                    let stats = target.stats();
                    let unused = stats
                        .reserved_bytes
                        .all
                        .current
                        .saturating_sub(stats.allocated_bytes.all.current);
                    peak_unused = peak_unused.max(Bytes(unused));
                }
            }
            let flow = each(index, outcome, target);
            let mut goes_on = flow.is_continue();
            if outcome == OperationOutcome::OutOfMemory
                && let TraceEvent::Allocate { id, .. } = self.program.operations[index]
            {
                let allocation = self.program.allocations[id as usize];
                let ends = matches!(self.program.ended, RecordedEnd::Oom { operation, .. }
                    if operation == index);
                if allocation.refused && !ends {
                    survived_ooms += 1;
                } else {
                    oom = Some(RefusedReplay {
                        operation: index,
                        event: self.program.origin[index],
                        requested: allocation.requested,
                    });
                }
                // The recording shows how the program continued after a failed request.
                goes_on &= allocation.refused;
            }
            if goes_on { Ok(()) } else { Err(Stop) }
        };
        match executor.run(target, &mut follow) {
            Ok(_) | Err(PassStopped::Observer(Stop)) => {}
            Err(PassStopped::Device { operation, source }) => {
                return Err(ProgramError::Replay { operation, source });
            }
        }
        let stats = target.stats();
        let (calls, driver_time) = target.with_device(|device| {
            (
                device.calls().since(&calls),
                device.now().saturating_sub(start),
            )
        });
        Ok(Replayed {
            oom,
            survived_ooms,
            stats,
            calls,
            driver_time,
            peak_unused,
        })
    }
}

/// Reserves the memory of these segments on a device. Maps the smallest pages, which can be
/// unmapped in any order.
pub(super) fn hold(
    device: &mut SimDevice,
    segments: &[SegmentInfo],
    reservations: &[MemoryRange],
) -> Result<(), DeviceError> {
    device.place_allocations(
        segments
            .iter()
            .filter(|segment| !segment.expandable)
            .map(|segment| segment.address),
    );
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

struct Stop;
