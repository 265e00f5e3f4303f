//! Python's audit events: [`harness_python_events`] passes those that change something outside of
//! the process on to the function of `effects.py`. Others, of which a program has thousands in a
//! second, need no Python.

use std::ffi::{CStr, c_char, c_void};
use std::ptr;
use std::sync::OnceLock;

/// Functions of Python, and the names of the events, each on a line.
#[repr(C)]
#[derive(Clone, Copy)]
struct Python {
    text: unsafe extern "C" fn(*mut c_void) -> *const c_char,
    call: unsafe extern "C" fn(*mut c_void, *const *mut c_void, usize, *mut c_void) -> *mut c_void,
    retain: unsafe extern "C" fn(*mut c_void),
    names: *const c_char,
}

struct Events {
    python: Python,
    names: Vec<Box<[u8]>>,
    /// Their hashes, as bits: most other names have others.
    hashes: u64,
}

fn hash(name: &[u8]) -> u64 {
    let first = name.first().copied().unwrap_or_default();
    1 << ((name.len() + 4 * usize::from(first)) % u64::BITS as usize)
}

// SAFETY: the names of `Python` are only read by `harness_python_events_begin`.
unsafe impl Send for Events {}
// SAFETY: as above.
unsafe impl Sync for Events {}

static EVENTS: OnceLock<Events> = OnceLock::new();

/// Sets Python's functions and the names of the events.
///
/// # Safety
/// They are `PyUnicode_AsUTF8`, `PyObject_Vectorcall` and `Py_IncRef`, and the names are a string.
#[unsafe(no_mangle)]
unsafe extern "C" fn harness_python_events_begin(python: &Python) {
    // SAFETY: as the caller promises.
    let names = unsafe { CStr::from_ptr(python.names) }.to_bytes();
    let names: Vec<Box<[u8]>> = names.split(|byte| *byte == b'\n').map(Box::from).collect();
    let _ = EVENTS.set(Events {
        python: *python,
        hashes: names.iter().fold(0, |hashes, name| hashes | hash(name)),
        names,
    });
}

/// A function for Python with `METH_FASTCALL`. Its object is the function that takes the events.
///
/// # Safety
/// [`harness_python_events_begin`] was called, and Python calls this with an event and its
/// arguments.
#[unsafe(no_mangle)]
unsafe extern "C" fn harness_python_events(
    function: *mut c_void,
    arguments: *const *mut c_void,
    count: usize,
) -> *mut c_void {
    let Some(Events {
        python,
        names,
        hashes,
    }) = EVENTS.get()
    else {
        return ptr::null_mut();
    };
    // SAFETY: the first argument is the name, a string of Python, and Python's lock is held.
    unsafe {
        let event = *arguments;
        let name = (python.text)(event);
        if name.is_null() {
            return ptr::null_mut();
        }
        let name = CStr::from_ptr(name).to_bytes();
        if hashes & hash(name) != 0 && names.iter().any(|other| **other == *name) {
            return (python.call)(function, arguments, count, ptr::null_mut());
        }
        (python.retain)(event);
        event // The result is not used.
    }
}
