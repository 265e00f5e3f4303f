//! What a simulated GPU and whoever starts programs on it share, and nothing that is exported to C.
//!
//! * [`settings`], with [`gpus`] and [`driver`], say what the simulated machine is like: they travel in an environment variable;
//! * [`limits`] say the same of a program on a real GPU;
//! * [`calls`] are those that can fail or take longer on both, and [`latency`] by how much;
//! * [`arrays`] are described as the driver has it;
//! * [`counters`] and [`attempts`] are what a process did on it: they are left in files of the run's folder;
//! * [`ledger`] is how much of its memory each process holds, in a file that they share.

pub mod arrays;
pub mod attempts;
pub mod calls;
pub mod counters;
pub mod driver;
pub mod gpus;
pub mod latency;
pub mod ledger;
pub mod limits;
pub mod settings;
mod text;
