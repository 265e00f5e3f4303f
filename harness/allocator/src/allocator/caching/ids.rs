//! Numbers of blocks and of lanes, which cannot be taken for each other.

/// A block's slot in the table of blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct BlockId(pub(super) u32);

/// A lane: the free blocks of one pool and one stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct LaneId(pub(super) u32);
