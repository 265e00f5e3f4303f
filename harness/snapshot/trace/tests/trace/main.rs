//! Tests of snapshots and traces, one module for each subject.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod program_snapshot;
mod snapshot_files;
mod snapshot_forms;
mod snapshot_recorder;
