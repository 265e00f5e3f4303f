//! Benchmarks: suites, runs, and comparisons of builds.
//!
//! A *suite* is a YAML file of *cases*. A case is one thing to time at one point of its axis, such
//! as a hit of 2 MiB. An *arm* is an allocator with its settings. An *entry* is a case on an arm. A
//! *round* runs every entry once with interleaved arms, so drift of the machine affects all alike.
//! A *benchmark run* runs all suites. Later builds are compared with the *accepted build*.

pub mod accepted;
pub mod builds;
pub mod child;
pub mod clock;
pub mod compare;
pub mod execute;
pub mod gate;
pub mod history;
pub mod inference;
pub mod machine;
mod measure;
pub mod merge;
pub mod plan;
pub mod provider;
pub mod record;
pub mod store;
pub mod suite;
pub mod summary;
pub mod torch;

#[cfg(any(test, feature = "examples"))]
mod tests;
#[cfg(any(test, feature = "examples"))]
pub use tests::examples;
