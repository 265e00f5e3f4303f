//! The cases of `--every-fault` that a program did not survive, for `--last-failed`: a file in the
//! cache folder for each folder, command, settings and expectation.

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::{env, io};

use harness_allocator::hash::fnv1a;
use harness_base::files;
use harness_exec::cache;
use harness_exec::trials::faults::{self, FaultCase, FaultPlan, FaultReport, RecoveryExpectation};
use harness_exec::trials::{observed::Observed, which::Which};
use serde::{Deserialize, Serialize};

use crate::{error::CliError, terminal};

const ALL_RUN: &str = "so all cases run";

pub(super) struct FailedCases {
    /// The run, which the name of the file has as a hash.
    run: String,
    expectation: RecoveryExpectation,
    /// A hash of all attempts and calls of the program, with their sizes.
    program: u64,
    /// The names of all cases of the program.
    all: BTreeSet<String>,
    failed: BTreeSet<FailedCase>,
    /// The names of those.
    names: BTreeSet<String>,
}

#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
struct FailedCase {
    name: String,
    /// As in [`FailedCases`]: the same name is another case if the program makes other attempts.
    program: u64,
    /// The files and functions of the error's call stack, innermost first.
    site: Vec<String>,
}

#[derive(Serialize, Deserialize)]
struct List {
    run: String,
    cases: BTreeSet<FailedCase>,
}

impl FailedCases {
    /// Reads the list of a command in the current folder. `settings` are those of the run, and
    /// `first` is a run without failures.
    pub(super) fn read(
        command: &str,
        settings: &[String],
        expectation: Option<RecoveryExpectation>,
        first: &Observed,
    ) -> Self {
        let folder = env::current_dir().unwrap_or_default();
        let expectation = expectation.unwrap_or(RecoveryExpectation::Recovers);
        let settings = settings.join(";");
        let run = format!("{}$ {command};{settings};{expectation:?}", folder.display());
        let cases = faults::all(first);
        let failed = path(&run).map(|path| read(&path, &run)).unwrap_or_default();
        Self {
            expectation,
            program: fnv1a(format!("{cases:?}").as_bytes()),
            all: cases.into_iter().map(|(name, _)| name).collect(),
            names: failed.iter().map(|case| case.name.clone()).collect(),
            failed,
            run,
        }
    }

    /// Limits a plan to the failed cases, if there are any and the program still makes them.
    pub(super) fn plan<'a>(&'a self, plan: FaultPlan<'a>) -> FaultPlan<'a> {
        if self.failed.is_empty() {
            return plan;
        }
        if self.failed.iter().any(|case| case.program != self.program) {
            terminal::message(format_args!(
                "the program makes other attempts than the failed runs, {ALL_RUN}"
            ));
            return all(plan);
        }
        FaultPlan {
            only: Some(&self.names),
            ..plan
        }
    }

    /// Returns a plan of all cases if one of the failed cases now has another call stack.
    pub(super) fn plan_if_moved<'a>(
        &self,
        plan: FaultPlan<'a>,
        report: &FaultReport,
    ) -> Option<FaultPlan<'a>> {
        plan.only?;
        let has_moved = |case: &FaultCase| {
            let mut same = self.failed.iter().filter(|old| old.name == case.name());
            same.any(|old| old.site != site(case))
        };
        report.injected().any(has_moved).then(|| {
            terminal::message(format_args!(
                "a failed case has another call stack than before, {ALL_RUN}"
            ));
            all(plan)
        })
    }

    /// Removes the cases of a report from the list, adds those that failed, and writes the file. A
    /// report of all cases replaces the list.
    pub(super) fn update(&self, report: &FaultReport) {
        if let Err(error) = self.try_update(report) {
            terminal::message(format_args!("`--last-failed` will not know these: {error}"));
        }
    }

    fn try_update(&self, report: &FaultReport) -> Result<(), CliError> {
        let Some(path) = path(&self.run) else {
            return Ok(());
        };
        // Runs at the same time, such as shards, wait for each other.
        let lock = path.with_extension("lock");
        let _locked = locked(&lock).map_err(CliError::unwritten(&lock))?;
        let mut cases = read(&path, &self.run);
        let made: BTreeSet<String> = report.injected().map(FaultCase::name).collect();
        if self.all.is_subset(&made) {
            cases.clear();
        }
        for case in report.injected() {
            let tested = FailedCase {
                name: case.name(),
                program: self.program,
                site: site(case),
            };
            if case.meets(self.expectation) {
                cases.remove(&tested);
            } else {
                cases.insert(tested);
            }
        }
        if cases.is_empty() && !path.exists() {
            return Ok(());
        }
        let run = self.run.clone();
        terminal::save(&path, terminal::json(&List { run, cases })?)
    }
}

const fn all(plan: FaultPlan<'_>) -> FaultPlan<'_> {
    FaultPlan {
        which: Which::All,
        only: None,
        ..plan
    }
}

/// The call stack without lines, which move when code above them changes.
fn site(case: &FaultCase) -> Vec<String> {
    let stack = case.stack.iter();
    stack
        .map(|frame| format!("{} {}", frame.file, frame.name))
        .collect()
}

/// An unreadable file counts as missing.
fn read(path: &Path, run: &str) -> BTreeSet<FailedCase> {
    files::read_to_string(path)
        .ok()
        .and_then(|text| serde_json::from_str::<List>(&text).ok())
        .filter(|list| list.run == run)
        .map(|list| list.cases)
        .unwrap_or_default()
}

fn locked(path: &Path) -> io::Result<File> {
    if let Some(folder) = path.parent() {
        fs::create_dir_all(folder)?;
    }
    let file = File::create(path)?;
    file.lock()?;
    Ok(file)
}

/// `None` if there is no cache folder.
fn path(run: &str) -> Option<PathBuf> {
    let folder = cache::folder(|name| env::var_os(name)).ok()?;
    let name = format!("{:016x}.json", fnv1a(run.as_bytes()));
    Some(folder.join("last-failed").join(name))
}
