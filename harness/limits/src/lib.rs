//! A limit on the device memory of an unmodified program on a real GPU, and failures that are asked for.
//!
//! The dynamic linker loads the shared library of this crate into a namespace of its own (`LD_AUDIT`) and asks it at each binding of a symbol. For functions
//! of CUDA's runtime, of the driver and of NVML that get, give back or tell of device memory, the program gets a wrapper; all others it gets as they are.
//! What a wrapper lets through is the real function's business. Nothing is done before the first call of a wrapper.
//!
//! * `audit` is what the dynamic linker calls, and finds the wrapper of a name;
//! * `runtime`, `driver` and `nvml` are the wrappers, by library; `real` declares them and keeps the real functions;
//! * `limiter` decides which attempts go through and counts them; `accounts` is what the process holds.
//!
//! A limit is that of each process, or where a ledger is named, that of all processes that have this ledger together.
//!
//! Managed memory is charged in full, wherever its pages lie, and an array by the bytes of its elements: a driver may take more for it.
//!
//! Not limited: arrays of formats whose elements have no size of their own, memory that comes from other processes, and what the driver takes for itself.

mod accounts;
mod audit;
mod driver;
mod limiter;
mod nvml;
mod real;
mod runtime;
