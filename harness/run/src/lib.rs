//! Runs scenarios.
//!
//! * [`rig`]: one device, the programs that allocate on it, and the audit of every operation;
//! * [`run`]: one scenario with one allocator, from start to verdict;
//! * [`session`]: scenarios × allocators × repetitions, told as events while they run;
//! * [`faults`]: what goes wrong in a run, by process;
//! * [`branches`]: a run that goes on in copies of this process, in each of which another call fails;
//! * [`processes`]: processes of a scenario beside the main one;
//! * [`timeline`]: what a traced run did, and when;
//! * [`control`]: what a run shares with whoever watches over its time limits.

mod between;
pub mod branches;
pub mod control;
pub mod faults;
mod leaks;
pub mod processes;
mod recovery;
pub mod rig;
pub mod run;
pub mod session;
mod shared_memory;
mod step_result;
pub mod timeline;
mod workload;
mod world;
