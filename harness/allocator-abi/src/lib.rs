//! The allocators of `harness-allocator` as a shared library, `libharness_allocator_abi.so`, for PyTorch's `CUDAPluggableAllocator` and `MemPool`, and for
//! any other program that takes such a library.
//!
//! `include/harness_allocator.h` declares what is exported: for each allocator the two functions of PyTorch's interface, functions for its further
//! settings (`set_record_stream_fn` and others), statistics, and a memory snapshot. Memory comes from the CUDA driver, in the primary context of each
//! device, which PyTorch uses too. Nothing is done before the first call.
//!
//! * `abi` is the exported functions: arguments as C has them, no panic, no error but by value;
//! * `front` is an allocator with its device for all threads;
//! * `settings` reads the environment;
//! * `streams` are the program's streams by number;
//! * `failure` is what went wrong last.

mod abi;
mod failure;
mod front;
mod settings;
mod streams;
