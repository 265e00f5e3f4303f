//! Stream-ordered pools. Where kernels are skipped they are those of the runtime: a device has one.

use std::ffi::{c_int, c_uint, c_void};

use harness_allocator::device::PooledDevice as _;
use harness_allocator::units::Bytes;

use super::put;
use crate::code::Code;
use crate::context::{Gpu, either, on_gpu, wait};
use crate::kernels::Work;
use crate::runtime::pools as runtime;

/// `CUmemPoolProps`.
#[repr(C)]
struct PoolProperties {
    kind: c_uint,
    handle_types: c_uint,
    location_kind: c_uint,
    location: c_int,
    attributes: *mut c_void,
    most: usize,
    usage: u16,
    reserved: [u8; 54],
}

/// Does something on the device of the thread's context, if that has pools.
fn on_gpu_with_pools(body: impl FnOnce(&mut Gpu<'_>) -> Result<(), Code>) -> Result<(), Code> {
    on_gpu(|gpu| if gpu.machine.settings.pools { body(gpu) } else { Err(Code::NotSupported) })
}

/// Where kernels are done, a pool of pinned memory (kind 1) of this device (kind 1) that nobody shares, without a limit.
#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemPoolCreate(pool: *mut usize, properties: *const PoolProperties) -> c_int {
    // SAFETY: the program passes properties and a pointer to a handle.
    let skipped = || unsafe { runtime::cudaDeviceGetDefaultMemPool(pool, (*properties).location) };
    either("cuMemPoolCreate", skipped, || {
        on_gpu_with_pools(|gpu| {
            // SAFETY: as above; null is refused.
            let wanted = unsafe { properties.as_ref() }.ok_or(Code::InvalidValue)?;
            let here = wanted.location_kind == 1 && usize::try_from(wanted.location) == Ok(gpu.memory.index());
            if wanted.kind != 1 || !here || wanted.reserved != [0; 54] {
                return Err(Code::InvalidValue);
            }
            if !wanted.attributes.is_null() || wanted.handle_types != 0 || wanted.most != 0 || wanted.usage != 0 {
                return Err(Code::NotSupported);
            }
            let id = gpu.memory.sim().create_pool(Bytes::ZERO)?;
            // SAFETY: as above.
            unsafe { put(pool, gpu.pool_handle(id)) }
        })
    })
}

/// Waits for all work, which a driver does not: there the pool goes when that is done.
#[unsafe(no_mangle)]
extern "C" fn cuMemPoolDestroy(pool: usize) -> c_int {
    let destroy = |gpu: &mut Gpu<'_>| {
        let id = gpu.pool(pool)?;
        Ok(gpu.memory.sim().destroy_pool(id)?)
    };
    either(
        "cuMemPoolDestroy",
        || 0,
        || on_gpu_with_pools(|_| Ok(())).and_then(|()| wait(|gpu| Ok(gpu.memory.sim().all_done_at()), destroy)),
    )
}

/// Attributes of 64 bits; 5 to 8 are the bytes that are reserved and used, now and at most.
#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemPoolGetAttribute(pool: usize, attribute: c_int, value: *mut c_void) -> c_int {
    // SAFETY: the program passes a pointer to a number of the attribute's size.
    let skipped = || unsafe { runtime::cudaMemPoolGetAttribute(pool, attribute, value) };
    either("cuMemPoolGetAttribute", skipped, || {
        on_gpu_with_pools(|gpu| {
            let id = gpu.pool(pool)?;
            let memory = gpu.memory.sim().pool_memory(id)?;
            let figure = match attribute {
                5 => memory.reserved,
                6 => memory.reserved_high,
                7 => memory.used,
                8 => memory.used_high,
                _ => return Err(Code::InvalidValue),
            };
            // SAFETY: as above.
            unsafe { put(value.cast::<u64>(), figure.0) }
        })
    })
}

/// Where kernels are done, the release threshold (4) is set, and that reuse by chance (2) and by waits of its own (3) are off is accepted.
#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemPoolSetAttribute(pool: usize, attribute: c_int, value: *mut c_void) -> c_int {
    either(
        "cuMemPoolSetAttribute",
        || runtime::cudaMemPoolSetAttribute(pool, attribute, value),
        || {
            on_gpu_with_pools(|gpu| {
                let id = gpu.pool(pool)?;
                gpu.memory.sim().pool_memory(id)?;
                if value.is_null() {
                    return Err(Code::InvalidValue);
                }
                match attribute {
                    // SAFETY: the program passes a pointer to an int for these attributes; it is not null.
                    2 | 3 if unsafe { value.cast::<c_int>().read() } == 0 => Ok(()),
                    // SAFETY: the program passes a pointer to 64 bits for this attribute; it is not null.
                    4 => Ok(gpu.memory.sim().set_release_threshold(id, Bytes(unsafe { value.cast::<u64>().read() }))?),
                    _ => Err(Code::NotSupported),
                }
            })
        },
    )
}

#[unsafe(no_mangle)]
extern "C" fn cuMemPoolTrimTo(pool: usize, keep: usize) -> c_int {
    either(
        "cuMemPoolTrimTo",
        || runtime::cudaMemPoolTrimTo(pool, keep),
        || {
            on_gpu_with_pools(|gpu| {
                let id = gpu.pool(pool)?;
                Ok(gpu.memory.sim().trim_pool(id, Bytes(keep as u64))?)
            })
        },
    )
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemAllocFromPoolAsync(address: *mut usize, size: usize, pool: usize, stream: usize) -> c_int {
    // SAFETY: the program passes a pointer to an address.
    let skipped = || unsafe { runtime::cudaMallocFromPoolAsync(address, size, pool, stream) };
    either("cuMemAllocFromPoolAsync", skipped, || {
        on_gpu_with_pools(|gpu| {
            let (id, stream) = (gpu.pool(pool)?, gpu.stream(stream)?);
            let start = gpu.memory.allocate_in_order(Bytes(size as u64), id, stream)?;
            // SAFETY: as above.
            unsafe { put(address, start as usize) }
        })
    })
}

/// The memory goes when the stream comes to it.
#[unsafe(no_mangle)]
extern "C" fn cuMemFreeAsync(address: usize, stream: usize) -> c_int {
    either(
        "cuMemFreeAsync",
        || runtime::cudaFreeAsync(address, stream),
        || {
            on_gpu_with_pools(|gpu| {
                let id = gpu.stream(stream)?;
                let done_at = gpu.stream_done_at(stream)?;
                let number = gpu.memory.free_in_order(address as u64, id)?;
                gpu.execution.queue(done_at, Work::Free { address: address as u64, number });
                Ok(())
            })
        },
    )
}
