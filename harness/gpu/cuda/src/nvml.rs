//! The management library (NVML): memory used on a GPU, its processes, and the facts that make runs
//! comparable.
//!
//! NVML has its own device numbers, and `CUDA_VISIBLE_DEVICES` renumbers CUDA devices, so an
//! [`NvmlDevice`] is found by its [`Uuid`]. Only queries are made. NVML is optional: without it, a
//! device opens with fewer figures.
#![allow(non_upper_case_globals, reason = "names of the bindings")]

pub(crate) mod functions;

use std::ffi::c_uint;
use std::sync::{Mutex, OnceLock};
use std::{collections::BTreeSet, fmt};

use nvml_wrapper::Device;
use nvml_wrapper::enum_wrappers::device::{Clock, PerformancePolicy, TemperatureSensor};
use nvml_wrapper::enums::device::UsedGpuMemory;
use nvml_wrapper::error::NvmlError;
use nvml_wrapper::struct_wrappers::device::{MemoryInfo, ProcessInfo};
use nvml_wrapper_sys::bindings::field_id::{
    NVML_FI_DEV_PERF_POLICY_POWER, NVML_FI_DEV_PERF_POLICY_THERMAL,
};
use nvml_wrapper_sys::bindings::*;
use procfs::process::Process;

use self::functions::{library, nvml, sentence};
use harness_allocator::sync::lock;
use harness_allocator::units::{Bytes, Nanos};
use harness_allocator::{device::Fingerprint, hash::fnv1a};

/// A GPU, or a slice of a multi-instance GPU, in NVML.
pub struct NvmlDevice {
    device: Device<'static>,
    uuid: Uuid,
}

#[derive(Clone, Debug, PartialEq, Eq, serde::Deserialize, serde::Serialize)]
pub struct ProcessUse {
    /// Its process ID in the kernel driver's namespace; a container may see another one.
    pub pid: u32,
    pub name: Option<String>,
    pub used: Option<Bytes>,
}

/// One reading of a GPU's sensors. `None` means that a value could not be read.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Reading {
    pub sm_mhz: Option<u32>,
    pub memory_mhz: Option<u32>,
    pub power_mw: Option<u32>,
    pub temperature: Option<u32>,
    /// Reasons that currently reduce the clocks; empty if there are none.
    pub throttled: Option<Vec<Throttle>>,
    /// Total time that power reduced the clocks since the driver was loaded.
    pub held_by_power: Option<Nanos>,
    /// Total time that heat reduced the clocks since the driver was loaded.
    pub held_by_heat: Option<Nanos>,
    /// Other processes with memory on the device.
    pub others: Option<Vec<ProcessUse>>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Throttle {
    /// The reason in words, such as `power cap`.
    pub words: &'static str,
    /// `true` if a setting causes it, so it is the same on every day.
    pub chosen: bool,
}

impl NvmlDevice {
    pub fn find(uuid: Uuid) -> Result<Self, String> {
        let nvml = library()?;
        // NVML writes the UUIDs of GPUs and of multi-instance slices differently, and the driver
        // does not distinguish them.
        let by_name = |prefix: &str| nvml.device_by_uuid(format!("{prefix}-{uuid}"));
        match by_name("GPU").or_else(|_| by_name("MIG")) {
            Ok(device) => Ok(Self { device, uuid }),
            Err(error) => Err(format!(
                "NVML finds no device with this GPU's UUID: {}",
                sentence("nvmlDeviceGetHandleByUUID", error)
            )),
        }
    }

    fn memory(&self) -> Result<MemoryInfo, String> {
        self.device
            .memory_info()
            .map_err(|error| sentence("nvmlDeviceGetMemoryInfo_v2", error))
    }

    pub fn used(&self) -> Result<Bytes, String> {
        self.memory().map(|memory| Bytes(memory.used))
    }

    pub fn free(&self) -> Result<Bytes, String> {
        self.memory().map(|memory| Bytes(memory.free))
    }

    /// Returns this process's memory; `None` if NVML does not list the process or its memory.
    pub fn used_by_this_process(&self) -> Result<Option<Bytes>, String> {
        let processes = self.processes()?;
        Ok(processes
            .iter()
            .find(|process| is_this_process(process.pid))
            .and_then(used))
    }

    /// Returns the other processes with a CUDA context on the device, except children of this one.
    pub fn other_processes(&self) -> Result<Vec<ProcessUse>, String> {
        let processes = self.processes()?;
        let others = processes
            .iter()
            .filter(|process| !is_this_process(process.pid) && !is_child(process.pid));
        Ok(others
            .map(|process| ProcessUse {
                pid: process.pid,
                name: self.process_name(process.pid),
                used: used(process),
            })
            .collect())
    }

    /// Returns the process IDs of all CUDA contexts on the device. A failure is an error, never an
    /// empty list.
    pub fn process_numbers(&self) -> Result<Vec<u32>, String> {
        Ok(self
            .processes()?
            .iter()
            .map(|process| process.pid)
            .collect())
    }

    /// The wrapper makes room for five processes more than it has counted. If more start at that
    /// moment, it counts again.
    fn processes(&self) -> Result<Vec<ProcessInfo>, String> {
        let mut answers = (0..MOST_COUNTS).map(|_| self.device.running_compute_processes());
        let last = answers.find(|answer| !matches!(answer, Err(NvmlError::InsufficientSize(_))));
        let processes = last.unwrap_or(Err(NvmlError::InsufficientSize(None)));
        processes.map_err(|error| sentence("nvmlDeviceGetComputeRunningProcesses_v3", error))
    }

    fn process_name(&self, pid: u32) -> Option<String> {
        self.device.nvml().sys_process_name(pid, LONGEST_NAME).ok()
    }

    /// Learns this process's ID in the kernel driver's namespace, which differs inside a container.
    /// It is the one new entry since the context was created, if a second query shows the same. If
    /// another process appeared at the same time, or NVML fails, nothing is learned.
    pub(super) fn notice_this_process(&self, before_context: &[u32]) {
        if let Some(number) = self.newcomer_since(before_context) {
            // A number learned earlier is the same.
            let _ = OWN_NUMBER.set(number);
        }
    }

    /// Registers a child so that it is not counted as foreign. Call it after the child has created
    /// its context. Needed only if the child's process ID is not visible here.
    pub fn notice_child(&self, before_context: &[u32]) {
        if let Some(number) = self.newcomer_since(before_context) {
            lock(&CHILDREN).insert(number);
        }
    }

    fn newcomer_since(&self, before: &[u32]) -> Option<u32> {
        let looks = [self.process_numbers().ok()?, self.process_numbers().ok()?];
        newcomer(before, &looks)
    }

    pub fn reading(&self) -> Reading {
        Reading {
            sm_mhz: self.device.clock_info(Clock::SM).ok(),
            memory_mhz: self.device.clock_info(Clock::Memory).ok(),
            power_mw: self.device.power_usage().ok(),
            temperature: self.temperature(),
            throttled: self.throttled(),
            held_by_power: self.held_down(NVML_FI_DEV_PERF_POLICY_POWER, PerformancePolicy::Power),
            // The similar clock event reasons have different numbers in different headers (251 to
            // 253, and 269 to 271), so they cannot be used safely.
            held_by_heat: self
                .held_down(NVML_FI_DEV_PERF_POLICY_THERMAL, PerformancePolicy::Thermal),
            others: self.other_processes().ok(),
        }
    }

    /// Newer drivers have only the newer function, which the wrapper lacks.
    fn temperature(&self) -> Option<u32> {
        let sensor = nvmlTemperatureSensors_enum_NVML_TEMPERATURE_GPU;
        let mut now = nvmlTemperature_t {
            version: version::<nvmlTemperature_t>(1),
            sensorType: sensor,
            temperature: 0,
        };
        match nvml!(self.device, nvmlDeviceGetTemperatureV(&mut now)) {
            Ok(()) => Some(u32::try_from(now.temperature).unwrap_or(0)),
            Err(_) => self.device.temperature(TemperatureSensor::Gpu).ok(),
        }
    }

    /// The wrapper lacks the newer function, and drops the bits that it does not know.
    fn throttled(&self) -> Option<Vec<Throttle>> {
        let mut reasons = 0;
        let newer = nvml!(
            self.device,
            nvmlDeviceGetCurrentClocksEventReasons(&mut reasons)
        );
        let read = newer.or_else(|_| {
            nvml!(
                self.device,
                nvmlDeviceGetCurrentClocksThrottleReasons(&mut reasons)
            )
        });
        read.ok().map(|()| throttles(reasons))
    }

    /// Returns the total time of reduced clocks since the driver was loaded, from the counter's
    /// field or the older function's policy. nvml-wrapper 0.13 cuts fields of the type `unsigned
    /// long` to 32 bits, which 4.3 s in nanoseconds exceed.
    fn held_down(&self, field: c_uint, policy: PerformancePolicy) -> Option<Nanos> {
        // SAFETY: zero is a valid value of each field.
        let mut value = nvmlFieldValue_t {
            fieldId: field,
            ..unsafe { std::mem::zeroed() }
        };
        let newer = nvml!(self.device, nvmlDeviceGetFieldValues(1, &mut value))
            .ok()
            .and_then(|()| unsigned(&value));
        newer
            .or_else(|| Some(self.device.violation_status(policy).ok()?.violation_time))
            .map(Nanos)
    }

    /// Returns the facts that must be equal for two runs to be compared. The CUDA driver adds the
    /// CUDA version.
    pub fn fingerprint(&self) -> Fingerprint {
        let clock = |kind| self.device.clock_info(kind).ok();
        Fingerprint {
            uuid_hash: Some(self.uuid.hash()),
            driver: driver_version().ok(),
            mig: self
                .device
                .mig_mode()
                .ok()
                .map(|mode| mode.current == NVML_DEVICE_MIG_ENABLE),
            ecc: self
                .device
                .is_ecc_enabled()
                .ok()
                .map(|mode| mode.currently_enabled),
            clocks_mhz: clock(Clock::SM).zip(clock(Clock::Memory)),
            throttle_reasons: match self.throttled() {
                Some(reasons) => reasons
                    .into_iter()
                    .map(|throttle| throttle.words.to_owned())
                    .collect(),
                None => vec![NOT_KNOWN.to_owned()],
            },
            other_processes: self
                .other_processes()
                .ok()
                .map(|others| u32::try_from(others.len()).unwrap_or(u32::MAX)),
            ..Fingerprint::default()
        }
    }
}

/// The entry of [`Fingerprint::throttle_reasons`] if NVML does not report reduced clocks. It
/// differs from an empty list.
pub const NOT_KNOWN: &str = "not known";

pub fn driver_version() -> Result<String, String> {
    library()?
        .sys_driver_version()
        .map_err(|error| sentence("nvmlSystemGetDriverVersion", error))
}

/// Returns the version of a struct: according to nvml.h, the size is in the low bytes and the
/// number in the highest byte.
const fn version<T>(number: u32) -> u32 {
    size_of::<T>() as u32 | number << 24
}

/// Returns the value of a field that was read and is an unsigned number.
const fn unsigned(field: &nvmlFieldValue_t) -> Option<u64> {
    // SAFETY: any bytes are valid numbers.
    let (short, long) = unsafe { (field.value.uiVal, field.value.ullVal) };
    match (field.nvmlReturn, field.valueType) {
        (nvmlReturn_enum_NVML_SUCCESS, nvmlValueType_enum_NVML_VALUE_TYPE_UNSIGNED_INT) => {
            Some(short as u64)
        }
        (nvmlReturn_enum_NVML_SUCCESS, nvmlValueType_enum_NVML_VALUE_TYPE_UNSIGNED_LONG) => {
            Some(long)
        }
        (nvmlReturn_enum_NVML_SUCCESS, nvmlValueType_enum_NVML_VALUE_TYPE_UNSIGNED_LONG_LONG) => {
            Some(long)
        }
        _ => None,
    }
}

/// Processes that start between the wrapper's count and its query make it count again, at most this
/// often.
const MOST_COUNTS: usize = 16;

/// Bytes of the longest name of a process.
const LONGEST_NAME: usize = 256;

/// This process's ID in the kernel driver's namespace, once known.
static OWN_NUMBER: OnceLock<u32> = OnceLock::new();

/// IDs of this process's children in the kernel driver's namespace, as far as they had to be
/// learned.
static CHILDREN: Mutex<BTreeSet<u32>> = Mutex::new(BTreeSet::new());

/// Returns the new process ID if exactly one appeared and both queries show it.
fn newcomer(before: &[u32], looks: &[Vec<u32>; 2]) -> Option<u32> {
    let [first, second] = looks.each_ref().map(|now| {
        let mut came = now.iter().filter(|number| !before.contains(number));
        came.next().copied().filter(|_| came.next().is_none())
    });
    first.filter(|_| first == second)
}

fn is_this_process(number: u32) -> bool {
    number == std::process::id() || OWN_NUMBER.get() == Some(&number)
}

/// Returns whether that process is a child of this one. This fails across namespaces, where the ID
/// must be learned.
fn is_child(number: u32) -> bool {
    let stat = Process::new(number.cast_signed()).and_then(|process| process.stat());
    let is_visible_child = stat.is_ok_and(|stat| stat.ppid.cast_unsigned() == std::process::id());
    is_visible_child || lock(&CHILDREN).contains(&number)
}

/// Returns the memory of a process, if NVML knows it.
const fn used(process: &ProcessInfo) -> Option<Bytes> {
    match process.used_gpu_memory {
        UsedGpuMemory::Unavailable => None,
        UsedGpuMemory::Used(bytes) => Some(Bytes(bytes)),
    }
}

/// The reasons by bit, in words, and whether a setting causes them. Bit 0, idling, does not count
/// as throttling. Source:
/// <https://docs.nvidia.com/deploy/nvml-api/group__nvmlClocksEventReasons.html>.
const REASONS: [(u32, &str, bool); 8] = [
    (1, "application clocks are set", true),
    (2, "power cap", false),
    (3, "hardware slowdown", false),
    (4, "limited by another GPU of its sync-boost group", false),
    (5, "temperature (software)", false),
    (6, "temperature (hardware)", false),
    (7, "power brake", false),
    (8, "display clocks", true),
];

/// Decodes a bit mask. NVIDIA adds bits over time; unknown bits also count as throttling.
fn throttles(mask: u64) -> Vec<Throttle> {
    let has = |bit: u32| mask & 1 << bit != 0;
    let mut throttles: Vec<_> = REASONS
        .into_iter()
        .filter(|(bit, ..)| has(*bit))
        .map(|(_, words, chosen)| Throttle { words, chosen })
        .collect();
    if mask >> 9 != 0 {
        throttles.push(Throttle {
            words: "a reason unknown to this program",
            chosen: false,
        });
    }
    throttles
}

/// The UUID of a GPU or of a slice. Displayed in the form 8-4-4-4-12.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Uuid(pub [u8; 16]);

impl Uuid {
    /// Returns a hash that identifies the device without revealing its UUID: [`fnv1a`] over the 16
    /// bytes, in hexadecimal.
    pub fn hash(self) -> String {
        format!("{:016x}", fnv1a(&self.0))
    }
}

impl fmt::Display for Uuid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, byte) in self.0.iter().enumerate() {
            let dash = if matches!(index, 4 | 6 | 8 | 10) {
                "-"
            } else {
                ""
            };
            write!(f, "{dash}{byte:02x}")?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests;
