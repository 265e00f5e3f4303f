//! Functions of the CUDA runtime (`libcudart`), declared as in <https://docs.nvidia.com/cuda/cuda-runtime-api/>.

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};

use harness_allocator::allocator::library::wire::{Call, Code};

use crate::connection::{ask, last_error, remember};
use crate::device::{
    VERSION, allocate, create_event, create_stream, destroy_event, destroy_stream, memory, only_device, put, query_event, record_event,
    synchronize_event, synchronize_stream, wait_event,
};
use crate::handles::{Event, Pool, Stream};
use crate::pools;

/// Stores and returns a call's result code.
fn answer(done: Result<(), Code>) -> c_int {
    remember(done.err().unwrap_or(Code::Success))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cudaMalloc(address: *mut usize, size: usize) -> c_int {
    // SAFETY: the library passes valid pointers.
    answer(allocate(size).and_then(|start| unsafe { put(address, start as usize) }))
}

#[unsafe(no_mangle)]
extern "C" fn cudaFree(address: usize) -> c_int {
    answer(if address == 0 { Ok(()) } else { ask(Call::Free(address as u64)).map(drop) })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cudaMemGetInfo(free: *mut usize, total: *mut usize) -> c_int {
    // SAFETY: the library passes valid pointers.
    answer(unsafe { memory(free, total) })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cudaGetDevice(device: *mut c_int) -> c_int {
    // SAFETY: the library passes valid pointers.
    answer(unsafe { put(device, 0) })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cudaGetDeviceCount(count: *mut c_int) -> c_int {
    // SAFETY: the library passes valid pointers.
    answer(unsafe { put(count, 1) })
}

#[unsafe(no_mangle)]
extern "C" fn cudaSetDevice(device: c_int) -> c_int {
    answer(only_device(device))
}

#[unsafe(no_mangle)]
extern "C" fn cudaDeviceSynchronize() -> c_int {
    answer(ask(Call::Synchronize).map(drop))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cudaRuntimeGetVersion(version: *mut c_int) -> c_int {
    // SAFETY: the library passes valid pointers.
    answer(unsafe { put(version, VERSION) })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cudaDriverGetVersion(version: *mut c_int) -> c_int {
    // SAFETY: the library passes valid pointers.
    answer(unsafe { put(version, VERSION) })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cudaStreamCreate(stream: *mut Stream) -> c_int {
    // SAFETY: the library passes valid pointers.
    answer(create_stream().and_then(|made| unsafe { put(stream, made) }))
}

/// Every stream of the harness is non-blocking.
#[unsafe(no_mangle)]
unsafe extern "C" fn cudaStreamCreateWithFlags(stream: *mut Stream, _: c_uint) -> c_int {
    // SAFETY: as for the other function.
    unsafe { cudaStreamCreate(stream) }
}

#[unsafe(no_mangle)]
extern "C" fn cudaStreamDestroy(stream: Stream) -> c_int {
    answer(destroy_stream(stream))
}

#[unsafe(no_mangle)]
extern "C" fn cudaStreamSynchronize(stream: Stream) -> c_int {
    answer(synchronize_stream(stream))
}

#[unsafe(no_mangle)]
extern "C" fn cudaStreamWaitEvent(stream: Stream, event: Event, _: c_uint) -> c_int {
    answer(wait_event(stream, event))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cudaEventCreate(event: *mut Event) -> c_int {
    // SAFETY: the library passes valid pointers.
    answer(create_event().and_then(|made| unsafe { put(event, made) }))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cudaEventCreateWithFlags(event: *mut Event, _: c_uint) -> c_int {
    // SAFETY: as for the other function.
    unsafe { cudaEventCreate(event) }
}

#[unsafe(no_mangle)]
extern "C" fn cudaEventDestroy(event: Event) -> c_int {
    answer(destroy_event(event))
}

#[unsafe(no_mangle)]
extern "C" fn cudaEventRecord(event: Event, stream: Stream) -> c_int {
    answer(record_event(event, stream))
}

#[unsafe(no_mangle)]
extern "C" fn cudaEventQuery(event: Event) -> c_int {
    answer(query_event(event))
}

#[unsafe(no_mangle)]
extern "C" fn cudaEventSynchronize(event: Event) -> c_int {
    answer(synchronize_event(event))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cudaMallocAsync(address: *mut usize, size: usize, stream: Stream) -> c_int {
    // SAFETY: as for the other function.
    unsafe { cudaMallocFromPoolAsync(address, size, pools::current(), stream) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cudaMallocFromPoolAsync(address: *mut usize, size: usize, pool: Pool, stream: Stream) -> c_int {
    let start = if size == 0 { Ok(0) } else { pools::allocate(pool, size, stream) };
    // SAFETY: the library passes valid pointers.
    answer(start.and_then(|start| unsafe { put(address, start as usize) }))
}

#[unsafe(no_mangle)]
extern "C" fn cudaFreeAsync(address: usize, stream: Stream) -> c_int {
    answer(pools::free(address as u64, stream))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cudaMemPoolCreate(pool: *mut Pool, _: *const c_void) -> c_int {
    // SAFETY: the library passes valid pointers.
    answer(pools::create().and_then(|made| unsafe { put(pool, made) }))
}

#[unsafe(no_mangle)]
extern "C" fn cudaMemPoolDestroy(pool: Pool) -> c_int {
    answer(pools::destroy(pool))
}

#[unsafe(no_mangle)]
extern "C" fn cudaMemPoolTrimTo(pool: Pool, keep: usize) -> c_int {
    answer(pools::trim(pool, keep))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cudaMemPoolSetAttribute(pool: Pool, attribute: c_int, value: *const c_void) -> c_int {
    // SAFETY: the library passes valid pointers.
    answer(unsafe { pools::set_attribute(pool, attribute, value) })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cudaMemPoolGetAttribute(pool: Pool, attribute: c_int, value: *mut c_void) -> c_int {
    // SAFETY: the library passes valid pointers.
    answer(unsafe { pools::get_attribute(pool, attribute, value) })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cudaDeviceGetDefaultMemPool(pool: *mut Pool, device: c_int) -> c_int {
    // SAFETY: the library passes valid pointers.
    answer(only_device(device).and_then(|()| unsafe { put(pool, Pool::DEFAULT) }))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cudaDeviceGetMemPool(pool: *mut Pool, device: c_int) -> c_int {
    // SAFETY: the library passes valid pointers.
    answer(only_device(device).and_then(|()| unsafe { put(pool, pools::current()) }))
}

#[unsafe(no_mangle)]
extern "C" fn cudaDeviceSetMemPool(device: c_int, pool: Pool) -> c_int {
    answer(only_device(device).and_then(|()| pools::set_current(pool)))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cudaDeviceGetAttribute(value: *mut c_int, attribute: c_int, device: c_int) -> c_int {
    let told = only_device(device).and_then(|()| pools::device_attribute("cudaDeviceGetAttribute", attribute));
    // SAFETY: the library passes valid pointers.
    answer(told.and_then(|told| unsafe { put(value, told) }))
}

#[unsafe(no_mangle)]
extern "C" fn cudaGetLastError() -> c_int {
    last_error(true)
}

#[unsafe(no_mangle)]
extern "C" fn cudaPeekAtLastError() -> c_int {
    last_error(false)
}

#[unsafe(no_mangle)]
extern "C" fn cudaGetErrorName(code: c_int) -> *const c_char {
    words(code).0.as_ptr()
}

#[unsafe(no_mangle)]
extern "C" fn cudaGetErrorString(code: c_int) -> *const c_char {
    words(code).1.as_ptr()
}

/// Names and texts of the result codes used here.
const fn words(code: c_int) -> (&'static CStr, &'static CStr) {
    match code {
        0 => (c"cudaSuccess", c"no error"),
        1 => (c"cudaErrorInvalidValue", c"invalid argument"),
        2 => (c"cudaErrorMemoryAllocation", c"out of memory"),
        400 => (c"cudaErrorInvalidResourceHandle", c"invalid resource handle"),
        600 => (c"cudaErrorNotReady", c"device not ready"),
        801 => (c"cudaErrorNotSupported", c"operation not supported"),
        _ => (c"cudaErrorUnknown", c"unknown error"),
    }
}
