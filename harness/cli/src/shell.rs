//! `harness completions` and `harness man`, with the feature `shell`: files for shells and for
//! `man`, made from the definitions of the commands.

use std::path::PathBuf;

use clap::{Args, ValueEnum};

use super::{error::Failures, exit::Exit};

#[cfg(feature = "shell")]
mod generated;

const EXAMPLES: &str = "Examples:
  harness completions bash > ~/.local/share/bash-completion/completions/harness
  harness completions zsh > ~/.zfunc/_harness        with `fpath+=~/.zfunc` before `compinit`
  harness completions fish > ~/.config/fish/completions/harness.fish";

/// Print the completion script of a shell.
///
/// The Python package and `ci/install` put the scripts below `share` of the place that they install
/// into. Of /usr and /usr/local, shells find them. Elsewhere, use the commands below.
#[derive(Args)]
#[command(after_help = EXAMPLES, arg_required_else_help = true)]
pub(super) struct Completions {
    /// The shell.
    #[arg(value_name = "SHELL")]
    shell: Shell,
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Shell {
    Bash,
    Zsh,
    Fish,
}

/// Write a man page per command.
///
/// `man` finds the pages of the Python package and of `ci/install` if the program is in PATH.
#[derive(Args)]
#[command(
    after_help = "Example:\n  harness man ~/.local/share/man/man1",
    arg_required_else_help = true
)]
pub(super) struct Man {
    /// The folder for the pages, harness.1, harness-exec.1 and so on.
    #[arg(value_name = "FOLDER")]
    folder: PathBuf,
}

#[cfg(not(feature = "shell"))]
fn not_built() -> Failures {
    let message = "this harness is built without completion scripts and man pages";
    super::error::CliError::input(message, super::error::with_feature("shell")).into()
}

impl Completions {
    #[cfg(feature = "shell")]
    pub(super) fn run(self) -> Result<Exit, Failures> {
        generated::completions(self.shell)
    }

    #[cfg(not(feature = "shell"))]
    pub(super) fn run(self) -> Result<Exit, Failures> {
        let Self { shell: _ } = self;
        Err(not_built())
    }
}

impl Man {
    #[cfg(feature = "shell")]
    pub(super) fn run(self) -> Result<Exit, Failures> {
        generated::man(&self.folder)
    }

    #[cfg(not(feature = "shell"))]
    pub(super) fn run(self) -> Result<Exit, Failures> {
        let Self { folder: _ } = self;
        Err(not_built())
    }
}
