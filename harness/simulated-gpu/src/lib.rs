//! A simulated GPU for unmodified CUDA programs.
//!
//! The shared library of this crate holds the functions of NVIDIA's libraries that PyTorch calls. PyTorch's own allocator and host code run for
//! real; kernels do nothing, so a program needs no GPU and has its real peak of memory, its real out of memory and its real recovery. Memory is
//! charged and addressed by the simulated device of `harness-allocator`. Nothing is done before the first call: the library is loaded into programs
//! that never use a GPU.
//!
//! What the machine is like, and the files that tell what a process did on it, are of `harness-gpu-settings`.
//!
//! * `audit` makes the dynamic linker take this library's companions for NVIDIA's;
//! * `world` is the state: `memory` of each device, `host` memory, `clock` of streams and events, and `values` that are read back;
//! * `runtime`, `driver`, `nvml`, `blas`, `dnn`, `fft`, `nvrtc` and `nccl` are the exported functions, by library, which `entry_points` finds by name;
//! * `unmodelled` answers for all functions that have no code of their own.

mod audit;
mod blas;
mod clock;
mod code;
mod device_figures;
mod dnn;
mod driver;
mod entry_points;
mod fft;
mod host;
mod memory;
mod nccl;
mod nvml;
mod nvrtc;
mod parameters;
mod runtime;
mod unmodelled;
mod values;
mod world;
