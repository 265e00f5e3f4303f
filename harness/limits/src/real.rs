//! [`functions`] declares the wrappers of a library, [`Real`] is the real function of a wrapper, and [`nested`] marks calls between CUDA's libraries.

use std::cell::Cell;
use std::ffi::{c_int, c_void};
use std::marker::PhantomData;
use std::mem::transmute_copy;
use std::ptr;
use std::sync::atomic::{AtomicPtr, Ordering};

use harness_gpu_settings::calls::Call;
use harness_gpu_settings::ffi::{Out, again, written};

use crate::limiter::{Refused, SUCCESS, limiter};

/// The wrapper of a function.
pub(crate) struct Wrapper {
    pub(crate) address: *mut c_void,
    /// True if it calls the real function that was found.
    pub(crate) calls_this: bool,
}

/// The real function of a wrapper: a function pointer of type `F`.
pub(crate) struct Real<F>(AtomicPtr<c_void>, PhantomData<F>);

impl<F: Copy> Real<F> {
    pub(crate) const fn unknown() -> Self {
        const { assert!(size_of::<F>() == size_of::<*mut c_void>()) };
        Self(AtomicPtr::new(ptr::null_mut()), PhantomData)
    }

    /// Stores the first known address. Returns whether it is `address`.
    pub(crate) fn is_first(&self, address: *mut c_void) -> bool {
        let stored = self.0.compare_exchange(ptr::null_mut(), address, Ordering::AcqRel, Ordering::Acquire);
        stored.map_or_else(|first| first == address, |_| true)
    }

    /// The function. Its address is always stored before a program gets the wrapper.
    ///
    /// # Safety
    /// `F` is the type of the function.
    pub(crate) unsafe fn get(&self) -> F {
        let address = self.0.load(Ordering::Acquire);
        assert!(!address.is_null());
        // SAFETY: the caller promises the type, and both are as wide as a pointer.
        unsafe { transmute_copy(&address) }
    }
}

thread_local! {
    /// The number of real functions on the stack of the thread.
    static DEPTH: Cell<u32> = const { Cell::new(0) };
}

/// Returns whether one of CUDA's libraries made this call. For example, `cudaMalloc` calls the driver. The outer call is already counted.
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

/// Declares the wrapped functions of a library with their types. `REAL` has a field for each; `wrapper` finds the wrapper, a function with the same
/// name and type.
macro_rules! functions {
    ($($name:ident: $type:ty),+ $(,)?) => {
        struct Functions {
            $($name: $crate::real::Real<$type>),+
        }

        static REAL: Functions = Functions { $($name: $crate::real::Real::unknown()),+ };

        /// Finds the wrapper of a function by name and stores the real function.
        pub(crate) fn wrapper(name: &[u8], real: *mut std::ffi::c_void) -> Option<$crate::real::Wrapper> {
            $(if name == stringify!($name).as_bytes() {
                let wrapper: $type = $name;
                let address = wrapper as *mut std::ffi::c_void;
                // A simulated GPU looks up its own functions and finds the wrapper.
                let calls_this = real == address || REAL.$name.is_first(real);
                return Some($crate::real::Wrapper { address, calls_this });
            })+
            None
        }
    };
}

/// Calls a real function: `real!(cudaFree(address))`.
macro_rules! real {
    ($name:ident($($argument:expr),*)) => {
        // SAFETY: `functions` gives the function and its wrapper one type, and the arguments come from the program or satisfy the same contract.
        unsafe { (REAL.$name.get())($($argument),*) }
    };
}

pub(crate) use {functions, real};

/// Requests `size` bytes of device memory. `get` calls the real function, which writes the address or handle.
pub(crate) fn allocate(
    call: Call,
    mut place: Out<'_, usize>,
    size: usize,
    mut get: impl FnMut(Out<'_, usize>) -> c_int,
) -> Result<c_int, Refused> {
    // The driver decides about a size of zero.
    if is_nested() || size == 0 || place.is_none() {
        return Ok(get(place));
    }
    limiter().allocate(call, size, || {
        let code = get(again(&mut place));
        // SAFETY: a successful call wrote the place.
        (code, if code == SUCCESS { unsafe { written(&place) }.map_or(0, |address| address as u64) } else { 0 })
    })
}

/// Calls a function that writes free and total memory, and applies the limit to them.
pub(crate) fn limit_info(
    mut free: Out<'_, usize>,
    mut total: Out<'_, usize>,
    get: impl FnOnce(Out<'_, usize>, Out<'_, usize>) -> c_int,
) -> c_int {
    let code = nested(|| get(again(&mut free), again(&mut total)));
    // SAFETY: a successful call wrote both.
    let memory = if code == SUCCESS && !is_nested() { unsafe { written(&free).zip(written(&total)) } } else { None };
    if let (Some((left, all)), Some(free), Some(total)) = (memory, free, total) {
        let (left, all) = limiter().visible_memory(left, all);
        free.write(left);
        total.write(all);
    }
    code
}
