//! [`Runner`]: runs a program for real, with the doubles in front of NVIDIA's libraries.

use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use harness_gpu_settings::settings::Settings;

use super::observed::{Ending, Observed};
use super::{Run, Trial};
use crate::launch::{Launch, LaunchError, PLACES, Prepared};
use crate::process::{self, End};
use crate::record::Record;

/// Names of the files for the program's standard output and error.
const OUTPUTS: [&str; 2] = ["stdout", "stderr"];

/// Why a program was not run, or not seen.
#[derive(Debug, thiserror::Error)]
pub enum RunnerError {
    /// As for one run.
    #[error(transparent)]
    Launch(#[from] LaunchError),
    /// Let the folder for temporary files alone, or name another one by TMPDIR.
    #[error("what the program's processes left behind cannot be read: {0}")]
    Lost(io::Error),
    /// Choose another folder, or make room.
    #[error("the program's output cannot be kept in `{}`: {source}", path.display())]
    Logs {
        /// The file or folder.
        path: PathBuf,
        /// What the system says.
        source: io::Error,
    },
}

/// A program on simulated GPUs.
#[derive(Debug)]
pub struct Runner<'a> {
    /// The program, the machine, and the doubles.
    pub launch: Launch<'a>,
    /// The folder that gets the output of all runs but the first.
    pub logs: Option<&'a Path>,
    /// How long a run may take.
    pub limit: Duration,
    /// Whether the user wants to stop.
    pub stop: &'a AtomicBool,
}

impl Runner<'_> {
    /// Runs the program with our standard output and error, and tells how long it took. Its standard output is our standard error where ours is kept for
    /// a document. `None` where the user interrupted.
    ///
    /// # Errors
    /// That it cannot be run.
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
        let settings = settings(self.launch.settings, trial);
        let launch = Launch { settings: &settings, alloc_conf: trial.alloc_conf.as_deref(), ..self.launch };
        let mut prepared = launch.prepare()?;
        let [stdout, stderr] = outputs(prepared.folder()).map_err(LaunchError::Folder)?;
        prepared.command.stdin(Stdio::null()).stdout(stdout).stderr(stderr).env(PLACES, "1");
        let give_up = |age| age > self.limit || self.stop.load(Ordering::Relaxed);
        let end = process::run_beside_others(&mut prepared.command, give_up).map_err(|source| prepared.start_error(source))?;
        if end.is_none() && self.stop.load(Ordering::Relaxed) {
            return Ok(None);
        }
        self.read(trial, prepared, end, &settings).map(Some)
    }

    fn read(&self, trial: &Trial, prepared: Prepared, end: Option<End>, settings: &Settings) -> Result<Observed, RunnerError> {
        let ended = prepared.ended(end.unwrap_or(End::Signal(9)));
        let folder = ended.folder();
        let record = Record::read(folder, ended.end, settings).map_err(RunnerError::Lost)?;
        let error_output = folder.join(OUTPUTS[1]);
        let kept = error_output.is_file();
        let ending = end.map_or(Ending::Hang, Ending::By);
        let observed = Observed::read(folder, &record, ending, kept.then_some(error_output.as_path())).map_err(RunnerError::Lost)?;
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

/// The machine of a trial.
fn settings(of_all: &Settings, trial: &Trial) -> Settings {
    Settings { memory: trial.memory, addresses: trial.addresses, faults: trial.faults.clone(), ..of_all.clone() }
}

/// The name of the files that keep a trial's output.
fn name(trial: &Trial) -> String {
    let fault = trial
        .faults
        .iter()
        .map(|fault| if fault.count == 1 { format!("fault-{}-alone", fault.first) } else { format!("fault-{}", fault.first) });
    let machine = || format!("{}-{}", trial.memory.0 >> 20, trial.addresses);
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
