//! [`Limited`]: gives any device a smaller memory, so an H200 and the simulated device run out of
//! memory at the same byte.

use std::collections::BTreeMap;

use super::{
    Device, DeviceCalls, DeviceError, DeviceInfo, DeviceMemory, DevicePtr, MappedDevice,
    MemoryRange, PoolId, PoolMemory, PooledDevice, StreamId, TestDevice, wrapper,
};
use crate::units::Bytes;

/// A device with a memory limit. Allocations are charged in whole granules, independent of the
/// inner device.
pub struct Limited<D> {
    inner: D,
    info: DeviceInfo,
    charges: BTreeMap<DevicePtr, Bytes>,
    charged: Bytes,
    external_memory: Bytes,
    /// The part of the limit that other processes use.
    elsewhere: Bytes,
    /// Live pools. Their reserved bytes are charged: the driver reports them when needed.
    pools: Vec<PoolId>,
    /// Pages refused by the limit. A driver of a device of this size would have been called for
    /// each.
    refused_pages: u64,
    /// Requests for memory of a pool refused by the limit.
    refused_pooled: u64,
}

impl<D: Device> Limited<D> {
    /// Limits a device without allocations. Fails with [`DeviceError::Unavailable`] if the limit is
    /// below one granule or above the free memory.
    pub fn new(mut device: D, limit: Bytes) -> Result<Self, DeviceError> {
        let (free, total) = (device.free_memory()?, device.info().total);
        let limited = Self::shared(device, limit)?;
        if limit > free {
            return Err(refused(
                limit,
                format!("only {free} of {total} are free; lower the limit or free device memory"),
            ));
        }
        Ok(limited)
    }

    /// Limits a device that other processes share within the same or a larger limit. The memory
    /// need not be free. Fails with [`DeviceError::Unavailable`] if the limit is below one granule.
    pub fn shared(device: D, limit: Bytes) -> Result<Self, DeviceError> {
        let granularity = device.info().granularity;
        if limit < granularity {
            return Err(refused(
                limit,
                format!(
                    "memory is allocated in units of {granularity}, so the limit must be at least \
                     that"
                ),
            ));
        }
        let info = DeviceInfo {
            total: limit,
            ..device.info().clone()
        };
        let (charges, charged, pools) = (BTreeMap::new(), Bytes::ZERO, Vec::new());
        let (external_memory, elsewhere) = (Bytes::ZERO, Bytes::ZERO);
        Ok(Self {
            inner: device,
            info,
            charges,
            charged,
            external_memory,
            elsewhere,
            pools,
            refused_pages: 0,
            refused_pooled: 0,
        })
    }

    /// Sets the part of the limit that other processes use.
    pub const fn set_held_elsewhere(&mut self, held: Bytes) {
        self.elsewhere = held;
    }

    /// Returns the bytes of the limit that this process uses, including simulated external memory.
    pub fn held(&mut self) -> Result<Bytes, DeviceError> {
        Ok(self.all_charged()? + self.external_memory)
    }

    /// Refuses an allocation. It asks the device for more than it has: the refusal is a real driver
    /// call, with its count and its time.
    fn refuse(&mut self, requested: Bytes) -> DeviceError {
        let impossible = self.inner.info().total + self.info.granularity;
        let refused = match self.inner.malloc(impossible) {
            Err(error) if error.is_out_of_memory() => Ok(()),
            Err(error) => Err(error),
            // The driver promised more than it has. Free it, and refuse anyway.
            Ok(ptr) => self.inner.free(ptr),
        };
        refused
            .and_then(|()| self.out_of_memory(requested))
            .unwrap_or_else(|error| error)
    }

    fn out_of_memory(&mut self, requested: Bytes) -> Result<DeviceError, DeviceError> {
        Ok(DeviceError::OutOfMemory {
            requested,
            free: self.free_memory()?,
        })
    }

    /// The unused part of the limit.
    fn left(&mut self) -> Result<Bytes, DeviceError> {
        Ok(self
            .info
            .total
            .saturating_sub(self.held()?)
            .saturating_sub(self.elsewhere))
    }

    fn all_charged(&mut self) -> Result<Bytes, DeviceError> {
        let mut charged = self.charged;
        for index in 0..self.pools.len() {
            let pool = self.pools[index];
            charged += self.inner.required_pooled()?.pool_reserved(pool)?;
        }
        Ok(charged)
    }
}

fn refused(limit: Bytes, why: String) -> DeviceError {
    DeviceError::Unavailable {
        what: format!("a limit of {limit}"),
        why,
    }
}

impl<D: Device> wrapper::DeviceWrapper for Limited<D> {
    type Inner = D;

    fn inner(&self) -> &D {
        &self.inner
    }

    fn inner_mut(&mut self) -> &mut D {
        &mut self.inner
    }

    fn info(&self) -> &DeviceInfo {
        &self.info
    }

    fn free_memory(&mut self) -> Result<Bytes, DeviceError> {
        Ok(self.left()?.min(self.inner.free_memory()?))
    }

    fn malloc(&mut self, size: Bytes) -> Result<DevicePtr, DeviceError> {
        let left = self.left()?;
        let Some(charge) = size
            .checked_round_up(self.info.granularity)
            .filter(|charge| *charge <= left)
        else {
            return Err(self.refuse(size));
        };
        let ptr = self.inner.malloc(size)?;
        self.charges.insert(ptr, charge);
        self.charged += charge;
        Ok(ptr)
    }

    fn free(&mut self, ptr: DevicePtr) -> Result<(), DeviceError> {
        self.inner.free(ptr)?;
        if let Some(charge) = self.charges.remove(&ptr) {
            self.charged -= charge;
        }
        Ok(())
    }

    fn mapped(&mut self) -> Option<&mut dyn MappedDevice> {
        self.inner.mapped().is_some().then_some(self as _)
    }

    fn pooled(&mut self) -> Option<&mut dyn PooledDevice> {
        self.inner.pooled().is_some().then_some(self as _)
    }
}

impl<D: TestDevice> wrapper::TestDeviceWrapper for Limited<D> {
    fn memory(&mut self) -> Result<DeviceMemory, DeviceError> {
        let inner = self.inner.memory()?;
        Ok(DeviceMemory {
            total: self.info.total,
            free: self.left()?.min(inner.free),
            external_memory: self.external_memory,
            ..inner
        })
    }

    fn calls(&self) -> DeviceCalls {
        let inner = self.inner.calls();
        // `Self::refuse` made these calls as plain allocations.
        let pooled = self.refused_pooled;
        DeviceCalls {
            create: inner.create + self.refused_pages,
            malloc: inner.malloc - pooled,
            malloc_failures: inner.malloc_failures.saturating_sub(pooled),
            malloc_async: inner.malloc_async + pooled,
            ..inner
        }
    }

    fn set_external_memory(&mut self, held: Bytes) -> Result<Bytes, DeviceError> {
        let most = self
            .info
            .total
            .saturating_sub(self.all_charged()?)
            .saturating_sub(self.elsewhere);
        self.external_memory = self.inner.set_external_memory(held.min(most))?;
        Ok(self.external_memory)
    }
}

impl<D: Device> Limited<D> {
    /// Returns true if the limit and the pool's unused memory together have room. Asks the pool
    /// only if the limit alone has too little.
    fn may_fit(&mut self, pool: PoolId, size: Bytes) -> Result<bool, DeviceError> {
        let left = self.left()?;
        if left >= size {
            return Ok(true);
        }
        let memory = self.inner.required_pooled()?.pool_memory(pool)?;
        Ok(left
            .0
            .saturating_add(memory.reserved.saturating_sub(memory.used).0)
            >= size.0)
    }

    /// Allocates from the pool if the pool then stays within the limit. Otherwise frees the
    /// allocation and trims the pool. The pool releases memory only after a wait for the stream.
    fn try_pool(
        &mut self,
        pool: PoolId,
        size: Bytes,
        stream: StreamId,
    ) -> Result<Option<DevicePtr>, DeviceError> {
        let before = self.inner.required_pooled()?.pool_reserved(pool)?;
        let ptr = match self
            .inner
            .required_pooled()?
            .malloc_async(pool, size, stream)
        {
            Ok(ptr) => ptr,
            Err(error) if error.is_out_of_memory() => return Ok(None),
            Err(error) => return Err(error),
        };
        if self.held()?.0.saturating_add(self.elsewhere.0) <= self.info.total.0 {
            return Ok(Some(ptr));
        }
        self.inner.required_pooled()?.free_async(ptr, stream)?;
        self.inner.synchronize_stream(stream)?;
        self.inner.required_pooled()?.trim_pool(pool, before)?;
        Ok(None)
    }
}

/// A pool is charged its reserved bytes. At the limit it releases its unused memory and tries
/// again, as a driver does when memory runs out.
impl<D: Device> PooledDevice for Limited<D> {
    fn create_pool(&mut self, release_threshold: Bytes) -> Result<PoolId, DeviceError> {
        let pool = self
            .inner
            .required_pooled()?
            .create_pool(release_threshold)?;
        self.pools.push(pool);
        Ok(pool)
    }

    fn destroy_pool(&mut self, pool: PoolId) -> Result<(), DeviceError> {
        self.inner.required_pooled()?.destroy_pool(pool)?;
        self.pools.retain(|known| *known != pool);
        Ok(())
    }

    fn malloc_async(
        &mut self,
        pool: PoolId,
        size: Bytes,
        stream: StreamId,
    ) -> Result<DevicePtr, DeviceError> {
        if self.may_fit(pool, size)? {
            if let Some(ptr) = self.try_pool(pool, size, stream)? {
                return Ok(ptr);
            }
            self.inner.required_pooled()?.trim_pool(pool, Bytes::ZERO)?;
            if let Some(ptr) = self.try_pool(pool, size, stream)? {
                return Ok(ptr);
            }
            Err(self.out_of_memory(size)?)
        } else {
            // The pool is not called: on an H200 it reserves all free memory before it refuses, and
            // keeps it.
            let error = self.refuse(size);
            self.refused_pooled += u64::from(error.is_out_of_memory());
            Err(error)
        }
    }

    fn free_async(&mut self, ptr: DevicePtr, stream: StreamId) -> Result<(), DeviceError> {
        self.inner.required_pooled()?.free_async(ptr, stream)
    }

    fn trim_pool(&mut self, pool: PoolId, keep: Bytes) -> Result<(), DeviceError> {
        self.inner.required_pooled()?.trim_pool(pool, keep)
    }

    fn pool_reserved(&mut self, pool: PoolId) -> Result<Bytes, DeviceError> {
        self.inner.required_pooled()?.pool_reserved(pool)
    }

    fn pool_memory(&mut self, pool: PoolId) -> Result<PoolMemory, DeviceError> {
        self.inner.required_pooled()?.pool_memory(pool)
    }
}

impl<D: Device> MappedDevice for Limited<D> {
    fn reserve(&mut self, size: Bytes) -> Result<DevicePtr, DeviceError> {
        self.inner.required_mapped()?.reserve(size)
    }

    fn unreserve(&mut self, start: DevicePtr) -> Result<(), DeviceError> {
        self.inner.required_mapped()?.unreserve(start)
    }

    fn map(&mut self, range: MemoryRange, page: Bytes) -> Result<(), DeviceError> {
        let left = self.left()?;
        if range.len > left {
            // A device of this size makes pages until one is refused and releases them again. Do
            // the same, because it takes time.
            let fitting = MemoryRange::new(
                range.start,
                Bytes(left.0 - left.0.checked_rem(page.0).unwrap_or(left.0)),
            );
            if fitting.len > Bytes::ZERO {
                self.inner.required_mapped()?.map(fitting, page)?;
                self.inner.required_mapped()?.unmap(fitting)?;
            }
            self.refused_pages += 1;
            let free = left.min(self.inner.free_memory()?);
            return Err(DeviceError::OutOfMemory {
                requested: range.len,
                free,
            });
        }
        self.inner.required_mapped()?.map(range, page)?;
        self.charged += range.len;
        Ok(())
    }

    fn unmap(&mut self, range: MemoryRange) -> Result<(), DeviceError> {
        self.inner.required_mapped()?.unmap(range)?;
        self.charged -= range.len;
        Ok(())
    }
}

#[cfg(test)]
mod tests;
