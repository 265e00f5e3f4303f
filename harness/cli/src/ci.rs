use std::io;
use std::path::{Path, PathBuf};

use clap::Args;
use harness_base::files;
use harness_report::github::SUMMARY_LIMIT;

use super::{arguments, error::CliError, terminal};

#[derive(Args)]
pub(super) struct Ci {
    /// Append a markdown summary to this file, cut to GitHub's size limit, as in `--summary
    /// "$GITHUB_STEP_SUMMARY"`.
    #[arg(long, value_name = "FILE", value_parser = arguments::output())]
    summary: Option<PathBuf>,
    /// Write passed, failed and skipped runs to this file in JUnit format.
    #[arg(long, value_name = "FILE", value_parser = arguments::output())]
    junit: Option<PathBuf>,
}

impl Ci {
    /// Writes the requested files. `summary` receives the number of bytes that it may use.
    pub(super) fn write(
        &self,
        summary: impl FnOnce(usize) -> String,
        junit: impl FnOnce() -> String,
    ) -> Result<(), CliError> {
        if let Some(path) = &self.summary {
            add(path, summary).map_err(CliError::unwritten(path))?;
        }
        if let Some(path) = &self.junit {
            terminal::save(path, junit())?;
        }
        Ok(())
    }
}

/// Appends to the summary. GitHub's limit includes the text that earlier commands of the same step
/// wrote.
fn add(path: &Path, summary: impl FnOnce(usize) -> String) -> io::Result<()> {
    files::append(path, |existing| {
        let between = if existing.ends_with_empty_line {
            ""
        } else {
            "\n"
        };
        let used = usize::try_from(existing.length)
            .unwrap_or(usize::MAX)
            .saturating_add(between.len());
        format!("{between}{}", summary(SUMMARY_LIMIT.saturating_sub(used)))
    })
}
