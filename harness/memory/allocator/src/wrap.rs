//! A macro for wrappers: types that override some methods of a device or an allocator and pass the
//! others on.

/// Writes a trait for wrappers of `$target`. Each method calls the inner object unless the wrapper
/// overrides it. A type that implements the trait is a `$target`. `$read` are the methods with
/// `&self`, `$call` those with `&mut self`.
macro_rules! wrapper {
    (
        $(#[$about:meta])*
        trait $wrapper:ident: $base:path => $target:ident { $($inner:tt)* }
        &self: $(fn $read:ident($($known:ident: $known_type:ty),*) -> $answer:ty;)*
        &mut self: $(fn $call:ident($($argument:ident: $argument_type:ty),*) $(-> $result:ty)?;)*
    ) => {
        $(#[$about])*
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
