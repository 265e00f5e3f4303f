//! [`Hook`]: a function in Python that is called after an event, for example to note its line.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::{mem, ptr};

/// The function, or null. It takes the interpreter's lock, so nothing may be locked during its
/// call.
pub(crate) struct Hook(AtomicUsize);

impl Hook {
    pub(crate) const fn new() -> Self {
        Self(AtomicUsize::new(0))
    }

    pub(crate) fn set(&self, hook: Option<extern "C" fn()>) {
        let address = hook.map_or(ptr::null(), |hook| hook as *const ());
        self.0.store(address.expose_provenance(), Ordering::Release);
    }

    pub(crate) fn call(&self) {
        // SAFETY: zero, or the address of such a function.
        let hook: Option<extern "C" fn()> =
            unsafe { mem::transmute::<usize, _>(self.0.load(Ordering::Acquire)) };
        if let Some(hook) = hook {
            hook();
        }
    }
}
