//! Virtual memory management of the driver: <https://docs.nvidia.com/cuda/cuda-driver-api/group__CUDA__VA.html>.

use std::ffi::{c_int, c_uint, c_ulonglong, c_void};

use harness_allocator::allocator::library::wire::{Call, Code};

use crate::connection::{ask, unanswered};
use crate::device::put;
use crate::driver::answer;

#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemGetAllocationGranularity(granularity: *mut usize, _: *const c_void, _: c_uint) -> c_int {
    // SAFETY: the library passes valid pointers.
    answer(ask(Call::Granularity).and_then(|bytes| unsafe { put(granularity, bytes as usize) }))
}

/// A requested address is only a hint, as in CUDA.
#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemAddressReserve(address: *mut u64, size: usize, alignment: usize, _: u64, _: c_ulonglong) -> c_int {
    let reserve = || {
        let start = ask(Call::Reserve(size as u64))?;
        if alignment > 0 && !start.is_multiple_of(alignment as u64) {
            ask(Call::Unreserve(start))?;
            return Err(unanswered(&format!("cuMemAddressReserve with an alignment of {alignment} bytes")));
        }
        // SAFETY: the library passes valid pointers.
        unsafe { put(address, start) }
    };
    answer(reserve())
}

#[unsafe(no_mangle)]
extern "C" fn cuMemAddressFree(address: u64, _: usize) -> c_int {
    answer(ask(Call::Unreserve(address)).map(drop))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemCreate(memory: *mut u64, size: usize, _: *const c_void, _: c_ulonglong) -> c_int {
    // SAFETY: the library passes valid pointers.
    answer(ask(Call::Create(size as u64)).and_then(|made| unsafe { put(memory, made) }))
}

#[unsafe(no_mangle)]
extern "C" fn cuMemRelease(memory: u64) -> c_int {
    answer(ask(Call::Release(memory)).map(drop))
}

#[unsafe(no_mangle)]
extern "C" fn cuMemMap(address: u64, size: usize, offset: usize, memory: u64, _: c_ulonglong) -> c_int {
    // CUDA supports no other offset yet.
    let mapped = if offset == 0 { ask(Call::Map { address, size: size as u64, memory }).map(drop) } else { Err(Code::InvalidValue) };
    answer(mapped)
}

#[unsafe(no_mangle)]
extern "C" fn cuMemUnmap(address: u64, size: usize) -> c_int {
    answer(ask(Call::Unmap { address, size: size as u64 }).map(drop))
}

/// Does nothing: the only device can access all mappings.
#[unsafe(no_mangle)]
extern "C" fn cuMemSetAccess(_: u64, _: usize, _: *const c_void, _: usize) -> c_int {
    0
}
