//! Runs an unmodified CUDA program on a simulated GPU, or on a real one with limited memory.
//!
//! 1. [`setup`] prepares a command. [`program`] finds what it runs, [`torch`] the PyTorch that it
//!    will import, and [`environment`] other packages that use CUDA.
//! 2. [`imports`] reads what they import from NVIDIA's libraries. [`stubs`] and [`stub_library`]
//!    make the stub libraries, and [`cache`] keeps them.
//! 3. [`launch`] starts the program through [`process`] on a [`machine`]: simulated GPUs, or a real
//!    GPU with a limit. [`hang`] finds ranks that wait forever.
//! 4. [`record`] collects the files that its processes wrote, with what torch reported
//!    ([`torch_record`]), its [`errors`] and the [`machine_memory`]; [`summary`] prints them, and
//!    [`timeline`] orders the memory events of a process. [`ahead`] replays a host that runs ahead
//!    of the GPU.
//!
//! [`trials`] runs a program many times: with injected failures, with less memory, or under other
//! settings. [`library_host`] runs a user's allocator library in a process. [`forked`] copies this
//! process, and [`large_pages`] makes that faster. `harness-simulated-gpu` implements the
//! libraries' functions; it is loaded into the program, not into this process.

pub mod ahead;
pub mod cache;
pub mod doubts;
pub mod environment;
pub mod errors;
mod files;
pub mod forked;
pub mod guardian;
pub mod hang;
pub mod host_memory;
pub mod imports;
pub mod large_pages;
pub mod launch;
pub mod library_host;
pub mod machine;
pub mod machine_memory;
pub mod matrix;
mod outlived;
mod own_libraries;
pub mod process;
pub mod program;
pub mod record;
pub mod setup;
pub mod stub_library;
pub mod stubs;
pub mod summary;
#[cfg(test)]
mod tests;
pub mod timeline;
pub mod torch;
pub mod torch_record;
pub mod trials;
