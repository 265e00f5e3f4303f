//! Functions of the CUDA runtime. A failed call must set `cudaGetLastError`, so the real function
//! is called with an impossible size.
#![allow(non_snake_case, reason = "wrappers have the names of the functions")]

use std::ffi::{c_int, c_uint, c_ulonglong, c_void};

use harness_gpu_settings::calls::Call;
use harness_gpu_settings::ffi::{Out, Text};

use crate::driver::replace_found;
use crate::limiter::{OUT_OF_MEMORY, Refused, limiter};
use crate::nesting::{is_nested, nested};
use crate::real::{self, limit_info, noted, wrap};

/// More than any device or host has: 1 PiB.
const IMPOSSIBLE: usize = 1 << 50;
/// The offset of `totalGlobalMem` in `cudaDeviceProp`, after name, UUID, LUID and node mask, in all
/// releases.
const TOTAL: usize = 288;

/// Requests device memory with `get`, which takes the place for the address and the size.
fn allocate(
    call: Call,
    address: Out<'_, usize>,
    size: usize,
    get: impl Fn(Out<'_, usize>, usize) -> c_int,
) -> c_int {
    real::allocate(call, address, size, |address| get(address, size))
        .unwrap_or_else(|Refused| fail(get))
}

/// Makes a call fail for lack of memory.
fn fail(get: impl Fn(Out<'_, usize>, usize) -> c_int) -> c_int {
    let mut unused = std::mem::MaybeUninit::uninit();
    nested(|| get(Some(&mut unused), IMPOSSIBLE));
    OUT_OF_MEMORY
}

wrap! {
    cudaMalloc(address: Out<'_, usize>, size: usize) = allocate(Call::Malloc, address, size, real);
    cudaMallocManaged(address: Out<'_, usize>, size: usize, flags: c_uint) =
        allocate(Call::Malloc, address, size, |address, size| real(address, size, flags));
    cudaFree(address: usize) = limiter().free(Call::Free, address as u64, || real(address));
    cudaMallocAsync, cudaMallocAsync_ptsz(address: Out<'_, usize>, size: usize, stream: usize) =
        allocate(Call::MallocAsync, address, size, |address, size| real(address, size, stream));
    cudaMallocFromPoolAsync, cudaMallocFromPoolAsync_ptsz(
        address: Out<'_, usize>, size: usize, pool: usize, stream: usize
    ) = allocate(Call::MallocAsync, address, size, |address, size| {
        real(address, size, pool, stream)
    });
    cudaFreeAsync, cudaFreeAsync_ptsz(address: usize, stream: usize) =
        limiter().free(Call::FreeAsync, address as u64, || real(address, stream));
    cudaHostAlloc(address: Out<'_, usize>, size: usize, flags: c_uint) =
        allocate_on_host(address, size, |address, size| real(address, size, flags));
    cudaMallocHost(address: Out<'_, usize>, size: usize) = allocate_on_host(address, size, real);
    cudaMemGetInfo(free: Out<'_, usize>, total: Out<'_, usize>) = limit_info(free, total, real);
    cudaGetDeviceProperties, cudaGetDeviceProperties_v2(into: *mut u8, device: c_int) =
        limit_properties(into, || real(into, device));
    cudaGetDriverEntryPoint(
        name: Text<'_>, function: Option<&mut *mut c_void>, flags: c_ulonglong, status: *mut c_int
    ) = replace_found(name, function, flags, |function| real(name, function, flags, status));
    cudaGetDriverEntryPointByVersion(
        name: Text<'_>, function: Option<&mut *mut c_void>, version: c_uint, flags: c_ulonglong,
        status: *mut c_int
    ) = replace_found(name, function, flags, |function| {
        real(name, function, version, flags, status)
    });
}

fn allocate_on_host(
    address: Out<'_, usize>,
    size: usize,
    get: impl Fn(Out<'_, usize>, usize) -> c_int,
) -> c_int {
    if is_nested() {
        return get(address, size);
    }
    limiter()
        .allocate_on_host(size, || get(address, size))
        .unwrap_or_else(|Refused| fail(get))
}

/// Calls a function that writes a `cudaDeviceProp`, and applies the limit to it.
fn limit_properties(into: *mut u8, get: impl FnOnce() -> c_int) -> c_int {
    noted(get, || {
        if !into.is_null() {
            // SAFETY: the real function wrote the whole structure, which is aligned as its widest
            // field.
            unsafe {
                let total = into.add(TOTAL).cast::<usize>();
                *total = limiter().visible_memory(0, *total).1;
            }
        }
    })
}
