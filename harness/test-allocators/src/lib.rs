//! Test only: allocators with the interface of PyTorch's `CUDAPluggableAllocator`, as others write them, in one shared library. They call the CUDA runtime,
//! which whoever loads the library has loaded before.
//!
//! * `plain_*` calls the driver for each request; `cached_*` keeps what is freed, by size and stream, until `cached_empty_cache`;
//! * `twice_malloc` hands out its first block again and again; `inside_malloc` blocks that overlap; `odd_malloc` addresses that are not aligned;
//! * `leaky_free` takes back nothing; `double_free` gives each block to the driver twice;
//! * `crash_malloc` writes to address 0 at its third call, `abort_free` ends the process at its second;
//! * `async_malloc` calls a function of CUDA that not every device of the harness has.

use std::ffi::{c_int, c_void};
use std::ptr;
use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};

unsafe extern "C" {
    fn cudaMalloc(address: *mut *mut c_void, size: usize) -> c_int;
    fn cudaFree(address: *mut c_void) -> c_int;
    fn cudaMallocAsync(address: *mut *mut c_void, size: usize, stream: *mut c_void) -> c_int;
}

fn take(size: isize) -> *mut c_void {
    let mut address = ptr::null_mut();
    // SAFETY: `address` is a place for the answer.
    match unsafe { cudaMalloc(&raw mut address, size.unsigned_abs()) } {
        0 => address,
        _ => ptr::null_mut(),
    }
}

fn give_back(address: *mut c_void) {
    // SAFETY: the runtime refuses an address that it does not know.
    unsafe { cudaFree(address) };
}

#[unsafe(no_mangle)]
extern "C" fn plain_malloc(size: isize, _: c_int, _: *mut c_void) -> *mut c_void {
    take(size)
}

#[unsafe(no_mangle)]
extern "C" fn plain_free(address: *mut c_void, _: isize, _: c_int, _: *mut c_void) {
    give_back(address);
}

/// What is free: size, stream and address.
static CACHE: Mutex<Vec<(isize, usize, usize)>> = Mutex::new(Vec::new());

#[unsafe(no_mangle)]
extern "C" fn cached_malloc(size: isize, _: c_int, stream: *mut c_void) -> *mut c_void {
    let mut cache = CACHE.lock().unwrap_or_else(PoisonError::into_inner);
    let fitting = cache.iter().position(|&(free, of, _)| (free, of) == (size, stream.addr()));
    if let Some(index) = fitting {
        return ptr::with_exposed_provenance_mut(cache.swap_remove(index).2);
    }
    drop(cache);
    let taken = take(size);
    if !taken.is_null() {
        return taken;
    }
    cached_empty_cache();
    take(size)
}

#[unsafe(no_mangle)]
extern "C" fn cached_free(address: *mut c_void, size: isize, _: c_int, stream: *mut c_void) {
    CACHE.lock().unwrap_or_else(PoisonError::into_inner).push((size, stream.addr(), address.expose_provenance()));
}

#[unsafe(no_mangle)]
extern "C" fn cached_empty_cache() {
    for (_, _, address) in CACHE.lock().unwrap_or_else(PoisonError::into_inner).drain(..) {
        give_back(ptr::with_exposed_provenance_mut(address));
    }
}

#[unsafe(no_mangle)]
extern "C" fn twice_malloc(size: isize, _: c_int, _: *mut c_void) -> *mut c_void {
    static FIRST: AtomicUsize = AtomicUsize::new(0);
    match FIRST.load(Ordering::Relaxed) {
        0 => {
            let taken = take(size);
            FIRST.store(taken.expose_provenance(), Ordering::Relaxed);
            taken
        }
        first => ptr::with_exposed_provenance_mut(first),
    }
}

#[unsafe(no_mangle)]
extern "C" fn inside_malloc(size: isize, _: c_int, _: *mut c_void) -> *mut c_void {
    static NEXT: AtomicUsize = AtomicUsize::new(0);
    if NEXT.load(Ordering::Relaxed) == 0 {
        NEXT.store(take(64 << 20).expose_provenance(), Ordering::Relaxed);
    }
    // Half of what it should go on by.
    ptr::with_exposed_provenance_mut(NEXT.fetch_add(size.unsigned_abs() / 2, Ordering::Relaxed))
}

#[unsafe(no_mangle)]
extern "C" fn odd_malloc(size: isize, _: c_int, _: *mut c_void) -> *mut c_void {
    take(size + 8).wrapping_byte_add(8)
}

#[unsafe(no_mangle)]
extern "C" fn leaky_free(_: *mut c_void, _: isize, _: c_int, _: *mut c_void) {}

#[unsafe(no_mangle)]
extern "C" fn double_free(address: *mut c_void, _: isize, _: c_int, _: *mut c_void) {
    give_back(address);
    give_back(address);
}

#[unsafe(no_mangle)]
extern "C" fn crash_malloc(size: isize, _: c_int, _: *mut c_void) -> *mut c_void {
    static CALLS: AtomicU32 = AtomicU32::new(0);
    if CALLS.fetch_add(1, Ordering::Relaxed) == 2 {
        let nowhere: *mut u8 = ptr::null_mut();
        // SAFETY: none. This is the mistake that tests look for: the system ends the process here.
        unsafe { std::arch::asm!("mov byte ptr [{}], 1", in(reg) nowhere) };
    }
    take(size)
}

#[unsafe(no_mangle)]
extern "C" fn abort_free(address: *mut c_void, _: isize, _: c_int, _: *mut c_void) {
    static CALLS: AtomicU32 = AtomicU32::new(0);
    if CALLS.fetch_add(1, Ordering::Relaxed) == 1 {
        std::process::abort();
    }
    give_back(address);
}

#[unsafe(no_mangle)]
extern "C" fn async_malloc(size: isize, _: c_int, stream: *mut c_void) -> *mut c_void {
    let mut address = ptr::null_mut();
    // SAFETY: `address` is a place for the answer.
    match unsafe { cudaMallocAsync(&raw mut address, size.unsigned_abs(), stream) } {
        0 => address,
        _ => ptr::null_mut(),
    }
}
