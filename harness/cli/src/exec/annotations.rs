//! Annotations of the lines whose memory grew, for code review.

use std::path::{Path, PathBuf};
use std::{env, fs};

use clap::Args;
use harness_report::annotations::{self, LineNote};

use crate::{arguments, error::CliError, terminal};

/// The variables that name the root of the repository: of GitHub Actions and of GitLab CI.
const ROOTS: [&str; 2] = ["GITHUB_WORKSPACE", "CI_PROJECT_DIR"];

#[derive(Args)]
pub(super) struct Annotations {
    /// With `--baseline`: write the lines that allocate more to this file, as a code quality report
    /// of GitLab. In GitHub Actions, the command prints annotations.
    #[arg(
        long,
        value_name = "FILE",
        conflicts_with = "update", value_parser = arguments::output())]
    code_quality: Option<PathBuf>,
    /// With `--baseline`: write the lines that allocate more to this file, in SARIF.
    #[arg(
        long,
        value_name = "FILE",
        conflicts_with = "update", value_parser = arguments::output())]
    sarif: Option<PathBuf>,
}

/// A line that allocates more than before.
pub(super) struct LineGrowth {
    /// Relative to the current folder or to the folder of Python packages, or absolute.
    pub(super) file: String,
    pub(super) line: u32,
    pub(super) message: String,
}

impl Annotations {
    pub(super) fn check_needed(&self, has_baseline: bool) -> Result<(), CliError> {
        let options = [
            ("--code-quality", self.code_quality.is_some()),
            ("--sarif", self.sarif.is_some()),
        ];
        super::require("`--baseline`", has_baseline, &options)
    }

    /// Writes notes on lines of files in the repository.
    pub(super) fn write(&self, grown: &[LineGrowth]) -> Result<(), CliError> {
        let here = env::current_dir().unwrap_or_default();
        let root = root(&here);
        // Other files belong to packages.
        let note = |growth: &LineGrowth| {
            let file = fs::canonicalize(here.join(&growth.file)).ok()?;
            Some(LineNote {
                path: file
                    .strip_prefix(&root)
                    .ok()?
                    .to_string_lossy()
                    .into_owned(),
                line: growth.line,
                message: growth.message.clone(),
            })
        };
        let notes: Vec<LineNote> = grown.iter().filter_map(note).collect();
        if let Some(path) = &self.code_quality {
            let report = annotations::code_quality(&notes);
            terminal::save(path, format!("{report:#}\n"))?;
        }
        if let Some(path) = &self.sarif {
            terminal::save(path, format!("{:#}\n", annotations::sarif(&notes)))?;
        }
        // GitHub reads them from standard error too. Standard output belongs to the program.
        if env::var_os("GITHUB_ACTIONS").is_some_and(|value| value == "true") {
            annotations::github(&notes)
                .iter()
                .for_each(terminal::message);
        }
        Ok(())
    }
}

/// The root of the repository that has this folder, or the folder.
fn root(here: &Path) -> PathBuf {
    let root = |name: &&str| fs::canonicalize(env::var_os(name)?).ok();
    let here = fs::canonicalize(here).unwrap_or_else(|_| here.to_owned());
    ROOTS
        .iter()
        .filter_map(root)
        .find(|root| here.starts_with(root))
        .unwrap_or(here)
}
