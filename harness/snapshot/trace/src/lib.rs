//! Allocation traces and memory snapshots of PyTorch.

pub mod execute;
pub mod program;
pub mod replay;
pub mod replay_bench;
pub mod snapshot;
pub mod trace;
