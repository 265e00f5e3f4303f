//! A simulated GPU for unmodified CUDA programs, and for the CUDA device of this project.
//!
//! The shared library of this crate holds the functions of NVIDIA's libraries that PyTorch calls. PyTorch's own allocator and host code run for
//! real; kernels do nothing, so a program needs no GPU and has its real peak of memory, its real out of memory and its real recovery. Memory is
//! charged and addressed by the simulated device of `harness-allocator`. Nothing is done before the first call: the library is loaded into programs
//! that never use a GPU.
//!
//! For tests of `harness-cuda` the library stands in for the driver and NVML alone, and really does the kernels of that crate, on memory of the
//! host: `Kernels::Done` of the settings.
//!
//! What the machine is like, and the files that tell what a process did on it, are of `harness-gpu-settings`.
//!
//! * `audit` makes the dynamic linker take this library's companions for NVIDIA's;
//! * `world` is the state: `memory` of each device, `host` memory, `clock` of streams and events, `values` that are read back, and `calls`;
//! * `execution` does the work of a device where kernels are done: `kernels` on `bytes`; `context` finds the device of a call and waits for its work;
//! * `runtime`, `driver`, `nvml`, `blas`, `dnn`, `fft`, `nvrtc` and `nccl` are the exported functions, by library, which `entry_points` finds by name;
//! * `unmodelled` answers for all functions that have no code of their own.

mod audit;
mod blas;
mod bytes;
mod calls;
mod clock;
mod code;
mod context;
mod device_figures;
mod dnn;
mod driver;
mod entry_points;
mod execution;
mod fft;
mod host;
mod kernels;
mod memory;
mod nccl;
mod nvml;
mod nvrtc;
mod parameters;
mod runtime;
mod unmodelled;
mod values;
mod world;
