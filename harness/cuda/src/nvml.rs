//! The management library (NVML): memory used on a GPU, its processes, and the facts that make runs comparable.
//!
//! NVML has its own device numbers, and `CUDA_VISIBLE_DEVICES` renumbers CUDA devices, so an [`NvmlDevice`] is found by its
//! [`Uuid`]. Only queries are made. NVML is optional: without it, a device opens with fewer figures.

mod functions;

use std::collections::BTreeSet;
use std::ffi::{CString, c_char, c_uint};
use std::fmt;
use std::ptr;
use std::sync::{Mutex, OnceLock, PoisonError};

use self::functions::{
    FieldValue, Functions, Handle, INSUFFICIENT_SIZE, Memory, ProcessInfo, Temperature, ViolationTime, newer_first, sentence,
};
use crate::library::Refusal;
use harness_allocator::device::Fingerprint;
use harness_allocator::hash::fnv1a;
use harness_allocator::units::{Bytes, Nanos};

/// A GPU, or a slice of a multi-instance GPU, in NVML.
pub struct NvmlDevice {
    nvml: &'static Functions,
    device: Handle,
    uuid: Uuid,
}

// SAFETY: NVML is thread-safe (<https://docs.nvidia.com/deploy/nvml-api/nvml-api-reference.html>).
unsafe impl Send for NvmlDevice {}
// SAFETY: as above.
unsafe impl Sync for NvmlDevice {}

/// Memory that a process holds on a device.
#[derive(Clone, Debug, PartialEq, Eq, serde::Deserialize, serde::Serialize)]
pub struct ProcessUse {
    /// Its process ID in the kernel driver's namespace; a container may see another one.
    pub pid: u32,
    /// Its program, if NVML reports it.
    pub name: Option<String>,
    /// Its memory, if NVML reports it.
    pub used: Option<Bytes>,
}

/// One reading of a GPU's sensors. `None` means that a value could not be read.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Reading {
    /// Clock of the streaming multiprocessors, in MHz.
    pub sm_mhz: Option<u32>,
    /// Clock of the memory, in MHz.
    pub memory_mhz: Option<u32>,
    /// Power draw, in milliwatts.
    pub power_mw: Option<u32>,
    /// In degrees Celsius.
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

/// A reason for reduced clocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Throttle {
    /// The reason in words, such as `power cap`.
    pub words: &'static str,
    /// `true` if a setting causes it, so it is the same on every day.
    pub chosen: bool,
}

impl NvmlDevice {
    /// Finds the device with this UUID.
    ///
    /// # Errors
    /// Why NVML is unavailable, or that it has no such device.
    pub fn find(uuid: Uuid) -> Result<Self, String> {
        let nvml = Functions::get()?;
        // NVML writes the UUIDs of GPUs and of multi-instance slices differently, and the driver does not distinguish them.
        let by_name = |prefix: &str| {
            let name = CString::new(format!("{prefix}-{uuid}")).unwrap_or_default();
            let mut device = ptr::null_mut();
            // SAFETY: the name is NUL-terminated, and `device` is a valid output.
            unsafe { nvml.device(name.as_ptr(), &raw mut device) }.map(|()| device)
        };
        match by_name("GPU").or_else(|_| by_name("MIG")) {
            Ok(device) => Ok(Self { nvml, device, uuid }),
            Err(refusal) => Err(format!("NVML finds no device with this GPU's UUID: {}", sentence(refusal))),
        }
    }

    fn memory(&self) -> Result<Memory, String> {
        // According to nvml.h, the version has the size of the struct in its low bytes and its number in the highest byte.
        let version = size_of::<Memory>() as c_uint | 2 << 24;
        let mut memory = Memory { version, total: 0, reserved: 0, free: 0, used: 0 };
        // SAFETY: `memory` is a valid output of the given version.
        unsafe { self.nvml.memory(self.device, &raw mut memory) }.map_err(sentence)?;
        Ok(memory)
    }

    /// Returns the used memory of the whole device.
    pub fn used(&self) -> Result<Bytes, String> {
        self.memory().map(|memory| Bytes(memory.used))
    }

    /// Returns the free memory.
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

    fn processes(&self) -> Result<Vec<ProcessInfo>, String> {
        let nothing = ProcessInfo { pid: 0, used_gpu_memory: 0, gpu_instance: 0, compute_instance: 0 };
        let mut infos = vec![nothing; 32];
        loop {
            let mut count = c_uint::try_from(infos.len()).unwrap_or(c_uint::MAX);
            // SAFETY: the array has room for `count` processes.
            match unsafe { self.nvml.processes(self.device, &raw mut count, infos.as_mut_ptr()) } {
                Ok(()) => {
                    infos.truncate(count as usize);
                    return Ok(infos);
                }
                // More processes may start before the next try, so the array grows by doubling.
                Err(Refusal { code: INSUFFICIENT_SIZE, .. }) if infos.len() < MOST_PROCESSES => infos.resize(2 * infos.len(), nothing),
                Err(refusal) => return Err(sentence(refusal)),
            }
        }
    }

    fn process_name(&self, pid: u32) -> Option<String> {
        let ask = |buffer, length| {
            // SAFETY: the buffer has room for `length` characters.
            unsafe { self.nvml.process_name(pid, buffer, length) }
        };
        text(ask).ok()
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

    /// Reads the sensors.
    #[must_use]
    pub fn reading(&self) -> Reading {
        Reading {
            sm_mhz: self.clock(SM_CLOCK),
            memory_mhz: self.clock(MEMORY_CLOCK),
            // SAFETY: the pointer is a valid output.
            power_mw: self.number(|place| unsafe { self.nvml.power(self.device, place) }),
            temperature: self.temperature(),
            throttled: self.throttled(),
            held_by_power: self.held_down(POWER_FIELD, POWER_POLICY),
            held_by_heat: self.held_down(HEAT_FIELD, HEAT_POLICY),
            others: self.other_processes().ok(),
        }
    }

    /// Reads one number.
    fn number(&self, ask: impl FnOnce(*mut c_uint) -> Result<(), Refusal>) -> Option<u32> {
        let mut number = 0;
        ask(&raw mut number).ok().map(|()| number)
    }

    fn clock(&self, kind: c_uint) -> Option<u32> {
        // SAFETY: the pointer is a valid output.
        self.number(|place| unsafe { self.nvml.clock(self.device, kind, place) })
    }

    fn temperature(&self) -> Option<u32> {
        let version = size_of::<Temperature>() as c_uint | 1 << 24;
        let mut temperature = Temperature { version, sensor: GPU_SENSOR, celsius: 0 };
        // SAFETY: `temperature` is a valid output of the given version.
        let newer = unsafe { self.nvml.temperature(self.device, &raw mut temperature) };
        let mut celsius = 0;
        // SAFETY: `celsius` is a valid output.
        let older = || unsafe { self.nvml.temperature_before_13(self.device, GPU_SENSOR, &raw mut celsius) }.map(|()| celsius);
        newer_first(newer.map(|()| u32::try_from(temperature.celsius).unwrap_or(0)), older).ok()
    }

    fn throttled(&self) -> Option<Vec<Throttle>> {
        let (mut reasons, mut older_reasons) = (0, 0);
        // SAFETY: `reasons` is a valid output.
        let newer = unsafe { self.nvml.event_reasons(self.device, &raw mut reasons) }.map(|()| reasons);
        // SAFETY: as above.
        let older = || unsafe { self.nvml.event_reasons_before_13(self.device, &raw mut older_reasons) }.map(|()| older_reasons);
        newer_first(newer, older).ok().map(throttles)
    }

    /// Returns the total time of reduced clocks since the driver was loaded, from the counter's field or the older function's
    /// policy.
    fn held_down(&self, field: c_uint, policy: c_uint) -> Option<Nanos> {
        let mut value = FieldValue { field, scope: 0, timestamp: 0, latency: 0, kind: 0, code: 0, value: [0; 8] };
        // SAFETY: `value` is one field with its number set, and a valid output.
        let asked = unsafe { self.nvml.fields(self.device, 1, &raw mut value) };
        let newer = asked.and_then(|()| value.unsigned().ok_or(Refusal { call: "nvmlDeviceGetFieldValues", code: value.code }));
        let mut time = ViolationTime { reference: 0, violation: 0 };
        // SAFETY: `time` is a valid output.
        let older = || unsafe { self.nvml.violation_before_13(self.device, policy, &raw mut time) }.map(|()| time.violation);
        newer_first(newer, older).ok().map(Nanos)
    }

    /// Returns the facts that must be equal for two runs to be compared. The CUDA driver adds the CUDA version.
    #[must_use]
    pub fn fingerprint(&self) -> Fingerprint {
        let mut pending = 0;
        Fingerprint {
            memory: None,
            uuid_hash: Some(self.uuid.hash()),
            driver: driver_version().ok(),
            cuda: None,
            // SAFETY: both pointers are valid outputs.
            mig: self.number(|place| unsafe { self.nvml.mig_mode(self.device, place, &raw mut pending) }).map(|mode| mode == ENABLED),
            // SAFETY: as above.
            ecc: self.number(|place| unsafe { self.nvml.ecc_mode(self.device, place, &raw mut pending) }).map(|mode| mode == ENABLED),
            clocks_mhz: self.clock(SM_CLOCK).zip(self.clock(MEMORY_CLOCK)),
            throttle_reasons: match self.throttled() {
                Some(reasons) => reasons.into_iter().map(|throttle| throttle.words.to_owned()).collect(),
                None => vec![NOT_KNOWN.to_owned()],
            },
            other_processes: self.other_processes().ok().map(|others| u32::try_from(others.len()).unwrap_or(u32::MAX)),
            cost_model: None,
        }
    }
}

/// The entry of [`Fingerprint::throttle_reasons`] if NVML does not report reduced clocks. It differs from an empty list.
pub const NOT_KNOWN: &str = "not known";

/// Returns the version of the kernel driver, for example `580.65.06`.
pub fn driver_version() -> Result<String, String> {
    let nvml = Functions::get()?;
    // SAFETY: the buffer has room for `length` characters.
    text(|buffer, length| unsafe { nvml.driver_version(buffer, length) }).map_err(sentence)
}

/// Reads a text of at most 255 characters.
fn text(ask: impl FnOnce(*mut c_char, c_uint) -> Result<(), Refusal>) -> Result<String, Refusal> {
    let mut buffer = [0_u8; 256];
    // One byte is left for a final NUL.
    ask(buffer.as_mut_ptr().cast(), 255)?;
    let text = buffer.split(|byte| *byte == 0).next().unwrap_or_default();
    Ok(String::from_utf8_lossy(text).into_owned())
}

impl FieldValue {
    /// Returns the value if the field was read and is an unsigned number.
    fn unsigned(&self) -> Option<u64> {
        let [a, b, c, d, ..] = self.value;
        match (self.code, self.kind) {
            // NVML_VALUE_TYPE_UNSIGNED_INT
            (0, 1) => Some(u64::from(u32::from_ne_bytes([a, b, c, d]))),
            // NVML_VALUE_TYPE_UNSIGNED_LONG (of 64 bits on Linux), NVML_VALUE_TYPE_UNSIGNED_LONG_LONG
            (0, 2 | 3) => Some(u64::from_ne_bytes(self.value)),
            _ => None,
        }
    }
}

/// An upper bound: a longer list indicates a fault in NVML.
const MOST_PROCESSES: usize = 1 << 16;
/// `NVML_CLOCK_SM`.
const SM_CLOCK: c_uint = 1;
/// `NVML_CLOCK_MEM`.
const MEMORY_CLOCK: c_uint = 2;
/// `NVML_TEMPERATURE_GPU`.
const GPU_SENSOR: c_uint = 0;
/// `NVML_FI_DEV_CLOCKS_EVENT_REASON_SW_POWER_CAP`, which is `NVML_FI_DEV_PERF_POLICY_POWER` of older headers, in nanoseconds.
const POWER_FIELD: c_uint = 74;
/// `NVML_FI_DEV_PERF_POLICY_THERMAL`, in nanoseconds. The similar clock event reasons have different numbers in different headers
/// (251 to 253, and 269 to 271), so they cannot be used safely.
const HEAT_FIELD: c_uint = 75;
/// `NVML_PERF_POLICY_POWER`.
const POWER_POLICY: c_uint = 0;
/// `NVML_PERF_POLICY_THERMAL`.
const HEAT_POLICY: c_uint = 1;
/// `NVML_DEVICE_MIG_ENABLE` and `NVML_FEATURE_ENABLED`.
const ENABLED: c_uint = 1;

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
    if CHILDREN.lock().unwrap_or_else(PoisonError::into_inner).contains(&number) {
        return true;
    }
    // The program's name in parentheses may contain any character; the state and the parent follow it
    // (<https://man7.org/linux/man-pages/man5/proc_pid_stat.5.html>).
    let parent = std::fs::read_to_string(format!("/proc/{number}/stat"))
        .ok()
        .and_then(|stat| stat.rsplit_once(')')?.1.split_whitespace().nth(1)?.parse::<u32>().ok());
    parent == Some(std::process::id())
}

/// Returns the memory of a process; all ones are `NVML_VALUE_NOT_AVAILABLE`.
const fn known(process: &ProcessInfo) -> Option<Bytes> {
    match process.used_gpu_memory {
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
    #[must_use]
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
