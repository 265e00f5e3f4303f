//! The list of failed runs for `harness run --last-failed`: a small file next to the numbered
//! reports.

use std::{collections::BTreeSet, fmt::Display, fs, io::ErrorKind, path::PathBuf};

use harness_base::files;
use harness_record::{RunRecord, Verdict};
use harness_report::store;
use serde::{Deserialize, Serialize};

use super::{error::CliError, terminal};

const VERSION: u32 = 2;

const HELP: &str = "remove this file, and run without `--last-failed`";

#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct LastFailed {
    version: u32,
    failed: BTreeSet<(String, String)>,
}

impl Default for LastFailed {
    fn default() -> Self {
        Self {
            version: VERSION,
            failed: BTreeSet::new(),
        }
    }
}

impl LastFailed {
    /// Reads the list, which is empty if there is no file.
    pub(crate) fn read() -> Result<Self, CliError> {
        let path = path();
        let invalid =
            |why: &dyn Display| CliError::input(format!("{}: {why}", path.display()), HELP);
        let text = match files::read_to_string(&path) {
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(Self::default()),
            read => read.map_err(|error| invalid(&error))?,
        };
        match serde_json::from_str(&text).map_err(|error| invalid(&error))? {
            known @ Self {
                version: VERSION, ..
            } => Ok(known),
            // Version 1 identified scenarios by name alone, which is ambiguous.
            Self { version: 1, .. } => Ok(Self::default()),
            Self { version, .. } => Err(invalid(&format_args!("version {version} is unknown"))),
        }
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.failed.is_empty()
    }

    pub(crate) fn has(&self, pair: &(String, String)) -> bool {
        self.failed.contains(pair)
    }

    /// Removes passed runs and adds failed ones.
    pub(crate) fn update(&mut self, runs: &[RunRecord]) {
        let pair = |run: &RunRecord| (run.scenario.id(), run.allocator.clone());
        for run in runs.iter().filter(|run| run.verdict == Verdict::Passed) {
            self.failed.remove(&pair(run));
        }
        self.failed.extend(
            runs.iter()
                .filter(|run| matches!(run.verdict, Verdict::Failed { .. }))
                .map(pair),
        );
    }

    pub(crate) fn write(&self) -> Result<(), CliError> {
        let path = path();
        let failed = |error| {
            CliError::output(
                Some(&path),
                &error,
                "free disk space, or run with `--no-report`",
            )
        };
        if self.is_empty() && !path.exists() {
            return Ok(());
        }
        fs::create_dir_all(store::DEFAULT_ROOT).map_err(&failed)?;
        files::write(&path, terminal::json(self)?).map_err(failed)
    }
}

fn path() -> PathBuf {
    PathBuf::from(store::DEFAULT_ROOT).join("last-failed.json")
}
