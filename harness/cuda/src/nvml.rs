//! What the management library (NVML) knows of a GPU: memory used on it, by whom, and the facts that make two runs comparable.
//!
//! NVML numbers GPUs by itself, while `CUDA_VISIBLE_DEVICES` renumbers them for CUDA: an [`NvmlDevice`] is found by its [`Uuid`]. Only
//! queries are made, never a setter. Everything here is optional: without NVML a device still opens, with less to tell.

use std::collections::BTreeSet;
use std::fmt;
use std::sync::{Mutex, OnceLock, PoisonError};

use nvml_wrapper::Nvml;
use nvml_wrapper::bitmasks::device::ThrottleReasons;
use nvml_wrapper::enum_wrappers::device::{Clock as NvmlClock, PerformancePolicy, TemperatureSensor};
use nvml_wrapper::enums::device::UsedGpuMemory;
use nvml_wrapper::error::NvmlError;

use harness_allocator::device::Fingerprint;
use harness_allocator::hash::fnv1a;
use harness_allocator::units::{Bytes, Nanos};

/// One GPU, or one instance of a multi-instance GPU, as NVML sees it.
pub struct NvmlDevice {
    nvml: &'static Nvml,
    device: nvml_wrapper::Device<'static>,
    uuid: Uuid,
}

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
    /// What holds the clocks down at this moment.
    pub throttled: Vec<Throttle>,
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
        let nvml = library()?;
        // The driver does not say whether a UUID is that of a GPU or of a multi-instance slice; NVML writes them differently.
        let by_name = |prefix: &str| nvml.device_by_uuid(format!("{prefix}-{uuid}"));
        match by_name("GPU").or_else(|_| by_name("MIG")) {
            Ok(device) => Ok(Self { nvml, device, uuid }),
            Err(error) => Err(format!("NVML finds no device with this GPU's UUID: {error}")),
        }
    }

    /// Memory used on the whole device, by everybody.
    ///
    /// # Errors
    /// NVML's sentence.
    pub fn used(&self) -> Result<Bytes, String> {
        self.device.memory_info().map(|memory| Bytes(memory.used)).map_err(sentence)
    }

    /// Memory that nobody has taken.
    ///
    /// # Errors
    /// NVML's sentence.
    pub fn free(&self) -> Result<Bytes, String> {
        self.device.memory_info().map(|memory| Bytes(memory.free)).map_err(sentence)
    }

    /// Memory of this process, where NVML lists it and tells.
    #[must_use]
    pub fn used_by_this_process(&self) -> Option<Bytes> {
        let processes = self.device.running_compute_processes().ok()?;
        let mine = processes.iter().find(|process| is_this_process(process.pid))?;
        known(&mine.used_gpu_memory)
    }

    /// The other processes with a CUDA context on the device, without those that this one started.
    ///
    /// # Errors
    /// NVML's sentence.
    pub fn other_processes(&self) -> Result<Vec<ProcessUse>, String> {
        let processes = self.device.running_compute_processes().map_err(sentence)?;
        let others = processes.into_iter().filter(|process| !is_this_process(process.pid) && !is_child(process.pid));
        Ok(others
            .map(|process| ProcessUse {
                pid: process.pid,
                name: self.nvml.sys_process_name(process.pid, 128).ok(),
                used: known(&process.used_gpu_memory),
            })
            .collect())
    }

    /// The numbers of all processes with a CUDA context on the device; none where NVML does not tell.
    #[must_use]
    pub fn process_numbers(&self) -> Vec<u32> {
        self.device.running_compute_processes().map(|all| all.iter().map(|process| process.pid).collect()).unwrap_or_default()
    }

    /// Learns this process's number in the kernel driver's namespace, which in a container is not the one seen inside: it is the one that
    /// came to the list with this process's context. Where another process came at the same moment, nothing is learnt.
    pub(super) fn notice_this_process(&self, before_context: &[u32]) {
        if let Some(number) = newcomer(before_context, &self.process_numbers()) {
            // Learnt before: it is the same number.
            let _ = OWN_NUMBER.set(number);
        }
    }

    /// The same for a process that this one has started and that has made its context by now: it is no other process from now on. Where the
    /// number of this process's children can be seen, nothing would have to be learnt.
    pub fn notice_child(&self, before_context: &[u32]) {
        if let Some(number) = newcomer(before_context, &self.process_numbers()) {
            CHILDREN.lock().unwrap_or_else(PoisonError::into_inner).insert(number);
        }
    }

    /// What its sensors tell now.
    #[must_use]
    pub fn reading(&self) -> Reading {
        let clock = |kind| self.device.clock_info(kind).ok();
        let held = |policy| self.device.violation_status(policy).ok().map(|status| Nanos(status.violation_time));
        Reading {
            sm_mhz: clock(NvmlClock::SM),
            memory_mhz: clock(NvmlClock::Memory),
            power_mw: self.device.power_usage().ok(),
            temperature: self.device.temperature(TemperatureSensor::Gpu).ok(),
            throttled: self.throttled(),
            held_by_power: held(PerformancePolicy::Power),
            held_by_heat: held(PerformancePolicy::Thermal),
            others: self.other_processes().ok(),
        }
    }

    fn throttled(&self) -> Vec<Throttle> {
        self.device.current_throttle_reasons().map(throttles).unwrap_or_default()
    }

    /// What must be equal for two runs to be compared, as it is now. The CUDA version is the CUDA driver's to tell.
    #[must_use]
    pub fn fingerprint(&self) -> Fingerprint {
        let clock = |kind| self.device.clock_info(kind).ok();
        Fingerprint {
            memory: None,
            uuid_hash: Some(self.uuid.hash()),
            driver: self.nvml.sys_driver_version().ok(),
            cuda: None,
            mig: self.device.mig_mode().ok().map(|mode| mode.current == MIG_ENABLED),
            ecc: self.device.is_ecc_enabled().ok().map(|state| state.currently_enabled),
            clocks_mhz: clock(NvmlClock::SM).zip(clock(NvmlClock::Memory)),
            throttle_reasons: self.throttled().into_iter().map(|throttle| throttle.words.to_owned()).collect(),
            other_processes: self.other_processes().ok().map(|others| u32::try_from(others.len()).unwrap_or(u32::MAX)),
            cost_model: None,
        }
    }
}

/// Version of the kernel driver, for example `580.65.06`.
///
/// # Errors
/// A sentence: why NVML is not there, or does not tell.
pub fn driver_version() -> Result<String, String> {
    library()?.sys_driver_version().map_err(sentence)
}

/// `NVML_DEVICE_MIG_ENABLE` of nvml.h.
const MIG_ENABLED: u32 = 1;

/// This process's number as the kernel driver has it, once a context was made and NVML listed it.
static OWN_NUMBER: OnceLock<u32> = OnceLock::new();

/// The numbers of processes that this one started, as the kernel driver has them, as far as they had to be learnt.
static CHILDREN: Mutex<BTreeSet<u32>> = Mutex::new(BTreeSet::new());

/// The number that came to a list, where it was one alone.
fn newcomer(before: &[u32], now: &[u32]) -> Option<u32> {
    let mut came = now.iter().filter(|number| !before.contains(number));
    match (came.next(), came.next()) {
        (Some(number), None) => Some(*number),
        _ => None,
    }
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

/// The library, loaded once for the whole process: never shut down, so devices can be kept.
fn library() -> Result<&'static Nvml, String> {
    static LIBRARY: OnceLock<Result<Nvml, String>> = OnceLock::new();
    LIBRARY.get_or_init(|| Nvml::init().map_err(sentence)).as_ref().map_err(Clone::clone)
}

/// Why NVML refused, and what to do where that is known.
fn sentence(error: NvmlError) -> String {
    match error {
        NvmlError::LibloadingError(_) => {
            "libnvidia-ml.so.1 is not on the loader's path; install the NVIDIA driver's utilities, in containers with \
             NVIDIA_DRIVER_CAPABILITIES=compute,utility"
                .to_owned()
        }
        NvmlError::FailedToLoadSymbol(symbol) => format!("libnvidia-ml.so.1 is too old, it lacks {symbol}"),
        NvmlError::LibRmVersionMismatch => {
            "the NVML library and the loaded kernel driver have different versions; reboot, or reload the nvidia modules".to_owned()
        }
        NvmlError::DriverNotLoaded => "the NVIDIA kernel driver is not loaded; `modprobe nvidia`, and see `dmesg | grep NVRM`".to_owned(),
        NvmlError::NoPermission => "NVML may not be used by this user".to_owned(),
        NvmlError::GpuLost => "the GPU has fallen off the bus; see `dmesg | grep Xid` and drain the node".to_owned(),
        other => format!("NVML: {other}"),
    }
}

const fn known(used: &UsedGpuMemory) -> Option<Bytes> {
    match used {
        UsedGpuMemory::Used(bytes) => Some(Bytes(*bytes)),
        UsedGpuMemory::Unavailable => None,
    }
}

/// The reasons in words. An idle GPU lowers its clocks too, which is no throttling and not named.
fn throttles(reasons: ThrottleReasons) -> Vec<Throttle> {
    let all = [
        (ThrottleReasons::APPLICATIONS_CLOCKS_SETTING, "application clocks are set", true),
        (ThrottleReasons::SW_POWER_CAP, "power cap", false),
        (ThrottleReasons::HW_SLOWDOWN, "hardware slowdown", false),
        (ThrottleReasons::SYNC_BOOST, "held by another GPU of its sync-boost group", false),
        (ThrottleReasons::SW_THERMAL_SLOWDOWN, "temperature (software)", false),
        (ThrottleReasons::HW_THERMAL_SLOWDOWN, "temperature (hardware)", false),
        (ThrottleReasons::HW_POWER_BRAKE_SLOWDOWN, "power brake", false),
        (ThrottleReasons::DISPLAY_CLOCK_SETTING, "display clocks", true),
    ];
    all.into_iter().filter(|(reason, ..)| reasons.contains(*reason)).map(|(_, words, chosen)| Throttle { words, chosen }).collect()
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
        assert_eq!(newcomer(&[], &[7]), Some(7));
        assert_eq!(newcomer(&[3, 5], &[5, 7]), Some(7), "another one may have gone");
        assert_eq!((newcomer(&[3], &[3]), newcomer(&[3], &[3, 7, 8]), newcomer(&[3], &[])), (None, None, None));
    }

    #[test]
    fn throttle_reasons_are_told_in_words_and_idling_is_none() {
        let reasons = ThrottleReasons::GPU_IDLE | ThrottleReasons::SW_POWER_CAP | ThrottleReasons::HW_THERMAL_SLOWDOWN;
        let words: Vec<_> = throttles(reasons).into_iter().map(|throttle| throttle.words).collect();
        assert_eq!(words, ["power cap", "temperature (hardware)"]);
    }
}
