//! Benchmarks: the suite language, the project's suites, the measuring loop, the detection of
//! slower allocators, and the command.

mod errors;
mod program;
mod provider;
mod reports;
mod rounds;
mod suites;
mod torch;
mod world;
