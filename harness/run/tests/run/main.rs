//! The harness catches what it promises to catch: scenarios that must fail say why in full, broken allocators are told by the invariant
//! that they break, right allocators never are, and the audit does no more work than it says.
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
