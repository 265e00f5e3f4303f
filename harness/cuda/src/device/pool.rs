//! [`PooledDevice`] for [`CudaDevice`], through the driver's stream-ordered pools
//! (<https://docs.nvidia.com/cuda/cuda-driver-api/group__CUDA__MALLOC__ASYNC.html>). [`CudaPools`] is its state.

use std::collections::BTreeMap;
use std::ffi::{c_int, c_uint};

use super::CudaDevice;
use super::driver::{self, Driver};
use super::types::{CUdevice, CUmemPoolProps, CUmemoryPool};
use crate::library::Refusal;
use harness_allocator::device::{DeviceError, DevicePtr, PoolId, PoolMemory, PooledDevice, StreamId};
use harness_allocator::units::Bytes;

/// The pools that callers created. The device's default pool is never used.
pub(super) struct CudaPools {
    property: CUmemPoolProps,
    pools: BTreeMap<u32, CUmemoryPool>,
    next: u32,
    /// Live allocations of callers, by address.
    pub(super) live: BTreeMap<u64, (Bytes, PoolId)>,
}

impl CudaPools {
    /// Returns `None` if the device has no pools.
    pub(super) fn of(driver: &Driver, device: CUdevice) -> Result<Option<Self>, Refusal> {
        let mut supported = 0;
        // SAFETY: `supported` is a valid output.
        unsafe { driver.device_attribute(&raw mut supported, driver::MEMORY_POOLS, device) }?;
        let pools = Self { property: driver::pool_on(device), pools: BTreeMap::new(), next: 0, live: BTreeMap::new() };
        Ok((supported != 0).then_some(pools))
    }

    fn handle(&self, pool: PoolId) -> Result<CUmemoryPool, DeviceError> {
        self.pools.get(&pool.0).copied().ok_or(DeviceError::UnknownHandle { kind: "pool", number: pool.0 })
    }

    /// Returns the number of live pools.
    pub(super) fn count(&self) -> u64 {
        self.pools.len() as u64
    }

    /// Returns the bytes that all pools have reserved. Pools whose attribute cannot be read count as zero.
    pub(super) fn reserved(&self, driver: &Driver) -> Bytes {
        self.pools.values().filter_map(|pool| attribute(driver, *pool, driver::POOL_RESERVED).ok()).sum()
    }

    /// Frees everything and ignores errors, when the device is dropped and idle.
    pub(super) fn release(&mut self, driver: &Driver) {
        // SAFETY: the tables list allocations and pools as live, and end here.
        unsafe {
            for address in self.live.keys() {
                let _ = driver.free_in_order(*address, std::ptr::null_mut());
            }
            let _ = driver.synchronize();
            for pool in self.pools.values() {
                let _ = driver.destroy_pool(*pool);
            }
        }
    }
}

fn attribute(driver: &Driver, pool: CUmemoryPool, attribute: c_uint) -> Result<Bytes, Refusal> {
    let mut value = 0_u64;
    // SAFETY: the pool lives; the requested attributes are 64-bit numbers, and `value` is a valid output.
    unsafe { driver.pool_attribute(pool, attribute, (&raw mut value).cast()) }?;
    Ok(Bytes(value))
}

/// Configures a new pool: no reuse beyond the stream's order, and its release threshold.
fn configure(driver: &Driver, pool: CUmemoryPool, threshold: Bytes) -> Result<(), Refusal> {
    for flag in [driver::POOL_REUSE_BY_CHANCE, driver::POOL_REUSE_BY_OWN_WAITS] {
        let mut off: c_int = 0;
        // SAFETY: the pool lives; the attribute is an int, read from `off`.
        unsafe { driver.set_pool_attribute(pool, flag, (&raw mut off).cast()) }?;
    }
    let mut threshold = threshold.0;
    // SAFETY: the pool lives; the attribute is a 64-bit number, read from `threshold`.
    unsafe { driver.set_pool_attribute(pool, driver::POOL_RELEASE_THRESHOLD, (&raw mut threshold).cast()) }
}

impl CudaDevice {
    fn pools(&mut self) -> Result<&mut CudaPools, DeviceError> {
        let why = || DeviceError::Unavailable { what: "memory pools of the driver".to_owned(), why: "this device has none".to_owned() };
        self.pools.as_mut().ok_or_else(why)
    }
}

impl PooledDevice for CudaDevice {
    fn create_pool(&mut self, release_threshold: Bytes) -> Result<PoolId, DeviceError> {
        let driver = self.driver()?;
        let pools = self.pools()?;
        let mut handle = std::ptr::null_mut();
        // SAFETY: `handle` is a valid output, and the property is fully initialized.
        unsafe { driver.create_pool(&raw mut handle, &raw const pools.property) }?;
        if let Err(refusal) = configure(driver, handle, release_threshold) {
            // SAFETY: the pool was just created, and nothing uses it. The first error is returned.
            let _ = unsafe { driver.destroy_pool(handle) };
            return Err(refusal.into());
        }
        let number = pools.next;
        pools.next += 1;
        pools.pools.insert(number, handle);
        Ok(PoolId(number))
    }

    fn destroy_pool(&mut self, pool: PoolId) -> Result<(), DeviceError> {
        let driver = self.driver()?;
        let pools = self.pools()?;
        let handle = pools.handle(pool)?;
        if pools.live.values().any(|live| live.1 == pool) {
            return Err(DeviceError::UnknownHandle { kind: "pool without allocations", number: pool.0 });
        }
        // SAFETY: the tables show that the pool lives without allocations, and drop it after the call. The wait makes the driver
        // release the memory now, not after the last queued free.
        unsafe {
            driver.synchronize()?;
            driver.destroy_pool(handle)?;
        }
        pools.pools.remove(&pool.0);
        Ok(())
    }

    fn malloc_async(&mut self, pool: PoolId, size: Bytes, stream: StreamId) -> Result<DevicePtr, DeviceError> {
        let queue = self.stream(stream)?;
        self.calls.malloc_async += 1;
        let driver = self.driver()?;
        let handle = self.pools()?.handle(pool)?;
        let mut address = 0;
        // SAFETY: `address` is a valid output; the tables list pool and stream as live.
        match unsafe { driver.allocate_in_order(&raw mut address, usize::try_from(size.0).unwrap_or(usize::MAX), handle, queue) } {
            Ok(()) => {
                self.pools()?.live.insert(address, (size, pool));
                self.freed.remove(&address);
                Ok(DevicePtr(address))
            }
            Err(Refusal { code: driver::OUT_OF_MEMORY, .. }) => {
                Err(DeviceError::OutOfMemory { requested: size, free: self.driver_free()? })
            }
            Err(refusal) => Err(refusal.into()),
        }
    }

    fn free_async(&mut self, ptr: DevicePtr, stream: StreamId) -> Result<(), DeviceError> {
        let queue = self.stream(stream)?;
        self.calls.free_async += 1;
        if !self.pools()?.live.contains_key(&ptr.0) {
            return Err(self.wrong_free(ptr));
        }
        // SAFETY: the table lists the address as a live allocation of a pool, and drops it after the call; the stream lives.
        unsafe { self.driver()?.free_in_order(ptr.0, queue) }?;
        self.pools()?.live.remove(&ptr.0);
        self.freed.insert(ptr.0, self.place);
        Ok(())
    }

    fn trim_pool(&mut self, pool: PoolId, keep: Bytes) -> Result<(), DeviceError> {
        let driver = self.driver()?;
        let handle = self.pools()?.handle(pool)?;
        // SAFETY: the table lists the pool as live.
        Ok(unsafe { driver.trim_pool(handle, usize::try_from(keep.0).unwrap_or(usize::MAX)) }?)
    }

    fn pool_reserved(&mut self, pool: PoolId) -> Result<Bytes, DeviceError> {
        let driver = self.driver()?;
        let handle = self.pools()?.handle(pool)?;
        Ok(attribute(driver, handle, driver::POOL_RESERVED)?)
    }

    fn pool_memory(&mut self, pool: PoolId) -> Result<PoolMemory, DeviceError> {
        let driver = self.driver()?;
        let handle = self.pools()?.handle(pool)?;
        Ok(PoolMemory {
            reserved: attribute(driver, handle, driver::POOL_RESERVED)?,
            reserved_high: attribute(driver, handle, driver::POOL_RESERVED_HIGH)?,
            used: attribute(driver, handle, driver::POOL_USED)?,
            used_high: attribute(driver, handle, driver::POOL_USED_HIGH)?,
        })
    }
}
