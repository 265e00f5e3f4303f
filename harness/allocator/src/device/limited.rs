//! [`Limited`]: any device with a smaller memory, so that an H200 and the simulated device run out of memory at the same byte.

use std::collections::BTreeMap;

use super::{
    Device, DeviceCalls, DeviceError, DeviceInfo, DeviceMemory, DevicePtr, MappedDevice, MemoryRange, PoolId, PoolMemory, PooledDevice,
    StreamId, TestDevice, wrapper,
};
use crate::units::Bytes;

/// A device of which only a part may be allocated. Allocations are charged against the limit in whole granules, whatever the device
/// itself does; everything else is the device's own, and so are the instruments of a [`TestDevice`].
#[allow(missing_docs, reason = "the names say what they are")]
pub struct Limited<D> {
    inner: D,
    info: DeviceInfo,
    /// The charge of each living allocation.
    charges: BTreeMap<DevicePtr, Bytes>,
    charged: Bytes,
    pressure: Bytes,
    /// What other processes hold of the same limit.
    elsewhere: Bytes,
    /// Pools that live: what they have reserved is charged as the driver tells it, whenever the limit matters.
    pools: Vec<PoolId>,
    /// Pages that the limit refused to make, each a call to a driver of a device of this size.
    refused_pages: u64,
}

impl<D: Device> Limited<D> {
    /// Limits a device. Nothing may be allocated on it yet.
    ///
    /// # Errors
    /// [`DeviceError::Unavailable`] where the limit is below one granule, or above what the device has free; the memory's own errors.
    pub fn new(mut device: D, limit: Bytes) -> Result<Self, DeviceError> {
        let (free, total) = (device.free_memory()?, device.info().total);
        let limited = Self::shared(device, limit)?;
        if limit > free {
            return Err(refused(limit, format!("only {free} of {total} are free; lower the limit or free the device")));
        }
        Ok(limited)
    }

    /// Limits a device that other processes use within the same limit, or within a larger one: so much need not be free.
    ///
    /// # Errors
    /// [`DeviceError::Unavailable`] where the limit is below one granule.
    pub fn shared(device: D, limit: Bytes) -> Result<Self, DeviceError> {
        let granularity = device.info().granularity;
        if limit < granularity {
            return Err(refused(limit, format!("memory comes in pieces of {granularity}, so the limit must be at least that")));
        }
        let info = DeviceInfo { total: limit, ..device.info().clone() };
        let (charges, charged, pools) = (BTreeMap::new(), Bytes::ZERO, Vec::new());
        let (pressure, elsewhere) = (Bytes::ZERO, Bytes::ZERO);
        Ok(Self { inner: device, info, charges, charged, pressure, elsewhere, pools, refused_pages: 0 })
    }

    /// From now on other processes hold so much of the same limit.
    pub const fn set_held_elsewhere(&mut self, held: Bytes) {
        self.elsewhere = held;
    }

    /// What this process holds of the limit, pressure included.
    ///
    /// # Errors
    /// [`DeviceError::Driver`] where the driver does not tell what a pool has reserved.
    pub fn held(&mut self) -> Result<Bytes, DeviceError> {
        Ok(self.all_charged()? + self.pressure)
    }

    /// Refuses an allocation. The device is asked for more than it has, so that a refusal is a driver call that fails, in its counts and in
    /// its time, as it would be on a device of this size.
    fn refuse(&mut self, requested: Bytes) -> DeviceError {
        let impossible = self.inner.info().total + self.info.granularity;
        let refused = match self.inner.malloc(impossible) {
            Err(error) if error.is_out_of_memory() => Ok(()),
            Err(error) => Err(error),
            // A driver that promises more than it has: what it gave goes back, and the limit stands.
            Ok(ptr) => self.inner.free(ptr),
        };
        refused.and_then(|()| self.out_of_memory(requested)).unwrap_or_else(|error| error)
    }

    /// The answer that there is no memory.
    fn out_of_memory(&mut self, requested: Bytes) -> Result<DeviceError, DeviceError> {
        Ok(DeviceError::OutOfMemory { requested, free: self.free_memory()? })
    }

    /// What the limit leaves.
    fn left(&mut self) -> Result<Bytes, DeviceError> {
        Ok(self.info.total.saturating_sub(self.held()?).saturating_sub(self.elsewhere))
    }

    /// What is charged now, pools included.
    fn all_charged(&mut self) -> Result<Bytes, DeviceError> {
        let mut charged = self.charged;
        for index in 0..self.pools.len() {
            let pool = self.pools[index];
            charged += self.inner_pooled()?.pool_reserved(pool)?;
        }
        Ok(charged)
    }
}

fn refused(limit: Bytes, why: String) -> DeviceError {
    DeviceError::Unavailable { what: format!("a limit of {limit}"), why }
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
        let Some(charge) = size.checked_round_up(self.info.granularity).filter(|charge| *charge <= left) else {
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
        if self.inner.mapped().is_some() { Some(self) } else { None }
    }

    fn pooled(&mut self) -> Option<&mut dyn PooledDevice> {
        if self.inner.pooled().is_some() { Some(self) } else { None }
    }
}

impl<D: TestDevice> wrapper::TestDeviceWrapper for Limited<D> {
    fn memory(&mut self) -> Result<DeviceMemory, DeviceError> {
        let inner = self.inner.memory()?;
        Ok(DeviceMemory { total: self.info.total, free: self.left()?.min(inner.free), pressure: self.pressure, ..inner })
    }

    fn calls(&self) -> DeviceCalls {
        let inner = self.inner.calls();
        DeviceCalls { create: inner.create + self.refused_pages, ..inner }
    }

    fn set_pressure(&mut self, held: Bytes) -> Result<Bytes, DeviceError> {
        let most = self.info.total.saturating_sub(self.all_charged()?).saturating_sub(self.elsewhere);
        self.pressure = self.inner.set_pressure(held.min(most))?;
        Ok(self.pressure)
    }
}

impl<D: Device> Limited<D> {
    fn inner_mapped(&mut self) -> Result<&mut dyn MappedDevice, DeviceError> {
        let why = || DeviceError::Unavailable { what: "memory mapping".to_owned(), why: "the device behind the limit has none".to_owned() };
        self.inner.mapped().ok_or_else(why)
    }

    fn inner_pooled(&mut self) -> Result<&mut dyn PooledDevice, DeviceError> {
        let why = || DeviceError::Unavailable { what: "memory pools".to_owned(), why: "the device behind the limit has none".to_owned() };
        self.inner.pooled().ok_or_else(why)
    }

    /// Whether what the limit leaves and what the pool has unused are so much together. The pool is asked only where it matters.
    fn may_fit(&mut self, pool: PoolId, size: Bytes) -> Result<bool, DeviceError> {
        let left = self.left()?;
        if left >= size {
            return Ok(true);
        }
        let memory = self.inner_pooled()?.pool_memory(pool)?;
        Ok(left.0.saturating_add(memory.reserved.saturating_sub(memory.used).0) >= size.0)
    }

    /// A piece of the pool, if the pool then is within the limit. Where it is not, the piece goes back, and so does what the pool took for
    /// it: the pool gives memory back only behind a wait for the stream.
    fn try_pool(&mut self, pool: PoolId, size: Bytes, stream: StreamId) -> Result<Option<DevicePtr>, DeviceError> {
        let before = self.inner_pooled()?.pool_reserved(pool)?;
        let ptr = match self.inner_pooled()?.malloc_async(pool, size, stream) {
            Ok(ptr) => ptr,
            Err(error) if error.is_out_of_memory() => return Ok(None),
            Err(error) => return Err(error),
        };
        if self.held()?.0.saturating_add(self.elsewhere.0) <= self.info.total.0 {
            return Ok(Some(ptr));
        }
        self.inner_pooled()?.free_async(ptr, stream)?;
        self.inner.synchronize_stream(stream)?;
        self.inner_pooled()?.trim_pool(pool, before)?;
        Ok(None)
    }
}

/// A pool is charged what it has reserved, as the driver tells it. At the limit it gives its unused memory back and is asked once more, as a
/// driver does at the end of its memory.
impl<D: Device> PooledDevice for Limited<D> {
    fn create_pool(&mut self, release_threshold: Bytes) -> Result<PoolId, DeviceError> {
        let pool = self.inner_pooled()?.create_pool(release_threshold)?;
        self.pools.push(pool);
        Ok(pool)
    }

    fn destroy_pool(&mut self, pool: PoolId) -> Result<(), DeviceError> {
        self.inner_pooled()?.destroy_pool(pool)?;
        self.pools.retain(|known| *known != pool);
        Ok(())
    }

    fn malloc_async(&mut self, pool: PoolId, size: Bytes, stream: StreamId) -> Result<DevicePtr, DeviceError> {
        if self.may_fit(pool, size)? {
            if let Some(ptr) = self.try_pool(pool, size, stream)? {
                return Ok(ptr);
            }
            self.inner_pooled()?.trim_pool(pool, Bytes::ZERO)?;
            if let Some(ptr) = self.try_pool(pool, size, stream)? {
                return Ok(ptr);
            }
        } else {
            // As other refusals: a call to the driver that fails.
            let impossible = self.inner.info().total + self.info.granularity;
            if let Ok(ptr) = self.inner_pooled()?.malloc_async(pool, impossible, stream) {
                self.inner_pooled()?.free_async(ptr, stream)?;
            }
        }
        Err(self.out_of_memory(size)?)
    }

    fn free_async(&mut self, ptr: DevicePtr, stream: StreamId) -> Result<(), DeviceError> {
        self.inner_pooled()?.free_async(ptr, stream)
    }

    fn trim_pool(&mut self, pool: PoolId, keep: Bytes) -> Result<(), DeviceError> {
        self.inner_pooled()?.trim_pool(pool, keep)
    }

    fn pool_reserved(&mut self, pool: PoolId) -> Result<Bytes, DeviceError> {
        self.inner_pooled()?.pool_reserved(pool)
    }

    fn pool_memory(&mut self, pool: PoolId) -> Result<PoolMemory, DeviceError> {
        self.inner_pooled()?.pool_memory(pool)
    }
}

impl<D: Device> MappedDevice for Limited<D> {
    fn reserve(&mut self, size: Bytes) -> Result<DevicePtr, DeviceError> {
        self.inner_mapped()?.reserve(size)
    }

    fn unreserve(&mut self, start: DevicePtr) -> Result<(), DeviceError> {
        self.inner_mapped()?.unreserve(start)
    }

    fn map(&mut self, range: MemoryRange, page: Bytes) -> Result<(), DeviceError> {
        let left = self.left()?;
        if range.len > left {
            // As on a device of this size: pages are made until one is refused, and those are given back. It takes time, so it is done.
            let fitting = MemoryRange::new(range.start, Bytes(left.0 - left.0.checked_rem(page.0).unwrap_or(left.0)));
            if fitting.len > Bytes::ZERO {
                self.inner_mapped()?.map(fitting, page)?;
                self.inner_mapped()?.unmap(fitting)?;
            }
            self.refused_pages += 1;
            let free = left.min(self.inner.free_memory()?);
            return Err(DeviceError::OutOfMemory { requested: range.len, free });
        }
        self.inner_mapped()?.map(range, page)?;
        self.charged += range.len;
        Ok(())
    }

    fn unmap(&mut self, range: MemoryRange) -> Result<(), DeviceError> {
        self.inner_mapped()?.unmap(range)?;
        self.charged -= range.len;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::sim::{SimConfig, SimDevice};
    use crate::units::Nanos;

    fn limited(limit: Bytes) -> Result<Limited<SimDevice>, DeviceError> {
        Limited::new(SimDevice::new(SimConfig { total: Bytes::gib(2), ..SimConfig::default() }), limit)
    }

    fn why(result: Result<Limited<SimDevice>, DeviceError>) -> String {
        result.err().expect("the limit is refused").to_string()
    }

    #[test]
    fn a_limit_below_a_granule_or_above_what_is_free_is_refused_with_the_figures() -> Result<(), DeviceError> {
        assert_eq!(why(limited(Bytes::ZERO)), "a limit of 0 B: memory comes in pieces of 2 MiB, so the limit must be at least that");
        assert!(limited(Bytes(Bytes::mib(2).0 - 1)).is_err());
        let mut device = SimDevice::new(SimConfig { total: Bytes::gib(2), context_overhead: Bytes::ZERO, ..SimConfig::default() });
        device.set_pressure(Bytes::gib(1))?;
        assert_eq!(
            why(Limited::new(device, Bytes::mib(1536))),
            "a limit of 1.50 GiB: only 1 GiB of 2 GiB are free; lower the limit or free the device"
        );
        Ok(())
    }

    #[test]
    fn a_refused_mapping_takes_as_long_as_making_the_pages_that_fit_and_leaves_nothing() -> Result<(), DeviceError> {
        let mut device = limited(Bytes::mib(64))?;
        let mapped = device.mapped().expect("the simulated device maps");
        let start = mapped.reserve(Bytes::mib(128))?;
        let page = Bytes::mib(2);
        let mut taken = |pages: u64| -> Result<(bool, Nanos, DeviceCalls), DeviceError> {
            let (before, calls) = (device.now(), device.calls());
            let range = MemoryRange::new(start, Bytes(pages * page.0));
            let mapped = device.mapped().expect("the simulated device maps");
            let served = mapped.map(range, page).is_ok();
            if served {
                mapped.unmap(range)?;
            }
            let after = device.calls();
            let calls =
                DeviceCalls { create: after.create - calls.create, release: after.release - calls.release, ..DeviceCalls::default() };
            Ok((served, device.now().saturating_sub(before), calls))
        };
        let (fits, made, _) = taken(32)?;
        let (too_large, refused, calls) = taken(33)?;
        assert_eq!((fits, too_large, refused), (true, false, made));
        assert_eq!((calls.create, calls.release), (33, 32), "one more was asked for");
        assert!(made > Nanos::ZERO);
        assert_eq!(device.memory()?.free, Bytes::mib(64));
        Ok(())
    }

    #[test]
    fn memory_ends_at_the_limit_to_the_byte() -> Result<(), DeviceError> {
        let mut device = limited(Bytes::mib(9))?;
        assert_eq!(device.info().name, "simulated");
        let used = device.memory()?.used;
        device.malloc(Bytes(1))?;
        let last = device.malloc(Bytes::mib(6))?;
        let full = DeviceError::OutOfMemory { requested: Bytes(1), free: Bytes::mib(1) };
        assert_eq!(device.malloc(Bytes(1)), Err(full), "half a granule is left, and no allocation fits it");
        assert_eq!(device.memory()?.used - used, Bytes::mib(8));
        device.free(last)?;
        assert!(device.free(last).is_err());
        assert_eq!(device.memory()?.free, Bytes::mib(7), "an invalid free gives nothing back");
        let calls = device.calls();
        assert_eq!((calls.malloc, calls.malloc_failures), (3, 1), "refusals are calls too");
        Ok(())
    }

    #[test]
    fn pressure_counts_against_the_limit_and_moves_device_used() -> Result<(), DeviceError> {
        let mut device = limited(Bytes::mib(16))?;
        let used = device.memory()?.used;
        device.malloc(Bytes::mib(4))?;
        assert_eq!(device.set_pressure(Bytes::gib(1))?, Bytes::mib(12));
        let memory = device.memory()?;
        assert_eq!((memory.free, memory.pressure, memory.used - used), (Bytes::ZERO, Bytes::mib(12), Bytes::mib(16)));
        assert_eq!(device.set_pressure(Bytes::mib(2))?, Bytes::mib(2));
        assert_eq!(device.memory()?.free, Bytes::mib(10));
        Ok(())
    }
}
