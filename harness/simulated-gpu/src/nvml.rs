//! NVML functions (<https://docs.nvidia.com/deploy/nvml-api/>) for PyTorch, its users, and this project's CUDA device. They report the memory of the
//! run's processes and the memory of others in the settings.

use std::ffi::{CStr, CString, c_char, c_int, c_uint, c_void};
use std::mem::MaybeUninit;
use std::ptr;
use std::sync::atomic::{AtomicU32, Ordering};

use harness_allocator::units::Bytes;
use harness_gpu_settings::export;
use harness_gpu_settings::ffi::{Out, Text, write};

use crate::context::call;
use crate::device_properties::{pci_address, pci_bus, uuid};
use crate::world::machine;

/// Error codes of NVML.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Error {
    Uninitialized = 1,
    InvalidArgument = 2,
    NotSupported = 3,
    NotFound = 6,
    InsufficientSize = 7,
}

/// The number of initializations without a shutdown.
static INITIALIZED: AtomicU32 = AtomicU32::new(0);

/// The number of the process outside of the run. Linux uses numbers up to 2^22.
const OTHER_PROCESS: c_uint = 5_000_000;
/// Added to process numbers in a container.
const CONTAINER: c_uint = 10_000_000;

fn answer(result: Result<(), Error>) -> c_int {
    result.err().map_or(0, |error| error as c_int)
}

/// Runs a call, for which NVML must be initialized.
fn nvml(function: &'static str, body: impl FnOnce() -> Result<(), Error>) -> c_int {
    call(function, || answer(if INITIALIZED.load(Ordering::Relaxed) > 0 { body() } else { Err(Error::Uninitialized) }))
}

/// Runs a call about a device. Its handle is its real number plus one, because NVML ignores `CUDA_VISIBLE_DEVICES`.
fn of_device(function: &'static str, handle: usize, body: impl FnOnce(u32) -> Result<(), Error>) -> c_int {
    nvml(function, || {
        let number = handle.checked_sub(1).and_then(|number| u32::try_from(number).ok()).ok_or(Error::InvalidArgument)?;
        if number < machine().settings.devices { body(number) } else { Err(Error::InvalidArgument) }
    })
}

/// Writes a property of a device.
fn get<T>(function: &'static str, handle: usize, place: Out<'_, T>, property: impl FnOnce(u32) -> T) -> c_int {
    of_device(function, handle, |number| put(place, property(number)))
}

/// Writes an output. A null pointer is an invalid argument.
fn put<T>(place: Out<'_, T>, value: T) -> Result<(), Error> {
    if write(place, value) { Ok(()) } else { Err(Error::InvalidArgument) }
}

/// The memory of a device that the run's processes hold, with their contexts.
fn used(number: u32) -> Bytes {
    machine().state().holdings(number).iter().fold(Bytes::ZERO, |sum, holding| sum + holding.held)
}

/// A device's memory, and the memory that all processes hold.
fn total_and_used(number: u32) -> (Bytes, Bytes) {
    (machine().settings.memory, used(number) + machine().settings.others)
}

/// Copies a string and its terminator to an array of `len` characters.
fn write_text(text: *mut c_char, len: c_uint, value: &str) -> Result<(), Error> {
    let value = CString::new(value).map_err(|_| Error::InvalidArgument)?;
    let bytes = value.as_bytes_with_nul();
    if bytes.len() > len as usize {
        return Err(Error::InsufficientSize);
    }
    // SAFETY: the program passes an array of `len` characters.
    unsafe { ptr::copy_nonoverlapping(bytes.as_ptr(), text.cast(), bytes.len()) };
    Ok(())
}

#[unsafe(no_mangle)]
extern "C" fn nvmlInit_v2() -> c_int {
    call("nvmlInit_v2", || {
        INITIALIZED.fetch_add(1, Ordering::Relaxed);
        0
    })
}

export! {
    nvmlInit() = nvmlInit_v2();
    nvmlInitWithFlags(_: c_uint) = nvmlInit_v2();
}

#[unsafe(no_mangle)]
extern "C" fn nvmlShutdown() -> c_int {
    nvml("nvmlShutdown", || {
        INITIALIZED.fetch_sub(1, Ordering::Relaxed);
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

export! {
    nvmlSystemGetCudaDriverVersion_v2(version: Out<'_, c_int>) =
        nvml("nvmlSystemGetCudaDriverVersion_v2", || put(version, machine().settings.cuda.driver_version()));
    nvmlSystemGetCudaDriverVersion(version: Out<'_, c_int>) = nvmlSystemGetCudaDriverVersion_v2(version);
    nvmlSystemGetDriverVersion(text: *mut c_char, len: c_uint) = nvml("nvmlSystemGetDriverVersion", || write_text(text, len, "simulated"));
}

/// Only the process outside of the run has a name.
#[unsafe(no_mangle)]
extern "C" fn nvmlSystemGetProcessName(pid: c_uint, text: *mut c_char, len: c_uint) -> c_int {
    nvml("nvmlSystemGetProcessName", || match pid {
        OTHER_PROCESS => write_text(text, len, "other-process"),
        _ => Err(Error::NotFound),
    })
}

export! {
    nvmlDeviceGetCount_v2(count: Out<'_, c_uint>) = nvml("nvmlDeviceGetCount_v2", || put(count, machine().settings.devices));
    nvmlDeviceGetHandleByIndex_v2(index: c_uint, handle: Out<'_, usize>) =
        get("nvmlDeviceGetHandleByIndex_v2", index as usize + 1, handle, |number| number as usize + 1);
}

/// Writes the handle of the device with this name.
fn find(function: &'static str, name: Text<'_>, handle: Out<'_, usize>, names_of: impl Fn(u32) -> Vec<String>) -> c_int {
    nvml(function, || {
        let name = name.get().ok_or(Error::InvalidArgument)?.to_string_lossy();
        let has_it = |number: &u32| names_of(*number).iter().any(|known| known.eq_ignore_ascii_case(&name));
        let found = (0..machine().settings.devices).find(has_it).ok_or(Error::NotFound)?;
        put(handle, found as usize + 1)
    })
}

/// The PCI domain has eight or four digits.
#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceGetHandleByPciBusId_v2(address: Text<'_>, handle: Out<'_, usize>) -> c_int {
    let names_of = |number| vec![pci_address(number), pci_address(number)[4..].to_owned()];
    find("nvmlDeviceGetHandleByPciBusId_v2", address, handle, names_of)
}

#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceGetHandleByUUID(name: Text<'_>, handle: Out<'_, usize>) -> c_int {
    find("nvmlDeviceGetHandleByUUID", name, handle, |number| vec![uuid_text(number)])
}

fn uuid_text(number: u32) -> String {
    let bytes = uuid(number);
    let hex = |from: usize, to: usize| bytes[from..to].iter().map(|byte| format!("{byte:02x}")).collect::<String>();
    let kind = if machine().settings.mig { "MIG" } else { "GPU" };
    format!("{kind}-{}-{}-{}-{}-{}", hex(0, 4), hex(4, 6), hex(6, 8), hex(8, 10), hex(10, 16))
}

export! {
    nvmlDeviceGetUUID(handle: usize, text: *mut c_char, len: c_uint) =
        of_device("nvmlDeviceGetUUID", handle, |number| write_text(text, len, &uuid_text(number)));
    nvmlDeviceGetName(handle: usize, text: *mut c_char, len: c_uint) =
        of_device("nvmlDeviceGetName", handle, |_| write_text(text, len, machine().settings.device_name()));
    nvmlDeviceGetIndex(handle: usize, index: Out<'_, c_uint>) = get("nvmlDeviceGetIndex", handle, index, |number| number);
}

#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceGetCudaComputeCapability(handle: usize, major: Out<'_, c_int>, minor: Out<'_, c_int>) -> c_int {
    let [first, second] = <[u32; 2]>::from(machine().settings.gpu.capability).map(u32::cast_signed);
    of_device("nvmlDeviceGetCudaComputeCapability", handle, |_| put(major, first).and(put(minor, second)))
}

/// `nvmlMemory_t`.
#[repr(C)]
struct Memory {
    total: u64,
    free: u64,
    used: u64,
}

/// `nvmlMemory_v2_t`.
#[repr(C)]
struct MemoryV2 {
    version: c_uint,
    total: u64,
    reserved: u64,
    free: u64,
    used: u64,
}

#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceGetMemoryInfo(handle: usize, memory: Out<'_, Memory>) -> c_int {
    get("nvmlDeviceGetMemoryInfo", handle, memory, |number| {
        let (total, used) = total_and_used(number);
        Memory { total: total.0, free: total.saturating_sub(used).0, used: used.0 }
    })
}

/// The version in a structure: its size, and the number of its version in the highest byte.
const fn version_of<T>(version: c_uint) -> c_uint {
    size_of::<T>() as c_uint | version << 24
}

#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceGetMemoryInfo_v2(handle: usize, memory: Option<&mut MemoryV2>) -> c_int {
    of_device("nvmlDeviceGetMemoryInfo_v2", handle, |number| {
        let memory = memory.filter(|memory| memory.version == version_of::<MemoryV2>(2)).ok_or(Error::InvalidArgument)?;
        let (total, used) = total_and_used(number);
        (memory.total, memory.reserved, memory.free, memory.used) = (total.0, 0, total.saturating_sub(used).0, used.0);
        Ok(())
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

/// The processes on a device: the run's processes that hold memory, and the process outside of the run.
fn processes_on(number: u32) -> Vec<(c_uint, Bytes)> {
    let machine = machine();
    let outside = |pid: u32| pid + if machine.settings.container { CONTAINER } else { 0 };
    let of_run = machine.state().holdings(number).into_iter().map(|holding| (outside(holding.pid), holding.held));
    let other = Some((OTHER_PROCESS, machine.settings.others)).filter(|process| process.1 > Bytes::ZERO);
    of_run.chain(other).collect()
}

/// Writes the processes on a device to an array of `count` elements, or only their number.
fn processes<T>(
    function: &'static str,
    handle: usize,
    count: Option<&mut c_uint>,
    infos: *mut MaybeUninit<T>,
    entry: impl Fn(c_uint, u64) -> T,
) -> c_int {
    of_device(function, handle, |number| {
        let processes = processes_on(number);
        let count = count.ok_or(Error::InvalidArgument)?;
        let length = std::mem::replace(count, processes.len() as c_uint);
        if (length as usize) < processes.len() {
            return Err(Error::InsufficientSize);
        }
        for (index, (pid, used)) in processes.into_iter().enumerate() {
            // SAFETY: the program passes an array of `count` elements or null, and the length was checked.
            put(unsafe { infos.wrapping_add(index).as_mut() }, entry(pid, used.0))?;
        }
        Ok(())
    })
}

export! {
    nvmlDeviceGetComputeRunningProcesses(handle: usize, count: Option<&mut c_uint>, infos: *mut MaybeUninit<Process>) =
        processes("nvmlDeviceGetComputeRunningProcesses", handle, count, infos, |pid, used| Process { pid, used });
    nvmlDeviceGetComputeRunningProcesses_v3(handle: usize, count: Option<&mut c_uint>, infos: *mut MaybeUninit<ProcessV3>) =
        processes("nvmlDeviceGetComputeRunningProcesses_v3", handle, count, infos, |pid, used| ProcessV3 { pid, used, instances: [!0; 2] });
}

#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceGetMigMode(handle: usize, current: Out<'_, c_uint>, pending: Out<'_, c_uint>) -> c_int {
    let mode = c_uint::from(machine().settings.mig);
    of_device("nvmlDeviceGetMigMode", handle, |_| put(current, mode).and(put(pending, mode)))
}

export! {
    /// Error correction is on.
    nvmlDeviceGetEccMode(handle: usize, current: Out<'_, c_uint>, pending: Out<'_, c_uint>) =
        of_device("nvmlDeviceGetEccMode", handle, |_| put(current, 1).and(put(pending, 1)));
    /// The rates are zero because work takes no time.
    nvmlDeviceGetUtilizationRates(handle: usize, rates: Out<'_, [c_uint; 2]>) =
        get("nvmlDeviceGetUtilizationRates", handle, rates, |_| [0, 0]);
}

/// A device has one sensor, with the number 0.
#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceGetTemperature(handle: usize, sensor: c_int, celsius: Out<'_, c_uint>) -> c_int {
    of_device("nvmlDeviceGetTemperature", handle, |_| match sensor {
        0 => put(celsius, machine().settings.sensors.celsius),
        _ => Err(Error::InvalidArgument),
    })
}

/// `nvmlTemperature_v1_t`.
#[repr(C)]
struct Temperature {
    version: c_uint,
    sensor: c_uint,
    celsius: c_int,
}

#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceGetTemperatureV(handle: usize, temperature: Option<&mut Temperature>) -> c_int {
    of_device("nvmlDeviceGetTemperatureV", handle, |_| {
        let temperature = temperature.ok_or(Error::InvalidArgument)?;
        if temperature.version != version_of::<Temperature>(1) || temperature.sensor != 0 {
            return Err(Error::InvalidArgument);
        }
        temperature.celsius = machine().settings.sensors.celsius.cast_signed();
        Ok(())
    })
}

#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceGetPowerUsage(handle: usize, milliwatts: Out<'_, c_uint>) -> c_int {
    get("nvmlDeviceGetPowerUsage", handle, milliwatts, |_| machine().settings.sensors.power_mw)
}

/// Kind 2 is the clock of the memory.
#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceGetClockInfo(handle: usize, kind: c_int, megahertz: Out<'_, c_uint>) -> c_int {
    let gpu = machine().settings.gpu;
    let clock = if kind == 2 { gpu.memory_clock_khz } else { gpu.clock_khz } / 1000;
    get("nvmlDeviceGetClockInfo", handle, megahertz, |_| clock)
}

export! {
    nvmlDeviceGetCurrentClocksEventReasons(handle: usize, reasons: Out<'_, u64>) =
        get("nvmlDeviceGetCurrentClocksEventReasons", handle, reasons, |_| machine().settings.sensors.reasons);
    /// The older name of [`nvmlDeviceGetCurrentClocksEventReasons`].
    nvmlDeviceGetCurrentClocksThrottleReasons(handle: usize, reasons: Out<'_, u64>) =
        get("nvmlDeviceGetCurrentClocksThrottleReasons", handle, reasons, |_| machine().settings.sensors.reasons);
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

/// Fields 74 and 75 are the times of clocks reduced by power and by heat, in nanoseconds (kind 3: unsigned, 64 bits). Both are zero.
#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlDeviceGetFieldValues(handle: usize, count: c_int, values: *mut FieldValue) -> c_int {
    of_device("nvmlDeviceGetFieldValues", handle, |_| {
        for index in 0..usize::try_from(count).map_err(|_| Error::InvalidArgument)? {
            // SAFETY: the program passes an array of `count` fields or null.
            let value = unsafe { values.wrapping_add(index).as_mut() }.ok_or(Error::InvalidArgument)?;
            let known = [74, 75].contains(&value.field);
            (value.code, value.kind, value.value) = if known { (0, 3, 0) } else { (Error::NotSupported as c_uint, 0, 0) };
        }
        Ok(())
    })
}

/// `nvmlViolationTime_t`, in microseconds and nanoseconds.
#[repr(C)]
struct ViolationTime {
    reference: u64,
    violation: u64,
}

/// Neither power (policy 0) nor heat (policy 1) reduces the clocks.
#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceGetViolationStatus(handle: usize, policy: c_uint, status: Out<'_, ViolationTime>) -> c_int {
    of_device("nvmlDeviceGetViolationStatus", handle, |_| match policy {
        0 | 1 => put(status, ViolationTime { reference: 0, violation: 0 }),
        _ => Err(Error::InvalidArgument),
    })
}

export! {
    nvmlDeviceGetNvLinkRemoteDeviceType(_: usize, _: c_uint, _: *mut c_int) = answer(Err(Error::NotSupported));
    nvmlDeviceGetNvLinkRemotePciInfo_v2(_: usize, _: c_uint, _: *mut c_void) = answer(Err(Error::NotSupported));
    nvmlDeviceGetGpuFabricInfoV(_: usize, _: *mut c_void) = answer(Err(Error::NotSupported));
    /// The status is 1: the chipset does not support peer-to-peer access.
    nvmlDeviceGetP2PStatus(_: usize, _: usize, _: c_int, status: Out<'_, c_int>) = answer(put(status, 1));
}

/// Writes `nvmlPciInfo_t`.
#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlDeviceGetPciInfo_v3(handle: usize, into: *mut u8) -> c_int {
    of_device("nvmlDeviceGetPciInfo_v3", handle, |number| {
        let address = pci_address(number);
        // SAFETY: the program passes a structure of 68 bytes: short address, domain, bus, device, two numbers, and address.
        unsafe {
            into.write_bytes(0, 68);
            ptr::copy_nonoverlapping(address[4..].as_ptr(), into, address.len() - 4);
            into.add(20).cast::<u32>().write_unaligned(pci_bus(number));
            ptr::copy_nonoverlapping(address.as_ptr(), into.add(36), address.len());
        }
        Ok(())
    })
}
