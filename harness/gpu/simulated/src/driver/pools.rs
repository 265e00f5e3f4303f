//! Stream-ordered pools. If kernels are no-ops, they are the runtime's.

use std::ffi::{c_int, c_void};
use std::mem::MaybeUninit;

use harness_allocator::device::{PoolId, PooledDevice as _};
use harness_allocator::units::Bytes;

use harness_gpu_settings::{export, ffi::Out};

use crate::code::{Code, answer, put};
use crate::context::{Gpu, by_kernel_mode, on_gpu, output_by_kernel_mode, wait};
use crate::kernels::Work;
use crate::runtime::pools::{self as runtime, Location, PoolProperties};

/// Runs `body` on the device of the thread's context if the driver supports pools.
fn on_gpu_with_pools<T>(body: impl FnOnce(&mut Gpu<'_>) -> Result<T, Code>) -> Result<T, Code> {
    on_gpu(|gpu| {
        if gpu.machine.settings.pools {
            body(gpu)
        } else {
            Err(Code::NotSupported)
        }
    })
}

/// Runs `body` for a pool of the device.
fn with_pool<T>(
    pool: usize,
    body: impl FnOnce(&mut Gpu<'_>, PoolId) -> Result<T, Code>,
) -> Result<T, Code> {
    on_gpu_with_pools(|gpu| {
        let id = gpu.pool(pool)?;
        body(gpu, id)
    })
}

export! {
    cuMemPoolCreate(pool: Out<'_, usize>, properties: Option<&PoolProperties>) =
        properties.map_or(answer(Err(Code::InvalidValue)), |wanted| create_pool(pool, wanted));
    cuMemPoolDestroy(pool: usize) =
        by_kernel_mode(THIS, || runtime::cudaMemPoolDestroy(pool), || destroy_pool(pool));
    cuMemPoolGetAttribute(pool: usize, attribute: c_int, value: *mut c_void) =
        by_kernel_mode(
            THIS,
            || runtime::cudaMemPoolGetAttribute(pool, attribute, value),
            || figure(pool, attribute, value),
        );
    cuMemPoolSetAttribute(pool: usize, attribute: c_int, value: *mut c_void) =
        by_kernel_mode(
            THIS,
            || runtime::cudaMemPoolSetAttribute(pool, attribute, value),
            || set(pool, attribute, value),
        );
    cuMemPoolTrimTo(pool: usize, keep: usize) =
        by_kernel_mode(THIS, || runtime::cudaMemPoolTrimTo(pool, keep), || trim_pool(pool, keep));
    cuMemAllocFromPoolAsync(address: Out<'_, usize>, size: usize, pool: usize, stream: usize) =
        output_by_kernel_mode(
            THIS,
            address,
            |address| runtime::cudaMallocFromPoolAsync(address, size, pool, stream),
            || allocate_from_pool(size, pool, stream),
        );
    cuMemAllocAsync(address: Out<'_, usize>, size: usize, stream: usize) =
        output_by_kernel_mode(
            THIS,
            address,
            |address| runtime::cudaMallocAsync(address, size, stream),
            || Err(Code::NotSupported),
        );
    cuDeviceGetDefaultMemPool(pool: Out<'_, usize>, index: c_int) = output_by_kernel_mode(
        THIS,
        pool,
        |pool| runtime::cudaDeviceGetDefaultMemPool(pool, index),
        || Err(Code::NotSupported),
    );
    cuDeviceGetMemPool(pool: Out<'_, usize>, index: c_int) = output_by_kernel_mode(
        THIS,
        pool,
        |pool| runtime::cudaDeviceGetMemPool(pool, index),
        || Err(Code::NotSupported),
    );
    cuDeviceSetMemPool(index: c_int, pool: usize) = by_kernel_mode(
        THIS,
        || runtime::cudaDeviceSetMemPool(index, pool),
        || Err(Code::NotSupported),
    );
    cuMemGetDefaultMemPool(pool: Out<'_, usize>, place: Option<&Location>, kind: c_int) =
        output_by_kernel_mode(
            THIS,
            pool,
            |pool| runtime::cudaMemGetDefaultMemPool(pool, place, kind),
            || Err(Code::NotSupported),
        );
    cuMemGetMemPool(pool: Out<'_, usize>, place: Option<&Location>, kind: c_int) =
        output_by_kernel_mode(
            THIS,
            pool,
            |pool| runtime::cudaMemGetMemPool(pool, place, kind),
            || Err(Code::NotSupported),
        );
    cuMemSetMemPool(place: Option<&Location>, kind: c_int, pool: usize) =
        by_kernel_mode(
            THIS,
            || runtime::cudaMemSetMemPool(place, kind, pool),
            || Err(Code::NotSupported),
        );
    cuMemPoolSetAccess(pool: usize, access: *const c_void, count: usize) =
        by_kernel_mode(
            THIS,
            || runtime::cudaMemPoolSetAccess(pool, access, count),
            || Err(Code::NotSupported),
        );
    cuMemPoolGetAccess(flags: Out<'_, c_int>, pool: usize, place: *const c_void) =
        output_by_kernel_mode(
            THIS,
            flags,
            |flags| runtime::cudaMemPoolGetAccess(flags, pool, place),
            || Err(Code::NotSupported),
        );
    cuMemFreeAsync(address: usize, stream: usize) = by_kernel_mode(
        THIS,
        || runtime::cudaFreeAsync(address, stream),
        || free_in_order(address as u64, stream),
    );
}

/// If kernels execute, only pools of unshared pinned memory (kind 1) on this device (location kind
/// 1) without a limit are supported.
fn create_pool(pool: Out<'_, usize>, wanted: &PoolProperties) -> c_int {
    let create = |gpu: &mut Gpu<'_>| {
        let here =
            wanted.location_kind == 1 && usize::try_from(wanted.location) == Ok(gpu.memory.index());
        if wanted.kind != 1 || !here || wanted.reserved != [0; 54] {
            return Err(Code::InvalidValue);
        }
        if !wanted.attributes.is_null()
            || wanted.handle_types != 0
            || wanted.most != 0
            || wanted.usage != 0
        {
            return Err(Code::NotSupported);
        }
        let id = gpu.sim().create_pool(Bytes::ZERO)?;
        Ok(gpu.pool_handle(id))
    };
    let no_op = |pool| runtime::cudaMemPoolCreate(pool, Some(wanted));
    output_by_kernel_mode("cuMemPoolCreate", pool, no_op, || on_gpu_with_pools(create))
}

/// Waits for all work. A driver instead destroys the pool after its work.
fn destroy_pool(pool: usize) -> Result<(), Code> {
    on_gpu_with_pools(|_| Ok(()))?;
    let destroy = |gpu: &mut Gpu<'_>| {
        let id = gpu.pool(pool)?;
        Ok(gpu.sim().destroy_pool(id)?)
    };
    wait(|gpu| Ok(gpu.sim().all_done_at()), destroy)
}

/// Writes current and peak bytes, reserved and used: attributes 5 to 8, of 64 bits.
fn figure(pool: usize, attribute: c_int, value: *mut c_void) -> Result<(), Code> {
    with_pool(pool, |gpu, id| {
        let memory = gpu.sim().pool_memory(id)?;
        let figure = match attribute {
            5 => memory.reserved,
            6 => memory.reserved_high,
            7 => memory.used,
            8 => memory.used_high,
            _ => return Err(Code::InvalidValue),
        };
        // SAFETY: the program passes a number of 64 bits or null.
        put(
            unsafe { value.cast::<MaybeUninit<u64>>().as_mut() },
            figure.0,
        )
    })
}

/// Sets the release threshold (4), and refuses to switch on reuse (2 and 3).
fn set(pool: usize, attribute: c_int, value: *mut c_void) -> Result<(), Code> {
    with_pool(pool, |gpu, id| {
        gpu.sim().pool_memory(id)?;
        if value.is_null() {
            return Err(Code::InvalidValue);
        }
        match attribute {
            // SAFETY: these attributes are an int, and the pointer is not null.
            2 | 3 if unsafe { value.cast::<c_int>().read() } == 0 => Ok(()),
            // SAFETY: this attribute has 64 bits, and the pointer is not null.
            4 => Ok(gpu
                .sim()
                .set_release_threshold(id, Bytes(unsafe { value.cast::<u64>().read() }))?),
            _ => Err(Code::NotSupported),
        }
    })
}

fn trim_pool(pool: usize, keep: usize) -> Result<(), Code> {
    with_pool(pool, |gpu, id| {
        Ok(gpu.sim().trim_pool(id, Bytes(keep as u64))?)
    })
}

fn allocate_from_pool(size: usize, pool: usize, stream: usize) -> Result<usize, Code> {
    with_pool(pool, |gpu, id| {
        let stream = gpu.stream(stream)?;
        Ok(gpu
            .memory
            .allocate_in_order(Bytes(size as u64), id, stream)? as usize)
    })
}

/// Frees memory after the earlier work of the stream.
fn free_in_order(address: u64, stream: usize) -> Result<(), Code> {
    on_gpu_with_pools(|gpu| {
        let id = gpu.stream(stream)?;
        let done_at = gpu.stream_done_at(stream)?;
        let number = gpu.memory.free_in_order(address, id)?;
        gpu.execution.queue(done_at, Work::Free { address, number });
        Ok(())
    })
}
