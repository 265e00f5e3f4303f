//! Reduces failing traces and scenarios to small ones that fail the same way.
//!
//! Every accepted step is verified by a run. Reduction uses no randomness and no clock, so the same
//! input always gives the same result.

mod delta;
pub mod scenario;
pub mod trace;

use std::ops::ControlFlow;

use harness_allocator::units::Bytes;

pub type Watch<'a> = dyn FnMut(&ReductionProgress) -> ControlFlow<()> + 'a;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReductionProgress {
    /// The remaining operations of a trace, or steps of a scenario.
    pub operations: usize,
    pub memory: Bytes,
    pub runs: u64,
}
