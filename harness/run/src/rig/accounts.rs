//! The figures of a run: accounts, device memory, the allocator's counters and structure, and the memory curve.
//!
//! The accounts and the curve describe the first program. The device's own figures cover all programs.

use harness_allocator::device::{DeviceCalls, DeviceInfo, DeviceMemory, DevicePtr, StreamId};
use harness_allocator::stats::{BlockState, MemoryStats, SegmentInfo};
use harness_allocator::units::{Bytes, Nanos};

use super::{ProgramId, Rig, Stop};
use crate::control::Call;
use harness_record::{Accounts, CurvePoint};

/// The memory state that a request meets.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MemoryState {
    blocks: Vec<(DevicePtr, Bytes, StreamId, BlockState)>,
    pub device_free: Bytes,
}

impl Rig {
    pub fn now(&mut self) -> Nanos {
        self.device.now()
    }

    pub fn stats(&self) -> MemoryStats {
        self.program().allocator.stats()
    }

    /// The structure of the current program's allocator. Linear in blocks.
    pub fn snapshot(&self) -> Vec<SegmentInfo> {
        self.program().allocator.snapshot()
    }

    /// The device's memory. Memory of the scenario's streams counts as context overhead.
    pub fn memory(&mut self) -> Result<DeviceMemory, Stop> {
        self.control.calls(Call::Memory);
        let memory = self.device.memory()?;
        Ok(DeviceMemory { context_overhead: self.start.context_overhead, ..memory })
    }

    pub fn free_memory(&mut self) -> Result<Bytes, Stop> {
        Ok(self.device.free_memory()?)
    }

    /// The memory state that a request of the current program would meet. Linear in blocks.
    pub fn memory_state(&mut self) -> Result<MemoryState, Stop> {
        let device_free = self.without_faults(|rig| rig.device.free_memory())?;
        let segments = self.snapshot();
        let blocks = segments.iter().flat_map(|segment| &segment.blocks);
        Ok(MemoryState { blocks: blocks.map(|block| (block.address, block.size, block.stream, block.state)).collect(), device_free })
    }

    pub fn info(&self) -> &DeviceInfo {
        self.device.info()
    }

    /// The current program's allocator reserves memory for large requests in multiples of this size.
    pub fn reserve_unit(&self) -> Bytes {
        self.program().allocator.reserve_unit(&*self.device)
    }

    /// All programs' device calls since the rig took the device.
    pub fn calls(&self) -> DeviceCalls {
        self.device.calls().since(&self.calls_at_start)
    }

    pub fn accounts(&mut self) -> Result<Accounts, Stop> {
        self.accounts_of(ProgramId::FIRST)
    }

    pub fn accounts_of(&mut self, program: ProgramId) -> Result<Accounts, Stop> {
        let stats = self.stats_of(program);
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

    /// The points of the memory curve; empty for a timed run.
    pub fn take_curve(&mut self) -> Vec<CurvePoint> {
        std::mem::take(&mut self.curve).into_points()
    }

    pub(super) fn refresh_memory(&mut self) -> Result<(), Stop> {
        self.last_memory = self.memory()?;
        self.last_calls = self.device.calls();
        Ok(())
    }

    pub(super) fn plot(&mut self) {
        let stats = self.stats_of(ProgramId::FIRST);
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
