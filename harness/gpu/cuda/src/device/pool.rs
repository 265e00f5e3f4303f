//! [`PooledDevice`] for [`CudaDevice`], through the driver's stream-ordered pools
//! (<https://docs.nvidia.com/cuda/cuda-driver-api/group__CUDA__MALLOC__ASYNC.html>). [`CudaPools`]
//! is its state.

use std::{collections::BTreeMap, ffi::c_int};

use cudarc::driver::sys::{
    CUdevice, CUdevice_attribute, CUmemAllocationType, CUmemPool_attribute, CUmemPoolProps,
    CUmemoryPool,
};

use super::driver::{Driver, cuda};
use super::{CudaDevice, mapping::location_of, probe::attribute};
use crate::library::Refusal;
use harness_allocator::device::{
    DeviceError, DevicePtr, PoolId, PoolMemory, PooledDevice, StreamId,
};
use harness_allocator::units::Bytes;

/// The pools that callers created. The device's default pool is never used.
pub(super) struct CudaPools {
    property: CUmemPoolProps,
    pools: BTreeMap<u32, CUmemoryPool>,
    next: u32,
    pub(super) live: BTreeMap<u64, (Bytes, PoolId)>,
}

impl CudaPools {
    /// Returns `None` if the device has no pools.
    pub(super) fn of(driver: &Driver, device: CUdevice) -> Result<Option<Self>, Refusal> {
        let supported = attribute(
            driver,
            device,
            CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED,
        )? != 0;
        Ok(supported.then(|| Self {
            property: pool_on(device),
            pools: BTreeMap::new(),
            next: 0,
            live: BTreeMap::new(),
        }))
    }

    fn handle(&self, pool: PoolId) -> Result<CUmemoryPool, DeviceError> {
        self.pools
            .get(&pool.0)
            .copied()
            .ok_or(DeviceError::UnknownHandle {
                kind: "pool",
                number: pool.0,
            })
    }

    pub(super) fn count(&self) -> u64 {
        self.pools.len() as u64
    }

    /// Returns the bytes that all pools have reserved. Pools whose attribute cannot be read count
    /// as zero.
    pub(super) fn reserved(&self, driver: &Driver) -> Bytes {
        self.pools
            .values()
            .filter_map(|pool| {
                figure(
                    driver,
                    *pool,
                    CUmemPool_attribute::CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT,
                )
                .ok()
            })
            .sum()
    }

    /// Frees everything and ignores errors, when the device is dropped and idle.
    pub(super) fn release(&mut self, driver: &Driver) {
        for address in self.live.keys() {
            let _ = cuda!(driver, cuMemFreeAsync(*address, std::ptr::null_mut()));
        }
        let _ = cuda!(driver, cuCtxSynchronize());
        for pool in self.pools.values() {
            let _ = cuda!(driver, cuMemPoolDestroy(*pool));
        }
    }
}

/// A pool of pinned memory of a device, shared with no other process and without a limit.
fn pool_on(device: CUdevice) -> CUmemPoolProps {
    // SAFETY: zero is a valid value of each field.
    let nothing: CUmemPoolProps = unsafe { std::mem::zeroed() };
    CUmemPoolProps {
        allocType: CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED,
        location: location_of(device),
        ..nothing
    }
}

fn figure(
    driver: &Driver,
    pool: CUmemoryPool,
    attribute: CUmemPool_attribute,
) -> Result<Bytes, Refusal> {
    let mut value = 0_u64;
    cuda!(
        driver,
        cuMemPoolGetAttribute(pool, attribute, (&raw mut value).cast())
    )?;
    Ok(Bytes(value))
}

/// Configures a new pool: no reuse beyond the stream's order, and its release threshold.
fn configure(driver: &Driver, pool: CUmemoryPool, threshold: Bytes) -> Result<(), Refusal> {
    use CUmemPool_attribute::*;
    for flag in [
        CU_MEMPOOL_ATTR_REUSE_ALLOW_OPPORTUNISTIC,
        CU_MEMPOOL_ATTR_REUSE_ALLOW_INTERNAL_DEPENDENCIES,
    ] {
        let mut off: c_int = 0;
        cuda!(
            driver,
            cuMemPoolSetAttribute(pool, flag, (&raw mut off).cast())
        )?;
    }
    let mut threshold: u64 = threshold.0;
    cuda!(
        driver,
        cuMemPoolSetAttribute(
            pool,
            CU_MEMPOOL_ATTR_RELEASE_THRESHOLD,
            (&raw mut threshold).cast()
        )
    )
}

impl CudaDevice {
    fn pools(&mut self) -> Result<&mut CudaPools, DeviceError> {
        let why = || DeviceError::Unavailable {
            what: "memory pools of the driver".to_owned(),
            why: "this device has none".to_owned(),
        };
        self.pools.as_mut().ok_or_else(why)
    }
}

impl PooledDevice for CudaDevice {
    fn create_pool(&mut self, release_threshold: Bytes) -> Result<PoolId, DeviceError> {
        let driver = self.driver()?;
        let pools = self.pools()?;
        let mut handle = std::ptr::null_mut();
        cuda!(driver, cuMemPoolCreate(&mut handle, &pools.property))?;
        if let Err(refusal) = configure(driver, handle, release_threshold) {
            // The first error is returned.
            let _ = cuda!(driver, cuMemPoolDestroy(handle));
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
            return Err(DeviceError::UnknownHandle {
                kind: "pool without allocations",
                number: pool.0,
            });
        }
        // The wait makes the driver release the memory now, not after the last queued free.
        cuda!(driver, cuCtxSynchronize())?;
        cuda!(driver, cuMemPoolDestroy(handle))?;
        pools.pools.remove(&pool.0);
        Ok(())
    }

    fn malloc_async(
        &mut self,
        pool: PoolId,
        size: Bytes,
        stream: StreamId,
    ) -> Result<DevicePtr, DeviceError> {
        let queue = self.stream(stream)?;
        self.calls.malloc_async += 1;
        let driver = self.driver()?;
        let handle = self.pools()?.handle(pool)?;
        let mut address = 0;
        let bytes = usize::try_from(size.0).unwrap_or(usize::MAX);
        self.granted(
            size,
            cuda!(
                driver,
                cuMemAllocFromPoolAsync(&mut address, bytes, handle, queue)
            ),
        )?;
        self.pools()?.live.insert(address, (size, pool));
        self.freed.remove(&address);
        Ok(DevicePtr(address))
    }

    fn free_async(&mut self, ptr: DevicePtr, stream: StreamId) -> Result<(), DeviceError> {
        let queue = self.stream(stream)?;
        self.calls.free_async += 1;
        if !self.pools()?.live.contains_key(&ptr.0) {
            return Err(self.wrong_free(ptr));
        }
        cuda!(self.driver()?, cuMemFreeAsync(ptr.0, queue))?;
        self.pools()?.live.remove(&ptr.0);
        self.freed.insert(ptr.0, self.place);
        Ok(())
    }

    fn trim_pool(&mut self, pool: PoolId, keep: Bytes) -> Result<(), DeviceError> {
        let driver = self.driver()?;
        let handle = self.pools()?.handle(pool)?;
        Ok(cuda!(
            driver,
            cuMemPoolTrimTo(handle, usize::try_from(keep.0).unwrap_or(usize::MAX))
        )?)
    }

    fn pool_reserved(&mut self, pool: PoolId) -> Result<Bytes, DeviceError> {
        let driver = self.driver()?;
        let handle = self.pools()?.handle(pool)?;
        Ok(figure(
            driver,
            handle,
            CUmemPool_attribute::CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT,
        )?)
    }

    fn pool_memory(&mut self, pool: PoolId) -> Result<PoolMemory, DeviceError> {
        let driver = self.driver()?;
        let handle = self.pools()?.handle(pool)?;
        Ok(PoolMemory {
            reserved: figure(
                driver,
                handle,
                CUmemPool_attribute::CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT,
            )?,
            reserved_high: figure(
                driver,
                handle,
                CUmemPool_attribute::CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH,
            )?,
            used: figure(
                driver,
                handle,
                CUmemPool_attribute::CU_MEMPOOL_ATTR_USED_MEM_CURRENT,
            )?,
            used_high: figure(
                driver,
                handle,
                CUmemPool_attribute::CU_MEMPOOL_ATTR_USED_MEM_HIGH,
            )?,
        })
    }
}
