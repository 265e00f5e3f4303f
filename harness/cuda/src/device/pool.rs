//! The driver's stream-ordered pools: [`PooledDevice`] for [`CudaDevice`]
//! (<https://docs.nvidia.com/cuda/cuda-driver-api/group__CUDA__MALLOC__ASYNC.html>). [`CudaPools`] is what it keeps.

use std::collections::BTreeMap;
use std::ffi::{c_int, c_uint};

use super::CudaDevice;
use super::driver::{self, Driver};
use super::types::{CUdevice, CUmemPoolProps, CUmemoryPool};
use crate::library::Refusal;
use harness_allocator::device::{DeviceError, DevicePtr, PoolId, PoolMemory, PooledDevice, StreamId};
use harness_allocator::units::Bytes;

/// CudaPools of a device that has them, each one's own: the device's default pool is left to others.
pub(super) struct CudaPools {
    property: CUmemPoolProps,
    pools: BTreeMap<u32, CUmemoryPool>,
    next: u32,
    /// Live allocations of callers, by address.
    pub(super) live: BTreeMap<u64, (Bytes, PoolId)>,
}

impl CudaPools {
    /// `None` where the device lacks them.
    pub(super) fn of(driver: &Driver, device: CUdevice) -> Result<Option<Self>, Refusal> {
        let mut supported = 0;
        // SAFETY: `supported` is a place for the answer.
        unsafe { driver.device_attribute(&raw mut supported, driver::MEMORY_POOLS, device) }?;
        let pools = Self { property: driver::pool_on(device), pools: BTreeMap::new(), next: 0, live: BTreeMap::new() };
        Ok((supported != 0).then_some(pools))
    }

    fn handle(&self, pool: PoolId) -> Result<CUmemoryPool, DeviceError> {
        self.pools.get(&pool.0).copied().ok_or(DeviceError::UnknownHandle { kind: "pool", number: pool.0 })
    }

    /// How many pools live.
    pub(super) fn count(&self) -> u64 {
        self.pools.len() as u64
    }

    /// What all pools have reserved, as far as the driver tells.
    pub(super) fn reserved(&self, driver: &Driver) -> Bytes {
        self.pools.values().filter_map(|pool| attribute(driver, *pool, driver::POOL_RESERVED).ok()).sum()
    }

    /// Gives everything back as far as the driver lets it; for the end of the device, when all work was waited for.
    pub(super) fn release(&mut self, driver: &Driver) {
        // SAFETY: allocations and pools live, as the tables say, and these end here.
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
    // SAFETY: the pool lives; the attributes that are asked for are 64-bit numbers, and `value` is a place for one.
    unsafe { driver.pool_attribute(pool, attribute, (&raw mut value).cast()) }?;
    Ok(Bytes(value))
}

/// Sets what every pool of this device is like, and its threshold.
fn configure(driver: &Driver, pool: CUmemoryPool, threshold: Bytes) -> Result<(), Refusal> {
    for flag in [driver::POOL_REUSE_BY_CHANCE, driver::POOL_REUSE_BY_OWN_WAITS] {
        let mut off: c_int = 0;
        // SAFETY: the pool lives; the attribute is an int, and is read from `off`.
        unsafe { driver.set_pool_attribute(pool, flag, (&raw mut off).cast()) }?;
    }
    let mut threshold = threshold.0;
    // SAFETY: the pool lives; the attribute is a 64-bit number, and is read from `threshold`.
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
        // SAFETY: `handle` is a place for the answer, and the property is whole.
        unsafe { driver.create_pool(&raw mut handle, &raw const pools.property) }?;
        if let Err(refusal) = configure(driver, handle, release_threshold) {
            // SAFETY: the pool was just made, and nobody knows of it. The first refusal is the one to tell.
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
        // SAFETY: the pool lives and nothing of it does, as the tables say; it is forgotten once it is destroyed. The wait makes the
        // driver give everything back now, and not when the last free has taken its turn.
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
        // SAFETY: `address` is a place for the answer; pool and stream live, as the tables say.
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
        // SAFETY: the address is a live allocation of a pool, as the table says, and is forgotten once it is freed; the stream lives.
        unsafe { self.driver()?.free_in_order(ptr.0, queue) }?;
        self.pools()?.live.remove(&ptr.0);
        self.freed.insert(ptr.0, self.place);
        Ok(())
    }

    fn trim_pool(&mut self, pool: PoolId, keep: Bytes) -> Result<(), DeviceError> {
        let driver = self.driver()?;
        let handle = self.pools()?.handle(pool)?;
        // SAFETY: the pool lives, as the table says.
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
