//! Test only: a CUDA driver and an NVML on host memory, so that the CUDA device's own code runs where there is no GPU.
//!
//! The shared library of this crate stands in for `libcuda.so.1` and `libnvidia-ml.so.1`. It really holds memory, runs the fill, verify and
//! spin kernels on it in stream order, charges whole 2 MiB, and is strict: an access outside live memory breaks the context as on a GPU,
//! and what a program leaves behind is written to a report. It measures nothing: no figure of it is a GPU's.
//!
//! * [`Config`] says how it behaves, and travels to it as environment variables;
//! * [`Staging`] puts it where the loader of a child process finds it;
//! * `cuda` and `nvml` are the exported functions, `world` is their state, `mapping` its addresses and pages,
//!   `pool` its stream-ordered pools, `work` what streams do.

mod config;
mod cuda;
mod mapping;
mod nvml;
mod pool;
mod staging;
mod work;
mod world;

pub use config::{Config, Failure, HANGS, WrongWrite};
pub use staging::{Staging, calls, hides_a_driver};
