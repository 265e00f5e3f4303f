//! [`wrap`] defines the wrappers of a library's functions, and [`Real`] is the real function of a
//! wrapper.

use std::ffi::{c_int, c_void};
use std::ptr;
use std::sync::atomic::{AtomicPtr, Ordering};

use harness_gpu_settings::calls::Call;
use harness_gpu_settings::ffi::{Out, again, written};

use crate::limiter::{Refused, SUCCESS, limiter};
use crate::nesting::{is_nested, nested};

pub(crate) struct Wrapper {
    pub(crate) address: *mut c_void,
    /// True if it calls the real function that was found.
    pub(crate) calls_this: bool,
}

pub(crate) struct Real(AtomicPtr<c_void>);

impl Real {
    pub(crate) const fn unknown() -> Self {
        Self(AtomicPtr::new(ptr::null_mut()))
    }

    /// Stores the first known address. Returns whether it is `address`.
    pub(crate) fn is_first(&self, address: *mut c_void) -> bool {
        let stored = self.0.compare_exchange(
            ptr::null_mut(),
            address,
            Ordering::AcqRel,
            Ordering::Acquire,
        );
        stored.map_or_else(|first| first == address, |_| true)
    }

    /// The address, which is always stored before a program gets the wrapper.
    pub(crate) fn get(&self) -> *mut c_void {
        let address = self.0.load(Ordering::Acquire);
        assert!(!address.is_null());
        address
    }
}

/// Calls a real function. Runs `note` if it succeeds and the program called it.
pub(crate) fn noted(call: impl FnOnce() -> c_int, note: impl FnOnce()) -> c_int {
    let code = nested(call);
    if code == SUCCESS && !is_nested() {
        note();
    }
    code
}

/// Defines the wrappers of a library's functions, one per row: `name(argument: Type) = body;`. In
/// the body, `real` calls the real function. Functions with equal wrappers share a row. `wrapper`
/// finds a wrapper.
macro_rules! wrap {
    ($($(#[$doc:meta])* $($name:ident),+($($argument:ident: $type:ty),*) = $body:expr;)+) => {
        struct Functions {
            $($($name: $crate::real::Real,)+)+
        }

        static REAL: Functions = Functions { $($($name: $crate::real::Real::unknown(),)+)+ };

        /// Finds the wrapper of a function by name and stores the real function.
        pub(crate) fn wrapper(
            name: &[u8],
            real: *mut std::ffi::c_void,
        ) -> Option<$crate::real::Wrapper> {
            $($(if name == stringify!($name).as_bytes() {
                let address = $name as *mut std::ffi::c_void;
                // A simulated GPU looks up its own functions and finds the wrapper.
                let calls_this = real == address || REAL.$name.is_first(real);
                return Some($crate::real::Wrapper { address, calls_this });
            })+)+
            None
        }

        $($crate::real::wrappers! { [$(#[$doc])*] [$($name)+] ($($argument: $type),*) $body })+
    };
}

macro_rules! wrappers {
    ($docs:tt [$($name:ident)+] $arguments:tt $body:expr) => {
        $($crate::real::wrappers! { $docs $name $arguments $body })+
    };
    ([$(#[$doc:meta])*] $name:ident ($($argument:ident: $type:ty),*) $body:expr) => {
        $(#[$doc])*
        extern "C" fn $name($($argument: $type),*) -> std::ffi::c_int {
            fn real($($argument: $type),*) -> std::ffi::c_int {
                type Function = unsafe extern "C" fn($($type),*) -> std::ffi::c_int;
                let real = REAL.$name.get();
                // SAFETY: the address is that of this function, and the arguments come from the
                // program or satisfy the same contract.
                unsafe {
                    std::mem::transmute::<*mut std::ffi::c_void, Function>(real)($($argument),*)
                }
            }
            $body
        }
    };
}

pub(crate) use wrap;
pub(crate) use wrappers;

/// Requests `size` bytes of device memory. `get` calls the real function, which writes the address
/// or handle.
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
        (
            code,
            if code == SUCCESS {
                // SAFETY: a successful call wrote the place.
                unsafe { written(&place) }.map_or(0, |address| address as u64)
            } else {
                0
            },
        )
    })
}

/// Calls a function that writes free and total memory, and applies the limit to them.
pub(crate) fn limit_info(
    mut free: Out<'_, usize>,
    mut total: Out<'_, usize>,
    get: impl FnOnce(Out<'_, usize>, Out<'_, usize>) -> c_int,
) -> c_int {
    let code = nested(|| get(again(&mut free), again(&mut total)));
    let memory = if code == SUCCESS && !is_nested() {
        // SAFETY: a successful call wrote both.
        unsafe { written(&free).zip(written(&total)) }
    } else {
        None
    };
    if let (Some((left, all)), Some(free), Some(total)) = (memory, free, total) {
        let (left, all) = limiter().visible_memory(left, all);
        free.write(left);
        total.write(all);
    }
    code
}
