//! Functions of the CUDA driver (`libcuda`), declared as in <https://docs.nvidia.com/cuda/cuda-driver-api/>.
//!
//! Every exported function relies on its caller, the library, to pass pointers as the driver's documentation demands.

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};

use harness_allocator::allocator::library::wire::{Call, Code};

use crate::connection::ask;
use crate::device::{
    VERSION, allocate, create_event, create_stream, destroy_event, destroy_stream, memory, only_device, put, query_event, record_event,
    synchronize_event, synchronize_stream, wait_event,
};
use crate::handles::{Event, Pool, Stream};
use crate::pools;

/// The handle of the only context.
const CONTEXT: usize = 0x4_0000_0000;

/// The driver keeps no last error.
pub(crate) fn answer(done: Result<(), Code>) -> c_int {
    done.err().unwrap_or(Code::Success) as c_int
}

#[unsafe(no_mangle)]
extern "C" fn cuInit(_: c_uint) -> c_int {
    0
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuDriverGetVersion(version: *mut c_int) -> c_int {
    // SAFETY: the library passes valid pointers.
    answer(unsafe { put(version, VERSION) })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuDeviceGetCount(count: *mut c_int) -> c_int {
    // SAFETY: the library passes valid pointers.
    answer(unsafe { put(count, 1) })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuDeviceGet(device: *mut c_int, ordinal: c_int) -> c_int {
    // SAFETY: the library passes valid pointers.
    answer(only_device(ordinal).and_then(|()| unsafe { put(device, 0) }))
}

/// Writes a fixed name: only the harness knows the actual device.
const NAME: &CStr = c"the device of the harness";

#[unsafe(no_mangle)]
unsafe extern "C" fn cuDeviceGetName(name: *mut c_char, length: c_int, device: c_int) -> c_int {
    let (bytes, room) = (NAME.to_bytes_with_nul(), usize::try_from(length).unwrap_or(0));
    if name.is_null() || room < bytes.len() {
        return answer(Err(Code::InvalidValue));
    }
    // SAFETY: the library passes a buffer of this size, and the name with its NUL fits.
    unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr().cast(), name, bytes.len()) };
    answer(only_device(device))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuDeviceTotalMem_v2(total: *mut usize, device: c_int) -> c_int {
    let bytes = only_device(device).and_then(|()| ask(Call::TotalMemory));
    // SAFETY: the library passes valid pointers.
    answer(bytes.and_then(|bytes| unsafe { put(total, bytes as usize) }))
}

/// The only device has a UUID of zeros.
#[unsafe(no_mangle)]
unsafe extern "C" fn cuDeviceGetUuid_v2(uuid: *mut [u8; 16], device: c_int) -> c_int {
    // SAFETY: the library passes a pointer to 16 bytes.
    answer(only_device(device).and_then(|()| unsafe { put(uuid, [0; 16]) }))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuDevicePrimaryCtxRetain(context: *mut usize, device: c_int) -> c_int {
    // SAFETY: the library passes valid pointers.
    answer(only_device(device).and_then(|()| unsafe { put(context, CONTEXT) }))
}

#[unsafe(no_mangle)]
extern "C" fn cuDevicePrimaryCtxRelease_v2(device: c_int) -> c_int {
    answer(only_device(device))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuCtxGetCurrent(context: *mut usize) -> c_int {
    // SAFETY: the library passes valid pointers.
    answer(unsafe { put(context, CONTEXT) })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuCtxGetDevice(device: *mut c_int) -> c_int {
    // SAFETY: the library passes valid pointers.
    answer(unsafe { put(device, 0) })
}

#[unsafe(no_mangle)]
extern "C" fn cuCtxSetCurrent(context: usize) -> c_int {
    answer(if [0, CONTEXT].contains(&context) { Ok(()) } else { Err(Code::InvalidValue) })
}

#[unsafe(no_mangle)]
extern "C" fn cuCtxSynchronize() -> c_int {
    answer(ask(Call::Synchronize).map(drop))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemAlloc_v2(address: *mut u64, size: usize) -> c_int {
    // The driver refuses zero bytes; the runtime returns null.
    let start = if size == 0 { Err(Code::InvalidValue) } else { allocate(size) };
    // SAFETY: the library passes valid pointers.
    answer(start.and_then(|start| unsafe { put(address, start) }))
}

#[unsafe(no_mangle)]
extern "C" fn cuMemFree_v2(address: u64) -> c_int {
    answer(if address == 0 { Ok(()) } else { ask(Call::Free(address)).map(drop) })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemGetInfo_v2(free: *mut usize, total: *mut usize) -> c_int {
    // SAFETY: the library passes valid pointers.
    answer(unsafe { memory(free, total) })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemAllocAsync(address: *mut u64, size: usize, stream: Stream) -> c_int {
    // SAFETY: as for the other function.
    unsafe { cuMemAllocFromPoolAsync(address, size, pools::current(), stream) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemAllocFromPoolAsync(address: *mut u64, size: usize, pool: Pool, stream: Stream) -> c_int {
    let start = if size == 0 { Err(Code::InvalidValue) } else { pools::allocate(pool, size, stream) };
    // SAFETY: the library passes valid pointers.
    answer(start.and_then(|start| unsafe { put(address, start) }))
}

#[unsafe(no_mangle)]
extern "C" fn cuMemFreeAsync(address: u64, stream: Stream) -> c_int {
    answer(pools::free(address, stream))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemPoolCreate(pool: *mut Pool, _: *const c_void) -> c_int {
    // SAFETY: the library passes valid pointers.
    answer(pools::create().and_then(|made| unsafe { put(pool, made) }))
}

#[unsafe(no_mangle)]
extern "C" fn cuMemPoolDestroy(pool: Pool) -> c_int {
    answer(pools::destroy(pool))
}

#[unsafe(no_mangle)]
extern "C" fn cuMemPoolTrimTo(pool: Pool, keep: usize) -> c_int {
    answer(pools::trim(pool, keep))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemPoolSetAttribute(pool: Pool, attribute: c_int, value: *const c_void) -> c_int {
    // SAFETY: the library passes valid pointers.
    answer(unsafe { pools::set_attribute(pool, attribute, value) })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemPoolGetAttribute(pool: Pool, attribute: c_int, value: *mut c_void) -> c_int {
    // SAFETY: the library passes valid pointers.
    answer(unsafe { pools::get_attribute(pool, attribute, value) })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuDeviceGetDefaultMemPool(pool: *mut Pool, device: c_int) -> c_int {
    // SAFETY: the library passes valid pointers.
    answer(only_device(device).and_then(|()| unsafe { put(pool, Pool::DEFAULT) }))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuDeviceGetMemPool(pool: *mut Pool, device: c_int) -> c_int {
    // SAFETY: the library passes valid pointers.
    answer(only_device(device).and_then(|()| unsafe { put(pool, pools::current()) }))
}

#[unsafe(no_mangle)]
extern "C" fn cuDeviceSetMemPool(device: c_int, pool: Pool) -> c_int {
    answer(only_device(device).and_then(|()| pools::set_current(pool)))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuDeviceGetAttribute(value: *mut c_int, attribute: c_int, device: c_int) -> c_int {
    let told = only_device(device).and_then(|()| pools::device_attribute("cuDeviceGetAttribute", attribute));
    // SAFETY: the library passes valid pointers.
    answer(told.and_then(|told| unsafe { put(value, told) }))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuStreamCreate(stream: *mut Stream, _: c_uint) -> c_int {
    // SAFETY: the library passes valid pointers.
    answer(create_stream().and_then(|made| unsafe { put(stream, made) }))
}

/// Every stream belongs to the only context.
#[unsafe(no_mangle)]
unsafe extern "C" fn cuStreamGetCtx(_: Stream, context: *mut usize) -> c_int {
    // SAFETY: the library passes valid pointers.
    answer(unsafe { put(context, CONTEXT) })
}

#[unsafe(no_mangle)]
extern "C" fn cuStreamDestroy_v2(stream: Stream) -> c_int {
    answer(destroy_stream(stream))
}

#[unsafe(no_mangle)]
extern "C" fn cuStreamSynchronize(stream: Stream) -> c_int {
    answer(synchronize_stream(stream))
}

#[unsafe(no_mangle)]
extern "C" fn cuStreamWaitEvent(stream: Stream, event: Event, _: c_uint) -> c_int {
    answer(wait_event(stream, event))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuEventCreate(event: *mut Event, _: c_uint) -> c_int {
    // SAFETY: the library passes valid pointers.
    answer(create_event().and_then(|made| unsafe { put(event, made) }))
}

#[unsafe(no_mangle)]
extern "C" fn cuEventDestroy_v2(event: Event) -> c_int {
    answer(destroy_event(event))
}

#[unsafe(no_mangle)]
extern "C" fn cuEventRecord(event: Event, stream: Stream) -> c_int {
    answer(record_event(event, stream))
}

#[unsafe(no_mangle)]
extern "C" fn cuEventQuery(event: Event) -> c_int {
    answer(query_event(event))
}

#[unsafe(no_mangle)]
extern "C" fn cuEventSynchronize(event: Event) -> c_int {
    answer(synchronize_event(event))
}
