//! [`Limits`] of a program on a real GPU. `harness` passes them to the program and its children in
//! an environment variable.

use std::fmt;

use harness_allocator::units::Bytes;
use serde::{Deserialize, Serialize};

use crate::{latency::Latency, settings::Fault};

pub const LIMITS: &str = "HARNESS_GPU_LIMITS";
/// The variable with the folder where each process writes its counters and attempts. Simulated GPUs
/// use another variable, so limits can be tested on one.
pub const LIMITS_RUN: &str = "HARNESS_GPU_LIMITS_RUN";
/// The variable with the path of the ledger of processes that share one limit. Without it each
/// process has its own limit.
pub const LIMITS_LEDGER: &str = "HARNESS_GPU_LIMITS_LEDGER";

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Limits {
    pub device: Bytes,
    /// The most device memory for each process, or for all processes that share a ledger; `None`
    /// for no limit.
    pub memory: Option<Bytes>,
    pub faults: Vec<Fault>,
    pub latencies: Vec<Latency>,
}

impl Limits {
    /// The memory that a process can query.
    pub fn visible(&self) -> Bytes {
        self.memory
            .map_or(self.device, |memory| memory.min(self.device))
    }
}

/// The text in records.
impl fmt::Display for Limits {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "device={}", self.device.0)?;
        self.memory
            .iter()
            .try_for_each(|memory| write!(f, ";memory={}", memory.0))?;
        self.faults
            .iter()
            .try_for_each(|fault| write!(f, ";fail={fault}"))?;
        self.latencies
            .iter()
            .try_for_each(|latency| write!(f, ";latency={latency}"))
    }
}
