//! Shared libraries as allocators: right ones pass, and each mistake of a wrong one is found and told. The libraries are those of `test-allocators`.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use tempfile::TempDir;

/// Where cargo puts shared libraries: beside this test.
fn library() -> PathBuf {
    let test = std::env::current_exe().expect("this test has a path");
    let library = test.with_file_name("libtest_allocators.so");
    assert!(library.is_file(), "{} is built with the tests", library.display());
    library
}

/// A folder with a link to the library, as a user has it beside a scenario.
fn folder() -> TempDir {
    let folder = tempfile::tempdir().expect("there is a folder for temporary files");
    std::os::unix::fs::symlink(library(), folder.path().join("alloc.so")).expect("it can be linked");
    folder
}

const STEPS: &str = "steps:
  - alloc: { buffer: a, size: 6MiB }
  - fill: a
  - alloc: { buffer: b, size: 3MiB }
  - free: a
  - alloc: { buffer: c, size: 6MiB }
  - fill: c
  - alloc: { buffer: d, size: 1GiB, expect: oom }
  - free: b
";

/// Runs a scenario with these arms: the exit code, and everything that was said.
fn run(folder: &Path, arms: &str) -> (Option<i32>, String) {
    let scenario = format!("about: Libraries are allocators.\nneeds: {{ memory: 64MiB }}\nallocators:\n{arms}{STEPS}");
    fs::write(folder.join("scenario.yaml"), scenario).expect("it can be written");
    harness(folder, &["run", "scenario.yaml", "--no-report", "--device", "sim"])
}

fn harness(folder: &Path, arguments: &[&str]) -> (Option<i32>, String) {
    let output = Command::new(env!("CARGO_BIN_EXE_harness")).args(arguments).current_dir(folder).output().expect("it can be started");
    let text = [output.stdout, output.stderr].map(|bytes| String::from_utf8_lossy(&bytes).into_owned()).concat();
    (output.status.code(), text)
}

/// An arm of the library.
fn arm(name: &str, alloc: &str, free: &str, rest: &str) -> String {
    format!("  - library: {{ name: {name}, path: ./alloc.so, alloc: {alloc}, free: {free}{rest} }}\n")
}

/// What is told of a wrong library: the run fails, the one beside it passes.
fn told(alloc: &str, free: &str) -> String {
    let folder = folder();
    let (code, text) = run(folder.path(), &(arm("wrong", alloc, free, "") + "  - direct\n"));
    assert_eq!(code, Some(1), "{text}");
    assert!(text.contains("1 passed") && text.contains("1 failed"), "{text}");
    text
}

#[test]
fn a_library_that_calls_the_driver_each_time_passes_every_check() {
    let folder = folder();
    let (code, text) = run(folder.path(), &(arm("plain", "plain_malloc", "plain_free", "") + "  - direct\n"));
    assert_eq!(code, Some(0), "{text}");
}

#[test]
fn a_library_with_a_cache_passes_where_it_says_how_the_cache_is_emptied_and_leaves_memory_behind_where_not() {
    let folder = folder();
    let (code, text) = run(folder.path(), &arm("cached", "cached_malloc", "cached_free", ", empty_cache: cached_empty_cache"));
    assert_eq!(code, Some(0), "{text}");
    let (code, text) = run(folder.path(), &arm("cached", "cached_malloc", "cached_free", ""));
    assert_eq!(code, Some(1), "{text}");
    assert!(text.contains("everything_goes_back"), "{text}");
}

#[test]
fn a_block_that_is_handed_out_twice_is_found() {
    let text = told("twice_malloc", "leaky_free");
    assert!(text.contains("allocations_are_disjoint") && text.contains("6 MiB on stream 0 are still in use at"), "{text}");
}

#[test]
fn blocks_that_overlap_are_found() {
    let text = told("inside_malloc", "leaky_free");
    assert!(text.contains("allocations_are_disjoint"), "{text}");
}

#[test]
fn an_address_that_is_not_aligned_is_found() {
    let text = told("odd_malloc", "plain_free");
    assert!(text.contains("which is no multiple of 16 bytes"), "{text}");
}

#[test]
fn memory_that_is_never_given_back_is_found() {
    let text = told("plain_malloc", "leaky_free");
    assert!(text.contains("everything_goes_back") && text.contains("15728640 B (15 MiB) reserved in 3 segments"), "{text}");
}

#[test]
fn memory_that_is_given_to_the_driver_twice_is_found() {
    let text = told("plain_malloc", "double_free");
    assert!(text.contains("is freed at step 4, but was freed before at step 4"), "{text}");
}

#[test]
fn a_crash_fails_the_run_with_its_signal_and_the_request_and_the_other_runs_go_on() {
    let text = told("crash_malloc", "plain_free");
    assert!(text.contains("SIGSEGV ended its process while `crash_malloc` was to hand out 6 MiB on stream 0, request 3"), "{text}");
    let text = told("plain_malloc", "abort_free");
    assert!(text.contains("SIGABRT ended its process while `abort_free` was to take back"), "{text}");
}

#[test]
fn a_function_of_cuda_that_is_not_passed_on_is_named() {
    let text = told("async_malloc", "plain_free");
    assert!(text.contains("`async_malloc` called cudaMallocAsync, which is none of the functions of CUDA that are passed on"), "{text}");
}

#[test]
fn what_is_wrong_with_a_library_is_said_at_its_place_in_the_file() {
    let folder = folder();
    let refused = |arms: &str, place: &str, message: &str| {
        let (code, text) = run(folder.path(), arms);
        assert_eq!(code, Some(2), "{text}");
        assert!(text.contains(place) && text.contains(message), "{text}");
    };
    refused("  - library\n", "scenario.yaml:4:5", "which library is not said");
    refused("  - library: { path: ./alloc.so, alloc: plain_malloc }\n", "scenario.yaml:4:5", "`library` has no `free`");
    refused("  - library: { path: ./none.so, alloc: a, free: b }\n", "scenario.yaml:4:22", "`./none.so` cannot be read: No such file");
    refused(
        "  - library: { path: ./alloc.so, alloc: plain_maloc, free: plain_free }\n",
        "scenario.yaml:4:41",
        "has no function `plain_maloc`",
    );
    refused("  - library: { path: ./alloc.so, allocate: a }\n", "scenario.yaml:4:34", "a library has no field `allocate`");
    fs::write(folder.path().join("text.so"), "text").expect("it can be written");
    refused("  - library: { path: ./text.so, alloc: a, free: b }\n", "scenario.yaml:4:22", "is not a shared library");
}

#[test]
fn a_library_of_the_command_line_runs_in_every_scenario() {
    let folder = folder();
    let (code, text) = run(folder.path(), "  - direct\n");
    assert_eq!(code, Some(0), "{text}");
    let with = |arm: &str| harness(folder.path(), &["run", "scenario.yaml", "--no-report", "--device", "sim", "--allocator", arm]);
    let (code, text) = with("library(path:./alloc.so,alloc:plain_malloc,free:plain_free)");
    assert!(code == Some(0) && text.contains("library(path:./alloc.so,alloc:plain_malloc,free:plain_free)"), "{code:?} {text}");
    let (code, text) = with("library(path:./alloc.so,alloc:plain_maloc,free:plain_free)");
    assert!(code == Some(2) && text.contains("has no function `plain_maloc`"), "{code:?} {text}");
    let (code, text) = with("library(path:./alloc.so)");
    assert!(code == Some(2) && text.contains("a library needs `alloc`"), "{code:?} {text}");
}
