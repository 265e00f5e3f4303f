//! Memory of the host that a device copies to and from.

use std::fmt;
use std::path::PathBuf;

/// A kind of host memory. The ones further down are easier to have, and copies of them are not faster.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum HostMemory {
    /// Page-locked: the device copies by itself, and the host does not wait (`cuMemHostAlloc`).
    Pinned,
    /// Plain memory of the process: the driver copies through a pinned buffer of its own.
    Pageable,
    /// A temporary file that is mapped, for where the host has too little memory too. It never has a name in its folder, so nothing stays of it, however
    /// the process ends. To the driver it is pageable memory.
    MappedFile {
        /// Where the file lies; `None`: where temporary files do (`TMPDIR`).
        folder: Option<PathBuf>,
    },
}

impl HostMemory {
    /// Whether the device copies by itself. Otherwise the host may wait in a copy for the work of its stream.
    #[must_use]
    pub const fn is_pinned(&self) -> bool {
        matches!(self, Self::Pinned)
    }

    /// The call that takes it.
    #[must_use]
    pub const fn call(&self) -> &'static str {
        match self {
            Self::Pinned => "cuMemHostAlloc",
            Self::Pageable | Self::MappedFile { .. } => "mmap",
        }
    }

    /// From what is hardest to have, 0, to what is easiest.
    #[must_use]
    pub const fn rank(&self) -> u8 {
        match self {
            Self::Pinned => 0,
            Self::Pageable => 1,
            Self::MappedFile { .. } => 2,
        }
    }
}

impl fmt::Display for HostMemory {
    /// As in `pinned host memory`.
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
