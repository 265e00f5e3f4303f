//! A macro for plain enums whose variants have names.

/// Declares an enum with `ALL`, `name` and `from_name`.
#[macro_export]
macro_rules! named_enum {
    ($(#[$meta:meta])* $type:ident { $($(#[$doc:meta])* $variant:ident = $name:expr,)* }) => {
        $(#[$meta])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub enum $type { $($(#[$doc])* $variant,)* }

        impl $type {
            /// All of them, in order of declaration.
            pub const ALL: &'static [Self] = &[$(Self::$variant),*];

            /// Its name in scenarios, keys and reports.
            pub const fn name(self) -> &'static str {
                match self { $(Self::$variant => $name),* }
            }

            pub fn from_name(name: &str) -> Option<Self> {
                Self::ALL.iter().copied().find(|named| named.name() == name)
            }
        }

        impl std::fmt::Display for $type {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str(self.name())
            }
        }
    };
}
pub(crate) use named_enum;
