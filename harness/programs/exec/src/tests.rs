//! Parts that several tests share.

pub(crate) mod fake;
pub(crate) mod fixture;
