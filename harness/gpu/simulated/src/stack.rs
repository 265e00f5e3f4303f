//! The stack of the calling thread.

use std::cell::Cell;
use std::mem::MaybeUninit;

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
