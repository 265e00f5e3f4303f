//! Figures of a run: the accounts, the device's memory, the allocator's counters and structure, and the points of the picture.
//!
//! The accounts and the picture of a run are those of the first program, beside the device's own word, which is of all programs together.

use harness_allocator::device::{DeviceCalls, DeviceInfo, DeviceMemory, DevicePtr, StreamId};
use harness_allocator::stats::{BlockState, MemoryStats, SegmentInfo};
use harness_allocator::units::{Bytes, Nanos};

use super::{ProgramId, Rig, Stop};
use crate::control::Call;
use harness_record::{Accounts, CurvePoint};

/// What a request meets: the allocator's blocks, and what is free on the device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MemoryState {
    /// Each block with its address, size, stream and state.
    blocks: Vec<(DevicePtr, Bytes, StreamId, BlockState)>,
    /// Free on the device.
    pub device_free: Bytes,
}

impl Rig {
    /// The time on the device's clock.
    pub fn now(&mut self) -> Nanos {
        self.device.now()
    }

    /// The counters of the entered program's allocator.
    #[must_use]
    pub fn stats(&self) -> MemoryStats {
        self.program().allocator.stats()
    }

    /// The structure of the entered program's allocator. Linear in blocks.
    #[must_use]
    pub fn snapshot(&self) -> Vec<SegmentInfo> {
        self.program().allocator.snapshot()
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

    /// What a request of the entered program would meet now. Linear in blocks.
    ///
    /// # Errors
    /// [`Stop::Device`].
    pub fn memory_state(&mut self) -> Result<MemoryState, Stop> {
        let device_free = self.unstruck(|rig| rig.device.free_memory())?;
        let segments = self.snapshot();
        let blocks = segments.iter().flat_map(|segment| &segment.blocks);
        Ok(MemoryState { blocks: blocks.map(|block| (block.address, block.size, block.stream, block.state)).collect(), device_free })
    }

    /// What the device is.
    #[must_use]
    pub fn info(&self) -> &DeviceInfo {
        self.device.info()
    }

    /// What the entered program's allocator takes from the device for a large request comes in whole multiples of this.
    #[must_use]
    pub fn reserve_unit(&self) -> Bytes {
        self.program().allocator.reserve_unit(&*self.device)
    }

    /// Calls made to the device since the rig took it, by all programs.
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

    /// The accounts of the first program now.
    ///
    /// # Errors
    /// [`Stop::Device`].
    pub fn accounts(&mut self) -> Result<Accounts, Stop> {
        self.accounts_of(ProgramId::FIRST)
    }

    /// The accounts of a program now. The device's memory is that of all programs.
    ///
    /// # Errors
    /// [`Stop::Device`].
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

    /// The points of the picture: none of a timed run.
    #[must_use]
    pub fn take_curve(&mut self) -> Vec<CurvePoint> {
        std::mem::take(&mut self.curve).into_points()
    }

    /// Asks the device for its memory, for the picture.
    pub(super) fn refresh_memory(&mut self) -> Result<(), Stop> {
        self.last_memory = self.memory()?;
        self.last_calls = self.device.calls();
        Ok(())
    }

    /// The same with what the scenario's streams take in the context overhead.
    fn with_streams(&self, memory: DeviceMemory) -> DeviceMemory {
        DeviceMemory { context_overhead: self.start.context_overhead, ..memory }
    }

    /// Adds a point to the picture.
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
