//! A simulated GPU for unmodified CUDA programs.
//!
//! The shared library of this crate holds the functions of NVIDIA's libraries that PyTorch calls. PyTorch's own allocator and host code run for
//! real; kernels do nothing, so a program needs no GPU and has its real peak of memory, its real out of memory and its real recovery. Memory is
//! charged and addressed by the simulated device of `harness-allocator`. Nothing is done before the first call: the library is loaded into programs
//! that never use a GPU.
//!
//! * [`settings`] and [`gpus`] say what the machine is like, [`counters`] and [`attempts`] what a process did on it: all are shared with whoever starts the program;
//! * `audit` makes the dynamic linker take this library's companions for NVIDIA's;
//! * `world` is the state: `memory` of each device, `host` memory, `clock` of streams and events, and `values` that are read back;
//! * `runtime`, `driver`, `nvml`, `blas`, `dnn`, `fft`, `nvrtc` and `nccl` are the exported functions, by library;
//! * `unmodelled` answers for all functions that have no code of their own.

pub mod attempts;
mod audit;
mod blas;
mod clock;
mod code;
pub mod counters;
mod device_figures;
mod dnn;
mod driver;
mod fft;
pub mod gpus;
mod host;
mod memory;
mod nccl;
mod nvml;
mod nvrtc;
mod parameters;
mod runtime;
pub mod settings;
mod unmodelled;
mod values;
mod world;
