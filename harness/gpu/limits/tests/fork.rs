//! Limits in forked children. Each test runs its program in a child process, on a simulated GPU in
//! place of a driver.
#![allow(clippy::unwrap_used, reason = "a test that cannot continue fails")]

use std::ffi::{CStr, CString, c_int, c_void};
use std::sync::atomic::{AtomicBool, Ordering};
use std::{env, path::PathBuf, process::Command, thread};

use harness_allocator::units::Bytes;
use harness_gpu_settings::limits::{LIMITS, LIMITS_RUN, Limits};
use harness_gpu_settings::{counters::ProcessCounters, text::to_variable};

/// Names the program that a child process runs.
const PROGRAM: &str = "LIMITS_TEST_PROGRAM";

/// A shared library of this project.
fn library(name: &str) -> PathBuf {
    env::current_exe().unwrap().with_file_name(name)
}

/// Runs a test in a child process with a limit of 8 GiB, and returns the counters of its processes.
fn run(test: &str) -> Vec<ProcessCounters> {
    let folder = tempfile::TempDir::new().unwrap();
    let limits = Limits {
        device: Bytes::gib(80),
        memory: Some(Bytes::gib(8)),
        faults: Vec::new(),
        latencies: Vec::new(),
    };
    let mut command = Command::new(env::current_exe().unwrap());
    command
        .args([test, "--exact", "--nocapture", "--test-threads", "1"])
        .env(PROGRAM, test);
    command
        .env("LD_AUDIT", library("libharness_limits.so"))
        .env(LIMITS, to_variable(&limits))
        .env(LIMITS_RUN, folder.path());
    let output = command.output().unwrap();
    let text = [&output.stdout, &output.stderr]
        .map(|bytes| String::from_utf8_lossy(bytes))
        .concat();
    assert!(output.status.success(), "{text}");
    ProcessCounters::read_folder(folder.path()).unwrap()
}

/// Allocates `mib` MiB with a function, and returns its code.
fn code_of(malloc: Malloc, mib: usize) -> c_int {
    let mut address = 0;
    malloc(&raw mut address, mib << 20)
}

fn is_program(test: &str) -> bool {
    env::var(PROGRAM).is_ok_and(|program| program == test)
}

/// A function of the simulated GPU, or its wrapper.
fn function(name: &CStr) -> *mut c_void {
    let path = CString::new(
        library("libharness_simulated_gpu.so")
            .into_os_string()
            .into_encoded_bytes(),
    )
    .unwrap();
    // SAFETY: the library has no initializers.
    let found = unsafe { libc::dlsym(libc::dlopen(path.as_ptr(), libc::RTLD_NOW), name.as_ptr()) };
    assert!(!found.is_null());
    found
}

type Malloc = extern "C" fn(*mut usize, usize) -> c_int;
type Free = extern "C" fn(usize) -> c_int;
type Properties = extern "C" fn(*mut u8, c_int) -> c_int;

fn functions() -> (Malloc, Free, Properties) {
    // SAFETY: the functions have these types.
    unsafe {
        (
            std::mem::transmute::<*mut c_void, Malloc>(function(c"cudaMalloc")),
            std::mem::transmute::<*mut c_void, Free>(function(c"cudaFree")),
            std::mem::transmute::<*mut c_void, Properties>(function(c"cudaGetDeviceProperties")),
        )
    }
}

/// Forks a child that runs `program` and ends with its code. A child that hangs is killed.
fn fork(program: impl FnOnce() -> c_int) -> libc::pid_t {
    // SAFETY: the child only runs the program and ends.
    unsafe {
        let child = libc::fork();
        if child == 0 {
            libc::alarm(30);
            libc::_exit(program());
        }
        child
    }
}

fn wait(child: libc::pid_t) -> c_int {
    let mut status = -1;
    // SAFETY: the status is valid.
    assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
    status
}

#[test]
fn children_that_are_forked_before_the_context_have_their_own_counters() {
    const TEST: &str = "children_that_are_forked_before_the_context_have_their_own_counters";
    if !is_program(TEST) {
        let mut peaks: Vec<_> = run(TEST)
            .iter()
            .map(|process| (process.devices[0].peak, process.devices[0].mallocs))
            .collect();
        peaks.retain(|(_, mallocs)| *mallocs > 0);
        peaks.sort_unstable();
        assert_eq!(peaks, [64, 128, 256].map(|size| (Bytes::mib(size), 1)));
        return;
    }
    let (malloc, _, properties) = functions();
    let mut bytes = [0_u64; 256];
    assert_eq!(properties(bytes.as_mut_ptr().cast(), 0), 0);
    let children = [64, 128, 256].map(|size| fork(|| code_of(malloc, size)));
    assert_eq!(children.map(wait), [0; 3]);
}

#[test]
fn a_fork_waits_for_the_calls_of_other_threads() {
    const TEST: &str = "a_fork_waits_for_the_calls_of_other_threads";
    if !is_program(TEST) {
        run(TEST);
        return;
    }
    let (malloc, free, _) = functions();
    assert_eq!(
        code_of(malloc, 2),
        0,
        "the first allocation creates the context"
    );
    let stop = AtomicBool::new(false);
    thread::scope(|scope| {
        for _ in 0..3 {
            scope.spawn(|| {
                while !stop.load(Ordering::Relaxed) {
                    let mut address = 0;
                    assert_eq!(malloc(&raw mut address, 2 << 20), 0);
                    assert_eq!(free(address), 0);
                }
            });
        }
        // A child has the context of its parent, so the driver refuses its call.
        let codes: Vec<c_int> = (0..200)
            .map(|_| wait(fork(|| code_of(malloc, 2))))
            .collect();
        stop.store(true, Ordering::Relaxed);
        assert!(codes.iter().all(|code| *code == 3 << 8), "{codes:?}");
    });
}
