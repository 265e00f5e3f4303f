//! Benchmarks: the language of suites, the ready ones, the loop, what a slower allocator looks like, and the command.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod errors;
mod program;
mod provider;
mod reports;
mod rounds;
mod suites;
mod torch;
mod world;
