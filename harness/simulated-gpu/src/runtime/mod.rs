//! The functions of the CUDA runtime (<https://docs.nvidia.com/cuda/cuda-runtime-api/>), by what they are about.

mod device;
mod graphs;
mod launch;
mod memory;
mod pools;
mod streams;

pub(crate) use device::device;
pub(crate) use launch::active_blocks;
pub(crate) use memory::{allocate, copy_on_device, free, free_and_total, write_address};
