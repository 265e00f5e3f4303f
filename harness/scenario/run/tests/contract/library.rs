//! Shared libraries as allocators, built by cargo next to this test. Their process is this program.

use std::{path::PathBuf, process::ExitCode};

use harness_allocator::allocator::{AllocatorSpec, library::LibrarySpec};

/// The subcommand that starts a library's process.
const SUBCOMMAND: &str = "library-host";

/// A library that calls the driver for each request, one that caches and ignores other streams, and
/// this project's own.
pub(crate) fn allocators() -> Vec<AllocatorSpec> {
    let [plain, cached] = ["plain", "cached"].map(|prefix| LibrarySpec {
        path: built("libtest_allocators.so"),
        alloc: format!("{prefix}_malloc"),
        free: format!("{prefix}_free"),
        record_stream: None,
        empty_cache: (prefix == "cached").then(|| "cached_empty_cache".to_owned()),
    });
    let own = LibrarySpec {
        path: built("libharness_allocator_abi.so"),
        alloc: "harness_caching_malloc".to_owned(),
        free: "harness_caching_free".to_owned(),
        record_stream: Some("harness_caching_record_stream".to_owned()),
        empty_cache: Some("harness_caching_empty_cache".to_owned()),
    };
    let named = |(library, name): (LibrarySpec, &str)| AllocatorSpec::library(library).named(name);
    [
        (plain, "library_plain"),
        (cached, "library_cached"),
        (own, "library_own"),
    ]
    .map(named)
    .into()
}

/// The folder for shared libraries, next to this test.
fn built(name: &str) -> PathBuf {
    std::env::current_exe()
        .unwrap_or_default()
        .with_file_name(name)
}

/// Runs as a library's process if it was started as one.
pub(crate) fn serve() -> Option<ExitCode> {
    let mut arguments = std::env::args().skip(1);
    arguments.next().filter(|first| first == SUBCOMMAND)?;
    let library = PathBuf::from(arguments.next()?);
    Some(ExitCode::from(
        u8::try_from(harness_exec::library_host::serve(&library)).unwrap_or(1),
    ))
}
