//! [`Runner`] runs a program on simulated GPUs, or with a limit on a real one.

use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use harness_allocator::units::Bytes;
use harness_gpu_settings::latency::Latency;
use harness_gpu_settings::limits::Limits;
use harness_gpu_settings::settings::Settings;

use super::observed::{Ending, Observed};
use super::{Run, Trial};
use crate::launch::{Launch, LaunchError, PLACES, Prepared};
use crate::limited::LimitedLaunch;
use crate::process::{self, End};
use crate::record::Record;
use crate::timeline::Timeline;

/// File names of the program's standard output and error.
const OUTPUTS: [&str; 2] = ["stdout", "stderr"];

/// Why a program was not run, or its outcome is unknown.
#[derive(Debug, thiserror::Error)]
pub enum RunnerError {
    #[error(transparent)]
    Launch(#[from] LaunchError),
    #[error("cannot read the files that the program's processes wrote to the temporary folder: {0}")]
    Lost(io::Error),
    #[error("cannot write the program's output to `{}`: {source}; free space there or choose another folder", path.display())]
    Logs {
        /// The file or folder.
        path: PathBuf,
        source: io::Error,
    },
}

/// A program and its machine.
#[derive(Clone, Copy, Debug)]
pub enum On<'a> {
    /// On simulated GPUs.
    Simulated(Launch<'a>),
    /// On a real GPU, with a limit.
    Real(LimitedLaunch<'a>),
}

/// The machine of one run.
#[derive(Clone, Debug)]
pub enum Machine {
    /// Simulated GPUs.
    Simulated(Settings),
    /// A real GPU, by its number.
    Real(u32, Limits),
}

/// Runs a program.
#[derive(Debug)]
pub struct Runner<'a> {
    pub on: On<'a>,
    /// The folder for the output of all runs except the first.
    pub logs: Option<&'a Path>,
    /// Time limit of a run.
    pub limit: Duration,
    /// Set when the user interrupts.
    pub stop: &'a AtomicBool,
}

impl Runner<'_> {
    /// Runs the program with this process's standard output and error, and returns its duration too. If `is_output_kept_free`,
    /// its standard output goes to standard error, because standard output carries a document. Returns `None` if the user
    /// interrupted.
    pub fn first(&self, trial: &Trial, is_output_kept_free: bool) -> Result<Option<(Observed, Duration)>, RunnerError> {
        let began = Instant::now();
        let stdout = if is_output_kept_free { Stdio::from(io::stderr()) } else { Stdio::inherit() };
        let observed = self.observe(trial, |_| Ok([stdout, Stdio::inherit()]))?;
        Ok(observed.map(|observed| (observed, began.elapsed())))
    }

    fn observe(&self, trial: &Trial, outputs: impl FnOnce(&Path) -> io::Result<[Stdio; 2]>) -> Result<Option<Observed>, RunnerError> {
        if self.stop.load(Ordering::Relaxed) {
            return Ok(None);
        }
        let (mut prepared, machine) = self.on.prepare(trial)?;
        let [stdout, stderr] = outputs(prepared.folder()).map_err(LaunchError::Folder)?;
        prepared.command.stdin(Stdio::null()).stdout(stdout).stderr(stderr).env(PLACES, "1");
        let give_up = |age| age > self.limit || self.stop.load(Ordering::Relaxed);
        let end = process::run_beside_others(&mut prepared.command, give_up).map_err(|source| prepared.start_error(source))?;
        if end.is_none() && self.stop.load(Ordering::Relaxed) {
            return Ok(None);
        }
        self.read(trial, prepared, end, &machine).map(Some)
    }

    fn read(&self, trial: &Trial, prepared: Prepared, end: Option<End>, machine: &Machine) -> Result<Observed, RunnerError> {
        let ended = prepared.ended(end.unwrap_or(End::Signal(9)))?;
        let folder = ended.folder();
        let error_output = folder.join(OUTPUTS[1]);
        let kept = error_output.is_file();
        let ending = end.map_or(Ending::Hang, Ending::By);
        let (_, observed) = machine.read(folder, (ended.end, ending), kept.then_some(error_output.as_path())).map_err(RunnerError::Lost)?;
        if let Some(logs) = self.logs.filter(|_| kept) {
            keep(folder, logs, &name(trial))?;
        }
        Ok(observed)
    }
}

impl Run for Runner<'_> {
    type Error = RunnerError;

    fn run(&self, trial: &Trial) -> Result<Option<Observed>, RunnerError> {
        self.observe(trial, |folder| {
            let [stdout, stderr] = OUTPUTS.map(|output| File::create(folder.join(output)));
            Ok([stdout?.into(), stderr?.into()])
        })
    }
}

impl On<'_> {
    /// Returns the parameters of the first run.
    #[must_use]
    pub fn first_trial(&self) -> Trial {
        let (memory, addresses, alloc_conf, faults) = match self {
            Self::Simulated(launch) => {
                let Settings { memory, addresses, faults, .. } = launch.settings;
                (*memory, Some(*addresses), launch.alloc_conf, faults)
            }
            Self::Real(launch) => (launch.limits.visible(), None, launch.alloc_conf, &launch.limits.faults),
        };
        Trial { memory, addresses, alloc_conf: alloc_conf.map(str::to_owned), faults: faults.clone() }
    }

    /// Returns the memory that each process takes before its first allocation.
    #[must_use]
    pub fn context_overhead(&self) -> Bytes {
        match self {
            Self::Simulated(launch) => launch.settings.context_overhead,
            Self::Real(_) => Bytes::ZERO,
        }
    }

    /// Returns the latencies of each run.
    #[must_use]
    pub fn latencies(&self) -> &[Latency] {
        match self {
            Self::Simulated(launch) => &launch.settings.latencies,
            Self::Real(launch) => &launch.limits.latencies,
        }
    }

    /// Returns the default number of parallel runs: the number of cores, or one on a real GPU.
    #[must_use]
    pub fn usual_jobs(&self) -> usize {
        match self {
            Self::Simulated(_) => std::thread::available_parallelism().map_or(1, usize::from),
            Self::Real(_) => 1,
        }
    }

    fn prepare(&self, trial: &Trial) -> Result<(Prepared, Machine), LaunchError> {
        let Trial { memory, addresses, alloc_conf, faults } = trial.clone();
        match self {
            Self::Simulated(launch) => {
                let settings =
                    Settings { memory, addresses: addresses.unwrap_or(launch.settings.addresses), faults, ..launch.settings.clone() };
                let launch = Launch { settings: &settings, alloc_conf: alloc_conf.as_deref(), ..*launch };
                Ok((launch.prepare()?, Machine::Simulated(settings)))
            }
            Self::Real(launch) => {
                let limits = Limits { memory: Some(memory), faults, ..launch.limits.clone() };
                let launch = LimitedLaunch { limits: &limits, alloc_conf: alloc_conf.as_deref(), ..*launch };
                Ok((launch.prepare()?, Machine::Real(launch.ordinal, limits)))
            }
        }
    }
}

impl Machine {
    /// Returns the memory of each GPU that a process sees.
    #[must_use]
    pub fn memory(&self) -> Bytes {
        match self {
            Self::Simulated(settings) => settings.memory,
            Self::Real(_, limits) => limits.visible(),
        }
    }

    /// Reads the files in the folder of a run. `error_output` is the file with its standard error, if kept.
    pub fn read(&self, folder: &Path, (end, ending): (End, Ending), error_output: Option<&Path>) -> io::Result<(Record, Observed)> {
        match self {
            Self::Simulated(settings) => {
                let record = Record::read(folder, end, settings)?;
                let observed = Observed::read(folder, &record, ending, error_output)?;
                Ok((record, observed))
            }
            Self::Real(ordinal, limits) => {
                let record = Record::read_limited(folder, end, *ordinal, limits)?;
                let observed = Observed::read_limited(folder, &record, ending, error_output)?;
                Ok((record, observed))
            }
        }
    }

    /// Reads the timeline of each process.
    pub fn timelines(&self, folder: &Path) -> io::Result<Vec<Timeline>> {
        match self {
            Self::Simulated(_) => Timeline::read_folder(folder),
            Self::Real(..) => Timeline::read_limited(folder),
        }
    }
}

/// Returns the base name of the files with a trial's output.
fn name(trial: &Trial) -> String {
    let fault = trial
        .faults
        .iter()
        .map(|fault| if fault.count == 1 { format!("fault-{}-alone", fault.first) } else { format!("fault-{}", fault.first) });
    let machine = || {
        let order = trial.addresses.map(|order| format!("-{order}"));
        format!("{}{}", trial.memory.0 >> 20, order.unwrap_or_default())
    };
    let conf = trial.alloc_conf.as_deref().map(harness_base::files::slug);
    fault.chain(trial.faults.is_empty().then(machine)).chain(conf.filter(|conf| !conf.is_empty())).collect::<Vec<_>>().join("-")
}

fn keep(folder: &Path, logs: &Path, name: &str) -> Result<(), RunnerError> {
    for output in OUTPUTS {
        let path = logs.join(format!("{name}.{output}"));
        fs::copy(folder.join(output), &path).map_err(|source| RunnerError::Logs { path, source })?;
    }
    Ok(())
}

#[cfg(test)]
mod tests;
