//! Released streams: their free memory returns to the driver, and other streams reuse their stream pools.

use std::collections::BTreeSet;

use super::CachingAllocator;
use super::pools::Pools;
use crate::allocator::pending::if_exists;
use crate::device::{Device, DeviceError, StreamId};

/// All released streams with live memory are checked again if there are more than this.
const FEW: usize = 64;

/// Streams that were released while they had live memory.
#[derive(Clone, Debug, Default)]
pub(super) struct ReleasedStreams {
    streams: BTreeSet<StreamId>,
    /// All of them are checked again above this number: twice as many as remained after the last check. So a release costs
    /// constant time on average.
    limit: usize,
}

impl ReleasedStreams {
    /// Forgets the streams without segments.
    pub(super) fn forget_empty(&mut self, pools: &mut Pools) {
        self.streams.retain(|&stream| !pools.remove_empty_stream_pools(stream));
        self.limit = 2 * self.streams.len();
    }
}

impl CachingAllocator {
    /// See [`crate::allocator::Allocator::release_stream`]. While the context of a private pool is open, the stream waits for a
    /// later call.
    pub(super) fn release_stream_pools_of(&mut self, device: &mut dyn Device, stream: StreamId) -> Result<(), DeviceError> {
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
mod tests {
    use super::*;
    use crate::allocator::caching::Config;
    use crate::allocator::{Allocator, Request};
    use crate::device::TestDevice;
    use crate::device::sim::{SimConfig, SimDevice};
    use crate::units::Bytes;

    fn short_lived_streams(config: Config, keep: bool) {
        // The simulated device never reuses addresses, and each stream reserves as many as the device has memory.
        let memory = if config.expandable_segments { Bytes::mib(512) } else { Bytes::gib(80) };
        let mut device = SimDevice::new(SimConfig::replay(memory));
        let mut allocator = CachingAllocator::new(config);
        let common = allocator.allocate(&mut device, Request::new(Bytes::mib(2))).expect("there is room");
        let mut kept = Vec::new();
        for _ in 0..10_000 {
            let stream = device.create_stream().expect("streams can be made");
            let small = allocator.allocate(&mut device, Request::new(Bytes(1000)).on(stream)).expect("there is room");
            allocator.record_stream(&common, stream).expect("it is live");
            if keep {
                kept.push(small);
            } else {
                allocator.free(&mut device, small).expect("it is live");
            }
            allocator.release_stream(&mut device, stream).expect("the device is sound");
            device.destroy_stream(stream).expect("it is there");
        }
        kept.into_iter().for_each(|small| allocator.free(&mut device, small).expect("it is live"));
        allocator.free(&mut device, common).expect("it is live");
        allocator.empty_cache(&mut device).expect("the device is sound");
        assert_eq!(allocator.stats().reserved_bytes.all.current, 0);
        assert_eq!(allocator.released_streams.streams.len(), 0);
        let stream_pools = allocator.pools.stream_pools();
        assert_eq!(stream_pools.in_use, 1, "the default stream's");
        assert!(keep || stream_pools.made <= 4, "the stream pools of one short-lived stream serve the next: {stream_pools:?}");
        assert!(device.calls().memory_calls() <= 20_010, "one driver allocation and one free per stream");
        allocator.close(&mut device).expect("the device is sound");
    }

    #[test]
    fn ten_thousand_short_lived_streams_leak_nothing() {
        short_lived_streams(Config::default(), false);
        short_lived_streams(Config { expandable_segments: true, ..Config::default() }, false);
    }

    #[test]
    fn streams_released_with_live_memory_are_forgotten_once_that_is_freed() {
        short_lived_streams(Config::default(), true);
    }
}
