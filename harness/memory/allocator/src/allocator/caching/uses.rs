//! The other streams that use a live block, from `record_stream`.

use std::collections::{BTreeMap, BTreeSet};

use super::config::Quirks;
use crate::allocator::ids::BlockId;
use crate::device::StreamId;

/// The streams of every block that more than one stream uses.
#[derive(Clone, Debug, Default)]
pub(super) struct Uses {
    by_block: BTreeMap<BlockId, BlockUses>,
}

#[derive(Clone, Debug, Default)]
struct BlockUses {
    streams: BTreeSet<StreamId>,
    /// Those recorded while a private pool's context was open.
    in_context: BTreeSet<StreamId>,
}

impl Uses {
    pub(super) fn record(&mut self, block: BlockId, stream: StreamId, is_capturing: bool) {
        let uses = self.by_block.entry(block).or_default();
        uses.streams.insert(stream);
        if is_capturing {
            uses.in_context.insert(stream);
        }
    }

    /// Takes the streams whose events a freed block waits for.
    pub(super) fn take(
        &mut self,
        block: BlockId,
        quirks: Quirks,
        is_capturing: bool,
    ) -> BTreeSet<StreamId> {
        let BlockUses {
            streams,
            in_context,
        } = self.by_block.remove(&block).unwrap_or_default();
        match quirks {
            // PyTorch assumes that these streams belong to a graph capture that ends with the
            // context, and forgets them.
            Quirks::AsTorch if is_capturing => &streams - &in_context,
            Quirks::Safe | Quirks::AsTorch => streams,
        }
    }

    pub(super) fn clear(&mut self) {
        self.by_block.clear();
    }
}
