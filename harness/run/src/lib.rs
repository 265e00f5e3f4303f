//! Runs scenarios.
//!
//! * [`rig`]: one device, the programs that allocate on it, and the audit of every operation;
//! * [`run`]: one scenario with one allocator, from start to verdict;
//! * [`session`]: scenarios × allocators × repetitions, told as events while they run;
//! * [`control`]: what a run shares with whoever watches over its time limits.

pub mod control;
mod recovery;
pub mod rig;
pub mod run;
pub mod session;
mod shared_memory;
mod workload;
mod world;
