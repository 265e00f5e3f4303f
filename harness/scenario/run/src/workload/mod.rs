//! Workloads: short descriptions that expand to many allocations.

pub(crate) mod exec;
pub(crate) mod infer;
mod memory;
pub(crate) mod pins;
pub(crate) mod replay;
pub(crate) mod storm;
pub(crate) mod train;

#[cfg(test)]
mod tests;
