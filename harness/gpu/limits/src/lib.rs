//! Limits the device memory of an unmodified program on a real GPU, and injects failures.
//!
//! The dynamic linker loads this shared library into its own namespace (`LD_AUDIT`) and asks it
//! about each symbol binding. For functions of the CUDA runtime, the driver and NVML that allocate,
//! free or report device memory, the program gets a wrapper. The library does nothing before the
//! first call of a wrapper.
//!
//! A limit applies to each process, or to all processes that share a ledger.
//!
//! Managed memory counts in full, wherever its pages are. An array counts with the bytes of its
//! elements; the driver may use more.
//!
//! Not limited: arrays of formats without a fixed element size, memory imported from other
//! processes, and the driver's own memory.

mod accounts;
mod audit;
mod driver;
mod fork;
mod limiter;
mod nesting;
mod nvml;
mod real;
mod runtime;

harness_gpu_settings::export_interface!();
