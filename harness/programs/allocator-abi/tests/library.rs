//! Loads the shared library as a program does and calls its functions by name, on the simulated
//! GPU.

use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::path::{Path, PathBuf};
use std::{collections::BTreeSet, env, process::Command, thread};

use harness_gpu_settings::settings::Settings;
use harness_staging::{Staging, strict};
use libloading::{Library, Symbol};

/// Names the test that a child process runs.
const CHILD: &str = "ABI_TEST_CHILD";

type Malloc = unsafe extern "C" fn(isize, c_int, *mut c_void) -> *mut c_void;
type Free = unsafe extern "C" fn(*mut c_void, isize, c_int, *mut c_void);

fn path() -> PathBuf {
    env::current_exe()
        .expect("this test has a path")
        .with_file_name("libharness_allocator_abi.so")
}

/// Runs a test again in a child process with two simulated GPUs. Returns whether this process is
/// that child.
fn is_child(test: &str, variables: &[(&str, &str)]) -> bool {
    if env::var(CHILD).is_ok_and(|name| name == test) {
        return true;
    }
    let staging = Staging::new(&Settings {
        devices: 2,
        list_calls: true,
        ..strict()
    })
    .expect("the simulated GPU is staged");
    let mut command = Command::new(env::current_exe().expect("this program has a path"));
    command
        .args(["--exact", test, "--nocapture"])
        .env(CHILD, test)
        .envs(variables.iter().copied());
    staging.apply(&mut command);
    let output = command.output().expect("this program runs again");
    let text = format!(
        "{}{}",
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    );
    assert!(
        output.status.success() && text.contains("1 passed"),
        "{}\n{text}",
        output.status
    );
    false
}

/// The loaded library, with the functions of one allocator.
struct Loaded {
    object: Library,
    prefix: &'static str,
}

impl Loaded {
    fn new(prefix: &'static str) -> Self {
        Self {
            // SAFETY: the library has no initialisers.
            object: unsafe { Library::new(path()) }.expect("it was built"),
            prefix,
        }
    }

    /// # Safety
    /// `T` is the function's type in the header.
    unsafe fn function<T>(&self, name: &str) -> Symbol<'_, T> {
        // SAFETY: the caller guarantees the type.
        unsafe {
            self.object
                .get(format!("{}_{name}", self.prefix).as_bytes())
        }
        .expect("it is exported")
    }

    fn malloc(&self, size: isize, device: c_int) -> *mut c_void {
        // SAFETY: the type is the header's, and null is the default stream.
        unsafe { self.function::<Malloc>("malloc")(size, device, std::ptr::null_mut()) }
    }

    fn free(&self, address: *mut c_void, device: c_int) {
        // SAFETY: the type is the header's, and null is the default stream.
        unsafe { self.function::<Free>("free")(address, 0, device, std::ptr::null_mut()) };
    }

    fn stats(&self, device: c_int) -> serde_json::Value {
        // SAFETY: the type is the header's.
        let stats = unsafe {
            self.function::<unsafe extern "C" fn(c_int, *mut c_char, usize) -> usize>("stats")
        };
        // SAFETY: the capacity is 0 for null and the length of the buffer otherwise.
        let text = unsafe {
            let length = stats(device, std::ptr::null_mut(), 0);
            let mut text = vec![0_u8; length + 1];
            assert_eq!(stats(device, text.as_mut_ptr().cast(), text.len()), length);
            CString::from_vec_with_nul(text).expect("it ends with a NUL")
        };
        serde_json::from_slice(text.as_bytes()).expect("it is JSON")
    }

    fn last_error(&self) -> String {
        // SAFETY: the type is the header's, and the text lives until the thread's next failure.
        unsafe {
            let last: Symbol<'_, unsafe extern "C" fn() -> *const c_char> = self
                .object
                .get(b"harness_allocator_last_error")
                .expect("it is exported");
            CStr::from_ptr(last()).to_string_lossy().into_owned()
        }
    }
}

#[test]
fn the_header_declares_exactly_the_exported_functions() {
    let header = include_str!("../include/harness_allocator.h");
    let declared = header
        .lines()
        .filter(|line| line.ends_with(");"))
        .filter_map(|line| {
            let name = line.split('(').next()?.rsplit([' ', '*']).next()?;
            name.starts_with("harness_").then(|| name.to_owned())
        });
    let exported = harness_base::shared_object::exports(&path()).expect("it was built");
    let exported: BTreeSet<String> = exported
        .into_iter()
        .filter(|name| name.starts_with("harness_"))
        .collect();
    assert_eq!(declared.collect::<BTreeSet<_>>(), exported);
}

#[test]
fn every_allocator_serves_each_device_and_counts_its_memory() {
    if !is_child(
        "every_allocator_serves_each_device_and_counts_its_memory",
        &[],
    ) {
        return;
    }
    for prefix in ["harness_caching", "harness_bfc", "harness_rmm_pool"] {
        let library = Loaded::new(prefix);
        for device in 0..2 {
            let (first, second) = (
                library.malloc(1 << 20, device),
                library.malloc(3 << 20, device),
            );
            assert!(
                !first.is_null() && !second.is_null() && first != second,
                "{prefix}: {}",
                library.last_error()
            );
            assert_eq!(
                library.stats(device)["requested_bytes.all.current"],
                4 << 20,
                "{prefix}"
            );
            let taken = library.stats(device)["num_device_alloc"].clone();
            library.free(first, device);
            library.free(second, device);
            library.free(std::ptr::null_mut(), device);
            let again = library.malloc(3 << 20, device);
            assert!(!again.is_null(), "{prefix}: {}", library.last_error());
            assert_eq!(
                library.stats(device)["num_device_alloc"],
                taken,
                "{prefix}: the cache serves the request"
            );
            library.free(again, device);
            assert_eq!(
                library.stats(device)["allocated_bytes.all.current"],
                0,
                "{prefix}"
            );
            assert_ne!(
                library.stats(device)["reserved_bytes.all.current"],
                0,
                "{prefix}"
            );
        }
        assert_eq!(library.last_error(), "", "{prefix}");
        // SAFETY: the type is the header's.
        unsafe { library.function::<unsafe extern "C" fn()>("empty_cache")() };
        for device in 0..2 {
            assert_eq!(
                library.stats(device)["reserved_bytes.all.current"],
                0,
                "{prefix}"
            );
        }
    }
}

#[test]
fn a_failed_call_returns_null_and_keeps_the_reason() {
    if !is_child(
        "a_failed_call_returns_null_and_keeps_the_reason",
        &[("HARNESS_BFC_CONF", "memory_limit:1")],
    ) {
        return;
    }
    let library = Loaded::new("harness_caching");
    assert!(library.malloc(0, 0).is_null());
    assert_eq!(library.last_error(), "");
    assert!(library.malloc(1 << 50, 0).is_null());
    assert!(
        library.last_error().starts_with("harness_caching_malloc: "),
        "{}",
        library.last_error()
    );
    assert!(library.malloc(-1, 0).is_null());
    assert!(
        library.last_error().contains("-1 is not a size"),
        "{}",
        library.last_error()
    );
    assert!(library.malloc(1, 7).is_null());
    assert!(
        library.last_error().contains("device 7") || library.last_error().contains("cuda:7"),
        "{}",
        library.last_error()
    );
    library.free(std::ptr::without_provenance_mut(4096), 0);
    assert!(
        library.last_error().contains("0x1000 is freed"),
        "{}",
        library.last_error()
    );
    let library = Loaded::new("harness_bfc");
    assert!(library.malloc(1, 0).is_null());
    assert!(
        library
            .last_error()
            .contains("HARNESS_BFC_CONF: unknown setting `memory_limit:1`"),
        "{}",
        library.last_error()
    );
}

/// The simulated GPU lists every driver call, `cuInit` and `cuCtxSetCurrent` included. Without
/// RMM's pool, whose free records an event.
#[test]
fn a_cache_hit_makes_no_driver_call() {
    if !is_child("a_cache_hit_makes_no_driver_call", &[]) {
        return;
    }
    for prefix in ["harness_caching", "harness_bfc"] {
        let library = Loaded::new(prefix);
        library.free(library.malloc(1 << 20, 0), 0);
        let before = harness_staging::calls()
            .expect("the first allocation calls the driver")
            .len();
        for _ in 0..100 {
            library.free(library.malloc(1 << 20, 0), 0);
        }
        let calls = harness_staging::calls().expect("calls are listed");
        assert_eq!(calls.get(before..), Some(&[][..]), "{prefix}");
    }
}

#[test]
fn a_driver_call_restores_the_context_of_the_thread() {
    if !is_child("a_driver_call_restores_the_context_of_the_thread", &[]) {
        return;
    }
    // SAFETY: the simulated GPU has no initialisers with preconditions.
    let driver = unsafe { Library::new("libcuda.so.1") }.expect("the simulated GPU is staged");
    let current = || {
        let mut context = std::ptr::null_mut::<c_void>();
        // SAFETY: the types are those of the CUDA driver, and `context` has room for the answer.
        unsafe {
            let get: Symbol<'_, unsafe extern "C" fn(*mut *mut c_void) -> c_int> =
                driver.get(b"cuCtxGetCurrent").expect("it is exported");
            assert_eq!(get(&raw mut context), 0);
        }
        context
    };
    let library = Loaded::new("harness_caching");
    let address = library.malloc(1 << 20, 1);
    assert!(!address.is_null(), "{}", library.last_error());
    assert!(current().is_null(), "this thread had no context");
    library.free(address, 1);
    // SAFETY: the type is the header's.
    unsafe { library.function::<unsafe extern "C" fn()>("empty_cache")() };
    assert!(current().is_null(), "this thread had no context");
}

#[test]
fn threads_never_share_a_block() {
    if !is_child("threads_never_share_a_block", &[]) {
        return;
    }
    for prefix in ["harness_caching", "harness_bfc", "harness_rmm_pool"] {
        let library = Loaded::new(prefix);
        let held: Vec<usize> = thread::scope(|scope| {
            let work = |seed: usize| {
                let library = &library;
                move || {
                    let mut held = Vec::new();
                    for turn in 0..200 {
                        let address = library.malloc(((seed + turn) % 7 + 1) as isize * 4096, 0);
                        assert!(!address.is_null(), "{}", library.last_error());
                        if turn % 4 == 0 {
                            held.push(address.addr())
                        } else {
                            library.free(address, 0)
                        }
                    }
                    held
                }
            };
            let threads: Vec<_> = (0..4).map(|seed| scope.spawn(work(seed))).collect();
            threads
                .into_iter()
                .flat_map(|thread| thread.join().expect("no thread fails"))
                .collect()
        });
        assert_eq!(
            held.iter().collect::<BTreeSet<_>>().len(),
            held.len(),
            "{prefix}"
        );
        assert_eq!(
            library.stats(0)["allocation.all.current"],
            held.len(),
            "{prefix}"
        );
    }
}

#[test]
fn a_recorded_allocator_writes_a_snapshot() {
    if !is_child(
        "a_recorded_allocator_writes_a_snapshot",
        &[("HARNESS_ALLOCATOR_RECORD", "1")],
    ) {
        return;
    }
    let library = Loaded::new("harness_caching");
    let address = library.malloc(1 << 20, 0);
    library.free(address, 0);
    let folder = tempfile::tempdir().expect("there is a folder for temporary files");
    let write = |path: &Path| {
        let path = CString::new(path.to_string_lossy().as_bytes()).expect("it has no NUL");
        // SAFETY: the type is the header's, and the path a C string.
        unsafe {
            library.function::<unsafe extern "C" fn(c_int, *const c_char) -> c_int>("snapshot")(
                0,
                path.as_ptr(),
            )
        }
    };
    assert_eq!(
        write(&folder.path().join("memory.pickle")),
        0,
        "{}",
        library.last_error()
    );
    assert!(folder.path().join("memory.pickle").is_file());
    assert_eq!(write(&folder.path().join("none/memory.pickle")), -1);
    assert!(
        library.last_error().contains("cannot write the snapshot"),
        "{}",
        library.last_error()
    );
}
