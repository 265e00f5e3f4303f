//! [`Machine`]: what a program sees, either simulated GPUs or a real GPU with a limit.

use std::path::{Path, PathBuf};
use std::{fmt, io};

use harness_allocator::units::Bytes;
use harness_gpu_settings::settings::{Fault, Settings};
use harness_gpu_settings::{latency::Latency, limits::Limits};

use crate::trials::Trial;
use crate::trials::observed::{Ending, Observed};
use crate::{host_memory, process::End, record::Record, timeline::Timeline};

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
        let cores = || std::thread::available_parallelism().map_or(1, usize::from);
        match self {
            Self::Simulated(settings) => cores().min(host_memory::most_runs(
                settings.devices,
                host_memory::available(),
            )),
            Self::Real(..) => 1,
        }
    }

    pub fn trial(&self, alloc_conf: Option<&str>) -> Trial {
        let addresses = match self {
            Self::Simulated(settings) => Some(settings.addresses),
            Self::Real(..) => None,
        };
        Trial {
            memory: self.memory(),
            addresses,
            alloc_conf: alloc_conf.map(str::to_owned),
            faults: self.injected().0.to_vec(),
            faulty_device: None,
        }
    }

    /// Returns this machine with the parameters of a trial.
    pub(crate) fn of_trial(&self, trial: &Trial) -> Self {
        let (memory, faults) = (trial.memory, trial.faults.clone());
        match self {
            Self::Simulated(settings) => {
                let addresses = trial.addresses.unwrap_or(settings.addresses);
                Self::Simulated(Settings {
                    memory,
                    addresses,
                    faults,
                    faulty_device: trial.faulty_device,
                    ..settings.clone()
                })
            }
            Self::Real(ordinal, limits) => Self::Real(
                *ordinal,
                Limits {
                    memory: Some(memory),
                    faults,
                    ..limits.clone()
                },
            ),
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

    /// Reads the files in the folder of a run. `error_output` is the file with its standard error,
    /// if kept.
    pub fn read(
        &self,
        run: &Path,
        (end, ending): (End, Ending),
        error_output: Option<&Path>,
    ) -> io::Result<(Record, Observed)> {
        let record = Record::read(run, end, self)?;
        let observed = Observed::read(run, &self.counters(run), &record, ending, error_output)?;
        Ok((record, observed))
    }

    pub fn timelines(&self, run: &Path) -> io::Result<Vec<Timeline>> {
        Timeline::read_folder(run, &self.counters(run))
    }
}
