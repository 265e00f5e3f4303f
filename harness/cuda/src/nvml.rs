//! What the management library (NVML) knows of a GPU: memory used on it, by whom, and the facts that make two runs comparable.
//!
//! NVML numbers GPUs by itself, while `CUDA_VISIBLE_DEVICES` renumbers them for CUDA: an [`NvmlDevice`] is found by its [`Uuid`]. Only
//! queries are made, never a setter. Everything here is optional: without NVML a device still opens, with less to tell.

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

/// One GPU, or one instance of a multi-instance GPU, as NVML sees it.
pub struct NvmlDevice {
    nvml: &'static Functions,
    device: Handle,
    uuid: Uuid,
}

// SAFETY: NVML may be called from every thread, with any handle (<https://docs.nvidia.com/deploy/nvml-api/nvml-api-reference.html>).
unsafe impl Send for NvmlDevice {}
// SAFETY: as above.
unsafe impl Sync for NvmlDevice {}

/// Memory that a process holds of a device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ProcessUse {
    /// Its number, as the kernel driver's namespace has it: in a container it may not be the one seen inside.
    pub pid: u32,
    /// Its program, where NVML tells.
    pub name: Option<String>,
    /// What it holds, where NVML tells.
    pub used: Option<Bytes>,
}

/// What the sensors of a GPU tell at one moment. `None`: it could not be read.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Reading {
    /// Clock of the streaming multiprocessors, in MHz.
    pub sm_mhz: Option<u32>,
    /// Clock of the memory, in MHz.
    pub memory_mhz: Option<u32>,
    /// Power drawn, in milliwatts.
    pub power_mw: Option<u32>,
    /// In degrees Celsius.
    pub temperature: Option<u32>,
    /// What holds the clocks down at this moment; empty where nothing does.
    pub throttled: Option<Vec<Throttle>>,
    /// For how long power held the clocks down since the driver was loaded.
    pub held_by_power: Option<Nanos>,
    /// For how long heat did.
    pub held_by_heat: Option<Nanos>,
    /// Other processes with memory on the device.
    pub others: Option<Vec<ProcessUse>>,
}

/// Something that holds the clocks of a GPU down.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Throttle {
    /// In words, as in `power cap`.
    pub words: &'static str,
    /// Whether somebody set the clocks so: then they are the same from day to day.
    pub chosen: bool,
}

impl NvmlDevice {
    /// The device with this UUID.
    ///
    /// # Errors
    /// A sentence: why there is no NVML, or that it has no such device.
    pub fn find(uuid: Uuid) -> Result<Self, String> {
        let nvml = Functions::get()?;
        // The driver does not say whether a UUID is that of a GPU or of a multi-instance slice; NVML writes them differently.
        let by_name = |prefix: &str| {
            let name = CString::new(format!("{prefix}-{uuid}")).unwrap_or_default();
            let mut device = ptr::null_mut();
            // SAFETY: the name is NUL-terminated, and `device` is a place for the answer.
            unsafe { nvml.device(name.as_ptr(), &raw mut device) }.map(|()| device)
        };
        match by_name("GPU").or_else(|_| by_name("MIG")) {
            Ok(device) => Ok(Self { nvml, device, uuid }),
            Err(refusal) => Err(format!("NVML finds no device with this GPU's UUID: {}", sentence(refusal))),
        }
    }

    fn memory(&self) -> Result<Memory, String> {
        // From nvml.h: the size of the struct, and its version in the highest byte.
        let version = size_of::<Memory>() as c_uint | 2 << 24;
        let mut memory = Memory { version, total: 0, reserved: 0, free: 0, used: 0 };
        // SAFETY: `memory` is a place for the answer, of the version that it says.
        unsafe { self.nvml.memory(self.device, &raw mut memory) }.map_err(sentence)?;
        Ok(memory)
    }

    /// Memory used on the whole device, by everybody.
    ///
    /// # Errors
    /// NVML's sentence.
    pub fn used(&self) -> Result<Bytes, String> {
        self.memory().map(|memory| Bytes(memory.used))
    }

    /// Memory that nobody has taken.
    ///
    /// # Errors
    /// NVML's sentence.
    pub fn free(&self) -> Result<Bytes, String> {
        self.memory().map(|memory| Bytes(memory.free))
    }

    /// Memory of this process; `None` where NVML does not list it, or does not tell its memory.
    ///
    /// # Errors
    /// NVML's sentence.
    pub fn used_by_this_process(&self) -> Result<Option<Bytes>, String> {
        let processes = self.processes()?;
        Ok(processes.iter().find(|process| is_this_process(process.pid)).and_then(known))
    }

    /// The other processes with a CUDA context on the device, without those that this one started.
    ///
    /// # Errors
    /// NVML's sentence.
    pub fn other_processes(&self) -> Result<Vec<ProcessUse>, String> {
        let processes = self.processes()?;
        let others = processes.iter().filter(|process| !is_this_process(process.pid) && !is_child(process.pid));
        Ok(others.map(|process| ProcessUse { pid: process.pid, name: self.process_name(process.pid), used: known(process) }).collect())
    }

    /// The numbers of all processes with a CUDA context on the device.
    ///
    /// # Errors
    /// NVML's sentence. An error is not an empty list.
    pub fn process_numbers(&self) -> Result<Vec<u32>, String> {
        Ok(self.processes()?.iter().map(|process| process.pid).collect())
    }

    fn processes(&self) -> Result<Vec<ProcessInfo>, String> {
        let nothing = ProcessInfo { pid: 0, used_gpu_memory: 0, gpu_instance: 0, compute_instance: 0 };
        let mut infos = vec![nothing; 32];
        loop {
            let mut count = c_uint::try_from(infos.len()).unwrap_or(c_uint::MAX);
            // SAFETY: there is room for `count` processes, and NVML writes no more.
            match unsafe { self.nvml.processes(self.device, &raw mut count, infos.as_mut_ptr()) } {
                Ok(()) => {
                    infos.truncate(count as usize);
                    return Ok(infos);
                }
                // More than there is room for, and more may come meanwhile.
                Err(Refusal { code: INSUFFICIENT_SIZE, .. }) if infos.len() < MOST_PROCESSES => infos.resize(2 * infos.len(), nothing),
                Err(refusal) => return Err(sentence(refusal)),
            }
        }
    }

    fn process_name(&self, pid: u32) -> Option<String> {
        let ask = |buffer, length| {
            // SAFETY: the buffer has room for as many characters as are told.
            unsafe { self.nvml.process_name(pid, buffer, length) }
        };
        text(ask).ok()
    }

    /// Learns this process's number in the kernel driver's namespace, which in a container is not the one seen inside: it is the one that
    /// came to the list with this process's context, and is still there at a second look. Where another process came at the same moment, or
    /// NVML fails to answer, nothing is learnt.
    pub(super) fn notice_this_process(&self, before_context: &[u32]) {
        if let Some(number) = self.newcomer_since(before_context) {
            // Learnt before: it is the same number.
            let _ = OWN_NUMBER.set(number);
        }
    }

    /// The same for a process that this one has started and that has made its context by now: it is no other process from now on. Where the
    /// number of this process's children can be seen, nothing would have to be learnt.
    pub fn notice_child(&self, before_context: &[u32]) {
        if let Some(number) = self.newcomer_since(before_context) {
            CHILDREN.lock().unwrap_or_else(PoisonError::into_inner).insert(number);
        }
    }

    fn newcomer_since(&self, before: &[u32]) -> Option<u32> {
        let looks = [self.process_numbers().ok()?, self.process_numbers().ok()?];
        newcomer(before, &looks)
    }

    /// What its sensors tell now.
    #[must_use]
    pub fn reading(&self) -> Reading {
        Reading {
            sm_mhz: self.clock(SM_CLOCK),
            memory_mhz: self.clock(MEMORY_CLOCK),
            // SAFETY: the place is one for the answer.
            power_mw: self.number(|place| unsafe { self.nvml.power(self.device, place) }),
            temperature: self.temperature(),
            throttled: self.throttled(),
            held_by_power: self.held_down(POWER_FIELD, POWER_POLICY),
            held_by_heat: self.held_down(HEAT_FIELD, HEAT_POLICY),
            others: self.other_processes().ok(),
        }
    }

    /// Asks for one number.
    fn number(&self, ask: impl FnOnce(*mut c_uint) -> Result<(), Refusal>) -> Option<u32> {
        let mut number = 0;
        ask(&raw mut number).ok().map(|()| number)
    }

    fn clock(&self, kind: c_uint) -> Option<u32> {
        // SAFETY: the place is one for the answer.
        self.number(|place| unsafe { self.nvml.clock(self.device, kind, place) })
    }

    fn temperature(&self) -> Option<u32> {
        let version = size_of::<Temperature>() as c_uint | 1 << 24;
        let mut temperature = Temperature { version, sensor: GPU_SENSOR, celsius: 0 };
        // SAFETY: `temperature` is a place for the answer, of the version that it says.
        let newer = unsafe { self.nvml.temperature(self.device, &raw mut temperature) };
        let mut celsius = 0;
        // SAFETY: `celsius` is a place for the answer.
        let older = || unsafe { self.nvml.temperature_before_13(self.device, GPU_SENSOR, &raw mut celsius) }.map(|()| celsius);
        newer_first(newer.map(|()| u32::try_from(temperature.celsius).unwrap_or(0)), older).ok()
    }

    fn throttled(&self) -> Option<Vec<Throttle>> {
        let (mut reasons, mut older_reasons) = (0, 0);
        // SAFETY: `reasons` is a place for the answer.
        let newer = unsafe { self.nvml.event_reasons(self.device, &raw mut reasons) }.map(|()| reasons);
        // SAFETY: as above.
        let older = || unsafe { self.nvml.event_reasons_before_13(self.device, &raw mut older_reasons) }.map(|()| older_reasons);
        newer_first(newer, older).ok().map(throttles)
    }

    /// For how long something held the clocks down since the driver was loaded: by the counter's field, or the old function's policy.
    fn held_down(&self, field: c_uint, policy: c_uint) -> Option<Nanos> {
        let mut value = FieldValue { field, scope: 0, timestamp: 0, latency: 0, kind: 0, code: 0, value: [0; 8] };
        // SAFETY: `value` is one field with its number set, and a place for the answer.
        let asked = unsafe { self.nvml.fields(self.device, 1, &raw mut value) };
        let newer = asked.and_then(|()| value.unsigned().ok_or(Refusal { call: "nvmlDeviceGetFieldValues", code: value.code }));
        let mut time = ViolationTime { reference: 0, violation: 0 };
        // SAFETY: `time` is a place for the answer.
        let older = || unsafe { self.nvml.violation_before_13(self.device, policy, &raw mut time) }.map(|()| time.violation);
        newer_first(newer, older).ok().map(Nanos)
    }

    /// What must be equal for two runs to be compared, as it is now. The CUDA version is the CUDA driver's to tell.
    #[must_use]
    pub fn fingerprint(&self) -> Fingerprint {
        let mut pending = 0;
        Fingerprint {
            memory: None,
            uuid_hash: Some(self.uuid.hash()),
            driver: driver_version().ok(),
            cuda: None,
            // SAFETY: both are places for the answers.
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

/// What stands in [`Fingerprint::throttle_reasons`] where NVML does not tell whether clocks are held down: that is not the same as nothing.
pub const NOT_KNOWN: &str = "not known";

/// Version of the kernel driver, for example `580.65.06`.
///
/// # Errors
/// A sentence: why NVML is not there, or does not tell.
pub fn driver_version() -> Result<String, String> {
    let nvml = Functions::get()?;
    // SAFETY: the buffer has room for as many characters as are told.
    text(|buffer, length| unsafe { nvml.driver_version(buffer, length) }).map_err(sentence)
}

/// Asks for a text of at most 255 characters.
fn text(ask: impl FnOnce(*mut c_char, c_uint) -> Result<(), Refusal>) -> Result<String, Refusal> {
    let mut buffer = [0_u8; 256];
    // One character less, so that there is a NUL in any case.
    ask(buffer.as_mut_ptr().cast(), 255)?;
    let text = buffer.split(|byte| *byte == 0).next().unwrap_or_default();
    Ok(String::from_utf8_lossy(text).into_owned())
}

impl FieldValue {
    /// The value, where the field could be read and is a number without sign.
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

/// No GPU serves as many processes: a list that is longer is a mistake of NVML's.
const MOST_PROCESSES: usize = 1 << 16;
/// `NVML_CLOCK_SM`.
const SM_CLOCK: c_uint = 1;
/// `NVML_CLOCK_MEM`.
const MEMORY_CLOCK: c_uint = 2;
/// `NVML_TEMPERATURE_GPU`.
const GPU_SENSOR: c_uint = 0;
/// `NVML_FI_DEV_CLOCKS_EVENT_REASON_SW_POWER_CAP`, which is `NVML_FI_DEV_PERF_POLICY_POWER` of older headers, in nanoseconds.
const POWER_FIELD: c_uint = 74;
/// `NVML_FI_DEV_PERF_POLICY_THERMAL`, in nanoseconds. Its namesakes among the clock event reasons have different numbers in different
/// headers (251 to 253, and 269 to 271), so they cannot be asked for safely.
const HEAT_FIELD: c_uint = 75;
/// `NVML_PERF_POLICY_POWER`.
const POWER_POLICY: c_uint = 0;
/// `NVML_PERF_POLICY_THERMAL`.
const HEAT_POLICY: c_uint = 1;
/// `NVML_DEVICE_MIG_ENABLE` and `NVML_FEATURE_ENABLED`.
const ENABLED: c_uint = 1;

/// This process's number as the kernel driver has it, once a context was made and NVML listed it.
static OWN_NUMBER: OnceLock<u32> = OnceLock::new();

/// The numbers of processes that this one started, as the kernel driver has them, as far as they had to be learnt.
static CHILDREN: Mutex<BTreeSet<u32>> = Mutex::new(BTreeSet::new());

/// The number that came to a list, where it came alone and two later looks both show it and no other new one.
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

/// Whether this process started that one: what it holds is held for this one. Where the numbers are of another namespace, it has to be learnt.
fn is_child(number: u32) -> bool {
    if CHILDREN.lock().unwrap_or_else(PoisonError::into_inner).contains(&number) {
        return true;
    }
    // The program's name stands in parentheses and may hold anything; behind it come the state and the parent
    // (<https://man7.org/linux/man-pages/man5/proc_pid_stat.5.html>).
    let parent = std::fs::read_to_string(format!("/proc/{number}/stat"))
        .ok()
        .and_then(|stat| stat.rsplit_once(')')?.1.split_whitespace().nth(1)?.parse::<u32>().ok());
    parent == Some(std::process::id())
}

/// What a process holds; `NVML_VALUE_NOT_AVAILABLE` is all ones.
const fn known(process: &ProcessInfo) -> Option<Bytes> {
    match process.used_gpu_memory {
        u64::MAX => None,
        used => Some(Bytes(used)),
    }
}

/// The reasons by their bits, in words, and whether somebody chose them. An idle GPU lowers its clocks too (bit 0), which is no throttling and
/// has no words. Source: <https://docs.nvidia.com/deploy/nvml-api/group__nvmlClocksEventReasons.html>.
const REASONS: [(u32, &str, bool); 8] = [
    (1, "application clocks are set", true),
    (2, "power cap", false),
    (3, "hardware slowdown", false),
    (4, "held by another GPU of its sync-boost group", false),
    (5, "temperature (software)", false),
    (6, "temperature (hardware)", false),
    (7, "power brake", false),
    (8, "display clocks", true),
];

/// The reasons of a bit mask. NVIDIA adds bits from time to time: what is not in the table holds the clocks down all the same.
fn throttles(mask: u64) -> Vec<Throttle> {
    let has = |bit: u32| mask & 1 << bit != 0;
    let mut throttles: Vec<_> =
        REASONS.into_iter().filter(|(bit, ..)| has(*bit)).map(|(_, words, chosen)| Throttle { words, chosen }).collect();
    if mask >> 9 != 0 {
        throttles.push(Throttle { words: "a reason that this program does not know", chosen: false });
    }
    throttles
}

/// The identity of a GPU or of an instance of one. Displayed in the form 8-4-4-4-12.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Uuid(pub [u8; 16]);

impl Uuid {
    /// A hash that tells devices apart without naming them: [`fnv1a`] over the 16 bytes, in hexadecimal.
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
mod tests {
    use super::*;

    #[test]
    fn a_uuid_is_written_as_nvml_writes_it() {
        let uuid = Uuid([0xab, 0xcd, 0xef, 0x01, 0x23, 0x45, 0x67, 0x89, 0x0a, 0xbc, 0xde, 0xf0, 0x12, 0x34, 0x56, 0x78]);
        assert_eq!(uuid.to_string(), "abcdef01-2345-6789-0abc-def012345678");
    }

    #[test]
    fn a_process_that_this_one_started_is_told_from_all_others() -> std::io::Result<()> {
        let mut child = std::process::Command::new("cat").stdin(std::process::Stdio::piped()).spawn()?;
        assert!(is_child(child.id()) && !is_this_process(child.id()));
        assert!(is_this_process(std::process::id()) && !is_child(std::process::id()));
        assert!(!is_child(1) && !is_child(u32::MAX));
        drop(child.stdin.take());
        child.wait().map(drop)
    }

    #[test]
    fn a_number_is_learnt_only_where_one_process_came_alone() {
        let twice = |before: &[u32], now: &[u32]| newcomer(before, &[now.to_vec(), now.to_vec()]);
        assert_eq!(twice(&[], &[7]), Some(7));
        assert_eq!(twice(&[3, 5], &[5, 7]), Some(7), "another one may have gone");
        assert_eq!((twice(&[3], &[3]), twice(&[3], &[3, 7, 8]), twice(&[3], &[])), (None, None, None));
        assert_eq!(newcomer(&[], &[vec![7], vec![]]), None, "it was gone at the second look");
        assert_eq!(newcomer(&[], &[vec![7], vec![7, 8]]), None, "another one came");
    }

    #[test]
    fn throttle_reasons_are_told_in_words_and_idling_is_none() {
        let words = |mask| throttles(mask).into_iter().map(|throttle| throttle.words).collect::<Vec<_>>();
        assert_eq!(words(0b100_0101), ["power cap", "temperature (hardware)"]);
        assert_eq!(words(1), [""; 0], "idling");
        assert_eq!(words(1 << 9), ["a reason that this program does not know"]);
        assert_eq!(words(u64::MAX).len(), REASONS.len() + 1);
    }
}
