//! What a device's bytes are used for: [`ByteCause`], and the bytes of each.

use harness_allocator::units::Bytes;
use harness_record::CauseKind;
use serde::Serialize;

use crate::sites::SiteId;

/// A use of memory, or what keeps it from being used.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
#[allow(missing_docs, reason = "each variant is described by `ByteCause::about`")]
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
    /// Every cause, in the order in which they are shown.
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

    /// The name in JSON. Where a request can fail for the same reason, it is the name of that [`CauseKind`].
    #[must_use]
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

    /// What it is, in a few words.
    #[must_use]
    pub const fn about(self) -> &'static str {
        match self {
            Self::Allocated => "allocated, as requested",
            Self::Rounding => "rounding of allocated blocks",
            Self::PendingFree => "freed, but other streams still use it",
            Self::OtherStream => "cached for another stream",
            Self::OtherPool => "cached for blocks of the other size",
            Self::PrivatePool => "cached in a private pool",
            Self::InactiveSplit => "free, but pinned in its segment",
            Self::WholeSegments => "free whole segments",
            Self::OthersHold => "other programs and the CUDA context",
            Self::Free => "free on the device",
            Self::FreeOrOthersHold => "not reserved: free, or held by others",
        }
    }
}

/// The bytes of one cause.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[allow(missing_docs, reason = "the names say what they are")]
pub struct CauseBytes {
    pub cause: ByteCause,
    pub bytes: Bytes,
    /// In how many blocks.
    pub blocks: u64,
    /// Of live blocks, who allocated them; of free ones, who allocated the block that pins them. Most bytes first. Together they have all bytes of the
    /// cause, except for free memory that nothing pins.
    pub sites: Vec<SiteBytes>,
}

/// What one site has of a cause.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[allow(missing_docs, reason = "the names say what they are")]
pub struct SiteBytes {
    /// The name of the site.
    pub site: String,
    /// The same, in [`crate::causes::Explanation::sites`].
    pub id: SiteId,
    pub bytes: Bytes,
    /// Of live blocks, how many; of free ones, in how many pieces.
    pub blocks: u64,
}
