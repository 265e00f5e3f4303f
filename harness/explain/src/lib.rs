//! Why a request ran out of memory, and what would have helped.
//!
//! * [`shrink`]: a trace that runs out of memory, reduced to a small one that fails the same way.

pub mod shrink;
