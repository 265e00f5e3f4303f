//! Traces and scenarios that fail, reduced to small ones that fail the same way.
//!
//! * [`trace`]: a trace that runs out of memory;
//! * [`scenario`]: a scenario that fails, for lack of memory or otherwise;
//! * `delta`: what both have in common.
//!
//! Each accepted step was run before. Nothing is random and no clock is read, so the same input always comes down to the same result.

mod delta;
pub mod scenario;
pub mod trace;

use harness_allocator::units::Bytes;

/// How far it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Progress {
    /// Operations of a trace, or steps of a scenario, that are left.
    pub operations: usize,
    /// The device's memory by now.
    pub memory: Bytes,
    /// How often something smaller was run so far.
    pub runs: u64,
}
