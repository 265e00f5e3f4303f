//! Annotations of the lines whose memory grew, for code review.

use std::path::{Path, PathBuf};
use std::{env, fs};

use clap::Args;
use harness_report::annotations::{self, LineNote};

use crate::{error::CliError, terminal};

/// The variables that name the root of the repository: of GitHub Actions and of GitLab CI.
const ROOTS: [&str; 2] = ["GITHUB_WORKSPACE", "CI_PROJECT_DIR"];

#[derive(Args)]
pub(super) struct Annotations {
    /// With `--baseline`: write the lines that allocate more to this file, as a code quality report
    /// of GitLab. In GitHub Actions, the command prints annotations.
    #[arg(
        long,
        value_name = "FILE",
        requires = "baseline",
        conflicts_with = "update"
    )]
    code_quality: Option<PathBuf>,
    /// With `--baseline`: write the lines that allocate more to this file, in SARIF.
    #[arg(
        long,
        value_name = "FILE",
        requires = "baseline",
        conflicts_with = "update"
    )]
    sarif: Option<PathBuf>,
}

/// A line that allocates more than before.
pub(super) struct LineGrowth {
    /// Relative to the current folder, or to the folder of Python packages.
    pub(super) file: String,
    pub(super) line: u32,
    pub(super) message: String,
}

impl Annotations {
    /// Writes notes on lines of files below the current folder.
    pub(super) fn write(&self, grown: &[LineGrowth]) -> Result<(), CliError> {
        let prefix = prefix();
        let note = |growth: &LineGrowth| LineNote {
            path: prefix.join(&growth.file).to_string_lossy().into_owned(),
            line: growth.line,
            message: growth.message.clone(),
        };
        // Other files belong to packages.
        let is_own = |growth: &&LineGrowth| {
            let file = Path::new(&growth.file);
            file.is_relative() && file.is_file()
        };
        let own = grown.iter().filter(is_own);
        let notes: Vec<LineNote> = own.map(note).collect();
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

/// The current folder, relative to the root of the repository.
fn prefix() -> PathBuf {
    let here = env::current_dir().unwrap_or_default();
    let root = |name: &&str| fs::canonicalize(env::var_os(name)?).ok();
    let root = ROOTS.iter().find_map(root);
    root.and_then(|root| Some(here.strip_prefix(root).ok()?.to_owned()))
        .unwrap_or_default()
}
