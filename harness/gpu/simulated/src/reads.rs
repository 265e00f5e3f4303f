//! Reads of values that nothing has computed, because kernels are no-ops: counted for the summary,
//! and shown to the hook in Python, which notes their lines.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::{cell::Cell, mem, ptr};

use crate::world::Machine;

/// Later reads are only counted.
const MOST_NOTED: u64 = 10_000;

/// A function of the hook that is called after such a read, or null.
static HOOK: AtomicUsize = AtomicUsize::new(0);

/// Sets the function of the hook. It takes the interpreter's lock, so nothing may be locked during
/// its call.
#[unsafe(no_mangle)]
extern "C" fn harness_reads_hook(hook: Option<extern "C" fn()>) {
    HOOK.store(
        hook.map_or(ptr::null(), |hook| hook as *const ())
            .expose_provenance(),
        Ordering::Release,
    );
}

thread_local! {
    /// The number that the next copy of a number to the host reads.
    static ANNOUNCED: Cell<Option<i64>> = const { Cell::new(None) };
}

/// Sets the number that this thread's next copy of a number to the host reads.
pub(crate) fn announce(number: Option<i64>) {
    ANNOUNCED.set(number);
}

/// Writes the announced number into the result of a copy. Returns whether there is one.
pub(crate) fn announced(into: &mut [u8]) -> bool {
    let number = if matches!(into.len(), 1 | 4 | 8) {
        ANNOUNCED.take()
    } else {
        None
    };
    number
        .map(|number| into.copy_from_slice(&number.to_le_bytes()[..into.len()]))
        .is_some()
}

/// Counts a read. Callers do not hold the state.
pub(crate) fn note(machine: &Machine) {
    let count = machine.counters.count_uncomputed_read();
    // SAFETY: zero, or the address of such a function.
    let hook: Option<extern "C" fn()> =
        unsafe { mem::transmute::<usize, _>(HOOK.load(Ordering::Acquire)) };
    if let Some(hook) = hook.filter(|_| count <= MOST_NOTED) {
        hook();
    }
}
