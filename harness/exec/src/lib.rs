//! Runs an unmodified PyTorch program on a simulated GPU.
//!
//! [`torch`] finds the PyTorch that the program will import, [`environment`] what other packages need of CUDA; [`imports`] reads what they import from NVIDIA's libraries, [`doubles`] and [`thin`] make
//! the libraries that stand in for them, [`cache`] keeps those; [`setup`] does all that for a command. [`launch`] starts the program with them by [`process`], and [`record`] puts together what its processes
//! left behind, for people in [`summary`]; [`timeline`] is what a process did to its memory in order. [`limited`] starts a program on a real GPU instead, with a limit. [`trials`] runs it many times, with failures, in less memory, or under other settings. [`library_host`] is the process of a library that allocates. [`forked`] makes copies of this process, and [`large_pages`] makes that faster. What the libraries do is the business of `harness-simulated-gpu`, which is loaded into the program and not into this one.

pub mod cache;
pub mod doubles;
pub mod environment;
#[cfg(test)]
mod fixture;
pub mod forked;
pub mod imports;
pub mod large_pages;
pub mod launch;
pub mod library_host;
pub mod limited;
pub mod process;
pub mod record;
pub mod setup;
pub mod summary;
pub mod thin;
pub mod timeline;
pub mod torch;
pub mod trials;
