//! [`functions`], by which a library declares its wrappers; [`Real`], the real function behind each; and whether a call was made inside another one.

use std::cell::Cell;
use std::ffi::c_void;
use std::marker::PhantomData;
use std::mem::transmute_copy;
use std::ptr;
use std::sync::atomic::{AtomicPtr, Ordering};

/// The wrapper of a function.
pub(crate) struct Wrapper {
    pub(crate) address: *mut c_void,
    /// Whether the real function at hand is the one that it calls.
    pub(crate) is_of_this: bool,
}

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

/// Declares the wrapped functions of a library with their types: `REAL` has a field for each, and `wrapper` finds the wrapper, a function of the
/// same name and type.
macro_rules! functions {
    ($($name:ident: $type:ty),+ $(,)?) => {
        struct Functions {
            $($name: $crate::real::Real<$type>),+
        }

        static REAL: Functions = Functions { $($name: $crate::real::Real::unknown()),+ };

        /// The wrapper of a function by its name; `None` for others. Notes the real function.
        pub(crate) fn wrapper(name: &[u8], real: *mut std::ffi::c_void) -> Option<$crate::real::Wrapper> {
            $(if name == stringify!($name).as_bytes() {
                let wrapper: $type = $name;
                let address = wrapper as *mut std::ffi::c_void;
                // A simulated GPU looks its own functions up as programs do, and so has the wrapper at hand.
                let is_of_this = real == address || REAL.$name.is_first(real);
                return Some($crate::real::Wrapper { address, is_of_this });
            })+
            None
        }
    };
}

/// Calls a real function: `real!(cudaFree(address))`.
macro_rules! real {
    ($name:ident($($argument:expr),*)) => {
        // SAFETY: `functions` gives the function and its wrapper one type, and the arguments are the program's own, or fulfil what it promised of them.
        unsafe { (REAL.$name.get())($($argument),*) }
    };
}

pub(crate) use {functions, real};
