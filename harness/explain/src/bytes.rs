//! The uses of a device's memory: [`ByteCause`].

use harness_allocator::units::Bytes;
use harness_record::CauseKind;
use serde::Serialize;

use crate::sites::SiteId;

/// A use of memory, or a reason why free memory is not usable.
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
    /// All causes in display order.
    pub const ALL: [Self; 11] = [
        Self::Allocated,
        Self::Rounding,
        Self::PendingFree,
        Self::OtherStream,
        Self::OtherPool,
        Self::PrivatePool,
        Self::InactiveSplit,
        Self::WholeSegments,
        Self::OthersHold,
        Self::Free,
        Self::FreeOrOthersHold,
    ];

    /// The name in JSON. It matches the [`CauseKind`] if requests can fail for the same reason.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Allocated => "allocated",
            Self::Rounding => CauseKind::Rounding.name(),
            Self::PendingFree => CauseKind::PendingFree.name(),
            Self::OtherStream => CauseKind::OtherStream.name(),
            Self::OtherPool => CauseKind::OtherPool.name(),
            Self::PrivatePool => CauseKind::PrivatePool.name(),
            Self::InactiveSplit => "inactive_split",
            Self::WholeSegments => "whole_segments",
            Self::OthersHold => CauseKind::OthersHold.name(),
            Self::Free => "free",
            Self::FreeOrOthersHold => "free_or_others_hold",
        }
    }

    /// A short description.
    pub const fn about(self) -> &'static str {
        match self {
            Self::Allocated => "allocated, as requested",
            Self::Rounding => "rounding of allocated blocks",
            Self::PendingFree => "freed, but other streams still use it",
            Self::OtherStream => "cached for another stream",
            Self::OtherPool => "cached for blocks of the other size",
            Self::PrivatePool => "cached in a private pool",
            Self::InactiveSplit => "free, but pinned by live blocks",
            Self::WholeSegments => "free whole segments",
            Self::OthersHold => "other processes and the CUDA context",
            Self::Free => "free on the device",
            Self::FreeOrOthersHold => "not reserved: free, or in use by other processes",
        }
    }
}

/// The memory of one cause.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct CauseBytes {
    pub cause: ByteCause,
    pub bytes: Bytes,
    /// The number of blocks.
    pub blocks: u64,
    /// The sites of live blocks, or of the blocks that pin free ones, largest first. They cover all bytes of the cause, except
    /// for free memory that nothing pins.
    pub sites: Vec<SiteBytes>,
}

/// The memory of one site and cause.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct SiteBytes {
    /// The site's name.
    pub site: String,
    /// The site's id in [`crate::causes::Explanation::sites`].
    pub id: SiteId,
    pub bytes: Bytes,
    /// The number of live blocks or free blocks.
    pub blocks: u64,
}
