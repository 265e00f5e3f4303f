//! What `guard.py` needs in C. Its functions in Python need frames, and the program may have left
//! none. These need as many as what they stand for, and let ours have more:
//!
//! * a hook for Python's audit events, which passes those that change something outside of the
//!   process to the function of `effects.py`. Others, of which a program has thousands in a second,
//!   need no Python;
//! * functions in place of those of C that ours wrap.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::ptr::null_mut;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicPtr, AtomicUsize, Ordering};

type Object = *mut c_void;

/// Functions of Python.
#[repr(C)]
#[derive(Clone, Copy)]
struct Python {
    add_hook: unsafe extern "C" fn(Hook, *mut c_void) -> c_int,
    call: unsafe extern "C" fn(Object, *const c_char, ...) -> Object,
    call_with: unsafe extern "C" fn(Object, *const Object, isize, Object) -> Object,
    retain: unsafe extern "C" fn(Object),
    release: unsafe extern "C" fn(Object),
    interpreter: unsafe extern "C" fn() -> *mut c_void,
    thread: unsafe extern "C" fn() -> *mut c_void,
    stop_tracing: unsafe extern "C" fn(*mut c_void),
    continue_tracing: unsafe extern "C" fn(*mut c_void),
    recursion_limit: unsafe extern "C" fn() -> c_int,
    set_recursion_limit: unsafe extern "C" fn(c_int),
}

type Hook = unsafe extern "C" fn(*const c_char, Object, *mut c_void) -> c_int;

struct Events {
    python: Python,
    /// The function for the events.
    watch: Object,
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

// SAFETY: the pointers are only passed to Python, whose lock is held then.
unsafe impl Send for Events {}
// SAFETY: as above.
unsafe impl Sync for Events {}

static PYTHON: OnceLock<Python> = OnceLock::new();
static EVENTS: OnceLock<Events> = OnceLock::new();

/// The frames that a function of ours may need. The import of a module takes about 40.
const FRAMES: c_int = 300;

impl Python {
    /// Calls a function of ours. It has frames of its own, also at the program's limit, and the
    /// program's trace functions do not see it.
    ///
    /// # Safety
    /// Python's lock is held.
    unsafe fn call_ours(&self, call: impl FnOnce() -> Object) -> Object {
        // SAFETY: Python's lock is held. Threads change the limit by a difference, so it does not
        // matter in which order they return.
        unsafe {
            let thread = (self.thread)();
            (self.stop_tracing)(thread);
            (self.set_recursion_limit)((self.recursion_limit)().saturating_add(FRAMES));
            let result = call();
            (self.set_recursion_limit)((self.recursion_limit)() - FRAMES);
            (self.continue_tracing)(thread);
            result
        }
    }
}

/// Keeps the functions of Python.
///
/// # Safety
/// They are those of `_FUNCTIONS` in `guard.py`.
#[unsafe(no_mangle)]
unsafe extern "C" fn harness_python_begin(python: &Python) {
    PYTHON.get_or_init(|| *python);
}

/// Adds the hook: `watch` gets the events with these names, each on a line. Returns whether Python
/// has accepted it.
///
/// # Safety
/// The names are a string, `watch` is a function, and Python's lock is held.
#[unsafe(no_mangle)]
unsafe extern "C" fn harness_python_events_begin(watch: Object, names: *const c_char) -> bool {
    let Some(&python) = PYTHON.get() else {
        return false;
    };
    // SAFETY: as the caller promises.
    let (names, interpreter) = unsafe { (CStr::from_ptr(names), (python.interpreter)()) };
    let names: Vec<Box<[u8]>> = names
        .to_bytes()
        .split(|byte| *byte == b'\n')
        .map(Box::from)
        .collect();
    let events = Events {
        python,
        watch,
        interpreter,
        hashes: names.iter().fold(0, |hashes, name| hashes | hash(name)),
        names,
    };
    if EVENTS.set(events).is_err() {
        return false;
    }
    // SAFETY: the hook stays until the process ends, and so does the function.
    unsafe {
        (python.retain)(watch);
        (python.add_hook)(take, null_mut()) == 0
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
    // SAFETY: Python's lock is held, and the function belongs to this interpreter.
    unsafe {
        if (python.interpreter)() != events.interpreter {
            return 0;
        }
        let watch = || (python.call)(events.watch, c"sO".as_ptr(), name, arguments);
        let result = python.call_ours(watch);
        if result.is_null() {
            return -1;
        }
        (python.release)(result);
    }
    0
}

/// A function of C with the convention `METH_FASTCALL | METH_KEYWORDS`.
type Function = unsafe extern "C" fn(Object, *const Object, isize, Object) -> Object;

/// Python takes two functions of one module for the same if their code is, so each has its own.
const FUNCTIONS: [Function; 32] = {
    macro_rules! all {
        ($($number:literal)*) => { [$(function::<$number>),*] };
    }
    all!(0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20 21 22 23 24 25 26 27 28 29 30 31)
};
/// What each of them calls, and their number.
static OURS: [AtomicPtr<c_void>; FUNCTIONS.len()] =
    [const { AtomicPtr::new(null_mut()) }; FUNCTIONS.len()];
static USED: AtomicUsize = AtomicUsize::new(0);

/// Calls ours with the arguments.
///
/// # Safety
/// Python calls this, and holds its lock.
unsafe extern "C" fn function<const NUMBER: usize>(
    _: Object,
    arguments: *const Object,
    number: isize,
    names: Object,
) -> Object {
    let Some(python) = PYTHON.get() else {
        return null_mut();
    };
    let ours = OURS[NUMBER].load(Ordering::Relaxed);
    // SAFETY: as Python promises; `harness_python_function` has kept ours before it returned this.
    unsafe { python.call_ours(|| (python.call_with)(ours, arguments, number, names)) }
}

/// Returns a function that calls ours; `None` if all are used.
///
/// # Safety
/// The argument is a function, and Python's lock is held.
#[unsafe(no_mangle)]
unsafe extern "C" fn harness_python_function(ours: Object) -> Option<Function> {
    let (python, number) = (PYTHON.get()?, USED.fetch_add(1, Ordering::Relaxed));
    let function = FUNCTIONS.get(number)?;
    // SAFETY: Python's lock is held. It stays until the process ends.
    unsafe { (python.retain)(ours) };
    OURS[number].store(ours, Ordering::Relaxed);
    Some(*function)
}
