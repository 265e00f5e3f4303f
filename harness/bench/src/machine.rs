//! [`machine()`] describes the machine of a run; [`Monitor`] watches its state during the run.
//!
//! Nothing is ever set. Unreadable values are omitted, and no conclusion is drawn from them.

mod host;

use std::time::{Duration, Instant};
use std::{collections::BTreeMap, thread};

use harness_allocator::device::{Clock, CostFigure, DeviceInfo, TestDevice};
use harness_allocator::units::{Bytes, Nanos};
use harness_cuda::machine::nvml_of;
use harness_cuda::nvml::{NOT_KNOWN, NvmlDevice, ProcessUse, Reading, Throttle};

use self::host::HostUse;
use super::record::{Conditions, GpuState, MachineInfo};

pub fn machine(device: &dyn TestDevice, compiler: &str) -> MachineInfo {
    let DeviceInfo {
        name,
        clock,
        fingerprint,
        ..
    } = device.info().clone();
    let cores = thread::available_parallelism()
        .map_or(1, |cores| u32::try_from(cores.get()).unwrap_or(u32::MAX));
    MachineInfo {
        device: name,
        clock,
        memory: fingerprint.memory,
        uuid_hash: fingerprint.uuid_hash,
        driver: fingerprint.driver,
        cuda: fingerprint.cuda,
        mig: fingerprint.mig,
        ecc: fingerprint.ecc,
        cost_model: fingerprint.cost_model,
        cpu: host::cpu(),
        cores,
        kernel: host::kernel(),
        compiler: compiler.to_owned(),
    }
}

impl MachineInfo {
    /// Differences from another machine, as in `driver: 580.65.06 against 570.12`.
    pub fn differences(&self, other: &Self) -> Vec<String> {
        let told = |fact: Option<String>| fact.unwrap_or_else(|| "unknown".to_owned());
        let pairs = self.facts().into_iter().zip(other.facts());
        pairs
            .filter(|((_, mine), (_, theirs))| mine != theirs)
            .map(|((name, mine), (_, theirs))| {
                format!("{name}: {} against {}", told(mine), told(theirs))
            })
            .collect()
    }

    /// Every fact with its name. `None`: unknown.
    pub fn facts(&self) -> [(&'static str, Option<String>); 13] {
        let Self {
            device,
            clock,
            memory,
            uuid_hash,
            driver,
            cuda,
            mig,
            ecc,
            cost_model,
            cpu,
            cores,
            kernel,
            compiler,
        } = self;
        let clock = if *clock == Clock::Simulated {
            "virtual"
        } else {
            "real"
        };
        let on = |switch: &Option<bool>| switch.map(|on| if on { "on" } else { "off" }.to_owned());
        [
            ("device", Some(device.clone())),
            ("clock", Some(clock.to_owned())),
            (
                "device memory",
                memory.map(|memory| format!("{memory} ({} bytes)", memory.0)),
            ),
            ("hash of the device's UUID", uuid_hash.clone()),
            ("driver", driver.clone()),
            ("CUDA version", cuda.clone()),
            ("multi-instance mode", on(mig)),
            ("error correction", on(ecc)),
            ("cost model", cost_model.clone()),
            ("processor", cpu.clone()),
            ("cores", Some(cores.to_string())),
            ("kernel", kernel.clone()),
            ("compiler", Some(compiler.clone())),
        ]
    }
}

/// Share of the time in which power or heat may reduce the clocks. Below it, figures of a whole run
/// move by less than the smallest change that suites look for.
const MAX_HELD_DOWN: f64 = 0.01;

/// In a shorter watch, one time slice of another program is a large share and means nothing.
const LEAST_WATCH: Duration = Duration::from_secs(1);

pub struct Monitor {
    began: Instant,
    nvml: Option<NvmlDevice>,
    cost_figures: Vec<CostFigure>,
    free_at_start: Option<Bytes>,
    gpu: GpuWatch,
    host: HostUse,
}

impl Monitor {
    /// Starts before anything is measured, with an open device. Devices may close and open during
    /// the watch.
    pub fn start(device: &mut dyn TestDevice) -> Self {
        let free_at_start = device.memory().ok().map(|memory| memory.free);
        let nvml = nvml_of(device.info()).ok();
        let (began, cost_figures, host) = (Instant::now(), device.cost_figures(), HostUse::now());
        let mut monitor = Self {
            began,
            nvml,
            cost_figures,
            free_at_start,
            gpu: GpuWatch::default(),
            host,
        };
        monitor.observe();
        monitor
    }

    pub fn finish(mut self) -> Conditions {
        self.observe();
        let waited = self.host.until(&HostUse::now(), self.began.elapsed());
        let host = host::contended(&waited).filter(|_| self.began.elapsed() >= LEAST_WATCH);
        let contended = self
            .gpu
            .contended(self.began.elapsed())
            .into_iter()
            .chain(host)
            .collect();
        Conditions {
            free_at_start: self.free_at_start,
            gpu: self.gpu.states,
            contended,
            cost_figures: self.cost_figures,
        }
    }

    pub fn observe(&mut self) {
        if let Some(nvml) = &self.nvml {
            self.gpu.note(self.began.elapsed(), nvml.reading());
        }
    }
}

#[derive(Default)]
struct GpuWatch {
    states: Vec<GpuState>,
    /// By pid, with the largest memory observed.
    others: BTreeMap<u32, ProcessUse>,
    throttled: Vec<Throttle>,
    /// `true` if NVML ever failed to report throttling.
    throttling_not_known: bool,
    /// Throttled time by power and by heat: first and last reading.
    held: Option<[[Option<Nanos>; 2]; 2]>,
}

impl GpuWatch {
    fn note(&mut self, at: Duration, reading: Reading) {
        let Reading {
            sm_mhz,
            memory_mhz,
            power_mw,
            temperature,
            throttled,
            held_by_power,
            held_by_heat,
            others,
        } = reading;
        self.states.push(GpuState {
            at_ms: u64::try_from(at.as_millis()).unwrap_or(u64::MAX),
            sm_mhz,
            memory_mhz,
            power_mw,
            temperature,
            throttle_reasons: match &throttled {
                Some(reasons) => reasons
                    .iter()
                    .map(|throttle| throttle.words.to_owned())
                    .collect(),
                None => vec![NOT_KNOWN.to_owned()],
            },
            other_processes: others
                .as_ref()
                .map(|others| u32::try_from(others.len()).unwrap_or(u32::MAX)),
        });
        for other in others.into_iter().flatten() {
            let most = self.others.get(&other.pid).and_then(|known| known.used);
            let used = other.used.max(most);
            self.others.insert(other.pid, ProcessUse { used, ..other });
        }
        self.throttling_not_known |= throttled.is_none();
        for throttle in throttled.into_iter().flatten() {
            if !throttle.chosen && !self.throttled.contains(&throttle) {
                self.throttled.push(throttle);
            }
        }
        let held = [held_by_power, held_by_heat];
        self.held = Some([self.held.map_or(held, |[first, _]| first), held]);
    }

    fn contended(&self, watched: Duration) -> Vec<String> {
        let others = (!self.others.is_empty()).then(|| others_in_words(self.others.values()));
        let seen = self
            .throttled
            .iter()
            .map(|throttle| throttle.words.to_owned());
        let [first, last] = self.held.unwrap_or_default();
        let lengths = ["power", "temperature"]
            .into_iter()
            .zip(first.into_iter().zip(last))
            .filter_map(|(cause, (first, last))| {
                let share = Duration::from_nanos(last?.saturating_sub(first?).0)
                    .div_duration_f64(watched.max(Duration::from_nanos(1)));
                (share > MAX_HELD_DOWN)
                    .then(|| format!("{cause}, for {:.0} % of the time", 100.0 * share.min(1.0)))
            });
        let held: Vec<String> = seen.chain(lengths).collect();
        let held =
            (!held.is_empty()).then(|| format!("clocks were held down: {}", held.join("; ")));
        let not_known = self
            .throttling_not_known
            .then(|| "NVML does not report throttling".to_owned());
        others.into_iter().chain(held).chain(not_known).collect()
    }
}

/// As in `2 other processes held memory of the GPU (python3, 3.2 GiB; a process without a name)`.
fn others_in_words<'a>(others: impl ExactSizeIterator<Item = &'a ProcessUse>) -> String {
    let count = others.len();
    let each = others.map(|other| {
        let name = other
            .name
            .as_deref()
            .and_then(|path| path.rsplit('/').next())
            .unwrap_or("a process without a name");
        other
            .used
            .map_or_else(|| name.to_owned(), |used| format!("{name}, {used}"))
    });
    let processes = if count == 1 { "process" } else { "processes" };
    format!(
        "{count} other {processes} held memory of the GPU ({})",
        each.collect::<Vec<_>>().join("; ")
    )
}

#[cfg(test)]
mod tests;
