//! What continuous integration takes of a run, beside the report: options that commands share.

use std::io;
use std::path::{Path, PathBuf};

use clap::Args;
use harness_base::files;
use harness_report::github::SUMMARY_LIMIT;

use super::error::CliError;

/// Files for continuous integration.
#[derive(Args)]
pub(super) struct Ci {
    /// Add a summary in markdown to the end of this file, as in `--summary "$GITHUB_STEP_SUMMARY"`, cut where GitHub takes no more.
    #[arg(long, value_name = "FILE")]
    summary: Option<PathBuf>,
    /// Write what passed, failed and was skipped to this file, as JUnit has it.
    #[arg(long, value_name = "FILE")]
    junit: Option<PathBuf>,
}

impl Ci {
    /// Writes what the user asked for. A summary gets the bytes that it may have.
    pub(super) fn write(&self, summary: impl FnOnce(usize) -> String, junit: impl FnOnce() -> String) -> Result<(), CliError> {
        if let Some(path) = &self.summary {
            add(path, summary).map_err(|error| failed(path, error, "make it writable, or choose another file with `--summary FILE`"))?;
        }
        if let Some(path) = &self.junit {
            write(path, &junit(), "make it writable, or choose another file with `--junit FILE`")?;
        }
        Ok(())
    }
}

/// Writes a file that the user named. `help` is shown where it cannot be written.
pub(super) fn write(path: &Path, text: &str, help: &'static str) -> Result<(), CliError> {
    files::write(path, text).map_err(|error| failed(path, error, help))
}

/// Other commands of the same step may have written before, and GitHub counts all of it.
fn add(path: &Path, summary: impl FnOnce(usize) -> String) -> io::Result<()> {
    files::append(path, |existing| {
        let between = if existing.ends_with_empty_line { "" } else { "\n" };
        let used = usize::try_from(existing.length).unwrap_or(usize::MAX).saturating_add(between.len());
        format!("{between}{}", summary(SUMMARY_LIMIT.saturating_sub(used)))
    })
}

fn failed(path: &Path, error: io::Error, help: &'static str) -> CliError {
    CliError::Output { target: Some(path.to_owned()), error, help }
}
