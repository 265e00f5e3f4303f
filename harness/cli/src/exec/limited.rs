//! `harness exec --device cuda:N`: runs a program on a real GPU with limited device memory and injected failures.

use std::process::ExitCode;

use harness_cuda::machine::DeviceFound;
use harness_devices::DeviceChoice;
use harness_exec::limited::LimitedLaunch;
use harness_exec::record::Record;
use harness_exec::summary;
use harness_exec::torch::Torch;
use harness_exec::trials::runner::{Machine, On};
use harness_gpu_settings::limits::Limits;

use super::{Exec, lost, of_launch};
use crate::device;
use crate::error::{CliError, Failures};
use crate::terminal::Terminal;

/// Parses the value of `--device`.
pub(crate) fn ordinal(text: &str) -> Result<u32, String> {
    match text.parse() {
        Ok(DeviceChoice::Cuda(ordinal)) => Ok(ordinal),
        _ => Err("expected a real GPU, as in `cuda:0`; without `--device` the GPU is simulated".to_owned()),
    }
}

impl Exec {
    pub(super) fn run_limited(&self, ordinal: u32, has_many: bool, torch: &Torch, terminal: &Terminal) -> Result<ExitCode, Failures> {
        let device = self.real_device(ordinal)?;
        let limits = Limits { device: device.total, memory: self.memory, faults: self.fail.clone(), latencies: self.latency.clone() };
        let launch = LimitedLaunch {
            command: &self.command,
            ordinal,
            limits: &limits,
            alloc_conf: self.alloc_conf.first().map(String::as_str),
            snapshot: self.snapshot.is_some(),
            libc: torch.libc,
            ledger: None,
        };
        if has_many {
            return self.many.run(On::Real(launch), &self.alloc_conf, terminal);
        }
        let ended = launch.run(self.many.report().is_some()).map_err(of_launch)?;
        let record = Record::read_limited(ended.folder(), ended.end, ordinal, &limits).map_err(|error| lost(&error))?;
        let summary = summary::render_limited(&record, &device.name, &limits);
        self.finish(&ended, &record, &summary, (&Machine::Real(ordinal, limits), Some(&device.name)), terminal)
    }

    /// Finds the GPU and checks that it has at least the memory of `--memory`.
    fn real_device(&self, ordinal: u32) -> Result<DeviceFound, CliError> {
        let probe = device::probe()?;
        let unusable = |error: &dyn std::fmt::Display| CliError::input(error.to_string(), "leave out `--device` to simulate a GPU");
        probe.require(ordinal).map_err(|error| unusable(&error))?;
        let devices = probe.driver.map_err(|error| unusable(&error))?.devices;
        let device = devices.into_iter().find(|device| device.ordinal == ordinal).ok_or_else(|| unusable(&"the GPU is gone"))?;
        match self.memory.filter(|memory| *memory > device.total) {
            Some(memory) => {
                let message = format!("cuda:{ordinal} ({}) has {}, which is less than `--memory {memory}`", device.name, device.total);
                Err(CliError::input(message, "give less `--memory`, or leave out `--device` to simulate a GPU"))
            }
            None => Ok(device),
        }
    }
}
