//! The program `nvidia-smi` that programs on a simulated GPU find in PATH: a link to this program.

use std::path::Path;
use std::process::ExitCode;

use harness_cuda::smi;
use harness_exec::launch::NVIDIA_SMI;

use super::terminal;

/// Whether this program was started under that name.
pub(super) fn is_asked() -> bool {
    let name = std::env::args_os().next().unwrap_or_default();
    Path::new(&name)
        .file_name()
        .is_some_and(|name| name == NVIDIA_SMI)
}

pub(super) fn run() -> ExitCode {
    let arguments: Vec<String> = std::env::args_os()
        .skip(1)
        .map(|argument| argument.to_string_lossy().into_owned())
        .collect();
    let printed = smi::run(&arguments);
    match terminal::print(&printed.text) {
        Ok(()) => printed.code.into(),
        Err(error) => terminal::fail(error.into()).into(),
    }
}
