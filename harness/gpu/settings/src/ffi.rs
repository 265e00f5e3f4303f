//! Types of parameters in CUDA's C functions: [`Out`] for outputs, [`Text`] for strings; and the
//! table of exported functions, [`export`](crate::export).

use std::ffi::{CStr, c_char};
use std::{marker::PhantomData, mem::MaybeUninit};

/// A place that a function writes to; `None` is a null pointer. A C caller passes a valid aligned
/// pointer or null.
pub type Out<'a, T> = Option<&'a mut MaybeUninit<T>>;

/// Writes a value and returns whether there is a place for it.
pub fn write<T>(place: Out<'_, T>, value: T) -> bool {
    place.map(|place| place.write(value)).is_some()
}

/// The same place, for a call that only borrows it.
pub fn again<'a, T>(place: &'a mut Out<'_, T>) -> Out<'a, T> {
    place.as_mut().map(|place| &mut **place)
}

/// The value that a function wrote.
///
/// # Safety
/// A function has written the place, if it is not null.
pub unsafe fn written<T: Copy>(place: &Out<'_, T>) -> Option<T> {
    // SAFETY: as the caller promises.
    place.as_ref().map(|place| unsafe { place.assume_init() })
}

/// A C string that a program passes, or null.
#[derive(Clone, Copy, Debug)]
#[repr(transparent)]
pub struct Text<'a>(*const c_char, PhantomData<&'a CStr>);

impl<'a> Text<'a> {
    pub fn get(self) -> Option<&'a CStr> {
        // SAFETY: a C caller passes null or a string that outlives the call.
        (!self.0.is_null()).then(|| unsafe { CStr::from_ptr(self.0) })
    }

    pub fn address(self) -> usize {
        self.0.expose_provenance()
    }
}

/// Exports C functions, one per row: `name(argument: Type) = body;`. They return an error code
/// unless the row names a type. Equal functions share a row. In the body, `THIS` is the name of the
/// function.
#[macro_export]
macro_rules! export {
    (@ $docs:tt [$($name:ident)+] $arguments:tt $result:tt $body:expr) => {
        $($crate::export! { @ $docs $name $arguments $result $body })+
    };
    (@ $docs:tt $name:ident $arguments:tt [] $body:expr) => {
        $crate::export! { @ $docs $name $arguments [std::ffi::c_int] $body }
    };
    (@ [$(#[$doc:meta])*] $name:ident ($($argument:tt: $type:ty),*) [$result:ty] $body:expr) => {
        $(#[$doc])*
        #[unsafe(no_mangle)]
        pub(crate) extern "C" fn $name($($argument: $type),*) -> $result {
            #[allow(dead_code, reason = "some functions do not need their name")]
            const THIS: &str = stringify!($name);
            $body
        }
    };
    ($(
        $(#[$doc:meta])*
        $($name:ident),+($($argument:tt: $type:ty),*) $(-> $result:ty)? = $body:expr;
    )+) => {
        $($crate::export! {
            @ [$(#[$doc])*] [$($name)+] ($($argument: $type),*) [$($result)?] $body
        })+
    };
}
