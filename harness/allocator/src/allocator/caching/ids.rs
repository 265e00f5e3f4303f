//! Numbers of blocks and of lanes, which cannot be taken for each other.

/// A block's slot in the table of blocks; slot 0 where there is none.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct BlockId(pub(super) u32);

impl BlockId {
    /// No block: the slot that is always vacant.
    pub(super) const NONE: Self = Self(0);

    /// Whether there is no block.
    #[inline]
    pub(super) const fn is_none(self) -> bool {
        self.0 == Self::NONE.0
    }
}

/// A lane: the free blocks of one pool and one stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct LaneId(pub(super) u32);
