//! Queries whether the GPU has finished, which the model of events answers: shown to the hook in
//! Python, which notes their lines. What the program does then depends on the timing of a GPU.

use std::ffi::c_void;
use std::mem;
use std::sync::LazyLock;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::hook::Hook;

/// Later queries are not shown.
const MOST_NOTED: u64 = 10_000;

static HOOK: Hook = Hook::new();
static NOTED: AtomicU64 = AtomicU64::new(0);

/// Sets the function that is called after such a query of a thread of Python. Others are threads of
/// libraries that watch work, for example of NCCL.
#[unsafe(no_mangle)]
extern "C" fn harness_polls_hook(hook: Option<extern "C" fn() -> bool>) {
    HOOK.set(hook);
}

type State = unsafe extern "C" fn() -> *const c_void;

/// Whether Python runs in this thread.
fn is_of_python() -> bool {
    static STATE: LazyLock<Option<State>> = LazyLock::new(|| {
        // SAFETY: the name is a string, and Python's function has this type.
        unsafe {
            let name = c"PyGILState_GetThisThreadState".as_ptr();
            mem::transmute(libc::dlsym(libc::RTLD_DEFAULT, name))
        }
    });
    // SAFETY: any thread may call it, also without Python's lock.
    STATE.is_some_and(|state| !unsafe { state() }.is_null())
}

/// Notes a query, if the model has answered it. Returns whether the program sees the answer, as far
/// as that is known. Callers do not hold the state.
pub(crate) fn note(is_modelled: bool) -> bool {
    is_modelled
        && is_of_python()
        && NOTED.fetch_add(1, Ordering::Relaxed) < MOST_NOTED
        && HOOK.call()
}
