//! The functions of `libnvidia-ml.so.1`, as `nvml.h` declares them (<https://docs.nvidia.com/deploy/nvml-api/>), and the meaning
//! of their codes. Only queries.

use std::ffi::{c_char, c_int, c_longlong, c_uint, c_ulonglong, c_void};
use std::sync::OnceLock;

use crate::library::{self, LoadError, MISSING, Refusal, function_table};

/// A GPU, or a slice of one. Valid while the library is loaded.
pub(super) type Handle = *mut c_void;

/// `nvmlMemory_v2_t`.
#[repr(C)]
pub(super) struct Memory {
    pub(super) version: c_uint,
    pub(super) total: c_ulonglong,
    pub(super) reserved: c_ulonglong,
    pub(super) free: c_ulonglong,
    pub(super) used: c_ulonglong,
}

/// `nvmlProcessInfo_t` of version 2 and later.
#[derive(Clone, Copy)]
#[repr(C)]
pub(super) struct ProcessInfo {
    pub(super) pid: c_uint,
    /// All ones if NVML does not report it.
    pub(super) used_gpu_memory: c_ulonglong,
    pub(super) gpu_instance: c_uint,
    pub(super) compute_instance: c_uint,
}

/// `nvmlTemperature_v1_t`.
#[repr(C)]
pub(super) struct Temperature {
    pub(super) version: c_uint,
    pub(super) sensor: c_uint,
    pub(super) celsius: c_int,
}

/// `nvmlFieldValue_t`.
#[repr(C)]
pub(super) struct FieldValue {
    pub(super) field: c_uint,
    pub(super) scope: c_uint,
    pub(super) timestamp: c_longlong,
    pub(super) latency: c_longlong,
    pub(super) kind: c_uint,
    pub(super) code: c_uint,
    /// `nvmlValue_t`, a union of 8 bytes; `kind` defines its type.
    pub(super) value: [u8; 8],
}

/// `nvmlViolationTime_t`.
#[repr(C)]
pub(super) struct ViolationTime {
    /// In microseconds.
    pub(super) reference: c_ulonglong,
    /// In nanoseconds.
    pub(super) violation: c_ulonglong,
}

function_table! {
    /// The functions of NVML. An older or newer library may lack some.
    Functions;

    /// Initializes NVML.
    init = nvmlInit_v2();
    /// Version of the kernel driver.
    driver_version = nvmlSystemGetDriverVersion(version: *mut c_char, length: c_uint);
    /// Name of a process.
    process_name = nvmlSystemGetProcessName(pid: c_uint, name: *mut c_char, length: c_uint);
    /// The device with a UUID.
    device = nvmlDeviceGetHandleByUUID(uuid: *const c_char, device: *mut Handle);
    /// Memory of the whole device.
    memory = nvmlDeviceGetMemoryInfo_v2(device: Handle, memory: *mut Memory);
    /// Processes with a CUDA context on the device.
    processes = nvmlDeviceGetComputeRunningProcesses_v3(device: Handle, count: *mut c_uint, infos: *mut ProcessInfo);
    /// `true` if multi-instance mode is on.
    mig_mode = nvmlDeviceGetMigMode(device: Handle, current: *mut c_uint, pending: *mut c_uint);
    /// `true` if error correction is on.
    ecc_mode = nvmlDeviceGetEccMode(device: Handle, current: *mut c_uint, pending: *mut c_uint);
    /// A clock in MHz.
    clock = nvmlDeviceGetClockInfo(device: Handle, kind: c_uint, megahertz: *mut c_uint);
    /// Power in milliwatts.
    power = nvmlDeviceGetPowerUsage(device: Handle, milliwatts: *mut c_uint);
    /// A temperature.
    temperature = nvmlDeviceGetTemperatureV(device: Handle, temperature: *mut Temperature);
    /// The older form, deprecated since CUDA 13.0 and removed in 14.0.
    temperature_before_13 = nvmlDeviceGetTemperature(device: Handle, sensor: c_uint, celsius: *mut c_uint);
    /// The reasons for reduced clocks, one bit each.
    event_reasons = nvmlDeviceGetCurrentClocksEventReasons(device: Handle, reasons: *mut c_ulonglong);
    /// The older form, deprecated since CUDA 13.0 and removed in 14.0.
    event_reasons_before_13 = nvmlDeviceGetCurrentClocksThrottleReasons(device: Handle, reasons: *mut c_ulonglong);
    /// Counters and other fields, by number.
    fields = nvmlDeviceGetFieldValues(device: Handle, count: c_int, values: *mut FieldValue);
    /// Time of reduced clocks; deprecated since CUDA 13.0 and removed in 14.0.
    violation_before_13 = nvmlDeviceGetViolationStatus(device: Handle, policy: c_uint, time: *mut ViolationTime);
}

/// `NVML_ERROR_NOT_FOUND`.
pub(super) const NOT_FOUND: u32 = 6;
/// `NVML_ERROR_INSUFFICIENT_SIZE`.
pub(super) const INSUFFICIENT_SIZE: u32 = 7;
/// `NVML_ERROR_DEPRECATED`: the result of a removed function.
const DEPRECATED: u32 = 26;

impl Functions {
    /// Returns the initialized NVML. The library is loaded once and never shut down; an error is remembered.
    pub(super) fn get() -> Result<&'static Self, String> {
        static FUNCTIONS: OnceLock<Result<Functions, String>> = OnceLock::new();
        FUNCTIONS.get_or_init(Self::load).as_ref().map_err(Clone::clone)
    }

    fn load() -> Result<Self, String> {
        let library = library::load("libnvidia-ml.so.1").map_err(|error| not_loaded(&error))?;
        // SAFETY: the addresses come from NVML's library.
        let functions = unsafe { Self::look_up(|name| library::find(library, name)) };
        // SAFETY: repeated calls are allowed.
        unsafe { functions.init() }.map_err(sentence)?;
        Ok(functions)
    }
}

/// Returns the newer function's result. If it failed, tries the deprecated one.
pub(super) fn newer_first<T>(newer: Result<T, Refusal>, older: impl FnOnce() -> Result<T, Refusal>) -> Result<T, Refusal> {
    newer.or_else(|refusal| match older() {
        // If the deprecated function is missing, the newer one's error counts.
        Err(Refusal { code: MISSING | DEPRECATED, .. }) => Err(refusal),
        answer => answer,
    })
}

fn not_loaded(error: &LoadError) -> String {
    match error {
        LoadError::Absent => "libnvidia-ml.so.1 is not on the loader's path; install the NVIDIA driver's utilities, in containers with \
             NVIDIA_DRIVER_CAPABILITIES=compute,utility"
            .to_owned(),
        LoadError::Unloadable(text) => format!(
            "libnvidia-ml.so.1 exists but cannot be loaded: {text}; reinstall the NVIDIA driver's utilities, or remove a wrong file from \
             LD_LIBRARY_PATH"
        ),
    }
}

/// Explains an error of NVML, with advice if there is any. Codes: `nvmlReturn_t`,
/// <https://docs.nvidia.com/deploy/nvml-api/group__nvmlDeviceEnumvs.html>.
pub(super) fn sentence(Refusal { call, code }: Refusal) -> String {
    let what = match code {
        MISSING => return format!("this libnvidia-ml.so.1 has no {call}; install a driver of CUDA 12 or later (525 or newer)"),
        3 => "the GPU does not support it",
        4 => return "this user has no permission to use NVML".to_owned(),
        NOT_FOUND => "no such device or process",
        9 => return "the NVIDIA kernel driver is not loaded; `modprobe nvidia`, and see `dmesg | grep NVRM`".to_owned(),
        15 => return "the GPU has fallen off the bus; see `dmesg | grep Xid` and drain the node".to_owned(),
        16 => "the GPU needs a reset",
        18 => {
            return "the NVML library and the loaded kernel driver have different versions; reboot, or reload the nvidia modules"
                .to_owned();
        }
        21 => "no data is available",
        DEPRECATED => "NVML has removed this function",
        999 => "NVML gives no reason; see `dmesg | grep Xid`",
        _ => "look the code up under nvmlReturn_t in nvml.h",
    };
    format!("{call} failed with code {code}: {what}")
}

#[cfg(test)]
mod tests;
