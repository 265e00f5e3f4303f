//! Shared helpers that are independent of GPU memory: files, shared objects, text excerpts, shell
//! quoting, order statistics, dates, shards, counted nouns and work on several cores.

pub mod date;
pub mod excerpt;
pub mod files;
pub mod packed;
pub mod parallel;
pub mod printable;
pub mod shard;
pub mod shared_object;
pub mod shell;
pub mod statistics;
pub mod temporary;
pub mod words;
