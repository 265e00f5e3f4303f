//! Streams that are used no more: their free memory goes back to the driver, and their lanes to other streams.

use std::collections::BTreeSet;

use super::CachingAllocator;
use super::pools::Pools;
use crate::allocator::pending::if_exists;
use crate::device::{Device, DeviceError, StreamId};

/// Look-ups of released streams with live memory are not worth it for fewer than this.
const FEW: usize = 64;

/// Streams that were released while memory of theirs was live.
#[derive(Debug, Default)]
pub(super) struct ReleasedStreams {
    streams: BTreeSet<StreamId>,
    /// How many there may be before all of them are looked at again: twice what the last look has left. So each release costs constant
    /// time on average.
    limit: usize,
}

impl ReleasedStreams {
    /// Forgets the streams that hold nothing any more.
    pub(super) fn forget_empty(&mut self, pools: &mut Pools) {
        self.streams.retain(|&stream| !pools.remove_empty_lanes(stream));
        self.limit = 2 * self.streams.len();
    }
}

impl CachingAllocator {
    /// See [`crate::allocator::Allocator::release_stream`]. While the context of a private pool is open nothing is looked at, as everywhere;
    /// the stream waits for a later call.
    pub(super) fn release_lanes_of(&mut self, device: &mut dyn Device, stream: StreamId) -> Result<(), DeviceError> {
        if stream == StreamId::DEFAULT {
            return Ok(());
        }
        self.released_streams.streams.insert(stream);
        if self.pools.context_is_open() {
            return Ok(());
        }
        if_exists(device.synchronize_stream(stream))?;
        self.poll_pending(device)?;
        let many = self.released_streams.streams.len() > self.released_streams.limit.max(FEW);
        let looked_at = if many { self.released_streams.streams.iter().copied().collect() } else { vec![stream] };
        for stream in looked_at {
            for lane in self.pools.lanes_of(stream) {
                self.release_whole(device, self.pools.free(lane).in_order(&self.blocks))?;
            }
            if self.pools.remove_empty_lanes(stream) {
                self.released_streams.streams.remove(&stream);
            }
        }
        if many {
            self.released_streams.limit = 2 * self.released_streams.streams.len();
        }
        Ok(())
    }
}
