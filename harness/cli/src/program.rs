//! The program's name, and other commands, as printed.

use std::ffi::OsString;

use harness_base::shell::{self, quoted};

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
