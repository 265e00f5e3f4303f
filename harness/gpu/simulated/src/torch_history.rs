//! PyTorch's history of its memory, which the hook in Python begins once the program creates a
//! stream: only then can freed memory wait for another stream.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::fmt::Write as _;
use std::sync::LazyLock;
use std::sync::atomic::{AtomicBool, Ordering};
use std::{fs, mem, ptr};

use crate::hook::Hook;
use crate::torch_allocator;
use crate::world::machine;

static HOOK: Hook = Hook::new();

/// Whether the program has created a stream. PyTorch does so before it initializes CUDA, and the
/// hook is set only then.
static HAS_STREAMS: AtomicBool = AtomicBool::new(false);

/// Sets the function that begins the history, and calls it if there are streams.
#[unsafe(no_mangle)]
extern "C" fn harness_history_hook(hook: Option<extern "C" fn() -> bool>) {
    HOOK.set(hook);
    if HAS_STREAMS.load(Ordering::Acquire) {
        HOOK.call();
    }
}

/// Writes the numbers of allocations and frees of each device, and the frees that waited for other
/// streams. Returns whether all are known.
///
/// # Safety
/// The path is a string.
#[unsafe(no_mangle)]
unsafe extern "C" fn harness_deferred_frees(path: *const c_char) -> bool {
    // SAFETY: as the caller promises.
    let path = unsafe { CStr::from_ptr(path) }.to_str();
    let machine = machine();
    let frees = machine.state().streams.deferred().lines();
    let mut lines = String::new();
    for device in 0..machine.visible.len() {
        if let Some([allocations, frees]) = torch_allocator::counts(device) {
            let _ = writeln!(lines, "all {device} {allocations} {frees}");
        }
    }
    path.ok()
        .zip(frees)
        .is_some_and(|(path, frees)| fs::write(path, lines + &frees).is_ok())
}

type HasLock = unsafe extern "C" fn() -> c_int;
type AddCall = unsafe extern "C" fn(extern "C" fn(*mut c_void) -> c_int, *mut c_void) -> c_int;

/// Functions of Python: whether this thread has its lock, and to call a function later.
static PYTHON: LazyLock<Option<(HasLock, AddCall)>> = LazyLock::new(|| {
    // SAFETY: the names are strings, and Python's functions have these types.
    unsafe {
        let find = |name: &CStr| libc::dlsym(libc::RTLD_DEFAULT, name.as_ptr());
        let has_lock = mem::transmute::<*mut c_void, Option<HasLock>>(find(c"PyGILState_Check"));
        let add_call = mem::transmute::<*mut c_void, Option<AddCall>>(find(c"Py_AddPendingCall"));
        has_lock.zip(add_call)
    }
});

extern "C" fn call(_: *mut c_void) -> c_int {
    HOOK.call();
    0
}

/// Begins the history, at once or when Python's main thread runs code. A thread without Python's
/// lock must not wait for it here: it may hold a lock of PyTorch. Callers do not hold the state.
pub(crate) fn begin() {
    HAS_STREAMS.store(true, Ordering::Release);
    if !HOOK.is_set() {
        return;
    }
    if let Some((has_lock, add_call)) = *PYTHON {
        // SAFETY: any thread may call these functions.
        unsafe {
            if has_lock() != 0 {
                HOOK.call();
            } else {
                add_call(call, ptr::null_mut());
            }
        }
    }
}
