//! [`Limits`] of a program on a real GPU. `harness` passes them to the program and its children in an environment variable.

use std::fmt;
use std::str::FromStr;

use harness_allocator::units::Bytes;

use crate::latency::Latency;
use crate::settings::Fault;
pub use crate::text::SettingsError;
use crate::text::number;

/// The variable that carries [`Limits`].
pub const LIMITS: &str = "HARNESS_GPU_LIMITS";
/// The variable with the folder where each process writes its counters and attempts. Simulated GPUs use another variable, so limits can be tested on
/// one.
pub const LIMITS_RUN: &str = "HARNESS_GPU_LIMITS_RUN";
/// The variable with the path of the ledger of processes that share one limit. Without it each process has its own limit.
pub const LIMITS_LEDGER: &str = "HARNESS_GPU_LIMITS_LEDGER";

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Memory of the real GPU.
    pub device: Bytes,
    /// The most device memory for each process, or for all processes that share a ledger; `None` for no limit.
    pub memory: Option<Bytes>,
    pub faults: Vec<Fault>,
    pub latencies: Vec<Latency>,
}

impl Limits {
    /// The memory that a process can query.
    #[must_use]
    pub fn visible(&self) -> Bytes {
        self.memory.map_or(self.device, |memory| memory.min(self.device))
    }
}

impl fmt::Display for Limits {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "device={}", self.device.0)?;
        self.memory.iter().try_for_each(|memory| write!(f, ";memory={}", memory.0))?;
        self.faults.iter().try_for_each(|fault| write!(f, ";fail={fault}"))?;
        self.latencies.iter().try_for_each(|latency| write!(f, ";latency={latency}"))
    }
}

impl FromStr for Limits {
    type Err = SettingsError;

    fn from_str(text: &str) -> Result<Self, SettingsError> {
        let mut limits = Self { device: Bytes::ZERO, memory: None, faults: Vec::new(), latencies: Vec::new() };
        for pair in text.split(';') {
            match pair.split_once('=') {
                Some(("device", value)) => limits.device = Bytes(number(value)?),
                Some(("memory", value)) => limits.memory = Some(Bytes(number(value)?)),
                Some(("fail", value)) => limits.faults.push(value.parse()?),
                Some(("latency", value)) => limits.latencies.push(value.parse()?),
                _ => {
                    return Err(SettingsError(format!(
                        "`{pair}` is not a limit: write device=BYTES, memory=BYTES, fail=FAULT or latency=LATENCY"
                    )));
                }
            }
        }
        Ok(limits)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limits_are_parsed_as_they_are_shown() {
        let faults = ["cudaMalloc:40:2", "any:3:1:20MiB"].map(|text| text.parse().expect("parse a fault")).to_vec();
        let latencies = vec!["cudaFree:3ms".parse().expect("parse a latency")];
        for memory in [None, Some(Bytes::gib(24))] {
            let limits = Limits { device: Bytes::gib(80), memory, faults: faults.clone(), latencies: latencies.clone() };
            assert_eq!(limits.to_string().parse(), Ok(limits));
        }
    }

    #[test]
    fn an_error_lists_the_accepted_limits() {
        let error = "memory=1;gpu=a100".parse::<Limits>().expect_err("reject a GPU");
        assert_eq!(error.to_string(), "`gpu=a100` is not a limit: write device=BYTES, memory=BYTES, fail=FAULT or latency=LATENCY");
    }
}
