//! Runs scenarios.
//!
//! * [`rig`]: one device, the programs that allocate on it, and the audit of every operation;
//! * [`run`]: one scenario with one allocator, from start to verdict;
//! * [`session`]: scenarios × allocators × repetitions, reported as events while they run;
//! * [`faults`]: the injected faults of a run, by process;
//! * [`branches`]: a run that forks itself, so that a different call fails in each copy;
//! * [`processes`]: the processes of a scenario other than the main one;
//! * [`timeline`]: the spans and memory curve of a traced run;
//! * [`control`]: state that a run shares with the thread that enforces its time limits.

mod between;
pub mod branches;
mod context;
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
