//! Host memory that a device copies to and from.

use std::{fmt, path::PathBuf};

/// A kind of host memory, from the scarcest to the most available. Copies of the later kinds are
/// not faster.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum HostMemory {
    /// Page-locked: copies run without the host (`cuMemHostAlloc`).
    Pinned,
    /// Plain process memory: the driver copies through its own pinned buffer.
    Pageable,
    /// A mapped temporary file, for hosts with too little memory. It never has a name in its
    /// folder, so nothing remains when the process ends. The driver treats it as pageable memory.
    /// The default folder is `TMPDIR`.
    MappedFile { folder: Option<PathBuf> },
}

impl HostMemory {
    /// Returns true if copies run without the host. Otherwise the host may wait in a copy for
    /// earlier work of its stream.
    pub const fn is_pinned(&self) -> bool {
        matches!(self, Self::Pinned)
    }

    pub const fn call(&self) -> &'static str {
        match self {
            Self::Pinned => "cuMemHostAlloc",
            Self::Pageable | Self::MappedFile { .. } => "mmap",
        }
    }

    /// The scarcity: 0 is the scarcest.
    pub const fn rank(&self) -> u8 {
        match self {
            Self::Pinned => 0,
            Self::Pageable => 1,
            Self::MappedFile { .. } => 2,
        }
    }
}

impl fmt::Display for HostMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Pinned => "pinned host memory",
            Self::Pageable => "pageable host memory",
            Self::MappedFile { .. } => "a mapped file",
        })
    }
}

/// Host memory of one device. Numbers are never reused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct HostId(pub u32);
