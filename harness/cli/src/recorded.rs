//! The recordings of `harness run`: `--snapshot` writes them as PyTorch memory snapshots,
//! `--explain` explains the memory at the end of each run.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{self, Receiver, Sender};

use clap::ValueEnum;
use harness_base::{files, shell::quoted};
use harness_explain::causes::{self, Options};
use harness_record::{PlannedRun, RunRecord, Verdict};
use harness_report::explain::text;
use harness_run::session::Plan;
use harness_trace::snapshot::Snapshot;

use super::{error::CliError, snapshots, terminal};

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Explained {
    /// Failed runs whose last request was refused.
    Failed,
    /// The end of every run.
    All,
}

pub(crate) struct Recordings {
    /// The files of the runs that have not ended, in the order of the plan.
    files: Vec<(PlannedRun, PathBuf)>,
    explained: Option<Explained>,
    screens: Vec<String>,
    receiver: Receiver<Snapshot>,
    failed: Option<CliError>,
}

impl Recordings {
    /// Checks before the first run that the runs can be recorded and written. `None` if no
    /// recording is requested.
    pub(crate) fn new(
        plan: &Plan,
        out: Option<&Path>,
        explained: Option<Explained>,
    ) -> Result<Option<(Self, Sender<Snapshot>)>, CliError> {
        if out.is_none() && explained.is_none() {
            return Ok(None);
        }
        let runs = recorded(plan)?;
        let files = match out {
            Some(out) => files_of(out, runs)?,
            None => Vec::new(),
        };
        let (sender, receiver) = mpsc::channel();
        Ok(Some((
            Self {
                files,
                explained,
                screens: Vec::new(),
                receiver,
                failed: None,
            },
            sender,
        )))
    }

    /// Writes and explains the recording of a finished run.
    pub(crate) fn run_ended(&mut self, run: &RunRecord) {
        // A run sends its recording before it ends. A run that did not start or was stuck sends
        // nothing.
        let Ok(snapshot) = self.receiver.try_recv() else {
            return;
        };
        let is_of = |(planned, _): &(PlannedRun, PathBuf)| {
            (&planned.scenario, &planned.allocator, planned.repetition)
                == (&run.scenario.name, &run.allocator, run.repetition)
        };
        // Scenarios with the same name in two folders run in the order of their files.
        if let Some((_, file)) = self
            .files
            .iter()
            .position(is_of)
            .map(|place| self.files.remove(place))
            && let Err(error) = snapshots::write(&file, &snapshot)
        {
            self.failed.get_or_insert(error);
        }
        let is_explained = match self.explained {
            None => false,
            Some(Explained::All) => true,
            Some(Explained::Failed) => matches!(
                run.verdict,
                Verdict::Failed { .. } | Verdict::FailedAsExpected { .. }
            ),
        };
        if is_explained {
            self.screens.extend(self.screen(run, &snapshot));
        }
    }

    fn screen(&self, run: &RunRecord, snapshot: &Snapshot) -> Option<String> {
        // Every recording can be explained at its end.
        let explanation = causes::explain(snapshot, 0, Options::default()).ok()?;
        if self.explained == Some(Explained::Failed) && explanation.request.is_none() {
            return None;
        }
        let repetition = if run.repetition > 0 {
            format!(", repetition {}", run.repetition + 1)
        } else {
            String::new()
        };
        let name = format!("{} with {}{repetition}", run.scenario.name, run.allocator);
        Some(text::render(
            &name,
            &explanation,
            terminal::style(),
            terminal::width_of_output(),
        ))
    }

    pub(crate) fn finish(self) -> Result<String, CliError> {
        if let Some(error) = self.failed {
            return Err(error);
        }
        if self.explained == Some(Explained::Failed) && self.screens.is_empty() {
            terminal::message(
                "nothing to explain: no run failed at a refused request; `--explain=all` explains \
                 the end of every run",
            );
        }
        Ok(self
            .screens
            .iter()
            .map(|screen| format!("\n{screen}"))
            .collect())
    }
}

/// The runs that can be recorded. Prints the others; an error if no run can be recorded.
fn recorded(plan: &Plan) -> Result<Vec<PlannedRun>, CliError> {
    let mut refused = BTreeSet::new();
    let mut runs = Vec::new();
    for (arm, planned) in plan.arms().zip(plan.planned()) {
        match arm.allocator.not_recorded() {
            None => runs.push(planned),
            Some(why) => drop(refused.insert((planned.allocator, why))),
        }
    }
    let sentence = |(allocator, why): &(String, &str)| {
        format!("runs with {allocator} cannot be recorded: {why}")
    };
    match (runs.as_slice(), refused.first()) {
        ([], Some(first)) => Err(CliError::input(
            sentence(first),
            "choose another allocator with `--allocator`, or leave out the option",
        )),
        _ => {
            refused
                .iter()
                .for_each(|refused| terminal::message(sentence(refused)));
            Ok(runs)
        }
    }
}

/// The snapshot file of each run: `out` itself for one run, else a file in the folder `out`.
fn files_of(out: &Path, runs: Vec<PlannedRun>) -> Result<Vec<(PlannedRun, PathBuf)>, CliError> {
    let shown = quoted(&out.to_string_lossy());
    let files: Vec<(PlannedRun, PathBuf)> = match <[PlannedRun; 1]>::try_from(runs) {
        Ok([run]) if out.is_dir() || out.to_string_lossy().ends_with(std::path::is_separator) => {
            let message = format!("--snapshot {shown} is a folder, but one run writes one file");
            return Err(CliError::input(
                message,
                format!(
                    "name a file, as in `--snapshot {}`",
                    out.join(file_name(&run)).display()
                ),
            ));
        }
        Ok([run]) => vec![(run, out.to_owned())],
        Err(runs) => {
            if out.exists() && !out.is_dir() {
                let message = format!(
                    "--snapshot {shown} is a file, but {} runs write one file each",
                    runs.len()
                );
                let help = "name a folder, or select one run with `--allocator`, `--filter` and \
                     `--repeat 1`";
                return Err(CliError::input(message, help));
            }
            let mut names = BTreeSet::new();
            runs.into_iter()
                .map(|run| (out.join(unused(file_name(&run), &mut names)), run))
                .map(|(file, run)| (run, file))
                .collect()
        }
    };
    files.first().map_or(Ok(()), |(_, file)| {
        files::check_place(file).map_err(CliError::unwritten(out))
    })?;
    Ok(files)
}

/// The file name of a run: `oom_retry-caching.pickle`, or `oom_retry-caching-2.pickle` for the
/// second repetition.
fn file_name(run: &PlannedRun) -> String {
    let repetition = if run.repetition > 0 {
        format!("-{}", run.repetition + 1)
    } else {
        String::new()
    };
    format!(
        "{}-{}{repetition}.pickle",
        files::slug(&run.scenario),
        files::slug(&run.allocator)
    )
}

/// Adds a number to the name if an earlier run uses it.
fn unused(name: String, names: &mut BTreeSet<String>) -> String {
    let stem = name.trim_end_matches(".pickle");
    let numbered = (2..).map(|number| format!("{stem}_{number}.pickle"));
    let unused = std::iter::once(name.clone())
        .chain(numbered)
        .find(|name| !names.contains(name))
        .unwrap_or_else(|| name.clone());
    names.insert(unused.clone());
    unused
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(scenario: &str, allocator: &str, repetition: u32) -> PlannedRun {
        PlannedRun {
            scenario: scenario.to_owned(),
            allocator: allocator.to_owned(),
            repetition,
        }
    }

    #[test]
    fn every_run_has_its_own_file_name() {
        assert_eq!(
            file_name(&run("oom_retry", "caching", 0)),
            "oom_retry-caching.pickle"
        );
        assert_eq!(
            file_name(&run(
                "kv_cache[batch=8]",
                "caching(max_split_size_mb:512)",
                1
            )),
            "kv_cache-batch-8-caching-max_split_size_mb-512-2.pickle"
        );
        let mut names = BTreeSet::new();
        let names: Vec<String> = ["a/b", "a b", "a+b"]
            .map(|name| unused(file_name(&run(name, "bfc", 0)), &mut names))
            .into();
        assert_eq!(
            names,
            ["a-b-bfc.pickle", "a-b-bfc_2.pickle", "a-b-bfc_3.pickle"]
        );
    }
}
