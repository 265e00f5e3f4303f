//! Distinct types for the numbers of blocks and of stream pools.

/// A block's slot in the table of blocks, or slot 0 for none.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct BlockId(pub(super) u32);

impl BlockId {
    /// No block: the slot that is always vacant.
    pub(super) const NONE: Self = Self(0);

    #[inline]
    pub(super) const fn is_none(self) -> bool {
        self.0 == Self::NONE.0
    }
}

/// The number of a stream pool: the free blocks of one pool and one stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct StreamPoolId(pub(super) u32);
