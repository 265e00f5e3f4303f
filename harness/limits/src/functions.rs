//! [`wrapped`]: what a program gets for a function of CUDA, and [`functions`], by which a library declares its wrappers.

use std::ffi::c_void;

use crate::{driver, nvml, runtime};

/// The wrapper of a function.
pub(crate) struct Wrapper {
    pub(crate) address: *mut c_void,
    /// Whether the real function at hand is the one that it calls.
    pub(crate) is_of_this: bool,
}

/// The address that the program gets for the real function of this name: that of its wrapper, if it has one.
pub(crate) fn wrapped(name: &[u8], real: *mut c_void) -> *mut c_void {
    if let Some(wrapper) = runtime::wrapper(name, real) {
        // A process may have several runtimes. Others than the first one are seen by what they ask of the driver, of which there is one.
        return if wrapper.is_of_this { wrapper.address } else { real };
    }
    driver::wrapper(name, real).or_else(|| nvml::wrapper(name, real)).map_or(real, |wrapper| wrapper.address)
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
        pub(crate) fn wrapper(name: &[u8], real: *mut std::ffi::c_void) -> Option<$crate::functions::Wrapper> {
            $(if name == stringify!($name).as_bytes() {
                let wrapper: $type = $name;
                let address = wrapper as *mut std::ffi::c_void;
                // A simulated GPU looks its own functions up as programs do, and so has the wrapper at hand.
                let is_of_this = real == address || REAL.$name.is_first(real);
                return Some($crate::functions::Wrapper { address, is_of_this });
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
