//! Functions of CUDA's runtime. A failure is the runtime's own, so that `cudaGetLastError` tells it: an impossible size is asked for.
#![allow(non_snake_case, reason = "wrappers have the names of the functions")]

use std::ffi::{c_char, c_int, c_uint, c_ulonglong, c_void};

use harness_gpu_settings::calls::{FaultyCall, SlowCall};

use crate::accounts::Kind;
use crate::driver::unversioned;
use crate::limiter::{OUT_OF_MEMORY, Refused, SUCCESS, limiter};
use crate::real::{functions, inside, is_inside, real};

/// More than any device or host has: 1 PiB.
const IMPOSSIBLE: usize = 1 << 50;
/// Where `cudaDeviceProp` has `totalGlobalMem`: behind name, UUID, LUID and node mask, in all releases.
const TOTAL: usize = 288;

type Allocate = unsafe extern "C" fn(*mut usize, usize) -> c_int;
type AllocateInOrder = unsafe extern "C" fn(*mut usize, usize, usize) -> c_int;
type AllocateFromPool = unsafe extern "C" fn(*mut usize, usize, usize, usize) -> c_int;
type Properties = unsafe extern "C" fn(*mut u8, c_int) -> c_int;

functions! {
    cudaMalloc: Allocate,
    cudaMallocManaged: unsafe extern "C" fn(*mut usize, usize, c_uint) -> c_int,
    cudaFree: unsafe extern "C" fn(usize) -> c_int,
    cudaMallocAsync: AllocateInOrder,
    cudaMallocAsync_ptsz: AllocateInOrder,
    cudaMallocFromPoolAsync: AllocateFromPool,
    cudaMallocFromPoolAsync_ptsz: AllocateFromPool,
    cudaFreeAsync: unsafe extern "C" fn(usize, usize) -> c_int,
    cudaFreeAsync_ptsz: unsafe extern "C" fn(usize, usize) -> c_int,
    cudaHostAlloc: unsafe extern "C" fn(*mut usize, usize, c_uint) -> c_int,
    cudaMallocHost: Allocate,
    cudaMemGetInfo: unsafe extern "C" fn(*mut usize, *mut usize) -> c_int,
    cudaGetDeviceProperties: Properties,
    cudaGetDeviceProperties_v2: Properties,
    cudaGetDriverEntryPoint: unsafe extern "C" fn(*const c_char, *mut *mut c_void, c_ulonglong, *mut c_int) -> c_int,
    cudaGetDriverEntryPointByVersion: unsafe extern "C" fn(*const c_char, *mut *mut c_void, c_uint, c_ulonglong, *mut c_int) -> c_int,
}

/// Gets device memory by a call that writes its address.
///
/// # Safety
/// The address may be written.
unsafe fn allocate(
    (call, kind): (FaultyCall, Kind),
    (address, size): (*mut usize, usize),
    get: impl Fn(*mut usize, usize) -> c_int,
) -> c_int {
    // A size of zero gets nothing.
    if is_inside() || size == 0 || address.is_null() {
        return get(address, size);
    }
    let got = limiter().allocate((call, kind, size), || {
        let code = get(address, size);
        // SAFETY: as the caller promises; where the call failed, it is not looked at.
        (code, if code == SUCCESS { unsafe { *address as u64 } } else { 0 })
    });
    got.unwrap_or_else(|Refused| fail(get))
}

/// Has a call fail for want of memory.
fn fail(get: impl Fn(*mut usize, usize) -> c_int) -> c_int {
    let mut nowhere = 0;
    inside(|| get(&raw mut nowhere, IMPOSSIBLE));
    OUT_OF_MEMORY
}

unsafe extern "C" fn cudaMalloc(address: *mut usize, size: usize) -> c_int {
    let get = |address, size| real!(cudaMalloc(address, size));
    // SAFETY: the program passes a pointer to a pointer.
    unsafe { allocate((FaultyCall::Malloc, Kind::Pages), (address, size), get) }
}

unsafe extern "C" fn cudaMallocManaged(address: *mut usize, size: usize, flags: c_uint) -> c_int {
    let get = |address, size| real!(cudaMallocManaged(address, size, flags));
    // SAFETY: the program passes a pointer to a pointer.
    unsafe { allocate((FaultyCall::Malloc, Kind::Pages), (address, size), get) }
}

unsafe extern "C" fn cudaFree(address: usize) -> c_int {
    if is_inside() { real!(cudaFree(address)) } else { limiter().free(SlowCall::Free, address as u64, || real!(cudaFree(address))) }
}

/// Calls in the order of a stream, as the default stream of the process or of the thread.
macro_rules! in_order {
    ($allocate:ident, $allocate_from_pool:ident, $free:ident) => {
        unsafe extern "C" fn $allocate(address: *mut usize, size: usize, stream: usize) -> c_int {
            let get = |address, size| real!($allocate(address, size, stream));
            // SAFETY: the program passes a pointer to a pointer.
            unsafe { allocate((FaultyCall::MallocAsync, Kind::Pooled), (address, size), get) }
        }

        unsafe extern "C" fn $allocate_from_pool(address: *mut usize, size: usize, pool: usize, stream: usize) -> c_int {
            let get = |address, size| real!($allocate_from_pool(address, size, pool, stream));
            // SAFETY: the program passes a pointer to a pointer.
            unsafe { allocate((FaultyCall::MallocAsync, Kind::Pooled), (address, size), get) }
        }

        unsafe extern "C" fn $free(address: usize, stream: usize) -> c_int {
            let free = || real!($free(address, stream));
            if is_inside() { free() } else { limiter().free(SlowCall::FreeAsync, address as u64, free) }
        }
    };
}

in_order!(cudaMallocAsync, cudaMallocFromPoolAsync, cudaFreeAsync);
in_order!(cudaMallocAsync_ptsz, cudaMallocFromPoolAsync_ptsz, cudaFreeAsync_ptsz);

fn allocate_on_host((address, size): (*mut usize, usize), get: impl Fn(*mut usize, usize) -> c_int) -> c_int {
    if is_inside() {
        return get(address, size);
    }
    limiter().allocate_on_host(size, || get(address, size)).unwrap_or_else(|Refused| fail(get))
}

unsafe extern "C" fn cudaHostAlloc(address: *mut usize, size: usize, flags: c_uint) -> c_int {
    allocate_on_host((address, size), |address, size| real!(cudaHostAlloc(address, size, flags)))
}

unsafe extern "C" fn cudaMallocHost(address: *mut usize, size: usize) -> c_int {
    allocate_on_host((address, size), |address, size| real!(cudaMallocHost(address, size)))
}

unsafe extern "C" fn cudaMemGetInfo(free: *mut usize, total: *mut usize) -> c_int {
    let code = inside(|| real!(cudaMemGetInfo(free, total)));
    if code == SUCCESS && !is_inside() && !free.is_null() && !total.is_null() {
        // SAFETY: the real function wrote both.
        unsafe { (*free, *total) = limiter().seen(*free, *total) };
    }
    code
}

/// Tells the limit in properties that the real function wrote.
///
/// # Safety
/// Where `code` is success, `into` is a whole `cudaDeviceProp`.
unsafe fn limit_properties(into: *mut u8, code: c_int) -> c_int {
    if code == SUCCESS && !is_inside() && !into.is_null() {
        // SAFETY: as the caller promises; the structure is aligned as its widest field.
        unsafe {
            let total = into.add(TOTAL).cast::<usize>();
            *total = limiter().seen(0, *total).1;
        }
    }
    code
}

unsafe extern "C" fn cudaGetDeviceProperties(into: *mut u8, device: c_int) -> c_int {
    let code = inside(|| real!(cudaGetDeviceProperties(into, device)));
    // SAFETY: the real function wrote it.
    unsafe { limit_properties(into, code) }
}

unsafe extern "C" fn cudaGetDeviceProperties_v2(into: *mut u8, device: c_int) -> c_int {
    let code = inside(|| real!(cudaGetDeviceProperties_v2(into, device)));
    // SAFETY: the real function wrote it.
    unsafe { limit_properties(into, code) }
}

unsafe extern "C" fn cudaGetDriverEntryPoint(
    name: *const c_char,
    function: *mut *mut c_void,
    flags: c_ulonglong,
    status: *mut c_int,
) -> c_int {
    let code = real!(cudaGetDriverEntryPoint(name, function, flags, status));
    // SAFETY: the name is the program's, and the real function wrote the address.
    unsafe { unversioned(code, name, function, flags) }
}

unsafe extern "C" fn cudaGetDriverEntryPointByVersion(
    name: *const c_char,
    function: *mut *mut c_void,
    version: c_uint,
    flags: c_ulonglong,
    status: *mut c_int,
) -> c_int {
    let code = real!(cudaGetDriverEntryPointByVersion(name, function, version, flags, status));
    // SAFETY: as for the other function.
    unsafe { unversioned(code, name, function, flags) }
}
