//! Data shared by simulated GPUs, limits on real GPUs, and the programs that start them. Nothing here is exported to C.
//!
//! * [`settings`], [`gpus`] and [`driver`] describe a simulated machine, [`limits`] the limits on a real GPU; environment variables carry both
//!   ([`text`]); [`workspaces`] models those of cuDNN;
//! * [`calls`] lists the calls with injectable failures and delays ([`latency`]);
//! * [`arrays`] computes the size of CUDA arrays, [`ffi`] has types for parameters of C functions;
//! * [`process`] is the life cycle of a process: start, `fork`, `exec`, exit. It governs the files of the run's folder:
//! * [`counters`] and [`attempts`], which each process writes, and the [`ledger`] of the memory that each process holds.

pub mod arrays;
pub mod attempts;
pub mod calls;
pub mod counters;
pub mod driver;
pub mod ffi;
pub mod gpus;
pub mod latency;
pub mod ledger;
pub mod limits;
pub mod mapping;
pub mod process;
pub mod settings;
pub mod text;
pub mod workspaces;
