//! Python's audit events: a hook passes those that change something outside of the process to the
//! function of `effects.py`. Others, of which a program has thousands in a second, need no Python.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::sync::OnceLock;

type Object = *mut c_void;

/// Functions of Python, the function for the events, and their names, each on a line.
#[repr(C)]
#[derive(Clone, Copy)]
struct Python {
    add_hook: unsafe extern "C" fn(Hook, *mut c_void) -> c_int,
    call: unsafe extern "C" fn(Object, *const c_char, ...) -> Object,
    retain: unsafe extern "C" fn(Object),
    release: unsafe extern "C" fn(Object),
    interpreter: unsafe extern "C" fn() -> *mut c_void,
    thread: unsafe extern "C" fn() -> *mut c_void,
    stop_tracing: unsafe extern "C" fn(*mut c_void),
    continue_tracing: unsafe extern "C" fn(*mut c_void),
    watch: Object,
    names: *const c_char,
}

type Hook = unsafe extern "C" fn(*const c_char, Object, *mut c_void) -> c_int;

struct Events {
    python: Python,
    /// The interpreter of the function: others share the hook.
    interpreter: *mut c_void,
    names: Vec<Box<[u8]>>,
    /// Their hashes, as bits: most other names have others.
    hashes: u64,
}

fn hash(name: &[u8]) -> u64 {
    let first = name.first().copied().unwrap_or_default();
    1 << ((name.len() + 4 * usize::from(first)) % u64::BITS as usize)
}

// SAFETY: the pointers of `Python` are only passed to Python, whose lock is held then.
unsafe impl Send for Events {}
// SAFETY: as above.
unsafe impl Sync for Events {}

static EVENTS: OnceLock<Events> = OnceLock::new();

/// Adds the hook. Returns whether Python has accepted it.
///
/// # Safety
/// The functions are `PySys_AddAuditHook`, `PyObject_CallFunction`, `Py_IncRef`, `Py_DecRef`,
/// `PyInterpreterState_Get`, `PyThreadState_Get`, `PyThreadState_EnterTracing` and
/// `PyThreadState_LeaveTracing`. The names are a string, and Python's lock is held.
#[unsafe(no_mangle)]
unsafe extern "C" fn harness_python_events_begin(python: &Python) -> bool {
    // SAFETY: as the caller promises.
    let (names, interpreter) = unsafe { (CStr::from_ptr(python.names), (python.interpreter)()) };
    let names: Vec<Box<[u8]>> = names
        .to_bytes()
        .split(|byte| *byte == b'\n')
        .map(Box::from)
        .collect();
    let events = Events {
        python: *python,
        interpreter,
        hashes: names.iter().fold(0, |hashes, name| hashes | hash(name)),
        names,
    };
    if EVENTS.set(events).is_err() {
        return false;
    }
    // SAFETY: the hook stays until the process ends, and so does the function.
    unsafe {
        (python.retain)(python.watch);
        (python.add_hook)(take, std::ptr::null_mut()) == 0
    }
}

/// Takes an event. Returns -1 if the function has raised an exception, which Python then raises.
///
/// # Safety
/// Python calls this with an event and its arguments, and holds its lock.
unsafe extern "C" fn take(name: *const c_char, arguments: Object, _: *mut c_void) -> c_int {
    let Some(events) = EVENTS.get() else {
        return 0;
    };
    // SAFETY: Python passes a string.
    let bytes = unsafe { CStr::from_ptr(name) }.to_bytes();
    if events.hashes & hash(bytes) == 0 || events.names.iter().all(|other| **other != *bytes) {
        return 0;
    }
    let python = &events.python;
    // SAFETY: Python's lock is held, and the function belongs to this interpreter. The program's
    // trace functions do not see it, as they see no hook.
    unsafe {
        if (python.interpreter)() != events.interpreter {
            return 0;
        }
        let thread = (python.thread)();
        (python.stop_tracing)(thread);
        let result = (python.call)(python.watch, c"sO".as_ptr(), name, arguments);
        (python.continue_tracing)(thread);
        if result.is_null() {
            return -1;
        }
        (python.release)(result);
    }
    0
}
