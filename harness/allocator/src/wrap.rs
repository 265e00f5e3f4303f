//! Wrappers: one way for a type around a device or an allocator to pass on all calls but those that it changes.

/// Writes a trait for wrappers of `$target`: each method passes the call on to the inner one, unless the wrapper writes it itself. Whatever
/// implements that trait is a `$target`. `$read` are the methods that take `&self`, `$call` those that take `&mut self`.
macro_rules! wrapper {
    (
        $(#[$about:meta])*
        trait $wrapper:ident: $base:path => $target:ident { $($inner:tt)* }
        &self: $(fn $read:ident($($known:ident: $known_type:ty),*) -> $answer:ty;)*
        &mut self: $(fn $call:ident($($argument:ident: $argument_type:ty),*) $(-> $result:ty)?;)*
    ) => {
        $(#[$about])*
        #[allow(missing_docs, reason = "each method is the one of the same name of the wrapped trait")]
        #[allow(clippy::missing_errors_doc, reason = "each method is the one of the same name of the wrapped trait")]
        pub trait $wrapper: $base {
            $($inner)*

            $(fn $read(&self $(, $known: $known_type)*) -> $answer {
                $target::$read(self.inner() $(, $known)*)
            })*

            $(fn $call(&mut self $(, $argument: $argument_type)*) $(-> $result)? {
                $target::$call(self.inner_mut() $(, $argument)*)
            })*
        }

        impl<W: $wrapper> $target for W {
            $(fn $read(&self $(, $known: $known_type)*) -> $answer {
                $wrapper::$read(self $(, $known)*)
            })*

            $(fn $call(&mut self $(, $argument: $argument_type)*) $(-> $result)? {
                $wrapper::$call(self $(, $argument)*)
            })*
        }
    };
}
pub(crate) use wrapper;
