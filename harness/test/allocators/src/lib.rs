//! Test only: a shared library with several allocators that have the interface of PyTorch's
//! `CUDAPluggableAllocator`. They call the CUDA runtime, which the loading process has already
//! loaded.
//!
//! * `plain_*` calls the driver for each request. `cached_*` keeps freed memory, by size and
//!   stream, until `cached_empty_cache`.
//! * `twice_malloc` always returns its first block. `inside_malloc` returns overlapping blocks, and
//!   `odd_malloc` unaligned addresses.
//! * `leaky_free` frees nothing. `double_free` frees each block twice.
//! * `crash_malloc` writes to address 0 at its third call. `abort_free` aborts at its second call.
//! * `async_*` allocates from the device's default pool, `pool_*` from its own pool, which keeps
//!   its memory until `pool_empty_cache`. `mixed_malloc` takes every second block from a pool.
//! * `mapped_*` maps memory for each request. `arena_*` maps memory side by side in one
//!   reservation; it releases memory at the end of the reservation, and everywhere at
//!   `arena_empty_cache`.
//! * `managed_malloc` calls a CUDA function that is not passed on to the device.

use std::ffi::{c_int, c_void};
use std::ptr;
use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};

unsafe extern "C" {
    fn cudaMalloc(address: *mut *mut c_void, size: usize) -> c_int;
    fn cudaFree(address: *mut c_void) -> c_int;
    fn cudaMallocAsync(address: *mut *mut c_void, size: usize, stream: *mut c_void) -> c_int;
    fn cudaFreeAsync(address: *mut c_void, stream: *mut c_void) -> c_int;
    fn cudaMallocManaged(address: *mut *mut c_void, size: usize, flags: u32) -> c_int;
    fn cuMemPoolCreate(pool: *mut usize, properties: *const c_void) -> c_int;
    fn cuMemPoolSetAttribute(pool: usize, attribute: c_int, value: *const c_void) -> c_int;
    fn cuMemPoolTrimTo(pool: usize, keep: usize) -> c_int;
    fn cuMemAllocFromPoolAsync(
        address: *mut u64,
        size: usize,
        pool: usize,
        stream: *mut c_void,
    ) -> c_int;
    fn cuMemFreeAsync(address: u64, stream: *mut c_void) -> c_int;
    fn cuCtxSynchronize() -> c_int;
    fn cuMemGetAllocationGranularity(
        granularity: *mut usize,
        property: *const c_void,
        option: u32,
    ) -> c_int;
    fn cuMemAddressReserve(
        address: *mut u64,
        size: usize,
        alignment: usize,
        wished: u64,
        flags: u64,
    ) -> c_int;
    fn cuMemAddressFree(address: u64, size: usize) -> c_int;
    fn cuMemCreate(memory: *mut u64, size: usize, property: *const c_void, flags: u64) -> c_int;
    fn cuMemRelease(memory: u64) -> c_int;
    fn cuMemMap(address: u64, size: usize, offset: usize, memory: u64, flags: u64) -> c_int;
    fn cuMemUnmap(address: u64, size: usize) -> c_int;
    fn cuMemSetAccess(address: u64, size: usize, access: *const c_void, count: usize) -> c_int;
}

fn take(size: isize) -> *mut c_void {
    let mut address = ptr::null_mut();
    // SAFETY: `address` has room for the answer.
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

/// Free blocks: size, stream and address.
static CACHE: Mutex<Vec<(isize, usize, usize)>> = Mutex::new(Vec::new());

#[unsafe(no_mangle)]
extern "C" fn cached_malloc(size: isize, _: c_int, stream: *mut c_void) -> *mut c_void {
    let mut cache = CACHE.lock().unwrap_or_else(PoisonError::into_inner);
    let fitting = cache
        .iter()
        .position(|&(free, of, _)| (free, of) == (size, stream.addr()));
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
    CACHE.lock().unwrap_or_else(PoisonError::into_inner).push((
        size,
        stream.addr(),
        address.expose_provenance(),
    ));
}

#[unsafe(no_mangle)]
extern "C" fn cached_empty_cache() {
    for (_, _, address) in CACHE
        .lock()
        .unwrap_or_else(PoisonError::into_inner)
        .drain(..)
    {
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
    // Half of the correct step.
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
        // SAFETY: none. This is the bug that tests look for: the system ends the process here.
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
    // SAFETY: `address` has room for the answer.
    match unsafe { cudaMallocAsync(&raw mut address, size.unsigned_abs(), stream) } {
        0 => address,
        _ => ptr::null_mut(),
    }
}

#[unsafe(no_mangle)]
extern "C" fn async_free(address: *mut c_void, _: isize, _: c_int, stream: *mut c_void) {
    // SAFETY: the runtime refuses an address that it does not know.
    unsafe { cudaFreeAsync(address, stream) };
}

#[unsafe(no_mangle)]
extern "C" fn mixed_malloc(size: isize, device: c_int, stream: *mut c_void) -> *mut c_void {
    static CALLS: AtomicU32 = AtomicU32::new(0);
    if CALLS.fetch_add(1, Ordering::Relaxed).is_multiple_of(2) {
        async_malloc(size, device, stream)
    } else {
        take(size)
    }
}

#[unsafe(no_mangle)]
extern "C" fn managed_malloc(size: isize, _: c_int, _: *mut c_void) -> *mut c_void {
    let mut address = ptr::null_mut();
    // SAFETY: `address` has room for the answer.
    match unsafe { cudaMallocManaged(&raw mut address, size.unsigned_abs(), 1) } {
        0 => address,
        _ => ptr::null_mut(),
    }
}

/// `CU_MEMPOOL_ATTR_RELEASE_THRESHOLD`.
const RELEASE_THRESHOLD: c_int = 4;

/// The pool of `pool_*`, made with the first request.
static POOL: Mutex<Option<usize>> = Mutex::new(None);

#[unsafe(no_mangle)]
extern "C" fn pool_malloc(size: isize, _: c_int, stream: *mut c_void) -> *mut c_void {
    let mut pool = POOL.lock().unwrap_or_else(PoisonError::into_inner);
    let pool = pool.get_or_insert_with(|| {
        let (mut made, everything) = (0, u64::MAX);
        // SAFETY: `made` has room for the answer, null means default properties, and the threshold
        // has 64 bits.
        unsafe {
            cuMemPoolCreate(&raw mut made, ptr::null());
            cuMemPoolSetAttribute(made, RELEASE_THRESHOLD, (&raw const everything).cast());
        }
        made
    });
    let mut address = 0;
    // SAFETY: `address` has room for the answer, and this library owns the pool.
    match unsafe { cuMemAllocFromPoolAsync(&raw mut address, size.unsigned_abs(), *pool, stream) } {
        0 => ptr::with_exposed_provenance_mut(address as usize),
        _ => ptr::null_mut(),
    }
}

#[unsafe(no_mangle)]
extern "C" fn pool_free(address: *mut c_void, _: isize, _: c_int, stream: *mut c_void) {
    // SAFETY: the driver refuses an address that it does not know.
    unsafe { cuMemFreeAsync(address.expose_provenance() as u64, stream) };
}

#[unsafe(no_mangle)]
extern "C" fn pool_empty_cache() {
    if let Some(pool) = *POOL.lock().unwrap_or_else(PoisonError::into_inner) {
        // SAFETY: this library owns the pool.
        unsafe {
            cuCtxSynchronize();
            cuMemPoolTrimTo(pool, 0);
        }
    }
}

/// Rounds a size up to whole pages.
fn pages(size: isize) -> usize {
    let mut page = 0;
    // SAFETY: `page` has room for the answer.
    unsafe { cuMemGetAllocationGranularity(&raw mut page, ptr::null(), 0) };
    size.unsigned_abs().next_multiple_of(page)
}

/// Maps new memory to reserved addresses. Returns its handle, or `None` if there is no memory.
fn map(address: u64, size: usize) -> Option<u64> {
    let mut memory = 0;
    // SAFETY: `memory` has room for the answer. This library owns the addresses, and nothing is
    // mapped there.
    unsafe {
        if cuMemCreate(&raw mut memory, size, ptr::null(), 0) != 0 {
            return None;
        }
        cuMemMap(address, size, 0, memory, 0);
        cuMemSetAccess(address, size, ptr::null(), 1);
    }
    Some(memory)
}

/// The live allocations of `mapped_*`: address and memory handle.
static MAPPED: Mutex<Vec<(u64, u64)>> = Mutex::new(Vec::new());

#[unsafe(no_mangle)]
extern "C" fn mapped_malloc(size: isize, _: c_int, _: *mut c_void) -> *mut c_void {
    let (size, mut address) = (pages(size), 0);
    // SAFETY: `address` has room for the answer.
    if unsafe { cuMemAddressReserve(&raw mut address, size, 0, 0, 0) } != 0 {
        return ptr::null_mut();
    }
    let Some(memory) = map(address, size) else {
        // SAFETY: the addresses were just reserved.
        unsafe { cuMemAddressFree(address, size) };
        return ptr::null_mut();
    };
    MAPPED
        .lock()
        .unwrap_or_else(PoisonError::into_inner)
        .push((address, memory));
    ptr::with_exposed_provenance_mut(address as usize)
}

#[unsafe(no_mangle)]
extern "C" fn mapped_free(address: *mut c_void, size: isize, _: c_int, _: *mut c_void) {
    let mut mapped = MAPPED.lock().unwrap_or_else(PoisonError::into_inner);
    let Some(index) = mapped
        .iter()
        .position(|&(at, _)| at == address.addr() as u64)
    else {
        return;
    };
    let ((address, memory), size) = (mapped.swap_remove(index), pages(size));
    // SAFETY: this library owns the memory, and no work uses it.
    unsafe {
        cuCtxSynchronize();
        cuMemUnmap(address, size);
        cuMemRelease(memory);
        cuMemAddressFree(address, size);
    }
}

/// The size of the reservation of `arena_*`.
const ARENA: usize = 1 << 30;

/// The reservation of `arena_*` and its mapped pieces in address order: address, size, and whether
/// the piece is live.
struct Arena {
    start: u64,
    pieces: Vec<(u64, usize, bool)>,
}

static THE_ARENA: Mutex<Option<Arena>> = Mutex::new(None);

#[unsafe(no_mangle)]
extern "C" fn arena_malloc(size: isize, _: c_int, _: *mut c_void) -> *mut c_void {
    let mut arena = THE_ARENA.lock().unwrap_or_else(PoisonError::into_inner);
    let arena = arena.get_or_insert_with(|| {
        let mut start = 0;
        // SAFETY: `start` has room for the answer.
        unsafe { cuMemAddressReserve(&raw mut start, ARENA, 0, 0, 0) };
        Arena {
            start,
            pieces: Vec::new(),
        }
    });
    let size = pages(size);
    let next = arena
        .pieces
        .last()
        .map_or(arena.start, |&(at, size, _)| at + size as u64);
    if next + size as u64 > arena.start + ARENA as u64 {
        return ptr::null_mut();
    }
    let Some(memory) = map(next, size) else {
        return ptr::null_mut();
    };
    // SAFETY: the memory stays as long as it is mapped.
    unsafe { cuMemRelease(memory) };
    arena.pieces.push((next, size, true));
    ptr::with_exposed_provenance_mut(next as usize)
}

/// Unmaps a piece.
fn unmap((address, size, _): (u64, usize, bool)) {
    // SAFETY: this library owns the memory, and no work uses it.
    unsafe {
        cuCtxSynchronize();
        cuMemUnmap(address, size);
    }
}

#[unsafe(no_mangle)]
extern "C" fn arena_free(address: *mut c_void, _: isize, _: c_int, _: *mut c_void) {
    let mut arena = THE_ARENA.lock().unwrap_or_else(PoisonError::into_inner);
    let Some(arena) = arena.as_mut() else { return };
    arena
        .pieces
        .iter_mut()
        .filter(|piece| piece.0 == address.addr() as u64)
        .for_each(|piece| piece.2 = false);
    while let Some(piece) = arena.pieces.pop_if(|piece| !piece.2) {
        unmap(piece);
    }
}

#[unsafe(no_mangle)]
extern "C" fn arena_empty_cache() {
    let mut kept = THE_ARENA.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(arena) = kept.as_mut() {
        arena
            .pieces
            .extract_if(.., |piece| !piece.2)
            .for_each(unmap);
    }
    if let Some(arena) = kept.take_if(|arena| arena.pieces.is_empty()) {
        // SAFETY: nothing is mapped there.
        unsafe { cuMemAddressFree(arena.start, ARENA) };
    }
}
