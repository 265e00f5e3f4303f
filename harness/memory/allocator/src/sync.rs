use std::sync::{Mutex, MutexGuard, PoisonError};

/// Locks a mutex whose value is consistent between statements, so the panic of an earlier holder
/// leaves it usable.
pub fn lock<T: ?Sized>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
