//! What the parts above share and that knows nothing of memory: files, shared objects, excerpts of texts, shell words, order statistics, dates, shards, counts in words.

pub mod date;
pub mod excerpt;
pub mod files;
pub mod packed;
pub mod printable;
pub mod shard;
pub mod shared_object;
pub mod shell;
pub mod statistics;
pub mod temporary;
pub mod words;
