//! The stack of the calling thread, and those of Python.

use std::cell::Cell;
use std::fs::{self, File};
use std::mem::MaybeUninit;
use std::{path::Path, ptr};

use harness_gpu_settings::collectives::{STACK_SIGNAL, STACKS};

thread_local! {
    /// The lowest address of the thread's stack and the one after it.
    static BOUNDS: Cell<Option<(usize, usize)>> = const { Cell::new(None) };
}

/// The number of words from an address to the end of the stack; 0 outside of it.
pub(crate) fn words_on_stack(address: usize) -> usize {
    let (lowest, end) = BOUNDS.get().unwrap_or_else(|| {
        let bounds = bounds().unwrap_or_default();
        BOUNDS.set(Some(bounds));
        bounds
    });
    if (lowest..end).contains(&address) {
        (end - address) / 8
    } else {
        0
    }
}

/// Copies the Python stacks of this process, which the handler of the hook writes into the folder
/// of the run, to a file.
pub(crate) fn write_stacks(run: &Path, to: &Path) {
    let signal = libc::SIGRTMIN() + STACK_SIGNAL;
    let mut action = MaybeUninit::<libc::sigaction>::zeroed();
    // SAFETY: the output is valid, and zeros are a valid action.
    let handler = unsafe {
        libc::sigaction(signal, ptr::null(), action.as_mut_ptr());
        action.assume_init().sa_sigaction
    };
    let stacks = run.join(format!("{STACKS}{}", std::process::id()));
    if [libc::SIG_DFL, libc::SIG_IGN].contains(&handler)
        || File::options()
            .write(true)
            .truncate(true)
            .open(&stacks)
            .is_err()
    {
        return;
    }
    // SAFETY: the signal has a handler, which runs in this thread before the call returns.
    unsafe { libc::raise(signal) };
    let _ = fs::copy(stacks, to);
}

fn bounds() -> Option<(usize, usize)> {
    let mut attributes = MaybeUninit::uninit();
    let (mut lowest, mut size) = (std::ptr::null_mut(), 0);
    // SAFETY: writes the attributes of this thread, reads them, and destroys them.
    unsafe {
        if libc::pthread_getattr_np(libc::pthread_self(), attributes.as_mut_ptr()) != 0 {
            return None;
        }
        let result =
            libc::pthread_attr_getstack(attributes.as_ptr(), &raw mut lowest, &raw mut size);
        libc::pthread_attr_destroy(attributes.as_mut_ptr());
        (result == 0).then(|| (lowest.addr(), lowest.addr() + size))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_local_variable_is_on_the_stack_and_a_box_is_not() {
        let (local, boxed) = (7_u64, Box::new(7_u64));
        assert!(words_on_stack((&raw const local).addr()) > 1);
        assert_eq!(words_on_stack((&raw const *boxed).addr()), 0);
    }
}
