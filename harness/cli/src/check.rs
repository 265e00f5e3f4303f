use std::path::PathBuf;

use clap::Args;
use harness_base::printable::printable;
use harness_scenario::ParameterSettings;

use super::error::{CliError, Failures};
use super::{exit::Exit, inputs, terminal};

/// Check scenarios without running them: one line per file, and the first error in each file.
#[derive(Args)]
#[command(after_help = "Examples:\n  harness check scenarios\n  harness check my.yaml other.yaml")]
pub(super) struct Check {
    /// Scenario files or folders. Of a folder, the `*.yaml` files are checked, without subfolders.
    #[arg(required = true, value_name = "PATH")]
    paths: Vec<PathBuf>,
}

impl Check {
    pub(super) fn run(self) -> Result<Exit, Failures> {
        let mut failures: Vec<CliError> = Vec::new();
        for path in inputs::files(&self.paths, "scenario")? {
            let checked = inputs::points(&path, &ParameterSettings::new());
            let word = if checked.is_ok() {
                "valid  "
            } else {
                "invalid"
            };
            terminal::print(&format!(
                "{word}  {}\n",
                printable(&path.display().to_string())
            ))?;
            failures.extend(checked.err());
        }
        if failures.is_empty() {
            Ok(Exit::Passed)
        } else {
            Err(Failures(failures))
        }
    }
}
