//! NVML functions (<https://docs.nvidia.com/deploy/nvml-api/>) for PyTorch, its users, and this
//! project's CUDA device. They report the memory of the run's processes and the memory of others in
//! the settings.
#![allow(non_snake_case, reason = "fields have the names of the bindings")]

use std::ffi::{CStr, CString, c_char, c_int, c_uint, c_void};
use std::sync::atomic::{AtomicU32, Ordering};
use std::{mem::MaybeUninit, ptr};

use harness_allocator::units::Bytes;
use harness_gpu_settings::export;
use harness_gpu_settings::ffi::{Out, Text, write};
use harness_gpu_settings::settings::SharedMemory;

use nvml_wrapper_sys::bindings::{
    nvmlFieldValue_t, nvmlMemory_t, nvmlMemory_v2_t, nvmlPciInfo_t, nvmlProcessInfo_t,
    nvmlProcessInfo_v1_t, nvmlTemperature_t, nvmlViolationTime_t,
};

use crate::device_properties::{pci_address, pci_bus, uuid};
use crate::{context::unless_injected, world::machine};

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
    unless_injected(function, || {
        answer(if INITIALIZED.load(Ordering::Relaxed) > 0 {
            body()
        } else {
            Err(Error::Uninitialized)
        })
    })
}

/// Runs a call about a device. Its handle is its real number plus one, because NVML ignores
/// `CUDA_VISIBLE_DEVICES`.
fn of_device(
    function: &'static str,
    handle: usize,
    body: impl FnOnce(u32) -> Result<(), Error>,
) -> c_int {
    nvml(function, || {
        let number = handle
            .checked_sub(1)
            .and_then(|number| u32::try_from(number).ok())
            .ok_or(Error::InvalidArgument)?;
        if number < machine().settings.devices {
            body(number)
        } else {
            Err(Error::InvalidArgument)
        }
    })
}

fn get<T>(
    function: &'static str,
    handle: usize,
    place: Out<'_, T>,
    property: impl FnOnce(u32) -> T,
) -> c_int {
    of_device(function, handle, |number| put(place, property(number)))
}

/// Writes an output. A null pointer is an invalid argument.
fn put<T>(place: Out<'_, T>, value: T) -> Result<(), Error> {
    if write(place, value) {
        Ok(())
    } else {
        Err(Error::InvalidArgument)
    }
}

/// The memory of a device that the run's processes hold, with their contexts.
fn used(number: u32) -> Bytes {
    machine()
        .state()
        .holdings(number)
        .iter()
        .fold(Bytes::ZERO, |sum, holding| sum + holding.held)
}

/// A device's memory, and the memory that all processes hold. NVML does not know them of a GPU that
/// shares the host's memory.
fn total_and_used(number: u32) -> Result<(Bytes, Bytes), Error> {
    match machine().settings.shared_memory {
        SharedMemory::None => Ok((machine().memory(), used(number) + machine().settings.others)),
        SharedMemory::Pinned | SharedMemory::Resident => Err(Error::NotSupported),
    }
}

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

export! {
    nvmlInit_v2, nvmlInit() = unless_injected("nvmlInit_v2", initialize);
    nvmlInitWithFlags(_: c_uint) = nvmlInit_v2();
    nvmlShutdown() = nvml(THIS, || {
        INITIALIZED.fetch_sub(1, Ordering::Relaxed);
        Ok(())
    });
    nvmlSystemGetCudaDriverVersion_v2, nvmlSystemGetCudaDriverVersion(version: Out<'_, c_int>) =
        nvml("nvmlSystemGetCudaDriverVersion_v2", || {
            put(version, machine().settings.cuda.driver_version())
        });
    nvmlSystemGetDriverVersion(text: *mut c_char, len: c_uint) =
        nvml(THIS, || write_text(text, len, machine().settings.driver_release()));
    /// Only the process outside of the run has a name.
    nvmlSystemGetProcessName(pid: c_uint, text: *mut c_char, len: c_uint) =
        nvml(THIS, || {
            if pid == OTHER_PROCESS {
                write_text(text, len, "other-process")
            } else {
                Err(Error::NotFound)
            }
        });
    nvmlDeviceGetCount_v2(count: Out<'_, c_uint>) =
        nvml(THIS, || put(count, machine().settings.devices));
    nvmlDeviceGetHandleByIndex_v2(index: c_uint, handle: Out<'_, usize>) =
        get(THIS, index as usize + 1, handle, |number| number as usize + 1);
    /// The PCI domain has eight or four digits.
    nvmlDeviceGetHandleByPciBusId_v2(address: Text<'_>, handle: Out<'_, usize>) =
        find(THIS, address, handle, |number| {
            vec![pci_address(number), pci_address(number)[4..].to_owned()]
        });
    nvmlDeviceGetHandleByUUID(name: Text<'_>, handle: Out<'_, usize>) =
        find(THIS, name, handle, |number| vec![uuid_text(number)]);
    nvmlDeviceGetUUID(handle: usize, text: *mut c_char, len: c_uint) =
        of_device(THIS, handle, |number| write_text(text, len, &uuid_text(number)));
    nvmlDeviceGetName(handle: usize, text: *mut c_char, len: c_uint) =
        of_device(THIS, handle, |_| write_text(text, len, machine().settings.device_name()));
    nvmlDeviceGetIndex(handle: usize, index: Out<'_, c_uint>) =
        get(THIS, handle, index, |number| number);
    nvmlDeviceGetCudaComputeCapability(
        handle: usize, major: Out<'_, c_int>, minor: Out<'_, c_int>
    ) = of_device(THIS, handle, |_| {
        let [first, second] =
            <[u32; 2]>::from(machine().settings.gpu.capability).map(u32::cast_signed);
        put(major, first).and(put(minor, second))
    });
    nvmlDeviceGetMemoryInfo(handle: usize, memory: Out<'_, nvmlMemory_t>) =
        of_device(THIS, handle, |number| {
            let (total, used) = total_and_used(number)?;
            let free = total.saturating_sub(used).0;
            put(memory, nvmlMemory_t { total: total.0, free, used: used.0 })
        });
    nvmlDeviceGetMemoryInfo_v2(handle: usize, memory: Option<&mut nvmlMemory_v2_t>) =
        of_device(THIS, handle, |number| {
            let memory = memory
                .filter(|memory| memory.version == version_of::<nvmlMemory_v2_t>(2))
                .ok_or(Error::InvalidArgument)?;
            let (total, used) = total_and_used(number)?;
            (memory.total, memory.reserved, memory.free, memory.used) =
                (total.0, 0, total.saturating_sub(used).0, used.0);
            Ok(())
        });
    nvmlDeviceGetComputeRunningProcesses(
        handle: usize, count: Option<&mut c_uint>, infos: *mut MaybeUninit<nvmlProcessInfo_v1_t>
    ) = processes(THIS, handle, count, infos, |pid, used| nvmlProcessInfo_v1_t {
        pid,
        usedGpuMemory: used,
    });
    nvmlDeviceGetComputeRunningProcesses_v3(
        handle: usize, count: Option<&mut c_uint>, infos: *mut MaybeUninit<nvmlProcessInfo_t>
    ) = processes(THIS, handle, count, infos, |pid, used| nvmlProcessInfo_t {
        pid,
        usedGpuMemory: used,
        gpuInstanceId: !0,
        computeInstanceId: !0,
    });
    nvmlDeviceGetMigMode(handle: usize, current: Out<'_, c_uint>, pending: Out<'_, c_uint>) =
        of_device(THIS, handle, |_| {
            put(current, machine().settings.mig.into())
                .and(put(pending, machine().settings.mig.into()))
        });
    /// Error correction is on.
    nvmlDeviceGetEccMode(handle: usize, current: Out<'_, c_uint>, pending: Out<'_, c_uint>) =
        of_device(THIS, handle, |_| put(current, 1).and(put(pending, 1)));
    /// The rates are zero because work takes no time.
    nvmlDeviceGetUtilizationRates(handle: usize, rates: Out<'_, [c_uint; 2]>) =
        get(THIS, handle, rates, |_| [0, 0]);
    /// A device has one sensor, with the number 0.
    nvmlDeviceGetTemperature(handle: usize, sensor: c_int, celsius: Out<'_, c_uint>) =
        of_device(THIS, handle, |_| match sensor {
            0 => put(celsius, machine().settings.sensors.celsius),
            _ => Err(Error::InvalidArgument),
        });
    nvmlDeviceGetTemperatureV(handle: usize, temperature: Option<&mut nvmlTemperature_t>) =
        of_device(THIS, handle, |_| {
            let of_version = |place: &&mut nvmlTemperature_t| {
                place.version == version_of::<nvmlTemperature_t>(1) && place.sensorType == 0
            };
            let place = temperature.filter(of_version).ok_or(Error::InvalidArgument)?;
            place.temperature = machine().settings.sensors.celsius.cast_signed();
            Ok(())
        });
    nvmlDeviceGetPowerUsage(handle: usize, milliwatts: Out<'_, c_uint>) =
        get(THIS, handle, milliwatts, |_| machine().settings.sensors.power_mw);
    /// Kind 2 is the clock of the memory.
    nvmlDeviceGetClockInfo(handle: usize, kind: c_int, megahertz: Out<'_, c_uint>) =
        get(THIS, handle, megahertz, |_| {
            let gpu = machine().settings.gpu;
            (if kind == 2 { gpu.memory_clock_khz } else { gpu.clock_khz }) / 1000
        });
    /// The second name is older.
    nvmlDeviceGetCurrentClocksEventReasons, nvmlDeviceGetCurrentClocksThrottleReasons(
        handle: usize, reasons: Out<'_, u64>
    ) = get(THIS, handle, reasons, |_| machine().settings.sensors.reasons);
    nvmlDeviceGetFieldValues(handle: usize, count: c_int, values: *mut nvmlFieldValue_t) =
        of_device(THIS, handle, |_| {
            read_fields(usize::try_from(count).map_err(|_| Error::InvalidArgument)?, values)
        });
    /// Neither power (policy 0) nor heat (policy 1) reduces the clocks.
    nvmlDeviceGetViolationStatus(
        handle: usize, policy: c_uint, status: Out<'_, nvmlViolationTime_t>
    ) = of_device(THIS, handle, |_| match policy {
        0 | 1 => put(status, nvmlViolationTime_t { referenceTime: 0, violationTime: 0 }),
        _ => Err(Error::InvalidArgument),
    });
    nvmlDeviceGetNvLinkRemoteDeviceType(_: usize, _: c_uint, _: *mut c_int) =
        answer(Err(Error::NotSupported));
    nvmlDeviceGetNvLinkRemotePciInfo_v2(_: usize, _: c_uint, _: *mut c_void) =
        answer(Err(Error::NotSupported));
    nvmlDeviceGetGpuFabricInfoV(_: usize, _: *mut c_void) = answer(Err(Error::NotSupported));
    /// The status is 0, or 1: the chipset does not support peer-to-peer access.
    nvmlDeviceGetP2PStatus(_: usize, _: usize, _: c_int, status: Out<'_, c_int>) =
        answer(put(status, c_int::from(!machine().settings.gpu.reaches_peers())));
    nvmlDeviceGetPciInfo_v3(handle: usize, into: Out<'_, nvmlPciInfo_t>) =
        get(THIS, handle, into, |number| {
            let address = pci_address(number);
            let (bus, busIdLegacy, busId) =
                (pci_bus(number), text_of(&address[4..]), text_of(&address));
            nvmlPciInfo_t {
                busIdLegacy,
                domain: 0,
                bus,
                device: 0,
                pciDeviceId: 0,
                pciSubSystemId: 0,
                busId,
            }
        });
}

fn initialize() -> c_int {
    INITIALIZED.fetch_add(1, Ordering::Relaxed);
    0
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

/// Writes the handle of the device with this name.
fn find(
    function: &'static str,
    name: Text<'_>,
    handle: Out<'_, usize>,
    names_of: impl Fn(u32) -> Vec<String>,
) -> c_int {
    nvml(function, || {
        let name = name.get().ok_or(Error::InvalidArgument)?.to_string_lossy();
        let has_it = |number: &u32| {
            names_of(*number)
                .iter()
                .any(|known| known.eq_ignore_ascii_case(&name))
        };
        let found = (0..machine().settings.devices)
            .find(has_it)
            .ok_or(Error::NotFound)?;
        put(handle, found as usize + 1)
    })
}

fn uuid_text(number: u32) -> String {
    let bytes = uuid(number);
    let hex = |from: usize, to: usize| {
        bytes[from..to]
            .iter()
            .map(|byte| format!("{byte:02x}"))
            .collect::<String>()
    };
    let kind = if machine().settings.mig { "MIG" } else { "GPU" };
    format!(
        "{kind}-{}-{}-{}-{}-{}",
        hex(0, 4),
        hex(4, 6),
        hex(6, 8),
        hex(8, 10),
        hex(10, 16)
    )
}

const fn version_of<T>(version: c_uint) -> c_uint {
    size_of::<T>() as c_uint | version << 24
}

/// The processes on a device: the run's processes that hold memory, and the process outside of the
/// run.
fn processes_on(number: u32) -> Vec<(c_uint, Bytes)> {
    let machine = machine();
    let outside = |pid: u32| {
        pid + if machine.settings.container {
            CONTAINER
        } else {
            0
        }
    };
    let of_run = machine
        .state()
        .holdings(number)
        .into_iter()
        .map(|holding| (outside(holding.pid), holding.held));
    let other =
        Some((OTHER_PROCESS, machine.settings.others)).filter(|process| process.1 > Bytes::ZERO);
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
            put(
                // SAFETY: the program passes an array of `count` elements or null, and the length
                // was checked.
                unsafe { infos.wrapping_add(index).as_mut() },
                entry(pid, used.0),
            )?;
        }
        Ok(())
    })
}

/// Fields 74 and 75 are the times of clocks reduced by power and by heat, in nanoseconds (kind 3:
/// unsigned, 64 bits). Both are zero.
fn read_fields(count: usize, values: *mut nvmlFieldValue_t) -> Result<(), Error> {
    for index in 0..count {
        // SAFETY: the program passes an array of `count` fields or null.
        let value = unsafe { values.wrapping_add(index).as_mut() }.ok_or(Error::InvalidArgument)?;
        let known = [74, 75].contains(&value.fieldId);
        (value.nvmlReturn, value.valueType) = if known {
            (0, 3)
        } else {
            (Error::NotSupported as c_uint, 0)
        };
        value.value.ullVal = 0;
    }
    Ok(())
}

/// A text in a structure, followed by zeros.
fn text_of<const LENGTH: usize>(text: &str) -> [c_char; LENGTH] {
    let mut bytes = text.bytes();
    std::array::from_fn(|_| bytes.next().unwrap_or(0) as c_char)
}
