//! The allocators of `harness-allocator` as a shared library, `libharness_allocator_abi.so`, for
//! PyTorch's `CUDAPluggableAllocator` and `MemPool`, and for other programs with the same
//! interface.
//!
//! `include/harness_allocator.h` declares the exported functions. For each allocator they are the
//! two functions of PyTorch's interface, its optional functions (for `set_record_stream_fn` and
//! others), statistics and a memory snapshot. Memory comes from the CUDA driver, in the primary
//! context of each device, which PyTorch uses too. Loading the library does nothing; the first call
//! opens the device.
//!
//! A cache hit makes no driver call and leaves the thread's CUDA context alone.

mod abi;
mod failure;
mod front;
mod settings;
mod streams;
