//! [`Real`]: the real function behind a wrapper, and whether a call was made inside another one.

use std::cell::Cell;
use std::ffi::c_void;
use std::marker::PhantomData;
use std::mem::transmute_copy;
use std::ptr;
use std::sync::atomic::{AtomicPtr, Ordering};

/// The real function behind a wrapper, a function pointer of type `F`.
pub(crate) struct Real<F>(AtomicPtr<c_void>, PhantomData<F>);

impl<F: Copy> Real<F> {
    pub(crate) const fn unknown() -> Self {
        const { assert!(size_of::<F>() == size_of::<*mut c_void>()) };
        Self(AtomicPtr::new(ptr::null_mut()), PhantomData)
    }

    /// Notes the first address that is known. Tells whether the wrapper stands for this one.
    pub(crate) fn is_first(&self, address: *mut c_void) -> bool {
        let noted = self.0.compare_exchange(ptr::null_mut(), address, Ordering::AcqRel, Ordering::Acquire);
        noted.map_or_else(|first| first == address, |_| true)
    }

    /// The function. Where a program reached the wrapper, it was noted.
    ///
    /// # Safety
    /// `F` is the type of the function.
    pub(crate) unsafe fn get(&self) -> F {
        let address = self.0.load(Ordering::Acquire);
        // A wrapper is handed out only for an address that was noted.
        assert!(!address.is_null());
        // SAFETY: the caller promises that the address is of such a function, and both are one pointer wide.
        unsafe { transmute_copy(&address) }
    }
}

thread_local! {
    /// How many real functions the thread is in.
    static DEPTH: Cell<u32> = const { Cell::new(0) };
}

/// Whether this call was made by a real function of CUDA, as that of the driver is by `cudaMalloc`: it is counted already.
pub(crate) fn is_inside() -> bool {
    DEPTH.get() > 0
}

/// Calls a real function. What it calls itself is not counted.
pub(crate) fn inside<T>(call: impl FnOnce() -> T) -> T {
    DEPTH.set(DEPTH.get() + 1);
    let result = call();
    DEPTH.set(DEPTH.get() - 1);
    result
}
