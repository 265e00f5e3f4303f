//! What a trace is replayed on: the caching allocator by either of its fronts, with what is live by the trace's ids.

use std::collections::BTreeMap;
use std::ops::DerefMut;

use harness_allocator::allocator::caching::{CachingAllocator, Config};
use harness_allocator::allocator::shared::{Cores, SharedAllocator};
use harness_allocator::allocator::{
    Allocation, Allocator, AllocatorError, MemoryFraction, PrivatePoolError, PrivatePoolId, PrivatePools, Request,
};
use harness_allocator::device::sim::SimDevice;
use harness_allocator::device::{DeviceError, DevicePtr, StreamId};
use harness_allocator::stats::{MemoryStats, SegmentInfo};

/// See the module. An id that is not live is passed over: who asks has looked.
pub(super) trait Subject {
    fn is_live(&self, id: u64) -> bool;
    fn allocate(&mut self, id: u64, request: Request) -> Result<(), AllocatorError>;
    fn free(&mut self, id: u64) -> Result<(), DeviceError>;
    fn record_stream(&mut self, id: u64, stream: StreamId) -> Result<(), DeviceError>;
    fn empty_cache(&mut self) -> Result<(), DeviceError>;
    fn set_memory_fraction(&mut self, fraction: MemoryFraction);
    fn reset_peaks(&mut self);
    fn begin(&mut self, pool: PrivatePoolId) -> Result<(), PrivatePoolError>;
    fn end(&mut self, pool: PrivatePoolId) -> Result<(), PrivatePoolError>;
    fn release(&mut self, pool: PrivatePoolId) -> Result<(), PrivatePoolError>;
    fn stats(&self) -> MemoryStats;
    fn snapshot(&self) -> Vec<SegmentInfo>;
    /// The device, for nobody else as long as this lives.
    fn device(&mut self) -> Box<dyn DerefMut<Target = SimDevice> + '_>;
}

/// The handle front.
pub(super) struct ByHandle {
    device: SimDevice,
    allocator: CachingAllocator,
    live: BTreeMap<u64, Allocation>,
}

impl ByHandle {
    pub(super) fn new(device: SimDevice, config: Config) -> Self {
        Self { device, allocator: CachingAllocator::new(config), live: BTreeMap::new() }
    }
}

impl Subject for ByHandle {
    fn is_live(&self, id: u64) -> bool {
        self.live.contains_key(&id)
    }

    fn allocate(&mut self, id: u64, request: Request) -> Result<(), AllocatorError> {
        let allocation = self.allocator.allocate(&mut self.device, request)?;
        self.live.insert(id, allocation);
        Ok(())
    }

    fn free(&mut self, id: u64) -> Result<(), DeviceError> {
        self.live.remove(&id).map_or(Ok(()), |allocation| self.allocator.free(&mut self.device, allocation))
    }

    fn record_stream(&mut self, id: u64, stream: StreamId) -> Result<(), DeviceError> {
        self.live.get(&id).map_or(Ok(()), |allocation| self.allocator.record_stream(allocation, stream))
    }

    fn empty_cache(&mut self) -> Result<(), DeviceError> {
        self.allocator.empty_cache(&mut self.device)
    }

    fn set_memory_fraction(&mut self, fraction: MemoryFraction) {
        self.allocator.set_memory_fraction(&self.device, fraction);
    }

    fn reset_peaks(&mut self) {
        self.allocator.reset_peaks();
    }

    fn begin(&mut self, pool: PrivatePoolId) -> Result<(), PrivatePoolError> {
        self.allocator.begin(pool)
    }

    fn end(&mut self, pool: PrivatePoolId) -> Result<(), PrivatePoolError> {
        self.allocator.end(pool)
    }

    fn release(&mut self, pool: PrivatePoolId) -> Result<(), PrivatePoolError> {
        self.allocator.release(&mut self.device, pool)
    }

    fn stats(&self) -> MemoryStats {
        self.allocator.stats()
    }

    fn snapshot(&self) -> Vec<SegmentInfo> {
        self.allocator.snapshot()
    }

    fn device(&mut self) -> Box<dyn DerefMut<Target = SimDevice> + '_> {
        Box::new(&mut self.device)
    }
}

/// The shared front with one core for all streams. What is live is known by address, as a caller of it would know it.
pub(super) struct Shared {
    allocator: SharedAllocator<SimDevice>,
    live: BTreeMap<u64, DevicePtr>,
}

impl Shared {
    pub(super) fn new(device: SimDevice, config: Config) -> Self {
        Self { allocator: SharedAllocator::new(device, config, Cores::One), live: BTreeMap::new() }
    }
}

impl Subject for Shared {
    fn is_live(&self, id: u64) -> bool {
        self.live.contains_key(&id)
    }

    fn allocate(&mut self, id: u64, request: Request) -> Result<(), AllocatorError> {
        let allocation = self.allocator.allocate(request)?;
        self.live.insert(id, allocation.ptr());
        Ok(())
    }

    fn free(&mut self, id: u64) -> Result<(), DeviceError> {
        self.live.remove(&id).map_or(Ok(()), |ptr| self.allocator.free(ptr))
    }

    fn record_stream(&mut self, id: u64, stream: StreamId) -> Result<(), DeviceError> {
        self.live.get(&id).map_or(Ok(()), |&ptr| self.allocator.record_stream(ptr, stream))
    }

    fn empty_cache(&mut self) -> Result<(), DeviceError> {
        self.allocator.empty_cache()
    }

    fn set_memory_fraction(&mut self, fraction: MemoryFraction) {
        self.allocator.set_memory_fraction(fraction);
    }

    fn reset_peaks(&mut self) {
        self.allocator.reset_peaks();
    }

    fn begin(&mut self, pool: PrivatePoolId) -> Result<(), PrivatePoolError> {
        self.allocator.begin_pool(pool)
    }

    fn end(&mut self, pool: PrivatePoolId) -> Result<(), PrivatePoolError> {
        self.allocator.end_pool(pool)
    }

    fn release(&mut self, pool: PrivatePoolId) -> Result<(), PrivatePoolError> {
        self.allocator.release_pool(pool)
    }

    fn stats(&self) -> MemoryStats {
        self.allocator.stats()
    }

    fn snapshot(&self) -> Vec<SegmentInfo> {
        self.allocator.snapshot()
    }

    fn device(&mut self) -> Box<dyn DerefMut<Target = SimDevice> + '_> {
        Box::new(self.allocator.device())
    }
}
