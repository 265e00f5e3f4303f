//! Explanations of memory snapshots.

pub mod html;
