//! The primitives of this module: the standard library's, or those of [shuttle](https://docs.rs/shuttle) in the library's own tests, where
//! every one of them is a point at which the explored schedule may go over to another thread.

#[cfg(not(test))]
use std::sync::Mutex;
use std::sync::PoisonError;
#[cfg(not(test))]
pub(super) use std::sync::{
    MutexGuard as Guard,
    atomic::{AtomicU64, Ordering},
};

#[cfg(test)]
use shuttle::sync::Mutex;
#[cfg(test)]
pub(super) use shuttle::sync::{
    MutexGuard as Guard,
    atomic::{AtomicU64, Ordering},
};

pub(super) struct Lock<T>(Mutex<T>);

impl<T> Lock<T> {
    pub(super) const fn new(value: T) -> Self {
        Self(Mutex::new(value))
    }

    /// Waits until nobody else holds it. Panics where a holder has panicked: what it left behind cannot be trusted.
    #[inline]
    pub(super) fn lock(&self) -> Guard<'_, T> {
        self.0.lock().expect("a thread panicked inside the allocator, so its accounts may be half done")
    }

    /// Waits until nobody else holds it, whether or not a holder has panicked: for what callers of the library may hold themselves.
    pub(super) fn lock_after_panics(&self) -> Guard<'_, T> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
