//! Allocation traces and recordings of PyTorch.
//!
//! * [`trace`]: the format and its reader;
//! * [`execute`]: the executor of traces, on any allocator;
//! * [`snapshot`]: memory snapshots of PyTorch;
//! * [`program`]: what a program asked its allocator for, recovered from a snapshot;
//! * [`replay`]: a trace on a device, and a recording compared row by row;
//! * [`replay_bench`]: the host time of an allocator over a trace.

pub mod execute;
pub mod program;
pub mod replay;
pub mod replay_bench;
pub mod snapshot;
pub mod trace;
