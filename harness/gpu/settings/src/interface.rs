//! [`INTERFACE`]: the build that a library inside a program and the program that starts it share.

/// The version, and a hash of the sources of this crate.
pub const INTERFACE: &str = concat!(
    env!("CARGO_PKG_VERSION"),
    " (interface ",
    env!("HARNESS_INTERFACE"),
    ")"
);

/// The section of a library's file that contains its [`INTERFACE`].
pub const SECTION: &str = ".harness.interface";

/// Puts [`INTERFACE`] into a library.
#[macro_export]
macro_rules! export_interface {
    () => {
        /// Exported, so the linker keeps it.
        #[unsafe(no_mangle)]
        #[unsafe(link_section = ".harness.interface")]
        pub static HARNESS_INTERFACE: [u8; $crate::interface::INTERFACE.len()] =
            match $crate::interface::INTERFACE.as_bytes().first_chunk() {
                Some(bytes) => *bytes,
                None => unreachable!(),
            };
    };
}
