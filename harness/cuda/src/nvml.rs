//! The management library (NVML): memory used on a GPU, its processes, and the facts that make runs comparable.
//!
//! NVML has its own device numbers, and `CUDA_VISIBLE_DEVICES` renumbers CUDA devices, so an [`NvmlDevice`] is found by its
//! [`Uuid`]. Only queries are made. NVML is optional: without it, a device opens with fewer figures.
#![allow(non_upper_case_globals, reason = "names of the bindings")]

mod functions;

use std::ffi::{CString, c_uint};
use std::sync::{Mutex, OnceLock, PoisonError};
use std::{collections::BTreeSet, fmt, ptr};

use nvml_wrapper_sys::bindings::field_id::{NVML_FI_DEV_PERF_POLICY_POWER, NVML_FI_DEV_PERF_POLICY_THERMAL};
use nvml_wrapper_sys::bindings::*;
use procfs::process::Process;

use self::functions::{newer_first, nvml, sentence};
use crate::library::{self, Refusal};
use harness_allocator::units::{Bytes, Nanos};
use harness_allocator::{device::Fingerprint, hash::fnv1a};

/// A GPU, or a slice of a multi-instance GPU, in NVML.
pub struct NvmlDevice {
    nvml: &'static NvmlLib,
    device: nvmlDevice_t,
    uuid: Uuid,
}

// SAFETY: NVML is thread-safe (<https://docs.nvidia.com/deploy/nvml-api/nvml-api-reference.html>).
unsafe impl Send for NvmlDevice {}
// SAFETY: as above.
unsafe impl Sync for NvmlDevice {}

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
        let nvml = functions::library()?;
        // NVML writes the UUIDs of GPUs and of multi-instance slices differently, and the driver does not distinguish them.
        let by_name = |prefix: &str| {
            let name = CString::new(format!("{prefix}-{uuid}")).unwrap_or_default();
            let mut device = ptr::null_mut();
            nvml!(nvml, nvmlDeviceGetHandleByUUID(name.as_ptr(), &mut device)).map(|()| device)
        };
        match by_name("GPU").or_else(|_| by_name("MIG")) {
            Ok(device) => Ok(Self { nvml, device, uuid }),
            Err(refusal) => Err(format!("NVML finds no device with this GPU's UUID: {}", sentence(refusal))),
        }
    }

    fn memory(&self) -> Result<nvmlMemory_v2_t, String> {
        let mut memory = nvmlMemory_v2_t { version: version::<nvmlMemory_v2_t>(2), total: 0, reserved: 0, free: 0, used: 0 };
        nvml!(self.nvml, nvmlDeviceGetMemoryInfo_v2(self.device, &mut memory)).map_err(sentence)?;
        Ok(memory)
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
        Ok(processes.iter().find(|process| is_this_process(process.pid)).and_then(known))
    }

    /// Returns the other processes with a CUDA context on the device, except children of this one.
    pub fn other_processes(&self) -> Result<Vec<ProcessUse>, String> {
        let processes = self.processes()?;
        let others = processes.iter().filter(|process| !is_this_process(process.pid) && !is_child(process.pid));
        Ok(others.map(|process| ProcessUse { pid: process.pid, name: self.process_name(process.pid), used: known(process) }).collect())
    }

    /// Returns the process IDs of all CUDA contexts on the device. A failure is an error, never an empty list.
    pub fn process_numbers(&self) -> Result<Vec<u32>, String> {
        Ok(self.processes()?.iter().map(|process| process.pid).collect())
    }

    fn processes(&self) -> Result<Vec<nvmlProcessInfo_t>, String> {
        let nothing = nvmlProcessInfo_t { pid: 0, usedGpuMemory: 0, gpuInstanceId: 0, computeInstanceId: 0 };
        let mut infos = vec![nothing; 32];
        loop {
            let mut count = c_uint::try_from(infos.len()).unwrap_or(c_uint::MAX);
            match nvml!(self.nvml, nvmlDeviceGetComputeRunningProcesses_v3(self.device, &mut count, infos.as_mut_ptr())) {
                Ok(()) => {
                    infos.truncate(count as usize);
                    return Ok(infos);
                }
                // More processes may start before the next try, so the array grows by doubling.
                Err(Refusal { code: nvmlReturn_enum_NVML_ERROR_INSUFFICIENT_SIZE, .. }) if infos.len() < MOST_PROCESSES => {
                    infos.resize(2 * infos.len(), nothing);
                }
                Err(refusal) => return Err(sentence(refusal)),
            }
        }
    }

    fn process_name(&self, pid: u32) -> Option<String> {
        library::text(|buffer, length| nvml!(self.nvml, nvmlSystemGetProcessName(pid, buffer, length))).ok()
    }

    /// Learns this process's ID in the kernel driver's namespace, which differs inside a container. It is the one new entry since
    /// the context was created, if a second query shows the same. If another process appeared at the same time, or NVML fails,
    /// nothing is learned.
    pub(super) fn notice_this_process(&self, before_context: &[u32]) {
        if let Some(number) = self.newcomer_since(before_context) {
            // A number learned earlier is the same.
            let _ = OWN_NUMBER.set(number);
        }
    }

    /// Registers a child so that it is not counted as foreign. Call it after the child has created its context. Needed only if
    /// the child's process ID is not visible here.
    pub fn notice_child(&self, before_context: &[u32]) {
        if let Some(number) = self.newcomer_since(before_context) {
            CHILDREN.lock().unwrap_or_else(PoisonError::into_inner).insert(number);
        }
    }

    fn newcomer_since(&self, before: &[u32]) -> Option<u32> {
        let looks = [self.process_numbers().ok()?, self.process_numbers().ok()?];
        newcomer(before, &looks)
    }

    pub fn reading(&self) -> Reading {
        Reading {
            sm_mhz: self.clock(nvmlClockType_enum_NVML_CLOCK_SM),
            memory_mhz: self.clock(nvmlClockType_enum_NVML_CLOCK_MEM),
            power_mw: number(|milliwatts| nvml!(self.nvml, nvmlDeviceGetPowerUsage(self.device, milliwatts))).ok(),
            temperature: self.temperature(),
            throttled: self.throttled(),
            held_by_power: self.held_down(NVML_FI_DEV_PERF_POLICY_POWER, nvmlPerfPolicyType_enum_NVML_PERF_POLICY_POWER),
            // The similar clock event reasons have different numbers in different headers (251 to 253, and 269 to 271), so they cannot
            // be used safely.
            held_by_heat: self.held_down(NVML_FI_DEV_PERF_POLICY_THERMAL, nvmlPerfPolicyType_enum_NVML_PERF_POLICY_THERMAL),
            others: self.other_processes().ok(),
        }
    }

    fn clock(&self, kind: nvmlClockType_t) -> Option<u32> {
        number(|megahertz| nvml!(self.nvml, nvmlDeviceGetClockInfo(self.device, kind, megahertz))).ok()
    }

    fn temperature(&self) -> Option<u32> {
        let sensor = nvmlTemperatureSensors_enum_NVML_TEMPERATURE_GPU;
        let mut now = nvmlTemperature_t { version: version::<nvmlTemperature_t>(1), sensorType: sensor, temperature: 0 };
        let newer = nvml!(self.nvml, nvmlDeviceGetTemperatureV(self.device, &mut now));
        let older = || number(|celsius| nvml!(self.nvml, nvmlDeviceGetTemperature(self.device, sensor, celsius)));
        newer_first(newer.map(|()| u32::try_from(now.temperature).unwrap_or(0)), older).ok()
    }

    fn throttled(&self) -> Option<Vec<Throttle>> {
        let newer = number(|reasons| nvml!(self.nvml, nvmlDeviceGetCurrentClocksEventReasons(self.device, reasons)));
        let older = || number(|reasons| nvml!(self.nvml, nvmlDeviceGetCurrentClocksThrottleReasons(self.device, reasons)));
        newer_first(newer, older).ok().map(throttles)
    }

    /// Returns the total time of reduced clocks since the driver was loaded, from the counter's field or the older function's policy.
    fn held_down(&self, field: c_uint, policy: nvmlPerfPolicyType_t) -> Option<Nanos> {
        // SAFETY: zero is a valid value of each field.
        let mut value = nvmlFieldValue_t { fieldId: field, ..unsafe { std::mem::zeroed() } };
        let asked = nvml!(self.nvml, nvmlDeviceGetFieldValues(self.device, 1, &mut value));
        let newer = asked.and_then(|()| unsigned(&value).ok_or(Refusal { call: "nvmlDeviceGetFieldValues", code: value.nvmlReturn }));
        let mut time = nvmlViolationTime_t { referenceTime: 0, violationTime: 0 };
        let older = || nvml!(self.nvml, nvmlDeviceGetViolationStatus(self.device, policy, &mut time)).map(|()| time.violationTime);
        newer_first(newer, older).ok().map(Nanos)
    }

    /// Returns the facts that must be equal for two runs to be compared. The CUDA driver adds the CUDA version.
    pub fn fingerprint(&self) -> Fingerprint {
        let mut pending = 0;
        let mig = number(|mode| nvml!(self.nvml, nvmlDeviceGetMigMode(self.device, mode, &mut pending)));
        let ecc = number(|mode| nvml!(self.nvml, nvmlDeviceGetEccMode(self.device, mode, &mut pending)));
        Fingerprint {
            uuid_hash: Some(self.uuid.hash()),
            driver: driver_version().ok(),
            mig: mig.ok().map(|mode| mode == NVML_DEVICE_MIG_ENABLE),
            ecc: ecc.ok().map(|mode| mode == nvmlEnableState_enum_NVML_FEATURE_ENABLED),
            clocks_mhz: self.clock(nvmlClockType_enum_NVML_CLOCK_SM).zip(self.clock(nvmlClockType_enum_NVML_CLOCK_MEM)),
            throttle_reasons: match self.throttled() {
                Some(reasons) => reasons.into_iter().map(|throttle| throttle.words.to_owned()).collect(),
                None => vec![NOT_KNOWN.to_owned()],
            },
            other_processes: self.other_processes().ok().map(|others| u32::try_from(others.len()).unwrap_or(u32::MAX)),
            ..Fingerprint::default()
        }
    }
}

/// The entry of [`Fingerprint::throttle_reasons`] if NVML does not report reduced clocks. It differs from an empty list.
pub const NOT_KNOWN: &str = "not known";

pub fn driver_version() -> Result<String, String> {
    let nvml = functions::library()?;
    library::text(|buffer, length| nvml!(nvml, nvmlSystemGetDriverVersion(buffer, length))).map_err(sentence)
}

fn number<T: Default>(read: impl FnOnce(&mut T) -> Result<(), Refusal>) -> Result<T, Refusal> {
    let mut number = T::default();
    read(&mut number).map(|()| number)
}

/// Returns the version of a struct: according to nvml.h, the size is in the low bytes and the number in the highest byte.
const fn version<T>(number: u32) -> u32 {
    size_of::<T>() as u32 | number << 24
}

/// Returns the value of a field that was read and is an unsigned number.
const fn unsigned(field: &nvmlFieldValue_t) -> Option<u64> {
    // SAFETY: any bytes are valid numbers.
    let (short, long) = unsafe { (field.value.uiVal, field.value.ullVal) };
    match (field.nvmlReturn, field.valueType) {
        (nvmlReturn_enum_NVML_SUCCESS, nvmlValueType_enum_NVML_VALUE_TYPE_UNSIGNED_INT) => Some(short as u64),
        (nvmlReturn_enum_NVML_SUCCESS, nvmlValueType_enum_NVML_VALUE_TYPE_UNSIGNED_LONG) => Some(long),
        (nvmlReturn_enum_NVML_SUCCESS, nvmlValueType_enum_NVML_VALUE_TYPE_UNSIGNED_LONG_LONG) => Some(long),
        _ => None,
    }
}

/// An upper bound: a longer list indicates a fault in NVML.
const MOST_PROCESSES: usize = 1 << 16;

/// This process's ID in the kernel driver's namespace, once known.
static OWN_NUMBER: OnceLock<u32> = OnceLock::new();

/// IDs of this process's children in the kernel driver's namespace, as far as they had to be learned.
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

/// Returns whether that process is a child of this one. This fails across namespaces, where the ID must be learned.
fn is_child(number: u32) -> bool {
    let stat = Process::new(number.cast_signed()).and_then(|process| process.stat());
    let is_visible_child = stat.is_ok_and(|stat| stat.ppid.cast_unsigned() == std::process::id());
    is_visible_child || CHILDREN.lock().unwrap_or_else(PoisonError::into_inner).contains(&number)
}

/// Returns the memory of a process; all ones are `NVML_VALUE_NOT_AVAILABLE`.
const fn known(process: &nvmlProcessInfo_t) -> Option<Bytes> {
    match process.usedGpuMemory {
        u64::MAX => None,
        used => Some(Bytes(used)),
    }
}

/// The reasons by bit, in words, and whether a setting causes them. Bit 0, idling, does not count as throttling. Source:
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
    let mut throttles: Vec<_> =
        REASONS.into_iter().filter(|(bit, ..)| has(*bit)).map(|(_, words, chosen)| Throttle { words, chosen }).collect();
    if mask >> 9 != 0 {
        throttles.push(Throttle { words: "a reason unknown to this program", chosen: false });
    }
    throttles
}

/// The UUID of a GPU or of a slice. Displayed in the form 8-4-4-4-12.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Uuid(pub [u8; 16]);

impl Uuid {
    /// Returns a hash that identifies the device without revealing its UUID: [`fnv1a`] over the 16 bytes, in hexadecimal.
    pub fn hash(self) -> String {
        format!("{:016x}", fnv1a(&self.0))
    }
}

impl fmt::Display for Uuid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, byte) in self.0.iter().enumerate() {
            let dash = if matches!(index, 4 | 6 | 8 | 10) { "-" } else { "" };
            write!(f, "{dash}{byte:02x}")?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests;
