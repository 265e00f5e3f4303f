//! Runs PyTorch's allocator next to the recording. Its reaction to each operation reveals actions
//! of the program that the recording lacks.

use std::collections::HashMap;

use harness_allocator::allocator::{
    Allocation, Allocator, AllocatorError, PrivatePoolId, PrivatePools as _, Request,
    caching::CachingAllocator,
};
use harness_allocator::device::sim::{GRANULARITY, SimConfig, SimDevice};
use harness_allocator::device::{
    Device, DeviceError, DevicePtr, StreamId, TestDevice as _, wrapper::DeviceWrapper as _,
};
use harness_allocator::{stats::SegmentInfo, units::Bytes};

use super::watch::{DriverCall, Logged};
use super::{ProgramError, RecordedProgram, replay::hold};
use crate::snapshot::Action;

pub(super) struct ShadowAllocator {
    pub(super) device: Logged<SimDevice>,
    allocator: CachingAllocator,
    live: HashMap<u64, Allocation>,
    pool: Option<PrivatePoolId>,
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Recorded {
    pub(super) driver: Vec<DriverCall>,
    pub(super) address: Option<DevicePtr>,
    /// The addresses that a failed request reserved, if any.
    pub(super) mapped_next: Option<DevicePtr>,
}

pub(super) struct Checkpoint {
    device: Logged<SimDevice>,
    allocator: CachingAllocator,
    pool: Option<PrivatePoolId>,
}

impl ShadowAllocator {
    /// Restores the allocator before the recording, on a device with the given memory and number of
    /// streams.
    pub(super) fn new(
        program: &RecordedProgram,
        start: &[SegmentInfo],
        memory: Bytes,
        streams: u32,
    ) -> Result<Self, ProgramError> {
        let mut device = SimDevice::new(SimConfig::replay(memory));
        let failed = |source| ProgramError::Replay {
            operation: 0,
            source,
        };
        for _ in 1..streams {
            device.create_stream().map_err(failed)?;
        }
        hold(&mut device, start, &program.reserved_at_start).map_err(failed)?;
        let (allocator, live) =
            CachingAllocator::restore(program.config.clone(), start, &program.reserved_at_start)?;
        let device = Logged::new(device, start);
        Ok(Self {
            device,
            allocator,
            live: (0..).zip(live).collect(),
            pool: None,
        })
    }

    pub(super) fn checkpoint(&self) -> Checkpoint {
        Checkpoint {
            device: self.device.clone(),
            allocator: self.allocator.clone(),
            pool: self.pool,
        }
    }

    pub(super) fn go_back(&mut self, to: Checkpoint) {
        Checkpoint {
            device: self.device,
            allocator: self.allocator,
            pool: self.pool,
        } = to;
    }

    /// Leaves the driver slightly less than `wanted` for the next request, or all memory.
    pub(super) fn refuse(&mut self, wanted: Option<Bytes>) {
        self.device.refused = None;
        let device = self.device.inner_mut();
        // The simulated device supports both calls.
        let _ = device.set_external_memory(Bytes::ZERO);
        if let Some(wanted) = wanted {
            let free = device.free_memory().unwrap_or_default();
            let _ =
                device.set_external_memory(free.saturating_sub(wanted.saturating_sub(GRANULARITY)));
        }
    }

    pub(super) fn allocate(
        &mut self,
        id: u64,
        request: Request,
        pool: Option<PrivatePoolId>,
        recorded: &Recorded,
    ) -> Result<bool, DeviceError> {
        self.enter(pool);
        self.place(recorded);
        let answer = self.allocator.allocate(&mut self.device, request);
        let address = match answer {
            Ok(allocation) => {
                let address = allocation.ptr();
                self.live.insert(id, allocation);
                Some(address)
            }
            Err(AllocatorError::Device(error)) => return Err(error),
            Err(_) => None,
        };
        Ok(address == recorded.address && self.device.take_log() == recorded.driver)
    }

    pub(super) fn free(&mut self, id: u64, waits_for: Option<StreamId>) -> Result<(), DeviceError> {
        self.enter(None);
        let Some(allocation) = self.live.remove(&id) else {
            return Ok(());
        };
        if let Some(stream) = waits_for {
            self.allocator.record_stream(&allocation, stream)?;
        }
        self.allocator.free(&mut self.device, allocation)
    }

    pub(super) fn synchronize(&mut self, stream: StreamId) -> Result<(), DeviceError> {
        Device::synchronize_stream(&mut self.device, stream)
    }

    /// Empties the cache. Returns whether the driver calls match the recording.
    pub(super) fn empty_cache(&mut self, recorded: &[DriverCall]) -> Result<bool, DeviceError> {
        self.enter(None);
        self.allocator.empty_cache(&mut self.device)?;
        Ok(self.device.take_log() == recorded)
    }

    /// Releases a private pool. Returns whether the driver calls match the recording.
    pub(super) fn release_pool(&mut self, pool: PrivatePoolId, recorded: &[DriverCall]) -> bool {
        self.enter(None);
        self.allocator.release(&mut self.device, pool).is_ok() && self.device.take_log() == recorded
    }

    fn enter(&mut self, pool: Option<PrivatePoolId>) {
        if self.pool == pool {
            return;
        }
        if let Some(open) = self.pool.take() {
            self.allocator.end(open).expect("the shadow opened it");
        }
        if let Some(pool) = pool {
            // A released pool cannot be opened, so its requests use the default pool.
            self.pool = self.allocator.begin(pool).is_ok().then_some(pool);
        }
    }

    /// Places the next driver allocations at the recorded addresses.
    fn place(&mut self, recorded: &Recorded) {
        let device = self.device.inner_mut();
        device.forget_placements();
        let starts = |action: Action| {
            recorded
                .driver
                .iter()
                .filter(move |call| call.action == action)
                .map(|call| call.range.start)
        };
        device.place_reservations(starts(Action::SegmentMap).next().or(recorded.mapped_next));
        device.place_allocations(starts(Action::SegmentAlloc));
    }
}
