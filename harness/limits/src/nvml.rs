//! NVML functions that report memory. They report the whole machine, so the limit applies to each GPU.
#![allow(non_snake_case, reason = "wrappers have the names of the functions")]

use std::ffi::c_int;

use nvml_wrapper_sys::bindings::{nvmlMemory_t, nvmlMemory_v2_t};

use crate::limiter::{SUCCESS, limiter};
use crate::real::{functions, real};

functions! {
    nvmlDeviceGetMemoryInfo: unsafe extern "C" fn(usize, Option<&mut nvmlMemory_t>) -> c_int,
    nvmlDeviceGetMemoryInfo_v2: unsafe extern "C" fn(usize, Option<&mut nvmlMemory_v2_t>) -> c_int,
}

extern "C" fn nvmlDeviceGetMemoryInfo(device: usize, mut memory: Option<&mut nvmlMemory_t>) -> c_int {
    let code = real!(nvmlDeviceGetMemoryInfo(device, memory.as_deref_mut()));
    if let Some(memory) = memory.filter(|_| code == SUCCESS) {
        (memory.total, memory.free, memory.used) = visible_memory(memory.total, memory.free);
    }
    code
}

extern "C" fn nvmlDeviceGetMemoryInfo_v2(device: usize, mut memory: Option<&mut nvmlMemory_v2_t>) -> c_int {
    let code = real!(nvmlDeviceGetMemoryInfo_v2(device, memory.as_deref_mut()));
    if let Some(memory) = memory.filter(|_| code == SUCCESS) {
        let (total, free, taken) = visible_memory(memory.total, memory.free);
        // The driver's own memory stays part of the memory that is not free.
        memory.reserved = memory.reserved.min(taken);
        (memory.total, memory.free, memory.used) = (total, free, taken - memory.reserved);
    }
    code
}

/// Total, free and used bytes under the limit.
fn visible_memory(total: u64, free: u64) -> (u64, u64, u64) {
    let (free, total) = limiter().visible_memory(free as usize, total as usize);
    (total as u64, free as u64, total.saturating_sub(free) as u64)
}
