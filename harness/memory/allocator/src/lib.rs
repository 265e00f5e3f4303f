//! Allocators and devices for GPU memory.
//!
//! * [`device`]: the interface of a device, and a simulated device that is stricter than hardware
//!   ([`device::sim`]). GPUs are in `harness-cuda`.
//! * [`allocator`]: a caching allocator that behaves byte for byte like PyTorch's
//!   ([`allocator::caching`]), the allocators of TensorFlow ([`allocator::bfc`]), RMM
//!   ([`allocator::rmm_pool`], [`allocator::rmm_arena`], [`allocator::rmm_binning`]), ONNX Runtime
//!   ([`allocator::ort_arena`]), JAX ([`allocator::xla_bfc`]) and CuPy ([`allocator::cupy_pool`]),
//!   the driver's own pool ([`allocator::async_pool`]), and a baseline without a cache
//!   ([`allocator::direct`]).
//! * [`stats`]: the counters, with the names of `torch.cuda.memory_stats()`.
//! * [`hash`]: hashes that are the same on every machine.
//!
//! # A caching allocator for your program
//!
//! ```
//! use harness_allocator::allocator::shared::SharedAllocator;
//! use harness_allocator::allocator::{Request, caching::{CachingAllocator, Config}};
//! use harness_allocator::device::sim::{SimConfig, SimDevice};
//! use harness_allocator::units::Bytes;
//!
//! let device = SimDevice::new(SimConfig::default()); // or `harness_cuda::CudaDevice::open(0)?`
//! let config = Config::parse("expandable_segments:True")?;
//! let allocator = SharedAllocator::new(CachingAllocator::new(config), device);
//! // On the default stream; `.on(stream)` names another one.
//! let allocation = allocator.allocate(Request::new(Bytes::mib(64)))?;
//! let address: u64 = allocation.ptr().0; // for kernels and `cuMemcpy*`
//! // From any thread, also while work of that stream uses the memory.
//! allocator.free(allocation.ptr())?;
//! assert_eq!(allocator.stats().allocated_bytes.all.peak, 64 << 20);
//! # assert_ne!(address, 0);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! `harness/gpu/cuda/examples/caching.rs` is a complete program with several threads.
//!
//! # Which interface
//!
//! | your program has | use | free takes |
//! |---|---|---|
//! | several threads, or only addresses | [`allocator::shared::SharedAllocator`] | the address |
//! | one thread, or its own lock | [`allocator::Allocator`] | the allocation |
//!
//! A `SharedAllocator` owns its device. An `Allocator` borrows the device for each call, and has
//! the fastest hits.
//!
//! # Which allocator
//!
//! [`allocator::AllocatorKind`] lists them. `caching` is the default choice. `expandable` suits
//! sizes that change from step to step, such as varying sequence lengths: its segments grow and
//! shrink instead of fragmenting. It needs a device that can map memory. `async_pool` leaves
//! caching to the driver and shares one pool with other users of `cudaMallocAsync` in the process.
//! `bfc`, `rmm_pool`, `rmm_arena`, `rmm_binning`, `ort_arena`, `xla_bfc` and `cupy_pool` are for
//! comparison. `direct` calls the driver for each request, so a memory checker sees every buffer.
//!
//! This crate does not depend on scenarios, reports or a command line.

#![forbid(unsafe_code)]

pub mod allocator;
pub mod device;
pub mod hash;
mod named;
pub mod stats;
pub mod sync;
pub mod units;
mod wrap;
