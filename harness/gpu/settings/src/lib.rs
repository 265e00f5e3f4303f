//! Data shared by simulated GPUs, limits on real GPUs, and the programs that start them. Nothing
//! here is exported to C.

pub mod arrays;
pub mod attempts;
pub mod audit;
pub mod calls;
pub mod collectives;
pub mod context_overhead;
pub mod counters;
pub mod driver;
pub mod ffi;
pub mod functions;
pub mod gpus;
pub mod interface;
pub mod latency;
pub mod ledger;
pub mod limits;
pub mod mapping;
pub mod nccl_memory;
pub mod process;
pub mod settings;
pub mod shared_memory;
pub mod text;
pub mod torch_statistics;
pub mod workspaces;
