//! Benchmarks: suites of things to time, nights of measurements, and what changed from one night to another.
//!
//! Words: a *suite* is a YAML file of things to time; a *case* is one of them, at one point of its axis (a hit of 2 MiB); an *arm* is what
//! does it (an allocator with its settings); an *entry* is a case done by an arm. A *round* does every entry once, arms interleaved, so that
//! what drifts on the machine hits all alike. A *night* is one run of all suites; its *baseline* is the last uncontended night before it of
//! the same machine.

pub mod clock;
pub mod compare;
pub mod criterion;
mod drift;
mod evidence;
pub mod execute;
pub mod history;
mod inference;
mod layout;
pub mod machine;
mod measure;
pub mod merge;
pub mod night;
pub mod nights;
pub mod record;
mod spread;
pub mod suite;
pub mod summary;
pub mod text;
pub mod torch;
pub mod verdict;
pub mod workshop;

#[cfg(any(test, feature = "examples"))]
pub mod examples;
