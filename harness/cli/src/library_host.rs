use std::{path::PathBuf, process::ExitCode};

use clap::Args;
use harness_exec::library_host;

/// Run the calls of an allocator library that arrive on standard input.
#[derive(Args)]
pub(super) struct LibraryHost {
    path: PathBuf,
}

impl LibraryHost {
    pub(super) fn run(self) -> ExitCode {
        ExitCode::from(u8::try_from(library_host::serve(&self.path)).unwrap_or(1))
    }
}
