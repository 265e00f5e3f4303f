//! `harness library-host`: the process that runs an allocator library, started by the harness itself.

use std::path::PathBuf;
use std::process::ExitCode;

use clap::Args;
use harness_allocator::allocator::library::LibrarySpec;
use harness_exec::library_host;

/// Run the calls of an allocator library that arrive on standard input.
#[derive(Args)]
pub(super) struct LibraryHost {
    path: PathBuf,
    #[arg(long)]
    alloc: String,
    #[arg(long)]
    free: String,
    #[arg(long)]
    record_stream: Option<String>,
    #[arg(long)]
    empty_cache: Option<String>,
}

impl LibraryHost {
    pub(super) fn run(self) -> ExitCode {
        let Self { path, alloc, free, record_stream, empty_cache } = self;
        let code = library_host::serve(&LibrarySpec { path, alloc, free, record_stream, empty_cache });
        ExitCode::from(u8::try_from(code).unwrap_or(1))
    }
}
