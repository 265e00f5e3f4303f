//! Shared libraries as allocators: correct ones pass, and each bug of a wrong one is found and
//! reported. The crate `test-allocators` contains the libraries.

use std::path::{Path, PathBuf};
use std::{fs, process::Command};

use harness_bench::record::{BenchRun, Entry, EntryResult, Quantity};
use harness_staging::{Staging, strict};
use tempfile::TempDir;

/// The folder of shared libraries, which is the folder of this test.
fn library() -> PathBuf {
    let test = std::env::current_exe().expect("this test has a path");
    let library = test.with_file_name("libtest_allocators.so");
    assert!(
        library.is_file(),
        "{} is built with the tests",
        library.display()
    );
    library
}

/// A folder with a link to the library, next to the scenarios.
fn folder() -> TempDir {
    let folder = tempfile::tempdir().expect("there is a folder for temporary files");
    std::os::unix::fs::symlink(library(), folder.path().join("alloc.so"))
        .expect("it can be linked");
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

/// Runs a scenario with these configurations. Returns the exit code and all output.
fn run(folder: &Path, arms: &str) -> (Option<i32>, String) {
    let scenario = format!(
        "about: Libraries are allocators.\nneeds: {{ memory: 64MiB }}\nallocators:\n{arms}{STEPS}"
    );
    fs::write(folder.join("scenario.yaml"), scenario).expect("it can be written");
    harness(
        folder,
        &["run", "scenario.yaml", "--no-report", "--device", "sim"],
    )
}

fn harness(folder: &Path, arguments: &[&str]) -> (Option<i32>, String) {
    let output = Command::new(env!("CARGO_BIN_EXE_harness"))
        .args(arguments)
        .current_dir(folder)
        .output()
        .expect("it can be started");
    let text = [output.stdout, output.stderr]
        .map(|bytes| String::from_utf8_lossy(&bytes).into_owned())
        .concat();
    (output.status.code(), text)
}

/// A configuration with the library.
fn arm(name: &str, alloc: &str, free: &str, rest: &str) -> String {
    format!(
        "  - library: {{ name: {name}, path: ./alloc.so, alloc: {alloc}, free: {free}{rest} }}\n"
    )
}

/// Returns the output for a wrong library: its run fails, and the other run passes.
fn told(alloc: &str, free: &str) -> String {
    let folder = folder();
    let (code, text) = run(
        folder.path(),
        &(arm("wrong", alloc, free, "") + "  - direct\n"),
    );
    assert_eq!(code, Some(1), "{text}");
    assert!(
        text.contains("1 passed") && text.contains("1 failed"),
        "{text}"
    );
    text
}

#[test]
fn a_library_that_calls_the_driver_each_time_passes_every_check() {
    let folder = folder();
    let (code, text) = run(
        folder.path(),
        &(arm("plain", "plain_malloc", "plain_free", "") + "  - direct\n"),
    );
    assert_eq!(code, Some(0), "{text}");
}

#[test]
fn a_library_with_a_cache_passes_only_with_a_function_that_empties_it() {
    let folder = folder();
    let (code, text) = run(
        folder.path(),
        &arm(
            "cached",
            "cached_malloc",
            "cached_free",
            ", empty_cache: cached_empty_cache",
        ),
    );
    assert_eq!(code, Some(0), "{text}");
    let (code, text) = run(
        folder.path(),
        &arm("cached", "cached_malloc", "cached_free", ""),
    );
    assert_eq!(code, Some(1), "{text}");
    assert!(text.contains("everything_goes_back"), "{text}");
}

#[test]
fn a_library_takes_memory_from_pools_of_the_driver_and_by_mapping() {
    let folder = folder();
    let rest = |prefix: &str| match prefix {
        "pool" | "arena" => format!(", empty_cache: {prefix}_empty_cache"),
        _ => String::new(),
    };
    for prefix in ["async", "pool", "mapped", "arena"] {
        let (code, text) = run(
            folder.path(),
            &arm(
                prefix,
                &format!("{prefix}_malloc"),
                &format!("{prefix}_free"),
                &rest(prefix),
            ),
        );
        assert_eq!(code, Some(0), "{prefix}: {text}");
    }
    let (code, text) = run(folder.path(), &arm("pool", "pool_malloc", "pool_free", ""));
    assert!(
        code == Some(1) && text.contains("everything_goes_back"),
        "the pool keeps memory without a function that releases it: {text}"
    );
    let (code, text) = run(
        folder.path(),
        &arm(
            "arena",
            "arena_malloc",
            "leaky_free",
            ", empty_cache: arena_empty_cache",
        ),
    );
    assert!(
        code == Some(1) && text.contains("everything_goes_back"),
        "{text}"
    );
}

#[test]
fn memory_from_a_pool_and_without_one_is_refused_with_the_reason() {
    let text = told("mixed_malloc", "plain_free");
    assert!(
        text.contains("it mixes a driver pool with another pool or with memory outside pools"),
        "{text}"
    );
}

#[test]
fn a_block_that_is_handed_out_twice_is_found() {
    let text = told("twice_malloc", "leaky_free");
    assert!(
        text.contains("allocations_are_disjoint")
            && text.contains("6 MiB on stream 0 are still in use at"),
        "{text}"
    );
}

#[test]
fn blocks_that_overlap_are_found() {
    let text = told("inside_malloc", "leaky_free");
    assert!(text.contains("allocations_are_disjoint"), "{text}");
}

#[test]
fn an_address_that_is_not_aligned_is_found() {
    let text = told("odd_malloc", "plain_free");
    assert!(
        text.contains("which is not a multiple of 16 bytes"),
        "{text}"
    );
}

#[test]
fn memory_that_is_never_given_back_is_found() {
    let text = told("plain_malloc", "leaky_free");
    assert!(
        text.contains("everything_goes_back")
            && text.contains("15728640 B (15 MiB) reserved in 3 segments"),
        "{text}"
    );
}

#[test]
fn memory_that_is_given_to_the_driver_twice_is_found() {
    let text = told("plain_malloc", "double_free");
    assert!(
        text.contains("is freed at step 4, but was already freed at step 4"),
        "{text}"
    );
}

#[test]
fn a_crash_fails_the_run_with_its_signal_and_the_request_and_the_other_runs_go_on() {
    let text = told("crash_malloc", "plain_free");
    assert!(
        text.contains(
            "SIGSEGV ended its process while `crash_malloc` allocated 6 MiB on stream 0, request 3"
        ),
        "{text}"
    );
    let text = told("plain_malloc", "abort_free");
    assert!(
        text.contains("SIGABRT ended its process while `abort_free` freed"),
        "{text}"
    );
}

#[test]
fn a_function_of_cuda_that_is_not_passed_on_is_named() {
    let text = told("managed_malloc", "plain_free");
    assert!(
        text.contains(
            "`managed_malloc` called cudaMallocManaged, a CUDA function that is not passed on"
        ),
        "{text}"
    );
}

#[test]
fn errors_of_libraries_show_their_place_in_the_scenario() {
    let folder = folder();
    let refused = |arms: &str, place: &str, message: &str| {
        let (code, text) = run(folder.path(), arms);
        assert_eq!(code, Some(2), "{text}");
        assert!(text.contains(place) && text.contains(message), "{text}");
    };
    refused(
        "  - library\n",
        "scenario.yaml:4:5",
        "`library` needs fields",
    );
    refused(
        "  - library: { path: ./alloc.so, alloc: plain_malloc }\n",
        "scenario.yaml:4:5",
        "the field `free` of `library` is missing",
    );
    refused(
        "  - library: { path: ./none.so, alloc: a, free: b }\n",
        "scenario.yaml:4:22",
        "`./none.so` cannot be read: No such file",
    );
    refused(
        "  - library: { path: ./alloc.so, alloc: plain_maloc, free: plain_free }\n",
        "scenario.yaml:4:41",
        "has no function `plain_maloc`",
    );
    refused(
        "  - library: { path: ./alloc.so, allocate: a }\n",
        "scenario.yaml:4:34",
        "a library has no field `allocate`",
    );
    fs::write(folder.path().join("text.so"), "text").expect("it can be written");
    refused(
        "  - library: { path: ./text.so, alloc: a, free: b }\n",
        "scenario.yaml:4:22",
        "is not a shared library",
    );
}

#[test]
fn a_library_of_the_command_line_runs_in_every_scenario() {
    let folder = folder();
    let (code, text) = run(folder.path(), "  - direct\n");
    assert_eq!(code, Some(0), "{text}");
    let with = |arm: &str| {
        harness(
            folder.path(),
            &[
                "run",
                "scenario.yaml",
                "--no-report",
                "--device",
                "sim",
                "--allocator",
                arm,
            ],
        )
    };
    let (code, text) = with("library(path:./alloc.so,alloc:plain_malloc,free:plain_free)");
    assert!(
        code == Some(0)
            && text.contains("library(path:./alloc.so,alloc:plain_malloc,free:plain_free)"),
        "{code:?} {text}"
    );
    let (code, text) = with("library(path:./alloc.so,alloc:plain_maloc,free:plain_free)");
    assert!(
        code == Some(2) && text.contains("has no function `plain_maloc`"),
        "{code:?} {text}"
    );
    let (code, text) = with("library(path:./alloc.so)");
    assert!(
        code == Some(2) && text.contains("a library needs `alloc`"),
        "{code:?} {text}"
    );
}

#[test]
fn an_optional_library_that_was_not_built_is_skipped_and_one_that_has_to_be_there_is_a_mistake() {
    let folder = folder();
    let gone = |optional: &str| {
        run(
            folder.path(),
            &format!(
                "  - library: {{ name: gone, path: ./gone.so, alloc: a, free: b, optional: \
                 {optional} }}\n  - direct\n"
            ),
        )
    };
    let (code, text) = gone("true");
    let words = text.split_whitespace().collect::<Vec<_>>().join(" ");
    assert!(
        code == Some(0)
            && words.contains("skipped scenario gone")
            && words.contains("passed scenario direct"),
        "{text}"
    );
    assert!(
        words.contains("gone.so`")
            && words.contains("there is no such file: it is optional, and was not built"),
        "{text}"
    );
    let (code, text) = gone("false");
    assert!(code == Some(2) && text.contains("gone.so"), "{text}");
    let (code, text) = gone("perhaps");
    assert!(
        code == Some(2) && text.contains("`optional` must be `true` or `false`"),
        "{text}"
    );
    // An existing library must export the functions.
    let (code, text) = run(
        folder.path(),
        &arm("wrong", "plain_maloc", "plain_free", ", optional: true"),
    );
    assert!(
        code == Some(2) && text.contains("has no function `plain_maloc`"),
        "{text}"
    );
}

#[test]
fn the_library_of_the_catalogue_passes_its_scenario() {
    let folder = tempfile::tempdir().expect("there is a folder for temporary files");
    let shipped = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../scenarios/libraries");
    fs::copy(shipped.join("bins.yaml"), folder.path().join("bins.yaml")).expect("it can be copied");
    let run = || {
        harness(
            folder.path(),
            &["run", "bins.yaml", "--no-report", "--device", "sim"],
        )
    };
    let (code, text) = run();
    assert!(
        code == Some(0)
            && text.contains("skipped  bins      bins")
            && text.contains("passed   bins      direct"),
        "{text}"
    );
    let mut compiler = Command::new("cc");
    compiler
        .args([
            "-shared", "-fPIC", "-O2", "-Wall", "-Wextra", "-Werror", "-o",
        ])
        .arg(folder.path().join("bins.so"));
    assert!(
        compiler
            .arg(shipped.join("bins.c"))
            .status()
            .expect("there is a C compiler")
            .success()
    );
    let (code, text) = run();
    assert!(
        code == Some(0) && text.contains("All 3 runs passed."),
        "{text}"
    );
}

const SUITE: &str = "about: Libraries are arms of benchmarks.
needs: { memory: 256MiB }
rounds: { least: 2, most: 2 }
arms:
  - library: { name: cached, path: ./alloc.so, alloc: cached_malloc, free: cached_free,
        empty_cache: cached_empty_cache }
  - library: { name: plain, path: ./alloc.so, alloc: plain_malloc, free: plain_free }
  - library: { name: gone, path: ./gone.so, alloc: plain_malloc, free: plain_free, optional: true }
time:
  - latency: { sizes: [2MiB] }
  - trace: { file: trace.txt }
  - scenario: { file: scenario.yaml }
  - recovery: { sizes: [16MiB] }
  - pipeline: { sizes: [2MiB] }
  - empty_cache: { segments: [4], size: 2MiB }
  - record_stream: { streams: [0, 1] }
  - threads: { counts: [2] }
";

/// Runs the suite with both libraries on a device.
fn bench(folder: &Path, staging: &Staging, device: &str) -> Vec<Entry> {
    fs::write(folder.join("suite.yaml"), SUITE).expect("it can be written");
    fs::write(
        folder.join("trace.txt"),
        "a 1 2097152 0\na 2 1000 0\nf 1\na 3 2097152 0\nf 2\n",
    )
    .expect("it can be written");
    fs::write(
        folder.join("scenario.yaml"),
        format!("about: Steps.\nneeds: {{ memory: 64MiB }}\n{STEPS}"),
    )
    .expect("it can be written");
    let mut command = Command::new(env!("CARGO_BIN_EXE_harness"));
    command
        .args([
            "bench",
            "suite.yaml",
            "--no-report",
            "--format",
            "json",
            "--device",
            device,
        ])
        .current_dir(folder);
    staging.apply(&mut command);
    let output = command.output().expect("it can be started");
    let told = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(0), "{told}");
    let run: BenchRun =
        serde_json::from_slice(&output.stdout).unwrap_or_else(|error| panic!("{error}: {told}"));
    run.suites
        .into_iter()
        .flat_map(|suite| suite.entries)
        .collect()
}

/// The only entry for a case, a configuration and a quantity.
fn entry<'a>(entries: &'a [Entry], case: &str, arm: &str, quantity: Quantity) -> &'a EntryResult {
    let found = entries
        .iter()
        .find(|entry| entry.case() == case && entry.arm == arm && entry.quantity == quantity);
    &found
        .unwrap_or_else(|| panic!("no {case} of {arm} in {quantity:?}: {entries:?}"))
        .outcome
}

fn median(entries: &[Entry], case: &str, arm: &str, quantity: Quantity) -> u64 {
    let outcome = entry(entries, case, arm, quantity);
    outcome
        .measured()
        .unwrap_or_else(|| panic!("{case} of {arm}: {outcome:?}"))
        .summary
        .median
}

const TIMED: [&str; 7] = [
    "hit, 2 MiB",
    "miss, 2 MiB",
    "after_empty_cache, 2 MiB",
    "recovery, 16 MiB",
    "empty_cache, 4 segments",
    "record_stream, 0 other streams",
    "record_stream, 1 other stream",
];

#[test]
fn on_a_simulated_device_libraries_have_the_model_times_of_their_calls_to_it() {
    let folder = folder();
    let entries = bench(
        folder.path(),
        &Staging::without_driver().expect("it can be made"),
        "sim",
    );
    let of = |case, arm| median(&entries, case, arm, Quantity::ModelTime);
    for case in TIMED.into_iter().chain(["pipeline, 2 MiB", "scenario"]) {
        of(case, "cached");
    }
    assert_eq!(
        of("hit, 2 MiB", "cached"),
        0,
        "a cache asks nothing of the device"
    );
    assert!(
        of("hit, 2 MiB", "plain") > 0 && of("miss, 2 MiB", "plain") == of("miss, 2 MiB", "cached")
    );
    assert!(
        median(&entries, "trace", "plain", Quantity::HostTime)
            > median(&entries, "trace", "cached", Quantity::HostTime)
    );
    let reason = entry(&entries, "threads, 2 threads", "plain", Quantity::HostTime).reason();
    assert_eq!(reason, Some("its process calls it from one thread"));
    for case in ["hit, 2 MiB", "scenario"] {
        let reason = entry(&entries, case, "gone", Quantity::ModelTime)
            .reason()
            .unwrap_or_default();
        assert!(
            reason.contains("gone.so`")
                && reason.contains("there is no such file: it is optional, and was not built"),
            "{case}: {reason}"
        );
    }
}

#[test]
fn on_a_gpu_the_time_of_a_library_excludes_the_way_between_the_processes() {
    let folder = folder();
    let staging = Staging::new(&strict()).expect("it can be made");
    let entries = bench(folder.path(), &staging, "cuda:0");
    let of = |case, arm| median(&entries, case, arm, Quantity::HostTime);
    for case in TIMED {
        assert!(of(case, "plain") > 0, "{case}");
    }
    // A cache hit takes some tens of nanoseconds. A message between two processes and its answer
    // take tens of microseconds.
    assert!(
        of("hit, 2 MiB", "cached") < 2_000_000,
        "{} ps",
        of("hit, 2 MiB", "cached")
    );
    for (case, quantity, expected) in [
        (
            "pipeline, 2 MiB",
            Quantity::DeviceTime,
            "wait for the calls between processes",
        ),
        ("scenario", Quantity::HostTime, "its calls cross processes"),
    ] {
        let reason = entry(&entries, case, "cached", quantity)
            .reason()
            .unwrap_or_default();
        assert!(reason.contains(expected), "{case}: {reason}");
    }
    assert!(
        median(
            &entries,
            "scenario: peak reserved",
            "cached",
            Quantity::Memory
        ) > 0
    );
}
