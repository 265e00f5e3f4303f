//! `harness doctor`: reports this machine's driver and GPUs, and whether the harness can use them.

use std::{fmt::Write as _, time::Duration};

use clap::Args;
use harness_allocator::units::Nanos;
use harness_cuda::CudaDevice;
use harness_cuda::machine::{self, DeviceFound, Probe};
use harness_devices::{DeviceChoice, Resolved};

use super::arguments::time;
use super::probe::{Finding, Findings, Message, ask_child};
use super::{Format, error::Failures, exit::Exit};

/// Report this machine's driver, NVML and GPUs, whether the GPUs can be used, and missing
/// libraries.
#[derive(Args)]
#[command(after_help = "Examples:
  harness doctor
  harness doctor --require-gpu --format json")]
pub(super) struct Doctor {
    /// Exit with code 3 if no GPU can be used.
    #[arg(long)]
    require_gpu: bool,
    /// Do not open the GPUs. Opening a GPU takes some hundred MiB of its memory for a moment.
    #[arg(long)]
    no_open: bool,
    /// The time that the driver and NVML get to answer, as in `60s`.
    #[arg(
        long,
        value_name = "TIME",
        default_value = "60s",
        value_parser = |text: &str| time("limit", text),
    )]
    limit: Nanos,
    /// The output format.
    #[arg(long, default_value = "text", value_name = "FORMAT")]
    format: Format,
    /// Run as the child process: print one line of JSON per [`Message`].
    #[arg(long, hide = true)]
    look: bool,
}

impl Doctor {
    pub(super) fn run(self) -> Result<Exit, Failures> {
        if self.look {
            self.look();
            return Ok(Exit::Passed);
        }
        let asked = ask_child(!self.no_open, Duration::from_nanos(self.limit.0));
        let findings = asked.unwrap_or_else(|error| {
            Err(format!(
                "the driver was not called: this program cannot start itself: {error}"
            ))
        });
        let findings = findings.unwrap_or_else(Findings::without);
        self.format.print(&findings, || findings.text())?;
        let has_gpu = findings
            .devices
            .iter()
            .any(|device| device.opens != Some(false));
        Ok(if self.require_gpu && !has_gpu {
            Exit::Device
        } else {
            Exit::Passed
        })
    }

    fn look(&self) {
        let waits_for = |what: &str| Message::WaitsFor(what.to_owned()).send();
        waits_for("the CUDA driver and NVML to list the GPUs");
        let probe = machine::probe();
        let findings = Findings::new(&probe, !self.no_open, waits_for);
        Message::Found(findings).send();
    }
}

impl Findings {
    /// Opens the devices of `probe` if `open`. Calls `waits_for` before each step.
    fn new(probe: &Probe, open: bool, waits_for: impl Fn(&str)) -> Self {
        let mut missing = Vec::new();
        let driver = probe
            .driver
            .as_ref()
            .inspect_err(|error| missing.push(error.to_string()))
            .ok();
        let found = driver.map_or(&[][..], |driver| &driver.devices);
        if let Err(why) = &probe.nvml {
            missing.push(format!(
                "NVML: {why}; without it, memory in use comes from the driver, \
                 and other processes are unknown"
            ));
        }
        let devices: Vec<Finding> = found
            .iter()
            .map(|device| Finding::new(device, open, &waits_for, &mut missing))
            .collect();
        let cuda = driver.map(|driver| driver.cuda.clone());
        let conclusion = conclusion(probe, &devices);
        let (harness, kernel_driver) = (
            env!("CARGO_PKG_VERSION").to_owned(),
            probe.nvml.as_ref().ok().cloned(),
        );
        Self {
            harness,
            cuda,
            kernel_driver,
            devices,
            missing,
            conclusion,
        }
    }

    fn without(why: String) -> Self {
        Self {
            harness: env!("CARGO_PKG_VERSION").to_owned(),
            missing: vec![why],
            conclusion: "scenarios run only with `--device sim`, which does not call the driver"
                .to_owned(),
            ..Self::default()
        }
    }

    fn text(&self) -> String {
        let mut out = String::new();
        let mut line = |head: &str, text: &str| {
            // Writing to a string cannot fail.
            let _ = writeln!(out, "{head:<14} {text}");
        };
        line("harness", &self.harness);
        line(
            "CUDA driver",
            &self.cuda.as_ref().map_or_else(
                || "not usable".to_owned(),
                |version| format!("CUDA {version}"),
            ),
        );
        line(
            "kernel driver",
            self.kernel_driver.as_deref().unwrap_or("unknown"),
        );
        if self.devices.is_empty() {
            line("GPUs", "none");
        }
        for device in &self.devices {
            line(
                &device.device,
                &format!(
                    "{}, compute capability {}",
                    device.name, device.compute_capability
                ),
            );
            line("  memory", &device.memory_text());
            line("  others", &device.others_text());
            line("  opens", device.opens_text());
        }
        self.missing
            .iter()
            .for_each(|missing| line("missing", missing));
        line("conclusion", &self.conclusion);
        out
    }
}

impl Finding {
    fn new(
        found: &DeviceFound,
        open: bool,
        waits_for: impl Fn(&str),
        missing: &mut Vec<String>,
    ) -> Self {
        let device = DeviceChoice::Cuda(found.ordinal).to_string();
        let nvml = found.nvml();
        if let Err(why) = &nvml {
            missing.push(format!("{device}: {why}"));
        }
        let opens = open.then(|| {
            waits_for(&format!("{device} to open and to pass a memory test"));
            // The check must find deliberately wrong bytes, too.
            CudaDevice::open(found.ordinal)
                .and_then(|mut device| device.check_verification())
                .inspect_err(|error| missing.push(format!("{device} cannot be used: {error}")))
                .is_ok()
        });
        let nvml = nvml.as_ref().ok();
        let (major, minor) = found.compute_capability;
        Self {
            device,
            name: found.name.clone(),
            uuid_hash: found.uuid.hash(),
            compute_capability: format!("{major}.{minor}"),
            total: found.total,
            free: nvml.map(|nvml| nvml.free),
            other_processes: nvml.map(|nvml| nvml.others.clone()),
            opens,
        }
    }

    fn memory_text(&self) -> String {
        match self.free {
            Some(free) => format!("{}, {free} free", self.total),
            None => format!("{}, free memory unknown", self.total),
        }
    }

    fn others_text(&self) -> String {
        let Some(others) = &self.other_processes else {
            return "unknown".to_owned();
        };
        if others.is_empty() {
            return "no other process".to_owned();
        }
        let processes = others.iter().map(|other| {
            let name = other.name.as_deref().unwrap_or("unnamed");
            let used = other
                .used
                .map_or_else(|| "an unknown amount".to_owned(), |used| used.to_string());
            format!("{name} (process {}) uses {used}", other.pid)
        });
        processes.collect::<Vec<_>>().join("; ")
    }

    const fn opens_text(&self) -> &'static str {
        match self.opens {
            Some(true) => "yes: a memory test passed, and it found every wrong byte",
            Some(false) => "no, see below",
            None => "not tested",
        }
    }
}

fn conclusion(probe: &Probe, devices: &[Finding]) -> String {
    match DeviceChoice::Auto.resolve(probe) {
        Ok(Resolved::Cuda(ordinal)) => {
            let device = DeviceChoice::Cuda(ordinal).to_string();
            let opens = devices
                .iter()
                .find(|found| found.device == device)
                .and_then(|found| found.opens);
            match opens {
                Some(false) => format!(
                    "scenarios would run on {device}, which cannot be used: choose another device, \
                     or `--device sim`"
                ),
                Some(true) | None => {
                    format!("scenarios run on {device}, unless `--device` names another device")
                }
            }
        }
        Ok(Resolved::Simulated { .. }) | Err(_) => {
            "scenarios run on the simulated device".to_owned()
        }
    }
}
