//! The harness detects what it promises: failing scenarios explain themselves, broken allocators
//! violate the right invariant, correct allocators violate none, and the audit stays within its
//! budget.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod broken;
mod causes;
mod contended;
mod cost;
mod faults;
mod generated;
mod health;
mod lacking;
mod language;
mod leaks;
mod lying;
mod meanwhile;
mod policies;
mod pool;
mod private_pools;
mod program;
mod programs;
mod random;
mod reads;
mod recorded;
mod replays;
mod scenarios;
mod staged;
mod timed;
mod watched;
