//! Tests of the program and of the project, one module for each subject: one program, because each
//! further one is compiled and linked on its own.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod bench;
mod calibrate;
mod ci_files;
mod commands;
mod cuda_device;
mod demo;
mod docs;
mod example_report;
mod explain;
mod fleet;
mod guide;
#[path = "../kept_report/mod.rs"]
mod kept_report;
mod libraries;
mod matrix;
mod mcp;
mod processes;
mod programs;
mod prose;
mod recorded;
mod sessions;
mod tidy;
