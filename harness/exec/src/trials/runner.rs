//! [`Runner`] runs a program on simulated GPUs, or with a limit on a real one.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};
use std::{io, process::Stdio};

use super::Trial;
use super::observed::{Ending, Observed};
use crate::launch::{Launch, LaunchError, PLACES};
use crate::process::{End, Started};

const OUTPUTS: [&str; 2] = ["stdout", "stderr"];

/// Why a program was not run, or its outcome is unknown.
#[derive(Debug, thiserror::Error, miette::Diagnostic)]
pub enum RunnerError {
    #[error(transparent)]
    #[diagnostic(transparent)]
    Launch(#[from] LaunchError),
    #[error("cannot read the files that the program's processes wrote to the temporary folder: {0}")]
    #[diagnostic(help("check whether another program deletes temporary files; TMPDIR selects another folder for them"))]
    Lost(io::Error),
    #[error("cannot write the program's output to `{}`: {source}; free space there or choose another folder", path.display())]
    #[diagnostic(help("choose another file, or free disk space"))]
    Logs { path: PathBuf, source: io::Error },
}

#[derive(Debug)]
pub struct Runner<'a> {
    pub launch: Launch<'a>,
    /// The folder for the output of all runs except the first.
    pub logs: Option<&'a Path>,
    pub limit: Duration,
    /// Set when the user interrupts.
    pub stop: &'a AtomicBool,
}

impl Runner<'_> {
    /// Runs the program with this process's standard output and error, and returns its duration too. If `is_output_kept_free`, its standard
    /// output goes to standard error, because standard output carries a document. Returns `None` if the user interrupted.
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
        let machine = self.launch.machine.of_trial(trial);
        let mut prepared = Launch { machine: &machine, alloc_conf: trial.alloc_conf.as_deref(), ..self.launch }.prepare()?;
        let [stdout, stderr] = outputs(prepared.folder()).map_err(LaunchError::Folder)?;
        prepared.command.stdin(Stdio::null()).stdout(stdout).stderr(stderr).env(PLACES, "1");
        let give_up = |age| age > self.limit || self.stop.load(Ordering::Relaxed);
        let started = Started::start(&mut prepared.command);
        let end = started.and_then(|started| started.wait(give_up, |program| prepared.watch.look(program)));
        let end = end.map_err(|source| prepared.start_error(source))?;
        if end.is_none() && self.stop.load(Ordering::Relaxed) {
            return Ok(None);
        }
        let ended = prepared.ended(end.unwrap_or(End::Signal(9)))?;
        let folder = ended.folder();
        let error_output = folder.join(OUTPUTS[1]);
        let kept = error_output.is_file();
        let ending = end.map_or(Ending::Hang, |_| Ending::By(ended.end));
        let (_, observed) = machine.read(folder, (ended.end, ending), kept.then_some(error_output.as_path())).map_err(RunnerError::Lost)?;
        if let Some(logs) = self.logs.filter(|_| kept) {
            keep(folder, logs, &name(trial))?;
        }
        Ok(Some(observed))
    }

    /// Runs the program with output that is kept in files.
    pub fn run(&self, trial: &Trial) -> Result<Option<Observed>, RunnerError> {
        self.observe(trial, |folder| {
            let [stdout, stderr] = OUTPUTS.map(|output| File::create(folder.join(output)));
            Ok([stdout?.into(), stderr?.into()])
        })
    }
}

fn name(trial: &Trial) -> String {
    let fault = trial
        .faults
        .iter()
        .map(|fault| if fault.count == 1 { format!("fault-{}-alone", fault.first) } else { format!("fault-{}", fault.first) });
    let rank = trial.faulty_device.map(|device| format!("rank-{device}"));
    let machine = || {
        let order = trial.addresses.map(|order| format!("-{order}"));
        format!("{}{}", trial.memory.0 >> 20, order.unwrap_or_default())
    };
    let conf = trial.alloc_conf.as_deref().map(harness_base::files::slug);
    rank.into_iter()
        .chain(fault)
        .chain(trial.faults.is_empty().then(machine))
        .chain(conf.filter(|conf| !conf.is_empty()))
        .collect::<Vec<_>>()
        .join("-")
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
