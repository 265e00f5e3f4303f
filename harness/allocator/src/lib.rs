//! Devices and allocators for GPU memory.
//!
//! * [`device`]: what a device supplies, and a simulated device that is stricter than hardware ([`device::sim`]). GPUs are in `harness-cuda`;
//! * [`allocator`]: a caching allocator that behaves byte for byte like PyTorch's ([`allocator::caching`]), also for many host threads
//!   ([`allocator::shared`]), the allocators of TensorFlow ([`allocator::bfc`]) and RMM ([`allocator::rmm_pool`]), the driver's own pool
//!   ([`allocator::async_pool`]), and one that calls the driver each time ([`allocator::direct`]). [`allocator::resource`] is one interface
//!   for all of them, and [`allocator::adaptors`] wrap it: limits, logging, names, a callback on out of memory;
//! * [`stats`]: what allocators count, named as `torch.cuda.memory_stats()` names it;
//! * [`hash`]: names for things in records.
//!
//! # A caching allocator for your program
//!
//! ```
//! use harness_allocator::allocator::shared::{Cores, SharedAllocator};
//! use harness_allocator::allocator::{Request, caching::Config};
//! use harness_allocator::device::sim::{SimConfig, SimDevice};
//! use harness_allocator::units::Bytes;
//!
//! let device = Box::new(SimDevice::new(SimConfig::default())); // or `harness_cuda::CudaDevice::open(0)?`
//! let allocator = SharedAllocator::new(device, Config::parse("expandable_segments:True")?, Cores::PerStream);
//! let allocation = allocator.allocate(Request::new(Bytes::mib(64)))?; // for the default stream; `.on(stream)` for another
//! let address: u64 = allocation.ptr().0; // what kernels and `cuMemcpy*` take
//! allocator.free(allocation.ptr())?; // from any thread; work in flight on that stream needs no waiting for
//! assert_eq!(allocator.stats().allocated_bytes.all.peak, 64 << 20);
//! # assert_ne!(address, 0);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! `harness/cuda/examples/caching.rs` is a whole program with several threads.
//!
//! # Which front
//!
//! | you have | take | frees go by |
//! |---|---|---|
//! | several host threads, or pointers only | [`allocator::shared::SharedAllocator`], which owns its device | address |
//! | one thread, or a lock of your own | [`allocator::Allocator`], which borrows the device for each call; its hits are the fastest | handle |
//!
//! [`allocator::shared::Cores::PerStream`] is for threads on streams of their own: they do not wait for each other on cache hits, and some
//! peaks become upper bounds. [`allocator::shared::Cores::One`] is for private pools, garbage collection, or peaks to the byte.
//!
//! # Which allocator
//!
//! The handle front has them all, by [`allocator::AllocatorKind`]. `caching` is the default choice. `expandable` is better where sizes
//! change from step to step, as with varying sequence lengths: segments grow and shrink instead of leaving holes; it needs a device that
//! can map memory. `async_pool` leaves the caching to the driver and shares one pool with other users of `cudaMallocAsync` in the process.
//! `bfc` and `rmm_pool` are there to compare with. `direct` calls the driver each time: the baseline, and the allocator under which a memory
//! checker sees every buffer.
//!
//! Nothing in here knows scenarios, reports or a command line.

#![forbid(unsafe_code)]

pub mod allocator;
pub mod device;
pub mod hash;
pub mod stats;
pub mod units;
mod wrap;
