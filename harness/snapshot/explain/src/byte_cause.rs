//! Uses of a device's memory at one moment: [`ByteCause`], with the bytes and sites of each.

use harness_allocator::units::Bytes;
use serde::Serialize;

use crate::sites::SiteId;

/// A use of memory, or a reason why free memory is not usable. The names in JSON match those of
/// [`harness_record::CauseKind`] where requests can fail for the same reason.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum ByteCause {
    Allocated,
    Rounding,
    PendingFree,
    OtherStream,
    OtherPool,
    PrivatePool,
    InactiveSplit,
    WholeSegments,
    OthersHold,
    Free,
    FreeOrOthersHold,
}

impl ByteCause {
    /// All causes in display order, with their names in JSON and short descriptions.
    pub(crate) const ALL: [(Self, &str, &str); 11] = [
        (Self::Allocated, "allocated", "allocated, as requested"),
        (Self::Rounding, "rounding", "rounding of allocated blocks"),
        (
            Self::PendingFree,
            "pending_free",
            "freed, but other streams still use it",
        ),
        (
            Self::OtherStream,
            "other_stream",
            "cached for another stream",
        ),
        (
            Self::OtherPool,
            "other_pool",
            "cached for blocks of the other size",
        ),
        (
            Self::PrivatePool,
            "private_pool",
            "cached in a private pool",
        ),
        (
            Self::InactiveSplit,
            "inactive_split",
            "free, but pinned by live blocks",
        ),
        (Self::WholeSegments, "whole_segments", "free whole segments"),
        (
            Self::OthersHold,
            "others_hold",
            "other processes and the CUDA context",
        ),
        (Self::Free, "free", "free on the device"),
        (
            Self::FreeOrOthersHold,
            "free_or_others_hold",
            "not reserved: free, or in use by other processes",
        ),
    ];

    pub const fn name(self) -> &'static str {
        Self::ALL[self as usize].1
    }

    pub const fn about(self) -> &'static str {
        Self::ALL[self as usize].2
    }
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct CauseBytes {
    pub cause: ByteCause,
    pub about: &'static str,
    pub bytes: Bytes,
    pub blocks: u64,
    /// The sites of live blocks, or of the blocks that pin free ones, largest first. They cover all
    /// bytes of the cause, except for free memory that nothing pins.
    pub sites: Vec<SiteBytes>,
}

impl CauseBytes {
    /// Bytes without blocks, as of free memory of the device.
    pub(crate) const fn new(cause: ByteCause, bytes: Bytes) -> Self {
        Self {
            cause,
            about: cause.about(),
            bytes,
            blocks: 0,
            sites: Vec::new(),
        }
    }
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct SiteBytes {
    pub site: String,
    /// The site's id in [`crate::causes::Explanation::sites`].
    pub id: SiteId,
    pub bytes: Bytes,
    pub blocks: u64,
}
