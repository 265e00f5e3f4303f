//! Reads of values that nothing has computed, because kernels are no-ops: counted for the summary,
//! and shown to the hook in Python, which notes their lines.

use std::cell::Cell;

use crate::hook::Hook;
use crate::world::{Machine, machine};

/// Later reads are only counted.
const MOST_NOTED: u64 = 10_000;

static HOOK: Hook = Hook::new();

/// Sets the function that is called for such a read.
#[unsafe(no_mangle)]
extern "C" fn harness_reads_hook(hook: Option<extern "C" fn() -> bool>) {
    HOOK.set(hook);
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

/// Counts a read, unless its values only go into a file. Callers do not hold the state.
pub(crate) fn note(machine: &Machine) {
    let is_noted = machine.counters.uncomputed_reads() < MOST_NOTED;
    if !(is_noted && HOOK.call()) {
        machine.counters.count_uncomputed_read();
    }
}

/// Counts a read of a file with such values.
#[unsafe(no_mangle)]
extern "C" fn harness_reads_note() {
    note(machine());
}
