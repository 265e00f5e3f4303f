//! Stream-ordered pools. If kernels are no-ops, they are the runtime's: a device has one pool.

use std::cell::Cell;
use std::ffi::{c_int, c_uint, c_void};
use std::mem::MaybeUninit;

use harness_allocator::device::PooledDevice as _;
use harness_allocator::units::Bytes;

use harness_gpu_settings::ffi::Out;

use crate::code::{Code, answer, put};
use crate::context::{Gpu, by_kernel_mode, on_gpu, wait};
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

/// Runs `body` on the device of the thread's context if the driver supports pools.
fn on_gpu_with_pools(body: impl FnOnce(&mut Gpu<'_>) -> Result<(), Code>) -> Result<(), Code> {
    on_gpu(|gpu| if gpu.machine.settings.pools { body(gpu) } else { Err(Code::NotSupported) })
}

/// If kernels execute, only pools of unshared pinned memory (kind 1) on this device (location kind 1) without a limit are supported.
#[unsafe(no_mangle)]
extern "C" fn cuMemPoolCreate(pool: Out<'_, usize>, properties: Option<&PoolProperties>) -> c_int {
    let Some(wanted) = properties else { return answer(Err(Code::InvalidValue)) };
    let place = Cell::new(pool);
    let no_op = || runtime::cudaDeviceGetDefaultMemPool(place.take(), wanted.location);
    by_kernel_mode("cuMemPoolCreate", no_op, || {
        on_gpu_with_pools(|gpu| {
            let here = wanted.location_kind == 1 && usize::try_from(wanted.location) == Ok(gpu.memory.index());
            if wanted.kind != 1 || !here || wanted.reserved != [0; 54] {
                return Err(Code::InvalidValue);
            }
            if !wanted.attributes.is_null() || wanted.handle_types != 0 || wanted.most != 0 || wanted.usage != 0 {
                return Err(Code::NotSupported);
            }
            let id = gpu.memory.sim().create_pool(Bytes::ZERO)?;
            put(place.take(), gpu.pool_handle(id))
        })
    })
}

/// Waits for all work. A driver instead destroys the pool after its work.
#[unsafe(no_mangle)]
extern "C" fn cuMemPoolDestroy(pool: usize) -> c_int {
    let destroy = |gpu: &mut Gpu<'_>| {
        let id = gpu.pool(pool)?;
        Ok(gpu.memory.sim().destroy_pool(id)?)
    };
    let execute = || on_gpu_with_pools(|_| Ok(())).and_then(|()| wait(|gpu| Ok(gpu.memory.sim().all_done_at()), destroy));
    by_kernel_mode("cuMemPoolDestroy", || 0, execute)
}

/// Attributes 5 to 8 are current and peak bytes, reserved and used, of 64 bits.
#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemPoolGetAttribute(pool: usize, attribute: c_int, value: *mut c_void) -> c_int {
    // SAFETY: the program passes a number of the attribute's size.
    let no_op = || unsafe { runtime::cudaMemPoolGetAttribute(pool, attribute, value) };
    by_kernel_mode("cuMemPoolGetAttribute", no_op, || {
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
            // SAFETY: as above; null is refused.
            put(unsafe { value.cast::<MaybeUninit<u64>>().as_mut() }, figure.0)
        })
    })
}

/// If kernels execute, sets the release threshold (4), and accepts that opportunistic reuse (2) and reuse by internal dependencies (3) are off.
#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemPoolSetAttribute(pool: usize, attribute: c_int, value: *mut c_void) -> c_int {
    by_kernel_mode(
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
                    // SAFETY: these attributes are an int, and the pointer is not null.
                    2 | 3 if unsafe { value.cast::<c_int>().read() } == 0 => Ok(()),
                    // SAFETY: this attribute has 64 bits, and the pointer is not null.
                    4 => Ok(gpu.memory.sim().set_release_threshold(id, Bytes(unsafe { value.cast::<u64>().read() }))?),
                    _ => Err(Code::NotSupported),
                }
            })
        },
    )
}

#[unsafe(no_mangle)]
extern "C" fn cuMemPoolTrimTo(pool: usize, keep: usize) -> c_int {
    by_kernel_mode(
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
extern "C" fn cuMemAllocFromPoolAsync(address: Out<'_, usize>, size: usize, pool: usize, stream: usize) -> c_int {
    let place = Cell::new(address);
    let no_op = || runtime::cudaMallocFromPoolAsync(place.take(), size, pool, stream);
    by_kernel_mode("cuMemAllocFromPoolAsync", no_op, || {
        on_gpu_with_pools(|gpu| {
            let (id, stream) = (gpu.pool(pool)?, gpu.stream(stream)?);
            let start = gpu.memory.allocate_in_order(Bytes(size as u64), id, stream)?;
            put(place.take(), start as usize)
        })
    })
}

/// The memory is freed after the earlier work of the stream.
#[unsafe(no_mangle)]
extern "C" fn cuMemFreeAsync(address: usize, stream: usize) -> c_int {
    by_kernel_mode(
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
