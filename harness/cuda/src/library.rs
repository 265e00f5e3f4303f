//! Loads the driver's shared libraries when they are first needed, and declares tables of their functions.
//!
//! Nothing of the driver is linked, and no feature of another crate decides how it is found: a program may use this crate beside any bindings
//! to CUDA, of any version.

use std::ffi::c_void;
use std::ptr::NonNull;

use libloading::Library;

/// Why a library is not there to be called.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum LoadError {
    /// The loader finds no file of this name.
    Absent,
    /// The loader finds a file and cannot load it: its reason, as it words it.
    Unloadable(String),
}

/// A call that the library refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Refusal {
    /// The library's function.
    pub(crate) call: &'static str,
    /// Its code, not 0; [`MISSING`] where the library has no such function.
    pub(crate) code: u32,
}

/// Code of a [`Refusal`] for a function that the library does not have. No library answers with it.
pub(crate) const MISSING: u32 = u32::MAX;

/// Loads the library with this file name, as the system's loader finds it. It stays loaded until the process ends: threads of its own may
/// run in it.
pub(crate) fn load(name: &str) -> Result<&'static Library, LoadError> {
    // SAFETY: the initialisers of NVIDIA's libraries have no precondition.
    match unsafe { Library::new(name) } {
        Ok(library) => Ok(Box::leak(Box::new(library))),
        Err(error) => Err(classify(name, &error.source_text())),
    }
}

/// The text of the system's loader behind an error.
trait SourceText {
    fn source_text(&self) -> String;
}

impl SourceText for libloading::Error {
    fn source_text(&self) -> String {
        std::error::Error::source(self).map_or_else(|| self.to_string(), ToString::to_string)
    }
}

/// Tells a missing file from one that is there. glibc begins its text with the file that it could not open: where that is another one, a
/// library which this one needs is missing.
fn classify(name: &str, text: &str) -> LoadError {
    if text.starts_with(name) && text.contains("No such file or directory") {
        LoadError::Absent
    } else {
        LoadError::Unloadable(text.to_owned())
    }
}

/// The address of a function, if the library has it.
pub(crate) fn find(library: &Library, name: &str) -> Option<NonNull<c_void>> {
    // SAFETY: only the symbol's address is taken; the table gives it its type.
    unsafe { library.get::<*mut c_void>(name) }.ok().and_then(|symbol| NonNull::new(*symbol))
}

/// Declares a table of C functions that answer with a code: the look-up, and one method a function that turns its code into a [`Refusal`].
macro_rules! function_table {
    (
        $(#[$table_doc:meta])* $table:ident;
        $( $(#[$doc:meta])* $method:ident = $function:ident($($argument:ident: $type:ty),* $(,)?); )*
    ) => {
        $(#[$table_doc])*
        #[derive(Clone, Debug)]
        pub(crate) struct $table { $( $method: Option<unsafe extern "C" fn($($type),*) -> u32>, )* }

        #[allow(clippy::too_many_arguments, reason = "the library's own argument lists")]
        #[allow(dead_code, reason = "not every table is asked what is missing")]
        impl $table {
            /// Finds what functions there are.
            ///
            /// # Safety
            /// What `find` returns for a name must be the library's function of that name.
            pub(crate) unsafe fn look_up(find: impl Fn(&str) -> Option<std::ptr::NonNull<std::ffi::c_void>>) -> Self {
                Self { $(
                    $method: find(stringify!($function)).map(|address| {
                        // SAFETY: the address is that of a C function with this argument list, as the caller promised; its code is a
                        // 32-bit enum in C, which is returned as a u32 is.
                        unsafe {
                            std::mem::transmute::<std::ptr::NonNull<std::ffi::c_void>, unsafe extern "C" fn($($type),*) -> u32>(address)
                        }
                    }),
                )* }
            }

            /// The functions that were not found.
            pub(crate) fn missing(&self) -> Vec<&'static str> {
                [$( (stringify!($function), self.$method.is_none()) ),*].into_iter().filter(|(_, none)| *none).map(|(name, _)| name).collect()
            }

            $(
                $(#[$doc])*
                ///
                /// # Safety
                /// As the library demands of this function.
                pub(crate) unsafe fn $method(&self, $($argument: $type),*) -> Result<(), $crate::library::Refusal> {
                    let call = stringify!($function);
                    let Some(function) = self.$method else {
                        return Err($crate::library::Refusal { call, code: $crate::library::MISSING });
                    };
                    // SAFETY: passed on to the caller of this method.
                    match unsafe { function($($argument),*) } {
                        0 => Ok(()),
                        code => Err($crate::library::Refusal { call, code }),
                    }
                }
            )*

            /// Name of each function, and the sizes of its arguments in bytes.
            #[cfg(test)]
            pub(crate) fn argument_sizes() -> Vec<(&'static str, Vec<usize>)> {
                vec![$( (stringify!($function), vec![$( size_of::<$type>() ),*]) ),*]
            }
        }
    };
}

pub(crate) use function_table;

/// The argument sizes of functions that other bindings declare, to compare [`function_table`]'s with.
#[cfg(test)]
pub(crate) mod argument_sizes {
    /// The type of a function.
    pub(crate) trait ArgumentSizes {
        /// The sizes of its arguments in bytes.
        fn sizes() -> Vec<usize>;
    }

    macro_rules! argument_sizes_of {
        ($( ($($argument:ident)*) )*) => {$(
            impl<$($argument,)* R> ArgumentSizes for unsafe fn($($argument),*) -> R {
                fn sizes() -> Vec<usize> {
                    vec![$( size_of::<$argument>() ),*]
                }
            }

            impl<$($argument,)* R> ArgumentSizes for unsafe extern "C" fn($($argument),*) -> R {
                fn sizes() -> Vec<usize> {
                    vec![$( size_of::<$argument>() ),*]
                }
            }
        )*};
    }

    argument_sizes_of! { () (A) (A B) (A B C) (A B C D) (A B C D E) (A B C D E F G H I J K) }

    /// Of a function.
    pub(crate) fn of<F: ArgumentSizes>(_: F) -> Vec<usize> {
        F::sizes()
    }

    /// Of a function that a table holds, without a table.
    pub(crate) fn of_field<Table, F: ArgumentSizes, E>(_: fn(&Table) -> &Result<F, E>) -> Vec<usize> {
        F::sizes()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_library_that_is_not_there_is_absent() {
        assert_eq!(load("libharness-has-no-such-library.so.1").map(drop), Err(LoadError::Absent));
    }

    #[test]
    fn a_file_that_is_no_library_is_unloadable_and_the_loader_says_why() {
        let path = std::env::current_exe().expect("this program has a path").with_extension("no-library");
        std::fs::write(&path, "not a library").expect("the folder of the tests can be written");
        let loaded = load(&path.to_string_lossy()).map(drop);
        std::fs::remove_file(&path).expect("it was just written");
        let Err(LoadError::Unloadable(why)) = loaded else { panic!("{loaded:?}") };
        assert!(why.contains("no-library"), "{why}");
    }

    #[test]
    fn a_library_whose_own_need_is_missing_is_unloadable() {
        let text = "libnvidia-ptxjitcompiler.so.1: cannot open shared object file: No such file or directory";
        assert_eq!(classify("libcuda.so.1", text), LoadError::Unloadable(text.to_owned()));
        let text = "libcuda.so.1: cannot open shared object file: Permission denied";
        assert_eq!(classify("libcuda.so.1", text), LoadError::Unloadable(text.to_owned()));
        assert_eq!(classify("libcuda.so.1", "libcuda.so.1: cannot open shared object file: No such file or directory"), LoadError::Absent);
    }
}
