//! Benchmarks: the language of suites, the ready ones, the loop, what a slower allocator looks like, and the command.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod errors;
mod program;
mod reports;
mod rounds;
mod shop;
mod suites;
mod torch;
mod world;
