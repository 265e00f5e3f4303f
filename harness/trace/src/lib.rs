//! Allocation traces and memory snapshots of PyTorch.
//!
//! * [`trace`]: the trace format and its reader
//! * [`execute`]: runs traces on any allocator
//! * [`snapshot`]: PyTorch's memory snapshots
//! * [`program`]: the requests of a program, recovered from its snapshot
//! * [`replay`]: replays traces on a device and compares recordings row by row
//! * [`replay_bench`]: measures an allocator's host time over a trace

pub mod execute;
pub mod program;
pub mod replay;
pub mod replay_bench;
pub mod snapshot;
pub mod trace;
