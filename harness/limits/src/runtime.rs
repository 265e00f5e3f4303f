//! Functions of the CUDA runtime. A failed call must set `cudaGetLastError`, so the real function is called with an impossible size.
#![allow(non_snake_case, reason = "wrappers have the names of the functions")]

use std::ffi::{c_int, c_uint, c_ulonglong, c_void};

use harness_gpu_settings::calls::Call;
use harness_gpu_settings::ffi::{Out, Text};

use crate::driver::replace_found;
use crate::limiter::{OUT_OF_MEMORY, Refused, SUCCESS, limiter};
use crate::real::{self, functions, is_nested, limit_info, nested, real};

/// More than any device or host has: 1 PiB.
const IMPOSSIBLE: usize = 1 << 50;
/// The offset of `totalGlobalMem` in `cudaDeviceProp`, after name, UUID, LUID and node mask, in all releases.
const TOTAL: usize = 288;

type Allocate = unsafe extern "C" fn(Out<'_, usize>, usize) -> c_int;
type AllocateInOrder = unsafe extern "C" fn(Out<'_, usize>, usize, usize) -> c_int;
type AllocateFromPool = unsafe extern "C" fn(Out<'_, usize>, usize, usize, usize) -> c_int;
type Properties = unsafe extern "C" fn(*mut u8, c_int) -> c_int;

functions! {
    cudaMalloc: Allocate,
    cudaMallocManaged: unsafe extern "C" fn(Out<'_, usize>, usize, c_uint) -> c_int,
    cudaFree: unsafe extern "C" fn(usize) -> c_int,
    cudaMallocAsync: AllocateInOrder,
    cudaMallocAsync_ptsz: AllocateInOrder,
    cudaMallocFromPoolAsync: AllocateFromPool,
    cudaMallocFromPoolAsync_ptsz: AllocateFromPool,
    cudaFreeAsync: unsafe extern "C" fn(usize, usize) -> c_int,
    cudaFreeAsync_ptsz: unsafe extern "C" fn(usize, usize) -> c_int,
    cudaHostAlloc: unsafe extern "C" fn(Out<'_, usize>, usize, c_uint) -> c_int,
    cudaMallocHost: Allocate,
    cudaMemGetInfo: unsafe extern "C" fn(Out<'_, usize>, Out<'_, usize>) -> c_int,
    cudaGetDeviceProperties: Properties,
    cudaGetDeviceProperties_v2: Properties,
    cudaGetDriverEntryPoint: unsafe extern "C" fn(Text<'_>, Option<&mut *mut c_void>, c_ulonglong, *mut c_int) -> c_int,
    cudaGetDriverEntryPointByVersion: unsafe extern "C" fn(Text<'_>, Option<&mut *mut c_void>, c_uint, c_ulonglong, *mut c_int) -> c_int,
}

/// Requests device memory with `get`, which takes the place for the address and the size.
fn allocate(call: Call, address: Out<'_, usize>, size: usize, get: impl Fn(Out<'_, usize>, usize) -> c_int) -> c_int {
    real::allocate(call, address, size, |address| get(address, size)).unwrap_or_else(|Refused| fail(get))
}

/// Makes a call fail for lack of memory.
fn fail(get: impl Fn(Out<'_, usize>, usize) -> c_int) -> c_int {
    let mut unused = std::mem::MaybeUninit::uninit();
    nested(|| get(Some(&mut unused), IMPOSSIBLE));
    OUT_OF_MEMORY
}

extern "C" fn cudaMalloc(address: Out<'_, usize>, size: usize) -> c_int {
    allocate(Call::Malloc, address, size, |address, size| real!(cudaMalloc(address, size)))
}

extern "C" fn cudaMallocManaged(address: Out<'_, usize>, size: usize, flags: c_uint) -> c_int {
    let get = |address: Out<'_, usize>, size| real!(cudaMallocManaged(address, size, flags));
    allocate(Call::Malloc, address, size, get)
}

extern "C" fn cudaFree(address: usize) -> c_int {
    limiter().free(Call::Free, address as u64, || real!(cudaFree(address)))
}

/// Stream-ordered functions, for the default stream of the process or of the thread.
macro_rules! in_order {
    ($allocate:ident, $allocate_from_pool:ident, $free:ident) => {
        extern "C" fn $allocate(address: Out<'_, usize>, size: usize, stream: usize) -> c_int {
            let get = |address: Out<'_, usize>, size| real!($allocate(address, size, stream));
            allocate(Call::MallocAsync, address, size, get)
        }

        extern "C" fn $allocate_from_pool(address: Out<'_, usize>, size: usize, pool: usize, stream: usize) -> c_int {
            let get = |address: Out<'_, usize>, size| real!($allocate_from_pool(address, size, pool, stream));
            allocate(Call::MallocAsync, address, size, get)
        }

        extern "C" fn $free(address: usize, stream: usize) -> c_int {
            limiter().free(Call::FreeAsync, address as u64, || real!($free(address, stream)))
        }
    };
}

in_order!(cudaMallocAsync, cudaMallocFromPoolAsync, cudaFreeAsync);
in_order!(cudaMallocAsync_ptsz, cudaMallocFromPoolAsync_ptsz, cudaFreeAsync_ptsz);

fn allocate_on_host(address: Out<'_, usize>, size: usize, get: impl Fn(Out<'_, usize>, usize) -> c_int) -> c_int {
    if is_nested() {
        return get(address, size);
    }
    limiter().allocate_on_host(size, || get(address, size)).unwrap_or_else(|Refused| fail(get))
}

extern "C" fn cudaHostAlloc(address: Out<'_, usize>, size: usize, flags: c_uint) -> c_int {
    allocate_on_host(address, size, |address, size| real!(cudaHostAlloc(address, size, flags)))
}

extern "C" fn cudaMallocHost(address: Out<'_, usize>, size: usize) -> c_int {
    allocate_on_host(address, size, |address, size| real!(cudaMallocHost(address, size)))
}

extern "C" fn cudaMemGetInfo(free: Out<'_, usize>, total: Out<'_, usize>) -> c_int {
    limit_info(free, total, |free, total| real!(cudaMemGetInfo(free, total)))
}

/// Calls a function that writes a `cudaDeviceProp`, and applies the limit to it.
fn limit_properties(into: *mut u8, get: impl FnOnce() -> c_int) -> c_int {
    let code = nested(get);
    if code == SUCCESS && !is_nested() && !into.is_null() {
        // SAFETY: the real function wrote the whole structure, which is aligned as its widest field.
        unsafe {
            let total = into.add(TOTAL).cast::<usize>();
            *total = limiter().visible_memory(0, *total).1;
        }
    }
    code
}

extern "C" fn cudaGetDeviceProperties(into: *mut u8, device: c_int) -> c_int {
    limit_properties(into, || real!(cudaGetDeviceProperties(into, device)))
}

extern "C" fn cudaGetDeviceProperties_v2(into: *mut u8, device: c_int) -> c_int {
    limit_properties(into, || real!(cudaGetDeviceProperties_v2(into, device)))
}

extern "C" fn cudaGetDriverEntryPoint(name: Text<'_>, function: Option<&mut *mut c_void>, flags: c_ulonglong, status: *mut c_int) -> c_int {
    replace_found(name, function, flags, |function| real!(cudaGetDriverEntryPoint(name, function, flags, status)))
}

extern "C" fn cudaGetDriverEntryPointByVersion(
    name: Text<'_>,
    function: Option<&mut *mut c_void>,
    version: c_uint,
    flags: c_ulonglong,
    status: *mut c_int,
) -> c_int {
    replace_found(name, function, flags, |function| real!(cudaGetDriverEntryPointByVersion(name, function, version, flags, status)))
}
