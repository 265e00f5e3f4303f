//! The driver's stream-ordered allocator (`cuMemAllocAsync`), as PyTorch's
//! `backend:cudaMallocAsync` uses it. Every request and every free calls a pool of the driver,
//! which keeps its reserved memory until a trim.
//!
//! The driver does not report how it rounds sizes or cuts its pool. So requested, allocated and
//! active bytes are our own count of the requests. Reserved bytes are the pool's own figure
//! (`CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT`), read after every call that may change it. Inactive
//! splits and device calls are unknown, and the snapshot shows one segment per live allocation. The
//! driver has one pool for all sizes, so all memory counts in the large pool. The audit asks the
//! driver for the rest ([`Allocator::driver_pool`]).
//!
//! Differences from PyTorch's backend (`c10/cuda/CUDAMallocAsyncAllocator.cpp`): if an allocation
//! fails and the pool has unused memory, it is tried again after a wait for the device and a trim.
//! Opportunistic reuse is off (see [`PooledDevice`]). As in PyTorch, the memory fraction limits the
//! allocated bytes, because the reserved bytes cannot be predicted. Memory that several streams
//! used is freed on an extra stream that waits for all of them, so none of them waits.

use super::live::{LiveAllocation, LiveAllocations};
use super::{
    Allocation, Allocator, AllocatorError, OomCause, Request, answered_by, pending::if_exists,
};
use crate::device::{
    Device, DeviceError, DevicePtr, EventId, MemoryRange, PoolId, PooledDevice, StreamId,
};
use crate::{stats::PoolKind, units::Bytes};

/// The assumed growth unit of a pool, as in the simulated device: the documentation gives no
/// figure.
const POOL_GROWTH: Bytes = Bytes::mib(32);

/// The pool never releases memory by itself, as in PyTorch's backend.
const KEEP_ALL: Bytes = Bytes(u64::MAX);

const POOL: PoolKind = PoolKind::Large;

#[derive(Debug, Default)]
pub struct AsyncPoolAllocator {
    /// Made with the first allocation.
    pool: Option<PoolId>,
    /// The stream for frees that wait for several streams, made with the first of them.
    free_stream: Option<StreamId>,
    /// Slots of freed allocations whose free the device failed to finish.
    unfinished: Vec<u32>,
    undestroyed: Vec<EventId>,
    live: LiveAllocations,
}

fn pooled(device: &mut dyn Device) -> Result<&mut dyn PooledDevice, DeviceError> {
    let why = || DeviceError::Unavailable {
        what: "the allocator `async_pool`".to_owned(),
        why: "this device has no stream-ordered memory pools; choose another allocator".to_owned(),
    };
    device.pooled().ok_or_else(why)
}

impl AsyncPoolAllocator {
    fn pool(&mut self, device: &mut dyn Device) -> Result<PoolId, DeviceError> {
        let pool = self
            .pool
            .map_or_else(|| pooled(device)?.create_pool(KEEP_ALL), Ok)?;
        self.pool = Some(pool);
        Ok(pool)
    }

    /// Reads the pool's reserved bytes.
    fn observe(&mut self, device: &mut dyn Device, pool: PoolId) -> Result<(), DeviceError> {
        let reserved = pooled(device)?.pool_reserved(pool)?.0;
        self.live.stats.reserved_bytes.set(POOL, reserved);
        Ok(())
    }

    /// Allocates from the pool. If it fails and the pool has unused memory, waits for all frees,
    /// trims, and tries again.
    fn ask(
        &mut self,
        device: &mut dyn Device,
        pool: PoolId,
        request: Request,
    ) -> Result<DevicePtr, DeviceError> {
        let first = pooled(device)?.malloc_async(pool, request.size, request.stream);
        let unused = self.live.stats.reserved_bytes.all.current
            > self.live.stats.allocated_bytes.all.current;
        if !unused || !first.as_ref().is_err_and(DeviceError::is_out_of_memory) {
            return first;
        }
        self.live.stats.num_alloc_retries += 1;
        self.give_unused_back(device, pool)?;
        pooled(device)?.malloc_async(pool, request.size, request.stream)
    }

    fn give_unused_back(
        &mut self,
        device: &mut dyn Device,
        pool: PoolId,
    ) -> Result<(), DeviceError> {
        device.synchronize()?;
        self.live.stats.num_sync_all_streams += 1;
        pooled(device)?.trim_pool(pool, Bytes::ZERO)?;
        self.observe(device, pool)
    }

    /// Frees an allocation to the pool after the work of all streams that use it. If the device
    /// fails, the free waits for [`Self::retry_frees`].
    fn finish_free(&mut self, device: &mut dyn Device, slot: u32) -> Result<(), DeviceError> {
        let freed = self.free_in_order(device, slot);
        match freed {
            Ok(()) => drop(self.live.remove(slot)),
            Err(_) => self.unfinished.push(slot),
        }
        freed
    }

    fn free_in_order(&mut self, device: &mut dyn Device, slot: u32) -> Result<(), DeviceError> {
        let LiveAllocation {
            range,
            stream,
            ref other_streams,
            ..
        } = self.live[slot];
        let stream = if other_streams.is_empty() {
            stream
        } else {
            self.wait_for_users(device, slot)?
        };
        match if_exists(pooled(device)?.free_async(range.start, stream))? {
            Some(()) => Ok(()),
            // The allocation's own stream is destroyed, so its work is complete and any stream will
            // do.
            None => pooled(device)?.free_async(range.start, StreamId::DEFAULT),
        }
    }

    /// Finishes the frees in which the device failed before.
    fn retry_frees(&mut self, device: &mut dyn Device) -> Result<(), DeviceError> {
        while let Some(slot) = self.unfinished.pop() {
            self.finish_free(device, slot)?;
        }
        Ok(())
    }

    /// Makes the extra stream wait for all work so far of every stream that uses the allocation,
    /// and returns it.
    fn wait_for_users(
        &mut self,
        device: &mut dyn Device,
        slot: u32,
    ) -> Result<StreamId, DeviceError> {
        let free_stream = self
            .free_stream
            .map_or_else(|| device.create_stream(), Ok)?;
        self.free_stream = Some(free_stream);
        let event = device.create_event()?;
        let LiveAllocation {
            stream,
            ref other_streams,
            ..
        } = self.live[slot];
        let waits = std::iter::once(stream)
            .chain(other_streams.iter().copied())
            .try_for_each(|user| match if_exists(device.record_event(event, user))? {
                Some(()) => device.wait_event(free_stream, event),
                None => Ok(()),
            });
        let destroyed = device.destroy_event(event);
        if destroyed.is_err() {
            self.undestroyed.push(event);
        }
        waits.and(destroyed).map(|()| free_stream)
    }

    fn keep(&mut self, range: MemoryRange, request: Request) -> Allocation {
        let handle = self.live.insert(LiveAllocation {
            range,
            stream: request.stream,
            pool: POOL,
            other_streams: Vec::new(),
        });
        // At least that much is reserved, even if the pool does not answer.
        let stats = &mut self.live.stats;
        stats.reserved_bytes.set(
            POOL,
            stats
                .reserved_bytes
                .all
                .current
                .max(stats.allocated_bytes.all.current),
        );
        Allocation::new(range, request, handle)
    }
}

impl Allocator for AsyncPoolAllocator {
    fn name(&self) -> &'static str {
        "async_pool"
    }

    fn largest_request(&self, _: &dyn Device, free: Bytes) -> Bytes {
        Bytes(free.0 - free.0 % POOL_GROWTH.0)
    }

    fn check_device(&self, device: &mut dyn Device) -> Result<(), DeviceError> {
        pooled(device).map(drop)
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
            return Err(self
                .live
                .out_of_memory(device, size, OomCause::Fraction { limit }, None));
        }
        self.retry_frees(device)?;
        let pool = self.pool(device)?;
        let answer = self.ask(device, pool, request);
        // Recorded before anything else can fail: `close` frees the live allocations.
        let answer = answer.map(|start| self.keep(MemoryRange::new(start, size), request));
        let observed = self.observe(device, pool);
        match (answer, observed) {
            (Ok(allocation), Ok(())) => Ok(allocation),
            (Ok(allocation), Err(error)) => {
                // The caller never learns of this allocation. If it cannot be freed either, it
                // stays live and counted.
                let _ = self.free(device, allocation);
                Err(error.into())
            }
            (Err(DeviceError::OutOfMemory { free, .. }), Ok(())) => {
                Err(self
                    .live
                    .out_of_memory(device, size, OomCause::Device { free }, None))
            }
            (Err(DeviceError::OutOfMemory { .. }), Err(error)) | (Err(error), _) => {
                Err(error.into())
            }
        }
    }

    fn free(&mut self, device: &mut dyn Device, allocation: Allocation) -> Result<(), DeviceError> {
        if allocation.is_null() {
            return Ok(());
        }
        let slot = self.live.slot_of(&allocation)?;
        self.finish_free(device, slot)
    }

    /// Waits for the device, because a pool releases only memory whose free the host has waited
    /// for.
    fn empty_cache(&mut self, device: &mut dyn Device) -> Result<(), DeviceError> {
        self.retry_frees(device)?;
        self.pool
            .map_or(Ok(()), |pool| self.give_unused_back(device, pool))
    }

    answered_by!(live);

    fn driver_pool(&self) -> Option<PoolId> {
        self.pool
    }

    fn close(&mut self, device: &mut dyn Device) -> Result<(), DeviceError> {
        let Some(pool) = self.pool else { return Ok(()) };
        // All work is complete afterwards, so any stream will do, even if the allocation's own one
        // is destroyed.
        device.synchronize()?;
        while let Some((start, slot)) = self.live.first() {
            pooled(device)?.free_async(start, StreamId::DEFAULT)?;
            self.live.remove(slot);
        }
        self.unfinished.clear();
        while let Some(&event) = self.undestroyed.last() {
            device.destroy_event(event)?;
            self.undestroyed.pop();
        }
        if let Some(stream) = self.free_stream {
            device.destroy_stream(stream)?;
            self.free_stream = None;
        }
        self.give_unused_back(device, pool)?;
        pooled(device)?.destroy_pool(pool)?;
        self.pool = None;
        Ok(())
    }
}
