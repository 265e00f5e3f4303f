//! Options for continuous integration, shared by several commands.

use std::io;
use std::path::{Path, PathBuf};

use clap::Args;
use harness_base::files;
use harness_report::github::SUMMARY_LIMIT;

use super::error::CliError;

#[derive(Args)]
pub(super) struct Ci {
    /// Append a markdown summary to this file, cut to GitHub's size limit, as in `--summary "$GITHUB_STEP_SUMMARY"`.
    #[arg(long, value_name = "FILE")]
    summary: Option<PathBuf>,
    /// Write passed, failed and skipped runs to this file in JUnit format.
    #[arg(long, value_name = "FILE")]
    junit: Option<PathBuf>,
}

impl Ci {
    /// Writes the requested files. `summary` receives the number of bytes that it may use.
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

/// Writes a file that the user named. `help` is shown if that fails.
pub(super) fn write(path: &Path, text: &str, help: &'static str) -> Result<(), CliError> {
    files::write(path, text).map_err(|error| failed(path, error, help))
}

/// Appends to the summary. GitHub's limit includes the text that earlier commands of the same step wrote.
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
