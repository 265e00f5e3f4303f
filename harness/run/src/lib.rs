//! Runs scenarios.
//!
//! * [`rig`]: one device, one allocator, and the audit of every operation;
//! * [`run`]: one scenario with one allocator, from start to verdict;
//! * [`session`]: scenarios × allocators × repetitions.

mod recovery;
pub mod rig;
pub mod run;
pub mod session;
mod workload;
mod world;
