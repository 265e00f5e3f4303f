//! Devices and allocators for GPU memory.
//!
//! * [`device`]: what a device supplies, on CUDA ([`device::cuda`]) or simulated and stricter than hardware ([`device::sim`]);
//! * [`allocator`]: a caching allocator that behaves byte for byte like PyTorch's ([`allocator::caching`]), the schools of
//!   TensorFlow ([`allocator::bfc`]) and RMM ([`allocator::rmm_pool`]), and a direct one;
//! * [`stats`]: what allocators count, named as `torch.cuda.memory_stats()` names it;
//! * [`trace`]: allocation traces, to be replayed anywhere;
//! * [`hash`]: names for things in records.
//!
//! Nothing in here knows scenarios, reports or a command line.

pub mod allocator;
pub mod device;
pub mod hash;
pub mod stats;
pub mod trace;
pub mod units;
