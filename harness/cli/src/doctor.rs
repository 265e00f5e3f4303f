//! `harness doctor`: what this machine has for the harness, what is missing, and what follows.
//!
//! A driver may hang, in a way that even ends no process. So a child process looks, and says before each step what it is going to wait for;
//! this one gives up when nothing comes for too long.

use std::fmt::Write as _;
use std::io::{self, BufRead as _, BufReader, Write as _};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError};
use std::thread;
use std::time::Duration;

use clap::Args;
use harness_allocator::device::DeviceError;
use harness_allocator::units::{Bytes, Nanos};
use harness_cuda::CudaDevice;
use harness_cuda::machine::{self, DeviceFound, NvmlFound, Probe};
use harness_devices::{DeviceChoice, Resolved};
use serde::{Deserialize, Serialize};

use super::error::Failures;
use super::exit::Exit;
use super::{Format, terminal};

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
    /// Give up when driver and NVML do not answer within this time, as in `60s`.
    #[arg(long, value_name = "TIME", default_value = "60s", value_parser = limit)]
    limit: Nanos,
    /// What to print.
    #[arg(long, default_value = "text", value_name = "FORMAT")]
    format: Format,
    /// Look, and tell the parent process: a line of JSON for each [`Message`].
    #[arg(long, hide = true)]
    look: bool,
}

fn limit(text: &str) -> Result<Nanos, String> {
    match Nanos::parse(text) {
        Ok(Nanos::ZERO) => Err("within no time nothing can answer: as in `60s`".to_owned()),
        Ok(limit) => Ok(limit),
        Err(error) => Err(error.to_string()),
    }
}

impl Doctor {
    pub(super) fn run(self) -> Result<Exit, Failures> {
        if self.look {
            self.look();
            return Ok(Exit::Passed);
        }
        let findings = self.ask_child();
        match self.format {
            Format::Text => terminal::print(&findings.text())?,
            Format::Json => terminal::print_json(&findings)?,
        }
        Ok(if self.require_gpu && !findings.has_gpu() { Exit::Device } else { Exit::Passed })
    }
}

/// What the child says.
#[derive(Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Message {
    /// What it is going to wait for.
    WaitsFor(String),
    /// All that was found, at the end.
    Found(Findings),
}

impl Message {
    /// Says it. Where nobody listens any more there is nothing to say.
    fn send(&self) {
        let mut out = io::stdout().lock();
        let _ = serde_json::to_string(self).map(|line| writeln!(out, "{line}").and_then(|()| out.flush()));
    }
}

impl Doctor {
    /// The child's part.
    fn look(&self) {
        let waits_for = |what: &str| Message::WaitsFor(what.to_owned()).send();
        waits_for("the CUDA driver and NVML to say which GPUs there are");
        let probe = machine::probe();
        let findings = Findings::new(&probe, !self.no_open, waits_for);
        Message::Found(findings).send();
    }

    /// Has a child look, and listens as long as it says something in time.
    fn ask_child(&self) -> Findings {
        let arguments = if self.no_open { &["doctor", "--look", "--no-open"][..] } else { &["doctor", "--look"] };
        let started = std::env::current_exe()
            .and_then(|program| Command::new(program).args(arguments).stdin(Stdio::null()).stdout(Stdio::piped()).spawn());
        match started {
            Ok(mut child) => self.listen(&mut child),
            Err(error) => Findings::without(format!("the driver was not asked: this program cannot start itself again: {error}")),
        }
    }

    fn listen(&self, child: &mut Child) -> Findings {
        let lines = lines_of(child);
        let mut waits_for = "the system to start this program again".to_owned();
        loop {
            match lines.recv_timeout(Duration::from_nanos(self.limit.0)) {
                Ok(line) => match serde_json::from_str(&line) {
                    Ok(Message::WaitsFor(what)) => waits_for = what,
                    Ok(Message::Found(findings)) => {
                        // Its last words: it ends by itself.
                        let _ = child.wait();
                        return findings;
                    }
                    // A line of the driver's own.
                    Err(_) => {}
                },
                Err(RecvTimeoutError::Timeout) => {
                    // Not waited for: a process inside a driver that hangs may never end.
                    let _ = child.kill();
                    return Findings::without(format!(
                        "no answer within {}, waiting for {waits_for}: the driver hangs; see `dmesg | grep NVRM`, then reset the GPU or reboot",
                        self.limit
                    ));
                }
                Err(RecvTimeoutError::Disconnected) => {
                    let ended = child.wait().map_or_else(|error| error.to_string(), |status| status.to_string());
                    return Findings::without(format!(
                        "the driver ended the process that asked it ({ended}), waiting for {waits_for}; see `dmesg | grep NVRM`, and reinstall \
                         the driver"
                    ));
                }
            }
        }
    }
}

/// What a child writes to its standard output, read by a thread of its own.
fn lines_of(child: &mut Child) -> Receiver<String> {
    let (sender, lines) = mpsc::channel();
    if let Some(output) = child.stdout.take() {
        thread::spawn(move || BufReader::new(output).lines().map_while(Result::ok).try_for_each(|line| sender.send(line)));
    }
    lines
}

/// All that is found.
#[derive(Serialize, Deserialize)]
struct Findings {
    /// Version of this program.
    harness: String,
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
#[derive(Serialize, Deserialize)]
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
#[derive(Serialize, Deserialize)]
struct Other {
    pid: u32,
    name: Option<String>,
    used: Option<Bytes>,
}

impl Findings {
    /// What was found by a look at this machine. `waits_for` is called with what is asked next.
    fn new(probe: &Probe, open: bool, waits_for: impl Fn(&str)) -> Self {
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
        let devices: Vec<Finding> = found.iter().map(|device| Finding::new(device, open, &waits_for, &mut missing)).collect();
        let cuda = probe.driver.as_ref().ok().map(|driver| driver.cuda.clone());
        let conclusion = conclusion(probe, &devices);
        Self {
            harness: env!("CARGO_PKG_VERSION").to_owned(),
            cuda,
            kernel_driver: probe.nvml.as_ref().ok().cloned(),
            devices,
            missing,
            conclusion,
        }
    }

    /// Nothing was found, since nobody answered.
    fn without(why: String) -> Self {
        Self {
            harness: env!("CARGO_PKG_VERSION").to_owned(),
            cuda: None,
            kernel_driver: None,
            devices: Vec::new(),
            missing: vec![why],
            conclusion: "scenarios run with `--device sim`; without it they would ask the same driver".to_owned(),
        }
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
        line("harness", &self.harness);
        line("CUDA driver", &self.cuda.as_ref().map_or_else(|| "not usable".to_owned(), |version| format!("CUDA {version}")));
        line("kernel driver", self.kernel_driver.as_deref().unwrap_or("unknown"));
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
    fn new(found: &DeviceFound, open: bool, waits_for: impl Fn(&str), missing: &mut Vec<String>) -> Self {
        let device = DeviceChoice::Cuda(found.ordinal).to_string();
        if let Err(why) = &found.nvml {
            missing.push(format!("{device}: {why}"));
        }
        let opens = open.then(|| {
            waits_for(&format!("{device} to be opened and used"));
            try_to_use(found.ordinal).inspect_err(|error| missing.push(format!("{device} cannot be used: {error}"))).is_ok()
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
            None => format!("{}, free memory unknown", self.total),
        }
    }

    fn others_text(&self) -> String {
        let Some(others) = &self.other_processes else { return "unknown".to_owned() };
        if others.is_empty() {
            return "no other process".to_owned();
        }
        let processes = others.iter().map(|other| {
            let name = other.name.as_deref().unwrap_or("unnamed");
            let used = other.used.map_or_else(|| "an amount that NVML does not tell".to_owned(), |used| used.to_string());
            format!("{name} (process {}) holds {used}", other.pid)
        });
        processes.collect::<Vec<_>>().join("; ")
    }

    const fn opens_text(&self) -> &'static str {
        match self.opens {
            Some(true) => "yes: memory was filled and read back, and each byte made wrong was found",
            Some(false) => "no, see below",
            None => "not tried",
        }
    }
}

fn others(nvml: &NvmlFound) -> Vec<Other> {
    nvml.others.iter().map(|other| Other { pid: other.pid, name: other.name.clone(), used: other.used }).collect()
}

/// Opens the device, fills a piece of its memory and reads it back: what is right must pass, and what is wrong must be found.
fn try_to_use(ordinal: u32) -> Result<(), DeviceError> {
    CudaDevice::open(ordinal)?.check_verification()
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
