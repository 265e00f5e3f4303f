//! Workloads: short descriptions turned into many allocations.

pub(crate) mod pins;
pub(crate) mod storm;
pub(crate) mod train;
