//! Benchmarks: suites of things to time, runs of them, and what changed from one build to another.
//!
//! Words: a *suite* is a YAML file of things to time; a *case* is one of them, at one point of its axis (a hit of 2 MiB); an *arm* is what
//! does it (an allocator with its settings); an *entry* is a case done by an arm. A *round* does every entry once, arms interleaved, so that
//! what drifts on the machine hits all alike. A *benchmark run* is one run of all suites. The *accepted build* is the one whose figures are the
//! measure of later ones, until somebody accepts another.

pub mod accepted;
pub mod builds;
mod child;
pub mod clock;
pub mod compare;
pub mod execute;
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
pub mod examples;
#[cfg(test)]
mod scripts;
