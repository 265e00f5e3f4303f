use std::path::Path;

use clap::{Command, CommandFactory as _};
use clap_complete::aot::{self, Generator};

use super::Shell;
use crate::error::{CliError, Failures};
use crate::{Cli, exit::Exit, terminal};

const NAME: &str = "harness";

pub(super) fn completions(shell: Shell) -> Result<Exit, Failures> {
    match shell {
        Shell::Bash => print(aot::Bash),
        Shell::Zsh => print(aot::Zsh),
        Shell::Fish => print(aot::Fish),
    }
}

/// The commands without hidden commands, which the scripts would offer.
fn visible() -> Command {
    let all = Cli::command();
    let shown = all
        .get_subcommands()
        .filter(|command| !command.is_hide_set());
    Command::new(NAME)
        .disable_help_subcommand(true)
        .args(all.get_arguments())
        .subcommands(shown)
}

fn print(shell: impl Generator) -> Result<Exit, Failures> {
    let mut script = Vec::new();
    aot::generate(shell, &mut visible(), NAME, &mut script);
    terminal::print_document(&String::from_utf8_lossy(&script))?;
    Ok(Exit::Passed)
}

pub(super) fn man(folder: &Path) -> Result<Exit, Failures> {
    let unwritten = CliError::unwritten(folder);
    let written = std::fs::create_dir_all(folder)
        .and_then(|()| clap_mangen::generate_to(Cli::command(), folder));
    written.map_err(unwritten)?;
    Ok(Exit::Passed)
}
