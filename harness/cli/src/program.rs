//! The program's name in printed commands ([`name`]), and its arguments with renamed options
//! ([`arguments`]).

use std::ffi::OsString;

use harness_base::shell::{self, quoted};

use super::terminal;

/// Options that have a new name: subcommand, old name, new name.
const RENAMED: [(&str, &str, &str); 5] = [
    ("run", "--no-audit", "--skip-checks"),
    ("squeeze", "--leave", "--leave-free"),
    ("shrink", "--while", "--preserve"),
    ("shrink", "--conf", "--alloc-conf"),
    ("advise", "--conf", "--alloc-conf"),
];

/// The command that started this program, quoted for a shell. Every printed command begins with it.
pub(crate) fn name() -> String {
    // Cargo sets this variable for the programs that it runs.
    if std::env::var_os("CARGO").is_some() {
        return if cfg!(debug_assertions) {
            "cargo run --"
        } else {
            "cargo run --release --"
        }
        .to_owned();
    }
    std::env::args_os().next().map_or_else(
        || "harness".to_owned(),
        |program| quoted(&program.to_string_lossy()),
    )
}

/// Another command as text, quoted for a shell.
pub(crate) fn shown(command: &[OsString]) -> String {
    shell::command(
        &command
            .iter()
            .map(|word| word.to_string_lossy().into_owned())
            .collect::<Vec<_>>(),
    )
}

/// The arguments of this process. An old option name becomes the new one, and a hint on standard
/// error names both.
pub(crate) fn arguments() -> Vec<OsString> {
    let (arguments, hints) = with_new_names(std::env::args_os());
    hints.iter().for_each(terminal::message);
    arguments
}

fn with_new_names(given: impl Iterator<Item = OsString>) -> (Vec<OsString>, Vec<String>) {
    let mut arguments: Vec<OsString> = given.collect();
    let mut hints = Vec::new();
    let end = arguments
        .iter()
        .position(|argument| argument == "--")
        .unwrap_or(arguments.len());
    let command = arguments[..end]
        .iter()
        .find(|argument| RENAMED.iter().any(|(command, ..)| argument == command))
        .cloned();
    for (_, old, new) in RENAMED
        .into_iter()
        .filter(|(name, ..)| command.as_ref().is_some_and(|command| command == name))
    {
        let mut is_used = false;
        for argument in &mut arguments[..end] {
            let Some(value) = argument.to_str().and_then(|text| text.strip_prefix(old)) else {
                continue;
            };
            if value.is_empty() || value.starts_with('=') {
                *argument = format!("{new}{value}").into();
                is_used = true;
            }
        }
        if is_used {
            hints.push(format!("`{old}` is now called `{new}`"));
        }
    }
    (arguments, hints)
}

#[cfg(test)]
mod tests;
