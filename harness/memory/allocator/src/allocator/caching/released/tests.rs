use super::*;
use crate::allocator::{Allocator, Request, caching::Config};
use crate::device::TestDevice;
use crate::device::sim::{SimConfig, SimDevice};
use crate::units::Bytes;

fn short_lived_streams(config: Config, keep: bool) {
    // The simulated device never reuses addresses, and each stream reserves as many as the device
    // has memory.
    let memory = if config.expandable_segments {
        Bytes::mib(512)
    } else {
        Bytes::gib(80)
    };
    let mut device = SimDevice::new(SimConfig::replay(memory));
    let mut allocator = CachingAllocator::new(config);
    let common = allocator
        .allocate(&mut device, Request::new(Bytes::mib(2)))
        .expect("there is room");
    let mut kept = Vec::new();
    for _ in 0..10_000 {
        let stream = device.create_stream().expect("streams can be made");
        let small = allocator
            .allocate(&mut device, Request::new(Bytes(1000)).on(stream))
            .expect("there is room");
        allocator
            .record_stream(&common, stream)
            .expect("it is live");
        if keep {
            kept.push(small);
        } else {
            allocator.free(&mut device, small).expect("it is live");
        }
        allocator
            .release_stream(&mut device, stream)
            .expect("the device is sound");
        device.destroy_stream(stream).expect("it is there");
    }
    kept.into_iter()
        .for_each(|small| allocator.free(&mut device, small).expect("it is live"));
    allocator.free(&mut device, common).expect("it is live");
    allocator
        .empty_cache(&mut device)
        .expect("the device is sound");
    assert_eq!(allocator.stats().reserved_bytes.all.current, 0);
    assert_eq!(allocator.released_streams.streams.len(), 0);
    let stream_pools = allocator.pools.stream_pools();
    assert_eq!(stream_pools.in_use, 1, "the default stream's");
    assert!(
        keep || stream_pools.made <= 4,
        "the stream pools of one short-lived stream serve the next: {stream_pools:?}"
    );
    assert!(
        device.calls().memory_calls() <= 20_010,
        "one driver allocation and one free per stream"
    );
    allocator.close(&mut device).expect("the device is sound");
}

#[test]
fn ten_thousand_short_lived_streams_leak_nothing() {
    short_lived_streams(Config::default(), false);
    short_lived_streams(
        Config {
            expandable_segments: true,
            ..Config::default()
        },
        false,
    );
}

#[test]
fn streams_released_with_live_memory_are_forgotten_once_that_is_freed() {
    short_lived_streams(Config::default(), true);
}
