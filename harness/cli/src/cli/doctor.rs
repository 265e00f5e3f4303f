//! `harness doctor`: what this machine has for the harness, what is missing, and what follows.

use std::fmt::Write as _;

use clap::Args;
use harness_allocator::device::{Device, DeviceError, MemoryRange, StreamId, Tag, TestDevice};
use harness_allocator::units::Bytes;
use harness_cuda::CudaDevice;
use harness_cuda::machine::{self, DeviceFound, NvmlFound, Probe};
use harness_devices::{DeviceChoice, Resolved};
use serde::Serialize;

use super::error::Failures;
use super::exit::Exit;
use super::{Format, terminal};

/// What opening is tried with: one piece of device memory.
const TRIED: Bytes = Bytes::mib(2);

/// Say what is found on this machine: driver, NVML, GPUs, whether they can be used, and what is missing.
#[derive(Args)]
#[command(after_help = "Examples:
  harness doctor
  harness doctor --require-gpu --format json")]
pub(super) struct Doctor {
    /// End with exit code 3 where there is no GPU that can be used.
    #[arg(long)]
    require_gpu: bool,
    /// Do not open the GPUs: opening one takes some hundred MiB of it for a moment.
    #[arg(long)]
    no_open: bool,
    /// What to print.
    #[arg(long, default_value = "text", value_name = "FORMAT")]
    format: Format,
}

impl Doctor {
    pub(super) fn run(self) -> Result<Exit, Failures> {
        let findings = Findings::new(&machine::probe(), !self.no_open);
        match self.format {
            Format::Text => terminal::print(&findings.text())?,
            Format::Json => terminal::print_json(&findings)?,
        }
        Ok(if self.require_gpu && !findings.has_gpu() { Exit::Device } else { Exit::Passed })
    }
}

/// All that is found.
#[derive(Serialize)]
struct Findings {
    /// Version of this program.
    harness: &'static str,
    /// CUDA version that the driver supports.
    cuda: Option<String>,
    /// Version of the kernel driver, as NVML tells it.
    kernel_driver: Option<String>,
    devices: Vec<Finding>,
    /// A sentence for each thing that is not there.
    missing: Vec<String>,
    /// What follows for `harness run`.
    conclusion: String,
}

/// One GPU.
#[derive(Serialize)]
struct Finding {
    /// As `--device` takes it.
    device: String,
    name: String,
    uuid_hash: String,
    compute_capability: String,
    total: Bytes,
    /// As NVML tells it.
    free: Option<Bytes>,
    /// As NVML tells them.
    other_processes: Option<Vec<Other>>,
    /// Whether it can be used; `None` where that was not tried.
    opens: Option<bool>,
}

/// Another process on a GPU.
#[derive(Serialize)]
struct Other {
    pid: u32,
    name: Option<String>,
    used: Option<Bytes>,
}

impl Findings {
    fn new(probe: &Probe, open: bool) -> Self {
        let mut missing = Vec::new();
        let found = match &probe.driver {
            Ok(driver) => driver.devices.as_slice(),
            Err(error) => {
                missing.push(error.to_string());
                &[]
            }
        };
        if let Err(why) = &probe.nvml {
            missing.push(format!("NVML: {why}; device used is then the driver's own figure, and other processes are not seen"));
        }
        let devices: Vec<Finding> = found.iter().map(|device| Finding::new(device, open, &mut missing)).collect();
        let cuda = probe.driver.as_ref().ok().map(|driver| driver.cuda.clone());
        let conclusion = conclusion(probe, &devices);
        Self { harness: env!("CARGO_PKG_VERSION"), cuda, kernel_driver: probe.nvml.as_ref().ok().cloned(), devices, missing, conclusion }
    }

    fn has_gpu(&self) -> bool {
        self.devices.iter().any(|device| device.opens != Some(false))
    }

    fn text(&self) -> String {
        let mut out = String::new();
        let mut line = |head: &str, text: &str| {
            // Writing to a string cannot fail.
            let _ = writeln!(out, "{head:<14} {text}");
        };
        line("harness", self.harness);
        line("CUDA driver", &self.cuda.as_ref().map_or_else(|| "not usable".to_owned(), |version| format!("CUDA {version}")));
        line("kernel driver", self.kernel_driver.as_deref().unwrap_or("not told, there is no NVML"));
        if self.devices.is_empty() {
            line("GPUs", "none");
        }
        for device in &self.devices {
            line(&device.device, &format!("{}, compute capability {}", device.name, device.compute_capability));
            line("  memory", &device.memory_text());
            line("  others", &device.others_text());
            line("  opens", device.opens_text());
        }
        self.missing.iter().for_each(|missing| line("missing", missing));
        line("so", &self.conclusion);
        out
    }
}

impl Finding {
    fn new(found: &DeviceFound, open: bool, missing: &mut Vec<String>) -> Self {
        let device = DeviceChoice::Cuda(found.ordinal).to_string();
        if let Err(why) = &found.nvml {
            missing.push(format!("{device}: {why}"));
        }
        let opens = open.then(|| match try_to_use(found.ordinal) {
            Ok(()) => true,
            Err(error) => {
                missing.push(format!("{device} cannot be used: {error}"));
                false
            }
        });
        let nvml = found.nvml.as_ref().ok();
        let (major, minor) = found.compute_capability;
        Self {
            device,
            name: found.name.clone(),
            uuid_hash: found.uuid_hash.clone(),
            compute_capability: format!("{major}.{minor}"),
            total: found.total,
            free: nvml.map(|nvml| nvml.free),
            other_processes: nvml.map(others),
            opens,
        }
    }

    fn memory_text(&self) -> String {
        match self.free {
            Some(free) => format!("{}, {free} free", self.total),
            None => format!("{}, free not told", self.total),
        }
    }

    fn others_text(&self) -> String {
        let Some(others) = &self.other_processes else { return "not told".to_owned() };
        if others.is_empty() {
            return "no other process".to_owned();
        }
        let told = others.iter().map(|other| {
            let name = other.name.as_deref().unwrap_or("unnamed");
            let used = other.used.map_or_else(|| "an amount that NVML does not tell".to_owned(), |used| used.to_string());
            format!("{name} (process {}) holds {used}", other.pid)
        });
        told.collect::<Vec<_>>().join("; ")
    }

    const fn opens_text(&self) -> &'static str {
        match self.opens {
            Some(true) => "yes: 2 MiB were allocated, filled, read back and freed",
            Some(false) => "no, see below",
            None => "not tried",
        }
    }
}

fn others(nvml: &NvmlFound) -> Vec<Other> {
    nvml.others.iter().map(|other| Other { pid: other.pid, name: other.name.clone(), used: other.used }).collect()
}

/// Opens the device, fills a piece of its memory and reads it back.
fn try_to_use(ordinal: u32) -> Result<(), DeviceError> {
    let mut device = CudaDevice::open(ordinal)?;
    let start = device.malloc(TRIED)?;
    let (range, tag) = (MemoryRange::new(start, TRIED), Tag(0x5eed_0000_5eed_0001));
    device.fill(StreamId::DEFAULT, range, tag)?;
    device.verify(StreamId::DEFAULT, range, tag)?;
    device.free(start)
}

fn conclusion(probe: &Probe, devices: &[Finding]) -> String {
    match DeviceChoice::Auto.resolve(probe) {
        Ok(Resolved::Cuda(ordinal)) => {
            let device = DeviceChoice::Cuda(ordinal).to_string();
            let opens = devices.iter().find(|found| found.device == device).and_then(|found| found.opens);
            match opens {
                Some(false) => format!("scenarios would run on {device}, which cannot be used: choose another one, or `--device sim`"),
                Some(true) | None => format!("scenarios run on {device}, unless `--device` says otherwise"),
            }
        }
        Ok(Resolved::Simulated { .. }) | Err(_) => "scenarios run on the simulated device".to_owned(),
    }
}
