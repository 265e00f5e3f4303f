//! The functions of `libnvidia-ml.so.1` that the CUDA device calls. They tell what the CUDA side of the double holds.
#![allow(non_snake_case, reason = "the library's own names")]

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};

use crate::cuda::{uuid, write_text};
use crate::world::{Gpu, World, call};

/// Codes of NVML that the double answers with.
mod code {
    pub(super) const UNINITIALIZED: u32 = 1;
    pub(super) const INVALID_ARGUMENT: u32 = 2;
    pub(super) const NOT_SUPPORTED: u32 = 3;
    pub(super) const NOT_FOUND: u32 = 6;
    pub(super) const INSUFFICIENT_SIZE: u32 = 7;
}

/// `nvmlMemory_v2_t` of nvml.h.
#[repr(C)]
struct Memory {
    version: c_uint,
    total: u64,
    reserved: u64,
    free: u64,
    used: u64,
}

/// `nvmlProcessInfo_v2_t` of nvml.h.
#[repr(C)]
struct ProcessInfo {
    pid: c_uint,
    used_gpu_memory: u64,
    gpu_instance_id: c_uint,
    compute_instance_id: c_uint,
}

/// The other process: a number above every one that Linux gives (2^22), so it is never ours.
const OTHER_PID: c_uint = 5_000_000;

/// What is added to this process's number where the double plays a container: beyond the other process's.
const CONTAINER: c_uint = 10_000_000;

/// "No multi-instance slice" in a process's numbers.
const NO_INSTANCE: c_uint = c_uint::MAX;

/// As [`call`], once NVML is initialised.
fn nvml(function: &'static str, body: impl FnOnce(&mut World) -> Result<(), u32>) -> u32 {
    call(function, |world| if world.nvml_initialised { body(world) } else { Err(code::UNINITIALIZED) })
}

/// As [`nvml`], with the device of a handle: its ordinal plus one.
fn device(function: &'static str, handle: *mut c_void, body: impl FnOnce(&mut Gpu) -> Result<(), u32>) -> u32 {
    nvml(function, |world| {
        let ordinal = (handle as usize).checked_sub(1).ok_or(code::INVALID_ARGUMENT)?;
        body(world.gpus.get_mut(ordinal).ok_or(code::INVALID_ARGUMENT)?)
    })
}

/// Writes an answer to the caller's place.
///
/// # Safety
/// `place` is null or valid for a write.
unsafe fn put<T>(place: *mut T, value: T) -> Result<(), u32> {
    if place.is_null() {
        return Err(code::INVALID_ARGUMENT);
    }
    // SAFETY: not null, so valid, as the caller promised.
    unsafe { place.write(value) };
    Ok(())
}

/// Initialises NVML.
#[unsafe(no_mangle)]
extern "C" fn nvmlInit_v2() -> u32 {
    call("nvmlInit_v2", |world| {
        world.nvml_initialised = true;
        Ok(())
    })
}

/// Ends it.
#[unsafe(no_mangle)]
extern "C" fn nvmlShutdown() -> u32 {
    nvml("nvmlShutdown", |world| {
        world.nvml_initialised = false;
        Ok(())
    })
}

/// A version that no driver has.
#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlSystemGetDriverVersion(version: *mut c_char, len: c_uint) -> u32 {
    nvml("nvmlSystemGetDriverVersion", |_| {
        // SAFETY: the caller has room for `len` characters, as NVML demands.
        unsafe { write_text(version, len as usize, "0.0.double") }.ok_or(code::INVALID_ARGUMENT)
    })
}

/// The other process has a name; no other number is known.
#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlSystemGetProcessName(pid: c_uint, name: *mut c_char, len: c_uint) -> u32 {
    nvml("nvmlSystemGetProcessName", |_| {
        if pid != OTHER_PID {
            return Err(code::NOT_FOUND);
        }
        // SAFETY: the caller has room for `len` characters, as NVML demands.
        unsafe { write_text(name, len as usize, "other-process") }.ok_or(code::INVALID_ARGUMENT)
    })
}

/// Finds a device by `GPU-8-4-4-4-12`, or by `MIG-…` where the double plays multi-instance slices.
#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlDeviceGetHandleByUUID(name: *const c_char, handle: *mut *mut c_void) -> u32 {
    nvml("nvmlDeviceGetHandleByUUID", |world| {
        // SAFETY: a NUL-terminated name, as NVML demands.
        let name = unsafe { CStr::from_ptr(name) }.to_str().map_err(|_| code::INVALID_ARGUMENT)?;
        let prefix = if world.config.mig { "MIG-" } else { "GPU-" };
        let digits = name.strip_prefix(prefix).ok_or(code::NOT_FOUND)?.replace('-', "");
        let hex = |ordinal: usize| uuid(ordinal as u8).iter().map(|byte| format!("{byte:02x}")).collect::<String>();
        let ordinal = (0..world.gpus.len()).find(|ordinal| hex(*ordinal) == digits).ok_or(code::NOT_FOUND)?;
        // SAFETY: the caller's place, as NVML demands.
        unsafe { put(handle, (ordinal + 1) as *mut c_void) }
    })
}

/// Used is the context's overhead, the allocations in whole 2 MiB, and what others hold; nothing is reserved.
#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlDeviceGetMemoryInfo_v2(handle: *mut c_void, memory: *mut Memory) -> u32 {
    device("nvmlDeviceGetMemoryInfo_v2", handle, |gpu| {
        // SAFETY: the caller's struct, with its version set, as NVML demands; null is refused.
        let version = unsafe { memory.as_ref() }.ok_or(code::INVALID_ARGUMENT)?.version;
        if version != size_of::<Memory>() as c_uint | 2 << 24 {
            return Err(code::INVALID_ARGUMENT);
        }
        let answer = Memory { version, total: gpu.free() + gpu.used(), reserved: 0, free: gpu.free(), used: gpu.used() };
        // SAFETY: as above.
        unsafe { put(memory, answer) }
    })
}

/// This process while it has a context, the other one where it holds anything, and programs that say so.
#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlDeviceGetComputeRunningProcesses_v3(handle: *mut c_void, count: *mut c_uint, infos: *mut ProcessInfo) -> u32 {
    device("nvmlDeviceGetComputeRunningProcesses_v3", handle, |gpu| {
        let number = |number: u32| number + if gpu.in_container { CONTAINER } else { 0 };
        let mine = (gpu.references > 0).then(|| (number(std::process::id()), gpu.process_used()));
        let other = Some((OTHER_PID, gpu.others())).filter(|other| other.1 > 0);
        let programs = gpu.processes().into_iter().map(|(program, held)| (number(program), held));
        let processes: Vec<_> = mine.into_iter().chain(other).chain(programs).collect();
        // SAFETY: the caller's count, as NVML demands; null is refused.
        let room = *unsafe { count.as_ref() }.ok_or(code::INVALID_ARGUMENT)?;
        // SAFETY: as above.
        unsafe { put(count, processes.len() as c_uint) }?;
        if (room as usize) < processes.len() {
            return Err(code::INSUFFICIENT_SIZE);
        }
        for (index, (pid, used_gpu_memory)) in processes.into_iter().enumerate() {
            let info = ProcessInfo { pid, used_gpu_memory, gpu_instance_id: NO_INSTANCE, compute_instance_id: NO_INSTANCE };
            // SAFETY: the caller's array has room for as many, as was just seen.
            unsafe { put(infos.wrapping_add(index), info) }?;
        }
        Ok(())
    })
}

/// As configured, now and after the next start.
#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlDeviceGetMigMode(_handle: *mut c_void, current: *mut c_uint, pending: *mut c_uint) -> u32 {
    nvml("nvmlDeviceGetMigMode", |world| {
        let mode = c_uint::from(world.config.mig);
        // SAFETY: the caller's places, as NVML demands.
        unsafe { put(current, mode).and_then(|()| put(pending, mode)) }
    })
}

/// Error correction is on.
#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlDeviceGetEccMode(handle: *mut c_void, current: *mut c_uint, pending: *mut c_uint) -> u32 {
    // SAFETY: the caller's places, as NVML demands.
    device("nvmlDeviceGetEccMode", handle, |_| unsafe { put(current, 1).and_then(|()| put(pending, 1)) })
}

/// 1000 MHz for the multiprocessors (kind 1), 2000 MHz for the memory (kind 2).
#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlDeviceGetClockInfo(handle: *mut c_void, kind: c_int, clock: *mut c_uint) -> u32 {
    device("nvmlDeviceGetClockInfo", handle, |_| {
        let megahertz = match kind {
            1 => 1000,
            2 => 2000,
            _ => return Err(code::INVALID_ARGUMENT),
        };
        // SAFETY: the caller's place, as NVML demands.
        unsafe { put(clock, megahertz) }
    })
}

/// 250 watts, in milliwatts.
#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlDeviceGetPowerUsage(handle: *mut c_void, power: *mut c_uint) -> u32 {
    // SAFETY: the caller's place, as NVML demands.
    device("nvmlDeviceGetPowerUsage", handle, |_| unsafe { put(power, 250_000) })
}

/// 40 degrees Celsius at the one sensor there is (kind 0).
#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlDeviceGetTemperature(handle: *mut c_void, kind: c_int, temperature: *mut c_uint) -> u32 {
    device("nvmlDeviceGetTemperature", handle, |_| match kind {
        // SAFETY: the caller's place, as NVML demands.
        0 => unsafe { put(temperature, 40) },
        _ => Err(code::INVALID_ARGUMENT),
    })
}

/// `nvmlTemperature_v1_t` of nvml.h.
#[repr(C)]
struct Temperature {
    version: c_uint,
    sensor: c_uint,
    celsius: c_int,
}

/// The same at the one sensor there is, by the newer function.
#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlDeviceGetTemperatureV(handle: *mut c_void, temperature: *mut Temperature) -> u32 {
    device("nvmlDeviceGetTemperatureV", handle, |_| {
        // SAFETY: the caller's struct, with version and sensor set, as NVML demands; null is refused.
        let temperature = unsafe { temperature.as_mut() }.ok_or(code::INVALID_ARGUMENT)?;
        if temperature.version != size_of::<Temperature>() as c_uint | 1 << 24 || temperature.sensor != 0 {
            return Err(code::INVALID_ARGUMENT);
        }
        temperature.celsius = 40;
        Ok(())
    })
}

/// `nvmlFieldValue_t` of nvml.h.
#[repr(C)]
struct FieldValue {
    field: c_uint,
    scope: c_uint,
    timestamp: i64,
    latency: i64,
    kind: c_uint,
    code: c_uint,
    value: u64,
}

/// The fields 74 and 75: neither power nor heat ever held the clocks down, in nanoseconds (kind 3, 64 bits without sign).
#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlDeviceGetFieldValues(handle: *mut c_void, count: c_int, values: *mut FieldValue) -> u32 {
    device("nvmlDeviceGetFieldValues", handle, |_| {
        for index in 0..usize::try_from(count).map_err(|_| code::INVALID_ARGUMENT)? {
            // SAFETY: the caller's array of `count` fields, as NVML demands; null is refused.
            let value = unsafe { values.wrapping_add(index).as_mut() }.ok_or(code::INVALID_ARGUMENT)?;
            (value.code, value.kind, value.value) = if [74, 75].contains(&value.field) { (0, 3, 0) } else { (code::NOT_SUPPORTED, 0, 0) };
        }
        Ok(())
    })
}

/// `nvmlViolationTime_t` of nvml.h: microseconds, and nanoseconds.
#[repr(C)]
struct ViolationTime {
    reference: u64,
    violation: u64,
}

/// Neither power (policy 0) nor heat (policy 1) ever held the clocks down.
#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlDeviceGetViolationStatus(handle: *mut c_void, policy: c_uint, status: *mut ViolationTime) -> u32 {
    device("nvmlDeviceGetViolationStatus", handle, |_| match policy {
        // SAFETY: the caller's place, as NVML demands.
        0 | 1 => unsafe { put(status, ViolationTime { reference: 0, violation: 0 }) },
        _ => Err(code::INVALID_ARGUMENT),
    })
}

/// The same by the newer function.
#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlDeviceGetCurrentClocksEventReasons(handle: *mut c_void, reasons: *mut u64) -> u32 {
    // SAFETY: the caller's place, as NVML demands.
    device("nvmlDeviceGetCurrentClocksEventReasons", handle, |_| unsafe { put(reasons, 4) })
}

/// The power cap (bit 2) holds the clocks down.
#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlDeviceGetCurrentClocksThrottleReasons(handle: *mut c_void, reasons: *mut u64) -> u32 {
    // SAFETY: the caller's place, as NVML demands.
    device("nvmlDeviceGetCurrentClocksThrottleReasons", handle, |_| unsafe { put(reasons, 4) })
}
