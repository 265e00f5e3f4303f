//! Tests of the allocators, one module for each subject.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod best_fit;
mod model;
mod pending_frees;
mod shared;
