//! The exported functions of the CUDA runtime and driver, declared as in
//! <https://docs.nvidia.com/cuda/cuda-runtime-api/> and
//! <https://docs.nvidia.com/cuda/cuda-driver-api/>. There is one device, with index 0, and one
//! context.

use std::ffi::{CStr, c_char, c_int, c_uint, c_ulonglong, c_void};

use harness_allocator::allocator::library::wire::{Code, LibraryCall};
use harness_gpu_settings::export;
use harness_gpu_settings::ffi::Out;

use crate::connection::{ask, last_error, remember, unanswered};
use crate::handles::{Event, Pool, Stream, put, small};
use crate::pools;

/// CUDA 13.0, in the form of `cudaRuntimeGetVersion`.
const VERSION: c_int = 13_000;
/// The handle of the only context.
const CONTEXT: usize = 0x4_0000_0000;
/// The device's name: only the harness knows the actual device.
const NAME: &CStr = c"the device of the harness";

/// Exports functions: `[RUNTIME / DRIVER](arguments) { result }`. Either name may be missing. A
/// runtime function stores its error for `cudaGetLastError`; the driver keeps none.
macro_rules! exports {
    ($([$($runtime:ident)? / $($driver:ident)?] $arguments:tt $body:block)*) => {
        $($(
            #[unsafe(no_mangle)]
            extern "C" fn $runtime $arguments -> c_int {
                let result: Result<(), Code> = $body;
                remember(result.err().unwrap_or(Code::Success))
            }
        )?
        $(
            #[unsafe(no_mangle)]
            extern "C" fn $driver $arguments -> c_int {
                let result: Result<(), Code> = $body;
                result.err().unwrap_or(Code::Success) as c_int
            }
        )?)*
    };
}

fn only_device(device: c_int) -> Result<(), Code> {
    if device == 0 {
        Ok(())
    } else {
        Err(Code::InvalidValue)
    }
}

/// Makes a call without a result.
fn order(call: LibraryCall) -> Result<(), Code> {
    ask(call).map(drop)
}

fn create_stream(stream: Out<'_, Stream>) -> Result<(), Code> {
    put(stream, Stream::new(small(ask(LibraryCall::CreateStream)?)?))
}

fn create_event(event: Out<'_, Event>) -> Result<(), Code> {
    put(event, Event::new(small(ask(LibraryCall::CreateEvent)?)?))
}

/// The driver rejects a request of zero bytes.
fn not_empty(size: usize) -> Result<u64, Code> {
    if size == 0 {
        Err(Code::InvalidValue)
    } else {
        Ok(size as u64)
    }
}

exports! {
    [/ cuInit](_: c_uint) { Ok(()) }
    [cudaRuntimeGetVersion /](version: Out<'_, c_int>) { put(version, VERSION) }
    [cudaDriverGetVersion / cuDriverGetVersion](version: Out<'_, c_int>) { put(version, VERSION) }

    [cudaGetDeviceCount / cuDeviceGetCount](count: Out<'_, c_int>) { put(count, 1) }
    [cudaGetDevice / cuCtxGetDevice](device: Out<'_, c_int>) { put(device, 0) }
    [cudaSetDevice /](device: c_int) { only_device(device) }
    [/ cuDeviceGet](device: Out<'_, c_int>, ordinal: c_int) {
        only_device(ordinal).and_then(|()| put(device, 0))
    }
    [cudaDeviceGetAttribute /](value: Out<'_, c_int>, attribute: c_int, device: c_int) {
        only_device(device).and_then(|()| {
            put(value, pools::device_attribute("cudaDeviceGetAttribute", attribute)?)
        })
    }
    [/ cuDeviceGetAttribute](value: Out<'_, c_int>, attribute: c_int, device: c_int) {
        only_device(device)
            .and_then(|()| put(value, pools::device_attribute("cuDeviceGetAttribute", attribute)?))
    }
    [/ cuDeviceGetName](name: *mut c_char, length: c_int, device: c_int) {
        let (bytes, room) = (NAME.to_bytes_with_nul(), usize::try_from(length).unwrap_or(0));
        if name.is_null() || room < bytes.len() {
            Err(Code::InvalidValue)
        } else {
            // SAFETY: the library passes a buffer of this size, and the name with its NUL fits.
            unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr().cast(), name, bytes.len()) };
            only_device(device)
        }
    }
    [/ cuDeviceTotalMem_v2](total: Out<'_, usize>, device: c_int) {
        only_device(device).and_then(|()| put(total, ask(LibraryCall::TotalMemory)? as usize))
    }
    // The UUID is all zeros.
    [/ cuDeviceGetUuid_v2](uuid: Out<'_, [u8; 16]>, device: c_int) {
        only_device(device).and_then(|()| put(uuid, [0; 16]))
    }
    [/ cuDevicePrimaryCtxRetain](context: Out<'_, usize>, device: c_int) {
        only_device(device).and_then(|()| put(context, CONTEXT))
    }
    [/ cuDevicePrimaryCtxRelease_v2](device: c_int) { only_device(device) }
    [/ cuCtxGetCurrent](context: Out<'_, usize>) { put(context, CONTEXT) }
    [/ cuCtxSetCurrent](context: usize) {
        if [0, CONTEXT].contains(&context) { Ok(()) } else { Err(Code::InvalidValue) }
    }
    [cudaDeviceSynchronize / cuCtxSynchronize]() { order(LibraryCall::Synchronize) }

    // A request of zero bytes returns null.
    [cudaMalloc /](address: Out<'_, u64>, size: usize) {
        if size == 0 {
            put(address, 0)
        } else {
            ask(LibraryCall::Allocate(size as u64)).and_then(|start| put(address, start))
        }
    }
    [/ cuMemAlloc_v2](address: Out<'_, u64>, size: usize) {
        not_empty(size).and_then(|size| put(address, ask(LibraryCall::Allocate(size))?))
    }
    [cudaFree / cuMemFree_v2](address: u64) {
        if address == 0 { Ok(()) } else { order(LibraryCall::Free(address)) }
    }
    [cudaMemGetInfo / cuMemGetInfo_v2](free: Out<'_, usize>, total: Out<'_, usize>) {
        ask(LibraryCall::FreeMemory)
            .and_then(|bytes| put(free, bytes as usize))
            .and_then(|()| put(total, ask(LibraryCall::TotalMemory)? as usize))
    }

    // Every stream of the harness is non-blocking.
    [cudaStreamCreate /](stream: Out<'_, Stream>) { create_stream(stream) }
    [cudaStreamCreateWithFlags / cuStreamCreate](stream: Out<'_, Stream>, _: c_uint) {
        create_stream(stream)
    }
    [cudaStreamDestroy / cuStreamDestroy_v2](stream: Stream) {
        stream.number().map(LibraryCall::DestroyStream).and_then(order)
    }
    [cudaStreamSynchronize / cuStreamSynchronize](stream: Stream) {
        stream.number().map(LibraryCall::SynchronizeStream).and_then(order)
    }
    [cudaStreamWaitEvent / cuStreamWaitEvent](stream: Stream, event: Event, _: c_uint) {
        stream.number().and_then(|stream| {
            let event = event.number()?;
            order(LibraryCall::WaitEvent { stream, event })
        })
    }
    [/ cuStreamGetCtx](_: Stream, context: Out<'_, usize>) { put(context, CONTEXT) }
    [cudaEventCreate /](event: Out<'_, Event>) { create_event(event) }
    [cudaEventCreateWithFlags / cuEventCreate](event: Out<'_, Event>, _: c_uint) {
        create_event(event)
    }
    [cudaEventDestroy / cuEventDestroy_v2](event: Event) {
        event.number().map(LibraryCall::DestroyEvent).and_then(order)
    }
    [cudaEventRecord / cuEventRecord](event: Event, stream: Stream) {
        event
            .number()
            .and_then(|event| order(LibraryCall::RecordEvent { event, stream: stream.number()? }))
    }
    [cudaEventQuery / cuEventQuery](event: Event) {
        event.number().map(LibraryCall::QueryEvent).and_then(order)
    }
    [cudaEventSynchronize / cuEventSynchronize](event: Event) {
        event.number().map(LibraryCall::SynchronizeEvent).and_then(order)
    }

    [cudaMallocAsync /](address: Out<'_, u64>, size: usize, stream: Stream) {
        if size == 0 {
            put(address, 0)
        } else {
            pools::allocate(pools::current(), size as u64, stream)
                .and_then(|start| put(address, start))
        }
    }
    [cudaMallocFromPoolAsync /](address: Out<'_, u64>, size: usize, pool: Pool, stream: Stream) {
        if size == 0 {
            put(address, 0)
        } else {
            pools::allocate(pool, size as u64, stream).and_then(|start| put(address, start))
        }
    }
    [/ cuMemAllocAsync](address: Out<'_, u64>, size: usize, stream: Stream) {
        not_empty(size)
            .and_then(|size| put(address, pools::allocate(pools::current(), size, stream)?))
    }
    [/ cuMemAllocFromPoolAsync](address: Out<'_, u64>, size: usize, pool: Pool, stream: Stream) {
        not_empty(size).and_then(|size| put(address, pools::allocate(pool, size, stream)?))
    }
    [cudaFreeAsync / cuMemFreeAsync](address: u64, stream: Stream) {
        if address == 0 {
            Ok(())
        } else {
            stream.number().and_then(|stream| order(LibraryCall::FreeAsync { address, stream }))
        }
    }
    [cudaMemPoolCreate / cuMemPoolCreate](pool: Out<'_, Pool>, _: *const c_void) {
        ask(LibraryCall::CreatePool).and_then(small).and_then(|number| put(pool, Pool::new(number)))
    }
    [cudaMemPoolDestroy / cuMemPoolDestroy](pool: Pool) { pools::destroy(pool) }
    [cudaMemPoolTrimTo / cuMemPoolTrimTo](pool: Pool, keep: usize) {
        pool.number().and_then(|pool| order(LibraryCall::TrimPool { pool, keep: keep as u64 }))
    }
    [cudaMemPoolSetAttribute / cuMemPoolSetAttribute](
        pool: Pool, attribute: c_int, value: *const c_void
    ) {
        // SAFETY: the library passes null or the attribute's value.
        unsafe { pools::set_attribute(pool, attribute, value) }
    }
    [cudaMemPoolGetAttribute / cuMemPoolGetAttribute](
        pool: Pool, attribute: c_int, value: *mut c_void
    ) {
        // SAFETY: the library passes null or a place for the attribute's value.
        unsafe { pools::get_attribute(pool, attribute, value) }
    }
    [cudaDeviceGetDefaultMemPool / cuDeviceGetDefaultMemPool](pool: Out<'_, Pool>, device: c_int) {
        only_device(device).and_then(|()| put(pool, Pool::new(0)))
    }
    [cudaDeviceGetMemPool / cuDeviceGetMemPool](pool: Out<'_, Pool>, device: c_int) {
        only_device(device).and_then(|()| put(pool, pools::current()))
    }
    [cudaDeviceSetMemPool / cuDeviceSetMemPool](device: c_int, pool: Pool) {
        only_device(device).and_then(|()| pools::set_current(pool))
    }

    [/ cuMemGetAllocationGranularity](granularity: Out<'_, usize>, _: *const c_void, _: c_uint) {
        ask(LibraryCall::Granularity).and_then(|bytes| put(granularity, bytes as usize))
    }
    // A requested address is only a hint, as in CUDA.
    [/ cuMemAddressReserve](
        address: Out<'_, u64>, size: usize, alignment: usize, _: u64, _: c_ulonglong
    ) {
        ask(LibraryCall::Reserve(size as u64)).and_then(|start| {
            if alignment > 0 && !start.is_multiple_of(alignment as u64) {
                ask(LibraryCall::Unreserve(start))?;
                return Err(unanswered(&format!(
                    "cuMemAddressReserve with an alignment of {alignment} bytes"
                )));
            }
            put(address, start)
        })
    }
    [/ cuMemAddressFree](address: u64, _: usize) { order(LibraryCall::Unreserve(address)) }
    [/ cuMemCreate](memory: Out<'_, u64>, size: usize, _: *const c_void, _: c_ulonglong) {
        ask(LibraryCall::Create(size as u64)).and_then(|handle| put(memory, handle))
    }
    [/ cuMemRelease](memory: u64) { order(LibraryCall::Release(memory)) }
    // CUDA supports only offset 0 yet.
    [/ cuMemMap](address: u64, size: usize, offset: usize, memory: u64, _: c_ulonglong) {
        if offset == 0 {
            order(LibraryCall::Map { address, size: size as u64, memory })
        } else {
            Err(Code::InvalidValue)
        }
    }
    [/ cuMemUnmap](address: u64, size: usize) {
        order(LibraryCall::Unmap { address, size: size as u64 })
    }
    // The only device can access all mappings.
    [/ cuMemSetAccess](_: u64, _: usize, _: *const c_void, _: usize) { Ok(()) }
}

export! {
    cudaGetLastError() = last_error(true);
    cudaPeekAtLastError() = last_error(false);
}

#[unsafe(no_mangle)]
extern "C" fn cudaGetErrorName(code: c_int) -> *const c_char {
    texts(code).0.as_ptr()
}

#[unsafe(no_mangle)]
extern "C" fn cudaGetErrorString(code: c_int) -> *const c_char {
    texts(code).1.as_ptr()
}

/// The name and the message of a result code.
const fn texts(code: c_int) -> (&'static CStr, &'static CStr) {
    match code {
        0 => (c"cudaSuccess", c"no error"),
        1 => (c"cudaErrorInvalidValue", c"invalid argument"),
        2 => (c"cudaErrorMemoryAllocation", c"out of memory"),
        400 => (
            c"cudaErrorInvalidResourceHandle",
            c"invalid resource handle",
        ),
        600 => (c"cudaErrorNotReady", c"device not ready"),
        801 => (c"cudaErrorNotSupported", c"operation not supported"),
        _ => (c"cudaErrorUnknown", c"unknown error"),
    }
}
