//! Functions of the CUDA runtime (<https://docs.nvidia.com/cuda/cuda-runtime-api/>), by topic.

pub(crate) mod boxes;
mod device;
pub(crate) mod fat_binary;
mod graph_memory;
mod graphs;
pub(crate) mod ipc;
mod launch;
pub(crate) mod memory;
pub(crate) mod pools;
pub(crate) mod streams;

pub(crate) use device::{device, put_attribute};
pub(crate) use memory::{allocate, allocate_managed, count_free, cudaFree, cudaMalloc, free};
