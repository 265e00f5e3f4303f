//! [`Machine`]: what a program sees, either simulated GPUs or a real GPU with a limit.

use std::fmt;
use std::path::{Path, PathBuf};

use harness_allocator::units::Bytes;
use harness_gpu_settings::settings::{Fault, Settings};
use harness_gpu_settings::{latency::Latency, limits::Limits};

use crate::host_memory;

#[derive(Clone, Debug)]
pub enum Machine {
    Simulated(Settings),
    /// A real GPU, by its number in this process. It is the only GPU that the program sees.
    Real(u32, Limits),
}

/// All settings, or the limits, on one line.
impl fmt::Display for Machine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Simulated(settings) => settings.fmt(f),
            Self::Real(_, limits) => limits.fmt(f),
        }
    }
}

impl Machine {
    pub fn memory(&self) -> Bytes {
        match self {
            Self::Simulated(settings) => settings.memory,
            Self::Real(_, limits) => limits.visible(),
        }
    }

    pub(crate) const fn has_several_devices(&self) -> bool {
        matches!(self, Self::Simulated(settings) if settings.devices > 1)
    }

    /// Returns the memory that each process takes before its first allocation.
    pub fn context_overhead(&self) -> Bytes {
        match self {
            Self::Simulated(settings) => settings.context_overhead,
            Self::Real(..) => Bytes::ZERO,
        }
    }

    pub fn injected(&self) -> (&[Fault], &[Latency]) {
        match self {
            Self::Simulated(Settings {
                faults, latencies, ..
            })
            | Self::Real(
                _,
                Limits {
                    faults, latencies, ..
                },
            ) => (faults, latencies),
        }
    }

    /// Returns the default number of parallel runs: the number of cores, or fewer if the host's
    /// memory is too small, or one on a real GPU.
    pub fn usual_jobs(&self) -> usize {
        match self {
            Self::Simulated(settings) => host_memory::usual_jobs(settings.devices),
            Self::Real(..) => 1,
        }
    }

    /// Returns the folder of the processes' counters. When the limits run on a simulated GPU, that
    /// GPU writes its own files into the run's folder.
    pub(crate) fn counters(&self, run: &Path) -> PathBuf {
        match self {
            Self::Simulated(_) => run.to_owned(),
            Self::Real(..) => run.join("limits"),
        }
    }
}
