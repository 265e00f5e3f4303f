//! A simulated GPU for unmodified CUDA programs, and for the CUDA device of this project.
//!
//! The shared library of this crate exports the functions of NVIDIA's libraries that PyTorch calls.
//! PyTorch's own allocator and host code run for real; kernels are no-ops. So a program needs no
//! GPU, yet has its real peak memory, its real OOM and its real recovery. The simulated device of
//! `harness-allocator` charges and addresses memory. The library does nothing before its first
//! call, because programs without a GPU load it too.
//!
//! For tests of `harness-cuda` the library replaces only the driver and NVML, and the kernels of
//! that crate execute on host memory (`Kernels::Execute`).
//!
//! `harness-gpu-settings` has the settings of the machine, the files that a process writes, and the
//! life cycle of a process.
//!
//! * `audit` makes the dynamic linker load the stub libraries instead of NVIDIA's;
//! * `world` is the state: `memory` of each device, `host` memory, `clock` of streams and events,
//!   `copied` bytes or the `contents` of all memory with their `backing`, `pools`, and `calls`;
//! * `shared_memory` and `page_locked` are for a GPU that shares the host's memory;
//! * `execution` runs the work of a device if kernels execute: `kernels` on `bytes`; `context`
//!   finds the device of a call and waits for its work, `contexts` has those of the program;
//! * `runtime`, `driver`, `nvml`, `blas`, `dnn`, `nvrtc` and `nccl` export the functions of a
//!   library; `entry_points` finds them by name;
//! * `loaded` has the modules of a program, each with its `image`;
//! * `libraries` creates the handles, plans and modules of libraries, which can fail;
//! * `versions` has the versions of libraries;
//! * `reads` counts reads of values that nothing has computed, and `python` finds effects of the
//!   program, and wraps functions of Python;
//! * `torch_allocator` keeps the statistics of PyTorch's allocators in a file, and `torch_history`
//!   begins PyTorch's memory history;
//! * `torch_kernel` runs small operations of PyTorch without Python, on the `contents`;
//! * `unmodelled` answers for all functions without code here, with `objects` for their handles;
//!   `solver` and `sparse` have the workspaces of cuSOLVER and cuSPARSE, `random` the numbers of
//!   cuRAND's generator, and `stack` the bounds of a thread's stack.
//!
//! To add a CUDA function, export it from the module of its library. Outputs have the type `Out`,
//! an `Option`: `put` refuses null, and `write` allows it. Functions of the runtime return
//! `remember(..)`, those of the driver `answer(..)`; `handles` checks handles.

mod audit;
mod backing;
mod blas;
mod bytes;
mod calls;
mod clock;
mod code;
mod contents;
mod context;
mod contexts;
mod copied;
mod device_properties;
mod distributions;
mod dnn;
mod driver;
mod entry_points;
mod execution;
mod graph_memory;
mod handles;
mod hook;
mod host;
mod image;
mod kernels;
mod libraries;
mod loaded;
mod mangled;
mod memory;
mod nccl;
mod nvml;
mod nvrtc;
mod objects;
mod opened;
mod page_locked;
mod per_thread;
mod polls;
mod pools;
mod python;
mod random;
mod reads;
mod runtime;
mod shared_memory;
mod solver;
mod sparse;
mod stack;
mod torch_allocator;
mod torch_history;
mod torch_kernel;
mod unmodelled;
mod versions;
mod world;

harness_gpu_settings::export_interface!();
