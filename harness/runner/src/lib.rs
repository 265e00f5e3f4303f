//! The harness: scenarios that drive memory allocators into exhaustion, the loop that runs and checks them, and reports of what happened.

pub mod bench;
pub mod calibrate;
pub mod date;
pub mod excerpt;
pub mod files;
pub mod invariant;
pub mod packed;
pub mod profile;
pub mod record;
mod recovery;
pub mod replay;
pub mod replay_bench;
pub mod report;
pub mod rig;
pub mod run;
pub mod scenario;
pub mod session;
pub mod shard;
pub mod statistics;
pub mod store;
mod workload;
mod world;
