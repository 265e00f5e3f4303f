//! CUDA's runtime and driver functions for the process of an allocator library. They forward the
//! library's calls to the harness and its device.
//!
//! Nothing is modelled here: memory, streams and events belong to the harness's device.
//! `harness_library_host` loads the library and executes the harness's orders. A missing function
//! is reported to the harness and returns "not supported".

mod connection;
mod exports;
mod handles;
mod host;
mod library;
mod pools;
mod timed;
