//! NVML functions that report memory. They report the whole machine, so the limit applies to each
//! GPU.
#![allow(non_snake_case, reason = "wrappers have the names of the functions")]

use std::ffi::c_int;

use nvml_wrapper_sys::bindings::{nvmlMemory_t, nvmlMemory_v2_t};

use crate::limiter::{SUCCESS, limiter};
use crate::real::wrap;

wrap! {
    nvmlDeviceGetMemoryInfo(device: usize, memory: Option<&mut nvmlMemory_t>) =
        limit(
            memory,
            |memory| real(device, memory),
            |memory| {
                (memory.total, memory.free, memory.used) =
                    visible_memory(memory.total, memory.free);
            },
        );
    nvmlDeviceGetMemoryInfo_v2(device: usize, memory: Option<&mut nvmlMemory_v2_t>) =
        limit(
            memory,
            |memory| real(device, memory),
            |memory| {
                let (total, free, taken) = visible_memory(memory.total, memory.free);
                // The driver's own memory stays part of the memory that is not free.
                memory.reserved = memory.reserved.min(taken);
                (memory.total, memory.free, memory.used) = (total, free, taken - memory.reserved);
            },
        );
}

/// Calls a function that describes memory, and applies the limit to the description.
fn limit<T>(
    mut memory: Option<&mut T>,
    get: impl FnOnce(Option<&mut T>) -> c_int,
    limit: impl FnOnce(&mut T),
) -> c_int {
    let code = get(memory.as_deref_mut());
    if let Some(memory) = memory.filter(|_| code == SUCCESS) {
        limit(memory);
    }
    code
}

/// Total, free and used bytes under the limit.
fn visible_memory(total: u64, free: u64) -> (u64, u64, u64) {
    let (free, total) = limiter().visible_memory(free as usize, total as usize);
    (total as u64, free as u64, total.saturating_sub(free) as u64)
}
