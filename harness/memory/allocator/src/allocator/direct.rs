//! The allocator without a cache: one driver allocation and one driver free per request. It is the
//! baseline of every timing.

use super::live::{LiveAllocation, LiveAllocations};
use super::{Allocation, Allocator, AllocatorError, OomCause, Request, answered_by};
use crate::device::{Device, DeviceError, MemoryRange};
use crate::{stats::PoolKind, units::Bytes};

#[derive(Debug, Default)]
pub struct DirectAllocator {
    live: LiveAllocations,
}

impl DirectAllocator {
    fn forget(&mut self, slot: u32) {
        let LiveAllocation { range, pool, .. } = self.live.remove(slot);
        self.live.stats.reserved_bytes.decrease(pool, range.len.0);
        self.live.stats.num_device_free += 1;
    }
}

impl Allocator for DirectAllocator {
    fn name(&self) -> &'static str {
        "direct"
    }

    fn allocate(
        &mut self,
        device: &mut dyn Device,
        request: Request,
    ) -> Result<Allocation, AllocatorError> {
        let size = request.size;
        if size == Bytes::ZERO {
            return Ok(Allocation::null(request));
        }
        if let Some(limit) = self.live.exceeded_limit(size) {
            return Err(self.live.out_of_memory(
                device,
                size,
                OomCause::Fraction { limit },
                Some(Bytes::ZERO),
            ));
        }
        match device.malloc(size) {
            Ok(start) => {
                let (range, pool) = (MemoryRange::new(start, size), PoolKind::of_block(size));
                let live = LiveAllocation {
                    range,
                    stream: request.stream,
                    pool,
                    other_streams: Vec::new(),
                };
                self.live.stats.reserved_bytes.increase(pool, size.0);
                self.live.stats.num_device_alloc += 1;
                Ok(Allocation::new(range, request, self.live.insert(live)))
            }
            Err(DeviceError::OutOfMemory { free, .. }) => Err(self.live.out_of_memory(
                device,
                size,
                OomCause::Device { free },
                Some(Bytes::ZERO),
            )),
            Err(error) => Err(error.into()),
        }
    }

    fn free(&mut self, device: &mut dyn Device, allocation: Allocation) -> Result<(), DeviceError> {
        if allocation.is_null() {
            return Ok(());
        }
        let slot = self.live.slot_of(&allocation)?;
        device.free(allocation.ptr())?;
        self.forget(slot);
        Ok(())
    }

    /// Does nothing: there is no cache.
    fn empty_cache(&mut self, _device: &mut dyn Device) -> Result<(), DeviceError> {
        Ok(())
    }

    answered_by!(live);

    fn close(&mut self, device: &mut dyn Device) -> Result<(), DeviceError> {
        while let Some((start, slot)) = self.live.first() {
            device.free(start)?;
            self.forget(slot);
        }
        Ok(())
    }
}
