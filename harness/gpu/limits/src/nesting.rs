//! [`nested`] marks the calls that CUDA's libraries make to each other.

use std::cell::Cell;

thread_local! {
    /// The number of real functions on the stack of the thread.
    static DEPTH: Cell<u32> = const { Cell::new(0) };
}

/// Returns whether one of CUDA's libraries made this call. For example, `cudaMalloc` calls the
/// driver. The outer call is already counted.
pub(crate) fn is_nested() -> bool {
    DEPTH.get() > 0
}

/// Calls a real function. The calls that it makes are not counted.
pub(crate) fn nested<T>(call: impl FnOnce() -> T) -> T {
    DEPTH.set(DEPTH.get() + 1);
    let result = call();
    DEPTH.set(DEPTH.get() - 1);
    result
}
