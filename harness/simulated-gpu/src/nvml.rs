//! NVML (<https://docs.nvidia.com/deploy/nvml-api/>): what PyTorch and its users ask of it, and the CUDA device of this project. It tells what the
//! processes of the run hold of the simulated devices, and what others hold by the settings.

use std::ffi::{CStr, CString, c_char, c_int, c_uint, c_void};
use std::ptr;
use std::sync::atomic::{AtomicU32, Ordering};

use harness_allocator::units::Bytes;

use crate::context::call;
use crate::device_figures::{pci_address, pci_bus, uuid};
use crate::world::machine;

/// Answers of NVML.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Answer {
    Uninitialized = 1,
    InvalidArgument = 2,
    NotSupported = 3,
    NotFound = 6,
    InsufficientSize = 7,
}

/// How often NVML was initialised and not ended.
static INITIALISED: AtomicU32 = AtomicU32::new(0);

/// The number of a process that is none of this machine: Linux gives numbers up to 2^22.
const OTHER_PROCESS: c_uint = 5_000_000;
/// What is added to numbers of processes in a container: they lie beyond that process's.
const CONTAINER: c_uint = 10_000_000;

fn answer(result: Result<(), Answer>) -> c_int {
    result.map_or_else(|answer| answer as c_int, |()| 0)
}

/// Answers a call to NVML, which must be initialised.
fn nvml(function: &'static str, body: impl FnOnce() -> Result<(), Answer>) -> c_int {
    call(function, || answer(if INITIALISED.load(Ordering::Relaxed) > 0 { body() } else { Err(Answer::Uninitialized) }))
}

/// Answers a call about the device with a handle, which is its real number plus one. NVML knows nothing of `CUDA_VISIBLE_DEVICES`.
fn of_device(function: &'static str, handle: usize, body: impl FnOnce(u32) -> Result<(), Answer>) -> c_int {
    nvml(function, || {
        let number = handle.checked_sub(1).and_then(|number| u32::try_from(number).ok()).ok_or(Answer::InvalidArgument)?;
        if number < machine().settings.devices { body(number) } else { Err(Answer::InvalidArgument) }
    })
}

/// Writes a value that every device has.
///
/// # Safety
/// `value` is null or may be written.
unsafe fn tell<T>(function: &'static str, handle: usize, value: *mut T, figure: impl FnOnce(u32) -> T) -> c_int {
    // SAFETY: as the caller promises.
    of_device(function, handle, |number| unsafe { put(value, figure(number)) })
}

/// # Safety
/// `place` is null or may be written.
unsafe fn put<T>(place: *mut T, value: T) -> Result<(), Answer> {
    if place.is_null() {
        return Err(Answer::InvalidArgument);
    }
    // SAFETY: not null, so that it may be written, as the caller promises.
    unsafe { place.write(value) };
    Ok(())
}

/// What the processes of the run hold of a device, their contexts included.
fn used(number: u32) -> Bytes {
    machine().state().holdings(number).iter().fold(Bytes::ZERO, |sum, holding| sum + holding.held)
}

/// All of a device's memory, and what all processes hold of it.
fn total_and_used(number: u32) -> (Bytes, Bytes) {
    (machine().settings.memory, used(number) + machine().others())
}

/// Copies a string with its end.
///
/// # Safety
/// `text` has room for `len` characters.
unsafe fn write_text(text: *mut c_char, len: c_uint, value: &str) -> Result<(), Answer> {
    let value = CString::new(value).map_err(|_| Answer::InvalidArgument)?;
    let bytes = value.as_bytes_with_nul();
    if bytes.len() > len as usize {
        return Err(Answer::InsufficientSize);
    }
    // SAFETY: as the caller promises.
    unsafe { ptr::copy_nonoverlapping(bytes.as_ptr(), text.cast(), bytes.len()) };
    Ok(())
}

#[unsafe(no_mangle)]
extern "C" fn nvmlInit_v2() -> c_int {
    call("nvmlInit_v2", || {
        INITIALISED.fetch_add(1, Ordering::Relaxed);
        0
    })
}

#[unsafe(no_mangle)]
extern "C" fn nvmlInit() -> c_int {
    nvmlInit_v2()
}

#[unsafe(no_mangle)]
extern "C" fn nvmlInitWithFlags(_: c_uint) -> c_int {
    nvmlInit_v2()
}

#[unsafe(no_mangle)]
extern "C" fn nvmlShutdown() -> c_int {
    nvml("nvmlShutdown", || {
        INITIALISED.fetch_sub(1, Ordering::Relaxed);
        Ok(())
    })
}

#[unsafe(no_mangle)]
extern "C" fn nvmlErrorString(number: c_int) -> *const c_char {
    let text: &CStr = match number {
        0 => c"Success",
        1 => c"Uninitialized",
        2 => c"Invalid Argument",
        3 => c"Not Supported",
        6 => c"Not Found",
        7 => c"Insufficient Size",
        _ => c"Unknown Error",
    };
    text.as_ptr()
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlSystemGetCudaDriverVersion_v2(version: *mut c_int) -> c_int {
    // SAFETY: the program passes a pointer to a number.
    nvml("nvmlSystemGetCudaDriverVersion_v2", || unsafe { put(version, machine().settings.cuda.driver_version()) })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlSystemGetCudaDriverVersion(version: *mut c_int) -> c_int {
    // SAFETY: as for the other function.
    unsafe { nvmlSystemGetCudaDriverVersion_v2(version) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlSystemGetDriverVersion(text: *mut c_char, len: c_uint) -> c_int {
    // SAFETY: the program passes an array of `len` characters.
    nvml("nvmlSystemGetDriverVersion", || unsafe { write_text(text, len, "simulated") })
}

/// The process that is none of this machine has a name; no other number is known.
#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlSystemGetProcessName(pid: c_uint, text: *mut c_char, len: c_uint) -> c_int {
    nvml("nvmlSystemGetProcessName", || match pid {
        // SAFETY: the program passes an array of `len` characters.
        OTHER_PROCESS => unsafe { write_text(text, len, "other-process") },
        _ => Err(Answer::NotFound),
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlDeviceGetCount_v2(count: *mut c_uint) -> c_int {
    // SAFETY: the program passes a pointer to a number.
    nvml("nvmlDeviceGetCount_v2", || unsafe { put(count, machine().settings.devices) })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlDeviceGetHandleByIndex_v2(index: c_uint, handle: *mut usize) -> c_int {
    // SAFETY: the program passes a pointer to a handle.
    unsafe { tell("nvmlDeviceGetHandleByIndex_v2", index as usize + 1, handle, |number| number as usize + 1) }
}

/// Writes the handle of the device that has a text among its names.
///
/// # Safety
/// `name` is a string and `handle` may be written.
unsafe fn find(function: &'static str, name: *const c_char, handle: *mut usize, names_of: impl Fn(u32) -> Vec<String>) -> c_int {
    nvml(function, || {
        // SAFETY: as the caller promises.
        let name = unsafe { CStr::from_ptr(name) }.to_string_lossy();
        let has_it = |number: &u32| names_of(*number).iter().any(|known| known.eq_ignore_ascii_case(&name));
        let found = (0..machine().settings.devices).find(has_it).ok_or(Answer::NotFound)?;
        // SAFETY: as the caller promises.
        unsafe { put(handle, found as usize + 1) }
    })
}

/// Domains are written with eight digits or four.
#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlDeviceGetHandleByPciBusId_v2(address: *const c_char, handle: *mut usize) -> c_int {
    let names_of = |number| vec![pci_address(number), pci_address(number)[4..].to_owned()];
    // SAFETY: the program passes a string and a pointer to a handle.
    unsafe { find("nvmlDeviceGetHandleByPciBusId_v2", address, handle, names_of) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlDeviceGetHandleByUUID(name: *const c_char, handle: *mut usize) -> c_int {
    // SAFETY: the program passes a string and a pointer to a handle.
    unsafe { find("nvmlDeviceGetHandleByUUID", name, handle, |number| vec![uuid_text(number)]) }
}

fn uuid_text(number: u32) -> String {
    let bytes = uuid(number);
    let hex = |from: usize, to: usize| bytes[from..to].iter().map(|byte| format!("{byte:02x}")).collect::<String>();
    let kind = if machine().settings.mig { "MIG" } else { "GPU" };
    format!("{kind}-{}-{}-{}-{}-{}", hex(0, 4), hex(4, 6), hex(6, 8), hex(8, 10), hex(10, 16))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlDeviceGetUUID(handle: usize, text: *mut c_char, len: c_uint) -> c_int {
    // SAFETY: the program passes an array of `len` characters.
    of_device("nvmlDeviceGetUUID", handle, |number| unsafe { write_text(text, len, &uuid_text(number)) })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlDeviceGetName(handle: usize, text: *mut c_char, len: c_uint) -> c_int {
    // SAFETY: the program passes an array of `len` characters.
    of_device("nvmlDeviceGetName", handle, |_| unsafe { write_text(text, len, machine().settings.device_name()) })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlDeviceGetIndex(handle: usize, index: *mut c_uint) -> c_int {
    // SAFETY: the program passes a pointer to a number.
    unsafe { tell("nvmlDeviceGetIndex", handle, index, |number| number) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlDeviceGetCudaComputeCapability(handle: usize, major: *mut c_int, minor: *mut c_int) -> c_int {
    let (wanted_major, wanted_minor) = machine().settings.gpu.capability;
    of_device("nvmlDeviceGetCudaComputeCapability", handle, |_| {
        // SAFETY: the program passes pointers to numbers.
        unsafe {
            put(major, c_int::try_from(wanted_major).unwrap_or(0))?;
            put(minor, c_int::try_from(wanted_minor).unwrap_or(0))
        }
    })
}

/// `nvmlMemory_t`.
#[repr(C)]
struct Memory {
    total: u64,
    free: u64,
    used: u64,
}

/// `nvmlMemory_v2_t` behind its version.
#[repr(C)]
struct MemoryV2 {
    version: c_uint,
    total: u64,
    reserved: u64,
    free: u64,
    used: u64,
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlDeviceGetMemoryInfo(handle: usize, memory: *mut Memory) -> c_int {
    let figures = |number: u32| {
        let (total, used) = total_and_used(number);
        Memory { total: total.0, free: total.saturating_sub(used).0, used: used.0 }
    };
    // SAFETY: the program passes a pointer to the structure.
    unsafe { tell("nvmlDeviceGetMemoryInfo", handle, memory, figures) }
}

/// The version that the program writes into a structure: its size, and its version in the highest byte.
const fn version_of<T>(version: c_uint) -> c_uint {
    size_of::<T>() as c_uint | version << 24
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlDeviceGetMemoryInfo_v2(handle: usize, memory: *mut MemoryV2) -> c_int {
    of_device("nvmlDeviceGetMemoryInfo_v2", handle, |number| {
        // SAFETY: the program passes a pointer to the structure, with its version; null is refused.
        let version = unsafe { memory.as_ref() }.ok_or(Answer::InvalidArgument)?.version;
        if version != version_of::<MemoryV2>(2) {
            return Err(Answer::InvalidArgument);
        }
        let (total, used) = total_and_used(number);
        let figures = MemoryV2 { version, total: total.0, reserved: 0, free: total.saturating_sub(used).0, used: used.0 };
        // SAFETY: as above.
        unsafe { put(memory, figures) }
    })
}

/// `nvmlProcessInfo_v1_t`.
#[repr(C)]
struct Process {
    pid: c_uint,
    used: u64,
}

/// `nvmlProcessInfo_t` of the third version.
#[repr(C)]
struct ProcessV3 {
    pid: c_uint,
    used: u64,
    instances: [c_uint; 2],
}

/// The processes on a device: those of the run that hold anything, and the one that is none of this machine.
fn processes_on(number: u32) -> Vec<(c_uint, Bytes)> {
    let machine = machine();
    let outside = |pid: u32| pid + if machine.settings.container { CONTAINER } else { 0 };
    let of_run = machine.state().holdings(number).into_iter().map(|holding| (outside(holding.pid), holding.held));
    let other = Some((OTHER_PROCESS, machine.settings.others)).filter(|process| process.1 > Bytes::ZERO);
    of_run.chain(other).collect()
}

/// Writes the processes on a device.
///
/// # Safety
/// `count` points to the room of `infos`.
unsafe fn processes<T>(
    function: &'static str,
    handle: usize,
    count: *mut c_uint,
    infos: *mut T,
    entry: impl Fn(c_uint, u64) -> T,
) -> c_int {
    of_device(function, handle, |number| {
        let processes = processes_on(number);
        // SAFETY: as the caller promises; null is refused.
        let room = *unsafe { count.as_ref() }.ok_or(Answer::InvalidArgument)?;
        // SAFETY: as above.
        unsafe { put(count, processes.len() as c_uint) }?;
        if (room as usize) < processes.len() {
            return Err(Answer::InsufficientSize);
        }
        for (index, (pid, used)) in processes.into_iter().enumerate() {
            // SAFETY: there is room for as many, as was just seen.
            unsafe { put(infos.wrapping_add(index), entry(pid, used.0)) }?;
        }
        Ok(())
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlDeviceGetComputeRunningProcesses(handle: usize, count: *mut c_uint, infos: *mut Process) -> c_int {
    // SAFETY: the program passes an array and a pointer to its length.
    unsafe { processes("nvmlDeviceGetComputeRunningProcesses", handle, count, infos, |pid, used| Process { pid, used }) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlDeviceGetComputeRunningProcesses_v3(handle: usize, count: *mut c_uint, infos: *mut ProcessV3) -> c_int {
    let entry = |pid, used| ProcessV3 { pid, used, instances: [c_uint::MAX; 2] };
    // SAFETY: the program passes an array and a pointer to its length.
    unsafe { processes("nvmlDeviceGetComputeRunningProcesses_v3", handle, count, infos, entry) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlDeviceGetMigMode(handle: usize, current: *mut c_uint, pending: *mut c_uint) -> c_int {
    let mode = c_uint::from(machine().settings.mig);
    // SAFETY: the program passes pointers to numbers.
    of_device("nvmlDeviceGetMigMode", handle, |_| unsafe { put(current, mode).and_then(|()| put(pending, mode)) })
}

/// Error correction is on.
#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlDeviceGetEccMode(handle: usize, current: *mut c_uint, pending: *mut c_uint) -> c_int {
    // SAFETY: the program passes pointers to numbers.
    of_device("nvmlDeviceGetEccMode", handle, |_| unsafe { put(current, 1).and_then(|()| put(pending, 1)) })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlDeviceGetUtilizationRates(handle: usize, rates: *mut [c_uint; 2]) -> c_int {
    // SAFETY: the program passes a pointer to two numbers. Work takes no time.
    unsafe { tell("nvmlDeviceGetUtilizationRates", handle, rates, |_| [0, 0]) }
}

/// There is one sensor, with the number 0.
#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlDeviceGetTemperature(handle: usize, sensor: c_int, celsius: *mut c_uint) -> c_int {
    of_device("nvmlDeviceGetTemperature", handle, |_| match sensor {
        // SAFETY: the program passes a pointer to a number.
        0 => unsafe { put(celsius, machine().settings.sensors.celsius) },
        _ => Err(Answer::InvalidArgument),
    })
}

/// `nvmlTemperature_v1_t`.
#[repr(C)]
struct Temperature {
    version: c_uint,
    sensor: c_uint,
    celsius: c_int,
}

/// The same by the newer function.
#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlDeviceGetTemperatureV(handle: usize, temperature: *mut Temperature) -> c_int {
    of_device("nvmlDeviceGetTemperatureV", handle, |_| {
        // SAFETY: the program passes a pointer to the structure, with version and sensor; null is refused.
        let temperature = unsafe { temperature.as_mut() }.ok_or(Answer::InvalidArgument)?;
        if temperature.version != version_of::<Temperature>(1) || temperature.sensor != 0 {
            return Err(Answer::InvalidArgument);
        }
        temperature.celsius = machine().settings.sensors.celsius.cast_signed();
        Ok(())
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlDeviceGetPowerUsage(handle: usize, milliwatts: *mut c_uint) -> c_int {
    // SAFETY: the program passes a pointer to a number.
    unsafe { tell("nvmlDeviceGetPowerUsage", handle, milliwatts, |_| machine().settings.sensors.power_mw) }
}

/// Kind 2 is the memory's clock.
#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlDeviceGetClockInfo(handle: usize, kind: c_int, megahertz: *mut c_uint) -> c_int {
    let gpu = machine().settings.gpu;
    let clock = if kind == 2 { gpu.memory_clock_khz } else { gpu.clock_khz } / 1000;
    // SAFETY: the program passes a pointer to a number.
    unsafe { tell("nvmlDeviceGetClockInfo", handle, megahertz, |_| clock) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlDeviceGetCurrentClocksEventReasons(handle: usize, reasons: *mut u64) -> c_int {
    // SAFETY: the program passes a pointer to a number.
    unsafe { tell("nvmlDeviceGetCurrentClocksEventReasons", handle, reasons, |_| machine().settings.sensors.reasons) }
}

/// The same by the older function.
#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlDeviceGetCurrentClocksThrottleReasons(handle: usize, reasons: *mut u64) -> c_int {
    // SAFETY: the program passes a pointer to a number.
    unsafe { tell("nvmlDeviceGetCurrentClocksThrottleReasons", handle, reasons, |_| machine().settings.sensors.reasons) }
}

/// `nvmlFieldValue_t`.
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
unsafe extern "C" fn nvmlDeviceGetFieldValues(handle: usize, count: c_int, values: *mut FieldValue) -> c_int {
    of_device("nvmlDeviceGetFieldValues", handle, |_| {
        for index in 0..usize::try_from(count).map_err(|_| Answer::InvalidArgument)? {
            // SAFETY: the program passes an array of `count` fields; null is refused.
            let value = unsafe { values.wrapping_add(index).as_mut() }.ok_or(Answer::InvalidArgument)?;
            let known = [74, 75].contains(&value.field);
            (value.code, value.kind, value.value) = if known { (0, 3, 0) } else { (Answer::NotSupported as c_uint, 0, 0) };
        }
        Ok(())
    })
}

/// `nvmlViolationTime_t`: microseconds, and nanoseconds.
#[repr(C)]
struct ViolationTime {
    reference: u64,
    violation: u64,
}

/// Neither power (policy 0) nor heat (policy 1) ever held the clocks down.
#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlDeviceGetViolationStatus(handle: usize, policy: c_uint, status: *mut ViolationTime) -> c_int {
    of_device("nvmlDeviceGetViolationStatus", handle, |_| match policy {
        // SAFETY: the program passes a pointer to the structure.
        0 | 1 => unsafe { put(status, ViolationTime { reference: 0, violation: 0 }) },
        _ => Err(Answer::InvalidArgument),
    })
}

#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceGetNvLinkRemoteDeviceType(_: usize, _: c_uint, _: *mut c_int) -> c_int {
    answer(Err(Answer::NotSupported))
}

#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceGetNvLinkRemotePciInfo_v2(_: usize, _: c_uint, _: *mut c_void) -> c_int {
    answer(Err(Answer::NotSupported))
}

#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceGetGpuFabricInfoV(_: usize, _: *mut c_void) -> c_int {
    answer(Err(Answer::NotSupported))
}

/// Devices are not linked.
#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlDeviceGetP2PStatus(_: usize, _: usize, _: c_int, status: *mut c_int) -> c_int {
    // SAFETY: the program passes a pointer to a number: "not supported by the chipset".
    unsafe { *status = 1 };
    0
}

/// The bus, the device and the domain that a device is at, in `nvmlPciInfo_t`.
#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlDeviceGetPciInfo_v3(handle: usize, into: *mut u8) -> c_int {
    of_device("nvmlDeviceGetPciInfo_v3", handle, |number| {
        let address = pci_address(number);
        // SAFETY: the program passes a structure of 68 bytes: a short address, domain, bus, device, two numbers, and the address.
        unsafe {
            into.write_bytes(0, 68);
            ptr::copy_nonoverlapping(address[4..].as_ptr(), into, address.len() - 4);
            into.add(20).cast::<u32>().write_unaligned(pci_bus(number));
            ptr::copy_nonoverlapping(address.as_ptr(), into.add(36), address.len());
        }
        Ok(())
    })
}
