//! Functions of NVML that tell of memory. They tell of the whole machine, so that the limit is told of each GPU.
#![allow(non_snake_case, reason = "wrappers have the names of the functions")]

use std::ffi::{c_int, c_uint};

use crate::limiter::{SUCCESS, limiter};
use crate::real::{functions, real};

/// `nvmlMemory_t`.
#[repr(C)]
pub(crate) struct Memory {
    total: u64,
    free: u64,
    used: u64,
}

/// `nvmlMemory_v2_t`.
#[repr(C)]
pub(crate) struct MemoryV2 {
    version: c_uint,
    total: u64,
    reserved: u64,
    free: u64,
    used: u64,
}

functions! {
    nvmlDeviceGetMemoryInfo: unsafe extern "C" fn(usize, *mut Memory) -> c_int,
    nvmlDeviceGetMemoryInfo_v2: unsafe extern "C" fn(usize, *mut MemoryV2) -> c_int,
}

unsafe extern "C" fn nvmlDeviceGetMemoryInfo(device: usize, memory: *mut Memory) -> c_int {
    let code = real!(nvmlDeviceGetMemoryInfo(device, memory));
    // SAFETY: NVML wrote the structure that the program passes.
    if let Some(memory) = unsafe { memory.as_mut() }.filter(|_| code == SUCCESS) {
        (memory.total, memory.free, memory.used) = seen(memory.total, memory.free);
    }
    code
}

unsafe extern "C" fn nvmlDeviceGetMemoryInfo_v2(device: usize, memory: *mut MemoryV2) -> c_int {
    let code = real!(nvmlDeviceGetMemoryInfo_v2(device, memory));
    // SAFETY: as for the other function.
    if let Some(memory) = unsafe { memory.as_mut() }.filter(|_| code == SUCCESS) {
        let (total, free, taken) = seen(memory.total, memory.free);
        // What the driver keeps for itself stays a part of what is not free.
        memory.reserved = memory.reserved.min(taken);
        (memory.total, memory.free, memory.used) = (total, free, taken - memory.reserved);
    }
    code
}

/// All memory, free and taken bytes under the limit.
fn seen(total: u64, free: u64) -> (u64, u64, u64) {
    let (free, total) = limiter().seen(free as usize, total as usize);
    (total as u64, free as u64, total.saturating_sub(free) as u64)
}
