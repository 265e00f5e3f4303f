//! Released streams: their free memory returns to the driver, and other streams reuse their stream
//! pools.

use std::collections::BTreeSet;

use super::{CachingAllocator, pools::Pools};
use crate::allocator::pending::if_exists;
use crate::device::{Device, DeviceError, StreamId};

/// All released streams with live memory are checked again if there are more than this.
const FEW: usize = 64;

/// Streams that were released while they had live memory.
#[derive(Clone, Debug, Default)]
pub(super) struct ReleasedStreams {
    streams: BTreeSet<StreamId>,
    /// All of them are checked again above this number: twice as many as remained after the last
    /// check. So a release costs constant time on average.
    limit: usize,
}

impl ReleasedStreams {
    /// Forgets the streams without segments.
    pub(super) fn forget_empty(&mut self, pools: &mut Pools) {
        self.streams
            .retain(|&stream| !pools.remove_empty_stream_pools(stream));
        self.limit = 2 * self.streams.len();
    }
}

impl CachingAllocator {
    /// See [`crate::allocator::Allocator::release_stream`]. While the context of a private pool is
    /// open, the stream waits for a later call.
    pub(super) fn release_stream_pools_of(
        &mut self,
        device: &mut dyn Device,
        stream: StreamId,
    ) -> Result<(), DeviceError> {
        if stream == StreamId::DEFAULT {
            return Ok(());
        }
        self.released_streams.streams.insert(stream);
        if self.pools.is_capturing() {
            return Ok(());
        }
        if_exists(device.synchronize_stream(stream))?;
        self.poll_pending(device)?;
        let many = self.released_streams.streams.len() > self.released_streams.limit.max(FEW);
        let looked_at = if many {
            self.released_streams.streams.iter().copied().collect()
        } else {
            vec![stream]
        };
        for stream in looked_at {
            for stream_pool in self.pools.stream_pools_of(stream) {
                self.release_whole(device, self.pools.free(stream_pool).in_order(&self.blocks))?;
            }
            if self.pools.remove_empty_stream_pools(stream) {
                self.released_streams.streams.remove(&stream);
            }
        }
        if many {
            self.released_streams.limit = 2 * self.released_streams.streams.len();
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests;
