//! What `guard.py` needs in C. Its functions in Python need frames, and the program may have left
//! none. These need as many as what they stand for:
//!
//! * a hook for Python's audit events, which passes those that change something outside of the
//!   process to the function of `effects.py`. Others, of which a program has thousands in a second,
//!   need no Python;
//! * functions in place of those of C that ours watch. Each calls ours, and then the original as
//!   the program would.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::ptr::{null, null_mut};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicPtr, AtomicUsize, Ordering};

type Object = *mut c_void;

/// Functions and objects of Python.
#[repr(C)]
#[derive(Clone, Copy)]
struct Python {
    add_hook: unsafe extern "C" fn(Hook, *mut c_void) -> c_int,
    call: unsafe extern "C" fn(Object, *const c_char, ...) -> Object,
    call_with: unsafe extern "C" fn(Object, *const Object, isize, Object) -> Object,
    has_raised: unsafe extern "C" fn(Object) -> c_int,
    forget_exception: unsafe extern "C" fn(),
    retain: unsafe extern "C" fn(Object),
    release: unsafe extern "C" fn(Object),
    interpreter: unsafe extern "C" fn() -> *mut c_void,
    thread: unsafe extern "C" fn() -> *mut c_void,
    stop_tracing: unsafe extern "C" fn(*mut c_void),
    continue_tracing: unsafe extern "C" fn(*mut c_void),
    recursion_limit: unsafe extern "C" fn() -> c_int,
    set_recursion_limit: unsafe extern "C" fn(c_int),
    recursion_error: *const Object,
    none: Object,
}

// SAFETY: the objects live as long as Python, whose lock is held when they are used.
unsafe impl Send for Python {}
// SAFETY: as above.
unsafe impl Sync for Python {}

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

/// A call of a function of ours.
struct Called {
    /// A null pointer if the frames were too few.
    result: Object,
    /// Whether the program has left no frame.
    lacked_frames: bool,
}

impl Python {
    /// Makes a call with more frames below the limit, which is that of all threads.
    ///
    /// # Safety
    /// Python's lock is held.
    unsafe fn with_more_frames(&self, number: c_int, call: impl FnOnce() -> Object) -> Object {
        // SAFETY: as the caller promises.
        unsafe {
            let limit = (self.recursion_limit)();
            let more = limit.saturating_add(number);
            (self.set_recursion_limit)(more);
            let result = call();
            // The program may have set another.
            if (self.recursion_limit)() == more {
                (self.set_recursion_limit)(limit);
            }
            result
        }
    }

    /// Calls a function of ours, which the program's trace functions do not see. If the program has
    /// left too few frames, calls it again with more. Returns `None` if the program's signal
    /// handler has raised an exception.
    ///
    /// # Safety
    /// Python's lock is held, and no exception is raised.
    unsafe fn call_ours(&self, call: impl Fn() -> Object) -> Option<Called> {
        // SAFETY: as the caller promises; each exception is forgotten before the next call.
        unsafe {
            let lacks_frames = |result: Object| {
                let lacks = result.is_null() && (self.has_raised)(*self.recursion_error) != 0;
                if lacks {
                    (self.forget_exception)();
                }
                lacks
            };
            let thread = (self.thread)();
            (self.stop_tracing)(thread);
            let mut result = call();
            let lacked_frames = lacks_frames(result);
            let mut is_interrupted = result.is_null();
            if lacked_frames {
                result = self.with_more_frames(FRAMES, &call);
                is_interrupted = result.is_null() && !lacks_frames(result);
            }
            (self.continue_tracing)(thread);
            (!is_interrupted).then_some(Called {
                result,
                lacked_frames,
            })
        }
    }

    /// Calls a function of ours as `call_ours`, and drops its result. Returns whether no exception
    /// is raised.
    ///
    /// # Safety
    /// As `call_ours`.
    unsafe fn run_ours(&self, call: impl Fn() -> Object) -> bool {
        // SAFETY: as the caller promises.
        unsafe {
            let called = self.call_ours(call);
            if let Some(called) = called.as_ref().filter(|called| !called.result.is_null()) {
                (self.release)(called.result);
            }
            called.is_some()
        }
    }
}

/// Keeps what `guard.py` has found.
///
/// # Safety
/// They are those of `_NEEDED` in `guard.py`.
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
        if python.run_ours(watch) { 0 } else { -1 }
    }
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
/// What each of them calls first, the original, and their number.
static OURS: [AtomicPtr<c_void>; FUNCTIONS.len()] =
    [const { AtomicPtr::new(null_mut()) }; FUNCTIONS.len()];
static ORIGINALS: [AtomicPtr<c_void>; FUNCTIONS.len()] =
    [const { AtomicPtr::new(null_mut()) }; FUNCTIONS.len()];
static USED: AtomicUsize = AtomicUsize::new(0);

/// Calls ours with the arguments, and then the original. If that succeeds, calls the function that
/// ours has returned.
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
    let [ours, original] =
        [&OURS, &ORIGINALS].map(|functions| functions[NUMBER].load(Ordering::Relaxed));
    // SAFETY: as Python promises; `harness_python_function` has kept both before it returned this.
    unsafe {
        let call = |function| (python.call_with)(function, arguments, number, names);
        let Some(called) = python.call_ours(|| call(ours)) else {
            return null_mut();
        };
        let after = called.result;
        let result = if called.lacked_frames {
            // Python 3.11 counts calls of C, too.
            python.with_more_frames(1, || call(original))
        } else {
            call(original)
        };
        if after.is_null() {
            return result;
        }
        let has_ended = result.is_null()
            || after == python.none
            || python.run_ours(|| (python.call)(after, null()));
        (python.release)(after);
        if has_ended {
            return result;
        }
        (python.release)(result);
        null_mut()
    }
}

/// Returns a function that calls ours and then the original; `None` if all are used.
///
/// # Safety
/// The arguments are functions, and Python's lock is held.
#[unsafe(no_mangle)]
unsafe extern "C" fn harness_python_function(ours: Object, original: Object) -> Option<Function> {
    let (python, number) = (PYTHON.get()?, USED.fetch_add(1, Ordering::Relaxed));
    let function = FUNCTIONS.get(number)?;
    for (functions, kept) in [(&OURS, ours), (&ORIGINALS, original)] {
        // SAFETY: Python's lock is held. Both stay until the process ends.
        unsafe { (python.retain)(kept) };
        functions[number].store(kept, Ordering::Relaxed);
    }
    Some(*function)
}
