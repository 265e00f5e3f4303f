//! [`Runner`] runs a program on simulated GPUs, or with a limit on a real one.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};
use std::{io, process::Stdio};

use harness_allocator::hash::fnv1a;
use harness_base::files::slug;
use harness_trace::program::RecordedProgram;
use harness_trace::snapshot::Snapshot;

use super::copies::Copies;
use super::observed::{Observed, TrialEnd};
use super::{OUTPUTS, Trial, replay};
use crate::launch::{EndedProgram, HISTORY, Launch, LaunchError, PLACES, Prepared, SNAPSHOT};
use crate::machine::Machine;
use crate::process::{End, Started};
use crate::record::Record;

/// Why a program was not run, or its outcome is unknown.
#[derive(Debug, thiserror::Error, miette::Diagnostic)]
pub enum RunnerError {
    #[error(transparent)]
    #[diagnostic(transparent)]
    Launch(#[from] LaunchError),
    #[error(
        "cannot read the files that the program's processes wrote to the temporary folder: {0}"
    )]
    #[diagnostic(help(
        "check whether another program deletes temporary files; TMPDIR selects another folder for \
         them"
    ))]
    Lost(io::Error),
    #[error("cannot write the program's output to `{}`: {source}; free space there or choose \
         another folder", path.display())]
    #[diagnostic(help("choose another file, or free disk space"))]
    Logs { path: PathBuf, source: io::Error },
}

#[derive(Debug)]
pub struct Runner<'a> {
    pub launch: Launch<'a>,
    /// The folder for the output of all runs except the first.
    pub logs: Option<&'a Path>,
    pub limit: Duration,
    /// How runs begin, except the first.
    pub copies: Copies,
    /// Set when the user interrupts.
    pub stop: &'a AtomicBool,
}

/// The first run.
pub struct FirstRun {
    pub observed: Observed,
    pub took: Duration,
    /// Its allocations if they were to be recorded, or why they cannot be replayed.
    pub recorded: Option<Result<RecordedProgram, &'static str>>,
    /// The call stacks of its allocations, if they were to be recorded too.
    pub snapshot: Option<Snapshot>,
}

/// What a run records about its allocations.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RecordedRequests {
    Nothing,
    Sizes,
    Stacks,
}

impl Runner<'_> {
    /// Runs the program with this process's standard output and error. If `is_output_kept_free`,
    /// its standard output goes to standard error, because standard output carries a document. If
    /// `is_recorded`, also records the program's allocations on a simulated GPU. Also returns the
    /// folder of the run; `None` if the user interrupted.
    pub fn first(
        &self,
        trial: &Trial,
        is_output_kept_free: bool,
        is_recorded: bool,
    ) -> Result<Option<(FirstRun, EndedProgram)>, RunnerError> {
        let recording = self.possible(if is_recorded {
            RecordedRequests::Sizes
        } else {
            RecordedRequests::Nothing
        });
        let began = Instant::now();
        let stdout = if is_output_kept_free {
            Stdio::from(io::stderr())
        } else {
            Stdio::inherit()
        };
        let ended = self.observe(trial, None, |prepared| {
            prepared.command.stdout(stdout);
            record(prepared, recording);
            Ok(())
        })?;
        Ok(ended.map(|ended| self.first_of(trial, began, ended, recording)))
    }

    /// Real GPUs record nothing.
    const fn possible(&self, recording: RecordedRequests) -> RecordedRequests {
        match self.launch.machine {
            Machine::Simulated(_) => recording,
            Machine::Real(..) => RecordedRequests::Nothing,
        }
    }

    /// Runs the program like [`Runner::first`], with output that is not shown.
    pub fn unseen(
        &self,
        trial: &Trial,
        recording: RecordedRequests,
    ) -> Result<Option<FirstRun>, RunnerError> {
        let recording = self.possible(recording);
        let began = Instant::now();
        let ended = self.observe(trial, None, |prepared| {
            keep_output(prepared)?;
            record(prepared, recording);
            Ok(())
        })?;
        Ok(ended.map(|ended| self.first_of(trial, began, ended, recording).0))
    }

    /// Runs the program like [`Runner::first`], with output that is kept in files. Also returns its
    /// record and how long it took.
    pub fn kept(&self, trial: &Trial) -> Result<Option<(Record, Observed, Duration)>, RunnerError> {
        let began = Instant::now();
        let ended = self.observe(trial, None, keep_output)?;
        Ok(ended.map(|(_, record, observed)| (record, observed, began.elapsed())))
    }

    fn first_of(
        &self,
        trial: &Trial,
        began: Instant,
        (ended, record, observed): (EndedProgram, Record, Observed),
        recording: RecordedRequests,
    ) -> (FirstRun, EndedProgram) {
        let memory = trial
            .memory
            .saturating_sub(self.launch.machine.context_overhead());
        let recorded = (recording != RecordedRequests::Nothing)
            .then(|| replay::recorded(&record, &observed, ended.folder(), memory));
        let (recorded, snapshot) = match recorded {
            Some(Ok((program, snapshot))) => (Some(Ok(program)), Some(snapshot)),
            Some(Err(why)) => (Some(Err(why)), None),
            None => (None, None),
        };
        let first = FirstRun {
            observed,
            took: began.elapsed(),
            recorded,
            snapshot: snapshot.filter(|_| recording == RecordedRequests::Stacks),
        };
        (first, ended)
    }

    fn observe(
        &self,
        trial: &Trial,
        copies: Option<&Copies>,
        begin: impl FnOnce(&mut Prepared) -> io::Result<()>,
    ) -> Result<Option<(EndedProgram, Record, Observed)>, RunnerError> {
        if self.stop.load(Ordering::Relaxed) {
            return Ok(None);
        }
        let machine = self.launch.machine.of_trial(trial);
        let mut prepared = Launch {
            machine: &machine,
            alloc_conf: trial.alloc_conf.as_deref(),
            ..self.launch
        }
        .prepare()?;
        prepared.command.stdin(Stdio::null()).env(PLACES, "1");
        begin(&mut prepared).map_err(LaunchError::Folder)?;
        let give_up = |age| age > self.limit || self.stop.load(Ordering::Relaxed);
        let started = match copies {
            Some(copies) => copies.start(trial, &mut prepared, give_up),
            None => Started::start(&mut prepared.command).map(|started| (started, false)),
        };
        let (started, is_copy) = started.map_err(|source| prepared.start_error(source))?;
        let end = started
            .wait(
                give_up,
                |program| prepared.watch.look(program),
                |program| prepared.watch.remaining(program),
            )
            .map_err(|source| prepared.start_error(source))?;
        if end.is_none() && self.stop.load(Ordering::Relaxed) {
            return Ok(None);
        }
        let ended = prepared.ended(end.unwrap_or(End::Signal(9)))?;
        let folder = ended.folder();
        let error_output = folder.join(OUTPUTS[1]);
        let kept = error_output.is_file();
        let ending = end.map_or(TrialEnd::Hang, |_| TrialEnd::By(ended.end));
        let (record, mut observed) = machine
            .read(
                folder,
                (ended.end, ending),
                kept.then_some(error_output.as_path()),
            )
            .map_err(RunnerError::Lost)?;
        observed.is_copy = is_copy;
        if let Some(logs) = self.logs.filter(|_| kept) {
            keep(folder, logs, &name(trial))?;
        }
        Ok(Some((ended, record, observed)))
    }

    /// Runs the program with output that is kept in files.
    pub fn run(&self, trial: &Trial) -> Result<Option<Observed>, RunnerError> {
        let ended = self.observe(trial, Some(&self.copies), keep_output)?;
        Ok(ended.map(|(ended, _, observed)| {
            self.copies.keep(ended);
            observed
        }))
    }
}

/// Writes the output into files of the run's folder.
fn keep_output(prepared: &mut Prepared) -> io::Result<()> {
    let [stdout, stderr] = OUTPUTS.map(|output| File::create(prepared.folder().join(output)));
    prepared.command.stdout(stdout?).stderr(stderr?);
    Ok(())
}

fn record(prepared: &mut Prepared, recording: RecordedRequests) {
    let form = match recording {
        RecordedRequests::Nothing => None,
        RecordedRequests::Sizes => Some("events"),
        RecordedRequests::Stacks => Some("stacks"),
    };
    prepared
        .command
        .env_remove(HISTORY)
        .envs(form.map(|form| (SNAPSHOT, form)));
}

fn name(trial: &Trial) -> String {
    let fault = trial.faults.iter().map(|fault| {
        if fault.count == 1 {
            format!("fault-{}-alone", fault.first)
        } else {
            format!("fault-{}", fault.first)
        }
    });
    let rank = trial.faulty_device.map(|device| format!("rank-{device}"));
    let machine = || {
        let order = trial.addresses.map(|order| format!("-{order}"));
        format!("{}{}", trial.memory.0 >> 20, order.unwrap_or_default())
    };
    let conf = trial.alloc_conf.as_deref().map(|conf| match slug(conf) {
        // The hash keeps long settings apart.
        name if conf.len() > name.len() => format!("{name}-{:016x}", fnv1a(conf.as_bytes())),
        name => name,
    });
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
        fs::copy(folder.join(output), &path)
            .map_err(|source| RunnerError::Logs { path, source })?;
    }
    Ok(())
}

#[cfg(test)]
mod tests;
