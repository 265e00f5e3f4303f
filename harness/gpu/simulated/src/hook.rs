//! [`Hook`]: a function in Python that is called for an event, for example to note its line.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::{mem, ptr};

/// The function, or null. It returns whether the event does not count. It takes the interpreter's
/// lock, so nothing may be locked during its call.
pub(crate) struct Hook(AtomicUsize);

impl Hook {
    pub(crate) const fn new() -> Self {
        Self(AtomicUsize::new(0))
    }

    pub(crate) fn set(&self, hook: Option<extern "C" fn() -> bool>) {
        let address = hook.map_or(ptr::null(), |hook| hook as *const ());
        self.0.store(address.expose_provenance(), Ordering::Release);
    }

    pub(crate) fn is_set(&self) -> bool {
        self.0.load(Ordering::Acquire) != 0
    }

    pub(crate) fn call(&self) -> bool {
        // SAFETY: zero, or the address of such a function.
        let hook: Option<extern "C" fn() -> bool> =
            unsafe { mem::transmute::<usize, _>(self.0.load(Ordering::Acquire)) };
        hook.is_some_and(|hook| hook())
    }
}
