//! What a caching allocator does without the device: cache hits, and frees of memory that only one stream used.

use super::CachingAllocator;
use super::blocks::{Block, State};
use super::ids::BlockId;
use crate::allocator::{Allocation, Handle, Request};
use crate::device::{DevicePtr, MemoryRange, StreamId};
use crate::stats::PoolKind;
use crate::units::Bytes;

/// How a free without a device ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::allocator) enum Freed {
    /// It can be handed out again.
    Done,
    /// Other streams use it: their events have to be recorded. Nothing has changed.
    NeedsDevice,
    /// Nothing is handed out there under that handle. Nothing has changed.
    NotLive,
}

impl CachingAllocator {
    /// Hands out memory from the cache, or `None`: then the device is needed, and nothing has changed.
    #[inline]
    pub(in crate::allocator) fn allocate_cached(&mut self, request: Request) -> Option<Allocation> {
        if request.size == Bytes::ZERO {
            return Some(Allocation::null(request));
        }
        if !self.pending.is_empty() && !self.pools.context_is_open() {
            return None;
        }
        let size = self.rules.round(&self.config, request.size.0)?;
        let pool = self.pools.route(PoolKind::of_block(Bytes(size)));
        let lane = self.pools.lane(pool, request.stream);
        let lookups = self.pools[pool].lookups;
        let Some(block) = self.take_cached(pool, lane, size) else {
            // The caller looks again with the device, and that look-up is the one to count.
            self.pools[pool].lookups = lookups;
            return None;
        };
        self.hand_out(block, lane, request.size.0, size);
        Some(self.allocation(block, request))
    }

    /// Takes back the memory at an address, if it is handed out there and no other stream uses it.
    #[inline]
    pub(in crate::allocator) fn free_without_device(&mut self, address: DevicePtr, handle: Handle) -> Freed {
        let id = BlockId(handle.slot());
        let Some(&Block { kind, size, requested, shared, .. }) = self.live(address, id) else { return Freed::NotLive };
        if shared {
            return Freed::NeedsDevice;
        }
        self.counters.freed(kind, size, requested);
        self.make_reusable(id);
        Freed::Done
    }

    /// The allocation at an address, if it is handed out there under that handle.
    pub(in crate::allocator) fn allocation_at(&self, address: DevicePtr, handle: Handle) -> Option<Allocation> {
        let block = self.live(address, BlockId(handle.slot()))?;
        let stream: StreamId = self.pools.owner(block.lane).stream;
        let request = Request { size: Bytes(block.requested), stream };
        Some(Allocation::new(MemoryRange::new(address, Bytes(block.size)), request, handle))
    }

    #[inline]
    fn live(&self, address: DevicePtr, id: BlockId) -> Option<&Block> {
        self.blocks.get(id).filter(|block| block.address == address.0 && block.state == State::Allocated)
    }
}
