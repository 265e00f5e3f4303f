//! Parts that several tests share; the tests of reports use [`examples`] too.

pub mod examples;
#[cfg(test)]
pub(crate) mod scripts;
