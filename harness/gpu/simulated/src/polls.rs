//! Queries whether the GPU has finished, which the model of events answers: shown to the hook in
//! Python, which notes their lines. What the program does then depends on the timing of a GPU.

use std::sync::atomic::{AtomicU64, Ordering};

use crate::hook::Hook;

/// Later queries are not shown.
const MOST_NOTED: u64 = 10_000;

static HOOK: Hook = Hook::new();
static NOTED: AtomicU64 = AtomicU64::new(0);

/// Sets the function that is called after such a query of the main thread. Others are threads of
/// libraries that watch work, for example of NCCL.
#[unsafe(no_mangle)]
extern "C" fn harness_polls_hook(hook: Option<extern "C" fn()>) {
    HOOK.set(hook);
}

/// Notes a query, if the model has answered it. Callers do not hold the state.
pub(crate) fn note(is_modelled: bool) {
    // SAFETY: both only return numbers.
    let is_main = || unsafe { libc::gettid() == libc::getpid() };
    if is_modelled && is_main() && NOTED.fetch_add(1, Ordering::Relaxed) < MOST_NOTED {
        HOOK.call();
    }
}
