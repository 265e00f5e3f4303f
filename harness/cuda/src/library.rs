//! Loads the driver's libraries on first use, and declares tables of their functions.
//!
//! Nothing is linked, so a program may also use other CUDA bindings of any version.

use std::ffi::c_void;
use std::ptr::NonNull;

use libloading::Library;

/// Why a library is unavailable.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum LoadError {
    /// The loader finds no file with this name.
    Absent,
    /// The loader finds a file but cannot load it, for this reason.
    Unloadable(String),
}

/// A failed call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Refusal {
    /// The library's function.
    pub(crate) call: &'static str,
    /// The result code, not 0; [`MISSING`] if the library lacks the function.
    pub(crate) code: u32,
}

/// Code of a [`Refusal`] for a function that the library lacks. No library returns it.
pub(crate) const MISSING: u32 = u32::MAX;

/// Loads the library with this file name from the loader's search path. It stays loaded until the process ends, because its own
/// threads may use it.
pub(crate) fn load(name: &str) -> Result<&'static Library, LoadError> {
    // SAFETY: the initializers of NVIDIA's libraries have no precondition.
    match unsafe { Library::new(name) } {
        Ok(library) => Ok(Box::leak(Box::new(library))),
        Err(error) => Err(classify(name, &error.source_text())),
    }
}

/// The system loader's text of an error.
trait SourceText {
    fn source_text(&self) -> String;
}

impl SourceText for libloading::Error {
    fn source_text(&self) -> String {
        std::error::Error::source(self).map_or_else(|| self.to_string(), ToString::to_string)
    }
}

/// Distinguishes a missing file from one that cannot be loaded. glibc's text begins with the file that it could not open; another
/// name there is a missing dependency.
fn classify(name: &str, text: &str) -> LoadError {
    if text.starts_with(name) && text.contains("No such file or directory") {
        LoadError::Absent
    } else {
        LoadError::Unloadable(text.to_owned())
    }
}

/// Returns the address of a function, if the library has it.
pub(crate) fn find(library: &Library, name: &str) -> Option<NonNull<c_void>> {
    // SAFETY: only the symbol's address is read; the table defines its type.
    unsafe { library.get::<*mut c_void>(name) }.ok().and_then(|symbol| NonNull::new(*symbol))
}

/// Declares a table of C functions that return a code, and a method for each that returns a [`Refusal`] for a nonzero code.
macro_rules! function_table {
    (
        $(#[$table_doc:meta])* $table:ident;
        $( $(#[$doc:meta])* $method:ident = $function:ident($($argument:ident: $type:ty),* $(,)?); )*
    ) => {
        $(#[$table_doc])*
        #[derive(Clone, Debug)]
        pub(crate) struct $table { $( $method: Option<unsafe extern "C" fn($($type),*) -> u32>, )* }

        #[allow(clippy::too_many_arguments, reason = "the library's own argument lists")]
        #[allow(dead_code, reason = "only one table lists its missing functions")]
        impl $table {
            /// Looks up the functions.
            ///
            /// # Safety
            /// `find` must return the library's function of the given name.
            pub(crate) unsafe fn look_up(find: impl Fn(&str) -> Option<std::ptr::NonNull<std::ffi::c_void>>) -> Self {
                Self { $(
                    $method: find(stringify!($function)).map(|address| {
                        // SAFETY: the caller guarantees that this is a C function with this argument list. C returns the 32-bit
                        // enum like a u32.
                        unsafe {
                            std::mem::transmute::<std::ptr::NonNull<std::ffi::c_void>, unsafe extern "C" fn($($type),*) -> u32>(address)
                        }
                    }),
                )* }
            }

            /// Returns the functions that were not found.
            pub(crate) fn missing(&self) -> Vec<&'static str> {
                [$( (stringify!($function), self.$method.is_none()) ),*].into_iter().filter(|(_, none)| *none).map(|(name, _)| name).collect()
            }

            $(
                $(#[$doc])*
                ///
                /// # Safety
                /// As the library requires for this function.
                pub(crate) unsafe fn $method(&self, $($argument: $type),*) -> Result<(), $crate::library::Refusal> {
                    let call = stringify!($function);
                    let Some(function) = self.$method else {
                        return Err($crate::library::Refusal { call, code: $crate::library::MISSING });
                    };
                    // SAFETY: guaranteed by the caller of this method.
                    match unsafe { function($($argument),*) } {
                        0 => Ok(()),
                        code => Err($crate::library::Refusal { call, code }),
                    }
                }
            )*

            /// Returns the name of each function and the sizes of its arguments in bytes.
            #[cfg(test)]
            pub(crate) fn argument_sizes() -> Vec<(&'static str, Vec<usize>)> {
                vec![$( (stringify!($function), vec![$( size_of::<$type>() ),*]) ),*]
            }
        }
    };
}

pub(crate) use function_table;

/// Argument sizes of the functions that other bindings declare, to compare with [`function_table`].
#[cfg(test)]
pub(crate) mod argument_sizes {
    /// The type of a function.
    pub(crate) trait ArgumentSizes {
        /// Returns the sizes of its arguments in bytes.
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

    /// Returns the argument sizes of a function.
    pub(crate) fn of<F: ArgumentSizes>(_: F) -> Vec<usize> {
        F::sizes()
    }

    /// Returns the argument sizes of a table's function, without an instance of the table.
    pub(crate) fn of_field<Table, F: ArgumentSizes, E>(_: fn(&Table) -> &Result<F, E>) -> Vec<usize> {
        F::sizes()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_library_is_absent() {
        assert_eq!(load("libharness-has-no-such-library.so.1").map(drop), Err(LoadError::Absent));
    }

    #[test]
    fn an_invalid_library_is_unloadable_with_the_loaders_reason() {
        let path = std::env::current_exe().expect("the test program has a path").with_extension("no-library");
        std::fs::write(&path, "not a library").expect("the folder of the tests is writable");
        let loaded = load(&path.to_string_lossy()).map(drop);
        std::fs::remove_file(&path).expect("the file exists");
        let Err(LoadError::Unloadable(why)) = loaded else { panic!("{loaded:?}") };
        assert!(why.contains("no-library"), "{why}");
    }

    #[test]
    fn a_library_with_a_missing_dependency_is_unloadable() {
        let text = "libnvidia-ptxjitcompiler.so.1: cannot open shared object file: No such file or directory";
        assert_eq!(classify("libcuda.so.1", text), LoadError::Unloadable(text.to_owned()));
        let text = "libcuda.so.1: cannot open shared object file: Permission denied";
        assert_eq!(classify("libcuda.so.1", text), LoadError::Unloadable(text.to_owned()));
        assert_eq!(classify("libcuda.so.1", "libcuda.so.1: cannot open shared object file: No such file or directory"), LoadError::Absent);
    }
}
