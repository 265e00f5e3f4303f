//! NVML (<https://docs.nvidia.com/deploy/nvml-api/>): what PyTorch and its users ask of it. It tells what the processes of the run hold of the
//! simulated devices; nothing else runs on them.

use std::ffi::{CStr, CString, c_char, c_int, c_uint, c_void};
use std::ptr;

use harness_allocator::units::Bytes;

use crate::device_figures::{pci_address, pci_bus, uuid};
use crate::world::machine;

/// Answers of NVML.
#[derive(Clone, Copy)]
enum Answer {
    InvalidArgument = 2,
    NotSupported = 3,
    NotFound = 6,
    InsufficientSize = 7,
}

fn answer(result: Result<(), Answer>) -> c_int {
    result.map_or_else(|answer| answer as c_int, |()| 0)
}

/// The real number of the device with a handle, which is that number plus one. NVML knows nothing of `CUDA_VISIBLE_DEVICES`.
fn device(handle: usize) -> Result<u32, Answer> {
    let number = handle.checked_sub(1).and_then(|number| u32::try_from(number).ok()).ok_or(Answer::InvalidArgument)?;
    (number < machine().settings.devices).then_some(number).ok_or(Answer::InvalidArgument)
}

/// What all processes hold of a device, their contexts included.
fn used(number: u32) -> Bytes {
    machine().state().holdings(number).iter().fold(Bytes::ZERO, |sum, holding| sum + holding.held)
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
    0
}

#[unsafe(no_mangle)]
extern "C" fn nvmlInit() -> c_int {
    0
}

#[unsafe(no_mangle)]
extern "C" fn nvmlInitWithFlags(_: c_uint) -> c_int {
    0
}

#[unsafe(no_mangle)]
extern "C" fn nvmlShutdown() -> c_int {
    0
}

#[unsafe(no_mangle)]
extern "C" fn nvmlErrorString(number: c_int) -> *const c_char {
    let text: &CStr = match number {
        0 => c"Success",
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
    unsafe { *version = machine().settings.cuda.driver_version() };
    0
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlSystemGetCudaDriverVersion(version: *mut c_int) -> c_int {
    // SAFETY: as for the other function.
    unsafe { nvmlSystemGetCudaDriverVersion_v2(version) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlSystemGetDriverVersion(text: *mut c_char, len: c_uint) -> c_int {
    // SAFETY: the program passes an array of `len` characters.
    answer(unsafe { write_text(text, len, "simulated") })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlDeviceGetCount_v2(count: *mut c_uint) -> c_int {
    // SAFETY: the program passes a pointer to a number.
    unsafe { *count = machine().settings.devices };
    0
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlDeviceGetHandleByIndex_v2(index: c_uint, handle: *mut usize) -> c_int {
    let known = device(index as usize + 1);
    // SAFETY: the program passes a pointer to a handle.
    answer(known.map(|_| unsafe { *handle = index as usize + 1 }))
}

/// Writes the handle of the device that has a text among its names.
///
/// # Safety
/// `name` is a string and `handle` may be written.
unsafe fn find(name: *const c_char, handle: *mut usize, name_of: impl Fn(u32) -> String) -> c_int {
    // SAFETY: as the caller promises.
    let name = unsafe { CStr::from_ptr(name) }.to_string_lossy().to_ascii_uppercase();
    let found = (0..machine().settings.devices).find(|number| name_of(*number).to_ascii_uppercase() == name);
    // SAFETY: as the caller promises.
    answer(found.map(|number| unsafe { *handle = number as usize + 1 }).ok_or(Answer::NotFound))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlDeviceGetHandleByPciBusId_v2(address: *const c_char, handle: *mut usize) -> c_int {
    // SAFETY: the program passes a string and a pointer to a handle. Domains are written with four digits or eight.
    unsafe {
        match find(address, handle, pci_address) {
            0 => 0,
            _ => find(address, handle, |number| pci_address(number)[4..].to_owned()),
        }
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlDeviceGetHandleByUUID(name: *const c_char, handle: *mut usize) -> c_int {
    // SAFETY: the program passes a string and a pointer to a handle.
    unsafe { find(name, handle, uuid_text) }
}

fn uuid_text(number: u32) -> String {
    let bytes = uuid(number);
    let hex = |from: usize, to: usize| bytes[from..to].iter().map(|byte| format!("{byte:02x}")).collect::<String>();
    format!("GPU-{}-{}-{}-{}-{}", hex(0, 4), hex(4, 6), hex(6, 8), hex(8, 10), hex(10, 16))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlDeviceGetUUID(handle: usize, text: *mut c_char, len: c_uint) -> c_int {
    // SAFETY: the program passes an array of `len` characters.
    answer(device(handle).and_then(|number| unsafe { write_text(text, len, &uuid_text(number)) }))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlDeviceGetName(handle: usize, text: *mut c_char, len: c_uint) -> c_int {
    // SAFETY: the program passes an array of `len` characters.
    answer(device(handle).and_then(|_| unsafe { write_text(text, len, machine().settings.gpu.device) }))
}

/// Writes a value that every device has.
///
/// # Safety
/// `value` may be written.
unsafe fn tell<T>(handle: usize, value: *mut T, figure: impl FnOnce(u32) -> T) -> c_int {
    // SAFETY: as the caller promises.
    answer(device(handle).map(|number| unsafe { *value = figure(number) }))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlDeviceGetIndex(handle: usize, index: *mut c_uint) -> c_int {
    // SAFETY: the program passes a pointer to a number.
    unsafe { tell(handle, index, |number| number) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlDeviceGetCudaComputeCapability(handle: usize, major: *mut c_int, minor: *mut c_int) -> c_int {
    let (wanted_major, wanted_minor) = machine().settings.gpu.capability;
    // SAFETY: the program passes pointers to numbers.
    unsafe {
        tell(handle, minor, |_| c_int::try_from(wanted_minor).unwrap_or(0));
        tell(handle, major, |_| c_int::try_from(wanted_major).unwrap_or(0))
    }
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
    let total = machine().settings.memory;
    let figures = |number: u32| {
        let used = used(number);
        Memory { total: total.0, free: total.saturating_sub(used).0, used: used.0 }
    };
    // SAFETY: the program passes a pointer to the structure.
    unsafe { tell(handle, memory, figures) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlDeviceGetMemoryInfo_v2(handle: usize, memory: *mut MemoryV2) -> c_int {
    let total = machine().settings.memory;
    // SAFETY: the program passes a pointer to the structure, with its version.
    unsafe {
        let version = (*memory).version;
        tell(handle, memory, |number| {
            let used = used(number);
            MemoryV2 { version, total: total.0, reserved: 0, free: total.saturating_sub(used).0, used: used.0 }
        })
    }
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

/// Writes the processes that hold memory of a device.
///
/// # Safety
/// `count` points to the room of `processes`.
unsafe fn processes<T>(handle: usize, count: *mut c_uint, processes: *mut T, entry: impl Fn(c_uint, u64) -> T) -> c_int {
    answer(device(handle).and_then(|number| {
        let holdings = machine().state().holdings(number);
        let entries = c_uint::try_from(holdings.len()).unwrap_or(c_uint::MAX);
        // SAFETY: as the caller promises; there is room for all of them.
        unsafe {
            let room = std::mem::replace(&mut *count, entries);
            if room < entries {
                return Err(Answer::InsufficientSize);
            }
            for (index, holding) in holdings.into_iter().enumerate() {
                processes.add(index).write(entry(holding.pid, holding.held.0));
            }
        }
        Ok(())
    }))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlDeviceGetComputeRunningProcesses(handle: usize, count: *mut c_uint, infos: *mut Process) -> c_int {
    // SAFETY: the program passes an array and a pointer to its length.
    unsafe { processes(handle, count, infos, |pid, used| Process { pid, used }) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlDeviceGetComputeRunningProcesses_v3(handle: usize, count: *mut c_uint, infos: *mut ProcessV3) -> c_int {
    // SAFETY: the program passes an array and a pointer to its length.
    unsafe { processes(handle, count, infos, |pid, used| ProcessV3 { pid, used, instances: [c_uint::MAX; 2] }) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlDeviceGetUtilizationRates(handle: usize, rates: *mut [c_uint; 2]) -> c_int {
    // SAFETY: the program passes a pointer to two numbers. Work takes no time.
    unsafe { tell(handle, rates, |_| [0, 0]) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlDeviceGetTemperature(handle: usize, _: c_int, temperature: *mut c_uint) -> c_int {
    // SAFETY: the program passes a pointer to a number. A device without heat has none to tell.
    unsafe { tell(handle, temperature, |_| 0) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlDeviceGetPowerUsage(handle: usize, milliwatts: *mut c_uint) -> c_int {
    // SAFETY: the program passes a pointer to a number.
    unsafe { tell(handle, milliwatts, |_| 0) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlDeviceGetClockInfo(handle: usize, kind: c_int, megahertz: *mut c_uint) -> c_int {
    let gpu = machine().settings.gpu;
    // SAFETY: the program passes a pointer to a number. Kind 2 is the memory's clock.
    unsafe { tell(handle, megahertz, |_| if kind == 2 { gpu.memory_clock_khz } else { gpu.clock_khz } / 1000) }
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
    answer(device(handle).map(|number| {
        let address = pci_address(number);
        // SAFETY: the program passes a structure of 68 bytes: a short address, domain, bus, device, two numbers, and the address.
        unsafe {
            into.write_bytes(0, 68);
            ptr::copy_nonoverlapping(address[4..].as_ptr(), into, address.len() - 4);
            into.add(20).cast::<u32>().write_unaligned(pci_bus(number));
            ptr::copy_nonoverlapping(address.as_ptr(), into.add(36), address.len());
        }
    }))
}
