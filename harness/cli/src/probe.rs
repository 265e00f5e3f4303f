//! Looks for GPUs without risk: [`probe`] for commands that use one, [`ask_child`] for `harness
//! doctor`.
//!
//! A broken driver may hang or crash the calling process. Therefore a child process calls the
//! driver, and announces each step before it starts. This process gives up if the child is silent
//! for too long.

use std::io::{self, Write as _};
use std::process::{Child, Command, Stdio};
use std::{sync::mpsc::RecvTimeoutError, time::Duration};

use harness_allocator::device::DeviceError;
use harness_allocator::units::{Bytes, Nanos};
use harness_bench::child::lines_of;
use harness_cuda::machine::{self, Probe};
use harness_cuda::nvml::ProcessUse;
use serde::{Deserialize, Serialize};

use super::{arguments::time, error::CliError};

/// The time that the driver gets to answer.
const LIMIT: Nanos = Nanos(60_000_000_000);

/// The time that the driver gets to answer, as in `90s`.
const LIMIT_VARIABLE: &str = "HARNESS_DRIVER_LIMIT";

/// Looks for GPUs. A child process does so first, because a broken driver may hang or crash the
/// process that calls it.
pub(crate) fn probe() -> Result<Probe, CliError> {
    let limit = match std::env::var(LIMIT_VARIABLE) {
        Ok(text) if !text.is_empty() => time("limit", &text).map_err(|error| {
            CliError::input(
                format!("{LIMIT_VARIABLE}: {error}"),
                "give a time, as in `90s`, or unset the variable",
            )
        })?,
        _ => LIMIT,
    };
    // If the child cannot be started, the driver is called without this protection.
    if let Ok(Err(why)) = ask_child(false, Duration::from_nanos(limit.0)) {
        let what = "the CUDA driver".to_owned();
        let help = "use `--device sim`; `HARNESS_DRIVER_LIMIT=90s` gives a slow driver more time";
        return Err(CliError::device(
            &DeviceError::Unavailable { what, why },
            help,
        ));
    }
    Ok(machine::probe())
}

#[derive(Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Message {
    WaitsFor(String),
    Found(Findings),
}

impl Message {
    /// Sends the message. Errors are ignored: the parent process may have ended.
    pub(crate) fn send(&self) {
        let mut out = io::stdout().lock();
        let _ = serde_json::to_string(self)
            .map(|line| writeln!(out, "{line}").and_then(|()| out.flush()));
    }
}

/// Has a child process call the driver. The inner error says why the driver did not answer; the
/// outer one why the child did not start.
pub(crate) fn ask_child(open: bool, limit: Duration) -> io::Result<Result<Findings, String>> {
    let arguments = if open {
        &["doctor", "--look"][..]
    } else {
        &["doctor", "--look", "--no-open"]
    };
    let mut child = Command::new(std::env::current_exe()?)
        .args(arguments)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()?;
    Ok(listen(&mut child, limit))
}

fn listen(child: &mut Child, limit: Duration) -> Result<Findings, String> {
    let Some(output) = child.stdout.take() else {
        return Err("this program has no standard output".to_owned());
    };
    let lines = lines_of(output);
    let mut waits_for = "this program to start".to_owned();
    loop {
        match lines.recv_timeout(limit) {
            Ok(line) => match serde_json::from_str(&line) {
                Ok(Message::WaitsFor(what)) => waits_for = what,
                Ok(Message::Found(findings)) => {
                    let _ = child.wait();
                    return Ok(findings);
                }
                // The driver may print lines too.
                Err(_) => {}
            },
            Err(RecvTimeoutError::Timeout) => {
                // Without `wait`, which may never return for a process in a hanging driver.
                let _ = child.kill();
                let limit = Nanos(u64::try_from(limit.as_nanos()).unwrap_or(u64::MAX));
                return Err(format!(
                    "no answer within {limit}, waiting for {waits_for}: the driver hangs; see \
                     `dmesg | grep NVRM`, then reset the GPU or reboot"
                ));
            }
            Err(RecvTimeoutError::Disconnected) => {
                let ended = child
                    .wait()
                    .map_or_else(|error| error.to_string(), |status| status.to_string());
                return Err(format!(
                    "the driver ended its calling process ({ended}), waiting for {waits_for}; see \
                     `dmesg | grep NVRM`, and reinstall the driver"
                ));
            }
        }
    }
}

#[derive(Default, Serialize, Deserialize)]
pub(crate) struct Findings {
    pub(crate) harness: String,
    /// CUDA version that the driver supports.
    pub(crate) cuda: Option<String>,
    /// Version of the kernel driver according to NVML.
    pub(crate) kernel_driver: Option<String>,
    pub(crate) devices: Vec<Finding>,
    /// One sentence per missing or broken thing.
    pub(crate) missing: Vec<String>,
    pub(crate) conclusion: String,
}

#[derive(Serialize, Deserialize)]
pub(crate) struct Finding {
    pub(crate) device: String,
    pub(crate) name: String,
    pub(crate) uuid_hash: String,
    pub(crate) compute_capability: String,
    pub(crate) total: Bytes,
    /// According to NVML.
    pub(crate) free: Option<Bytes>,
    /// According to NVML.
    pub(crate) other_processes: Option<Vec<ProcessUse>>,
    /// `true` if the GPU can be used; `None` if it was not opened.
    pub(crate) opens: Option<bool>,
}
