//! RMM's rules: the order of lists, growth, and what is released.

use harness_allocator::allocator::rmm_pool::{RmmPool, RmmPoolConfig};
use harness_allocator::allocator::{Allocator, OomCause};
use harness_allocator::device::{StreamId, Tag};
use harness_allocator::units::{Bytes, Nanos};
use proptest::prelude::*;

use super::Fixture;

fn fixture(memory: Bytes, config: RmmPoolConfig) -> Fixture<RmmPool> {
    Fixture::new(RmmPool::new(config), memory)
}

/// A pool with this initial size.
fn started_with(initial: Bytes) -> Fixture<RmmPool> {
    fixture(
        Bytes::gib(1),
        RmmPoolConfig {
            initial_pool_size: Some(initial),
            ..RmmPoolConfig::default()
        },
    )
}

#[test]
fn the_initial_pool_is_half_of_the_free_memory() {
    let mut fixture = fixture(Bytes::gib(1), RmmPoolConfig::default());
    fixture.leave(Bytes::mib(600));
    assert_eq!(fixture.alloc(Bytes(1)).size(), Bytes(256));
    assert_eq!(fixture.regions(), [Bytes::mib(300)]);
    fixture.close();
}

#[test]
fn a_block_is_always_cut_to_the_request() {
    let mut fixture = started_with(Bytes::mib(2));
    let first = fixture.alloc(Bytes(Bytes::mib(2).0 - 256));
    assert_eq!(first.size(), Bytes(Bytes::mib(2).0 - 256));
    assert_eq!(
        fixture.alloc(Bytes(7)).ptr(),
        first.ptr().offset(first.size()),
        "the last 256 B of the pool"
    );
    fixture.close();
}

#[test]
fn the_pool_grows_half_way_to_its_maximum_or_by_a_larger_request() {
    let mut fixture = fixture(
        Bytes::gib(1),
        RmmPoolConfig {
            initial_pool_size: Some(Bytes::mib(100)),
            maximum_pool_size: Some(Bytes::mib(900)),
        },
    );
    fixture.hold(Bytes::mib(101), StreamId::DEFAULT);
    fixture.hold(Bytes::mib(299), StreamId::DEFAULT);
    assert_eq!(
        fixture.regions(),
        [100, 400].map(Bytes::mib),
        "half of the remaining 800 MiB"
    );
    fixture.hold(Bytes::mib(300), StreamId::DEFAULT);
    assert_eq!(
        fixture.regions(),
        [100, 400, 300].map(Bytes::mib),
        "half of the distance would be 200"
    );
    assert_eq!(
        fixture.oom(Bytes::mib(201)).cause,
        OomCause::Allocator {
            limit: Bytes::mib(900)
        }
    );
    fixture.close();
}

#[test]
fn refused_growth_is_halved_down_to_the_request() {
    let mut fixture = fixture(
        Bytes::gib(1),
        RmmPoolConfig {
            initial_pool_size: Some(Bytes::ZERO),
            maximum_pool_size: Some(Bytes::gib(1)),
        },
    );
    fixture.leave(Bytes::mib(150));
    fixture.hold(Bytes::mib(90), StreamId::DEFAULT);
    assert_eq!(
        (fixture.regions(), fixture.device.calls().malloc),
        (vec![Bytes::mib(128)], 3),
        "512, 256 and 128 MiB"
    );
    fixture.leave(Bytes::mib(20));
    let oom = fixture.oom(Bytes::mib(39));
    assert_eq!(
        (oom.cause, oom.largest_free_block),
        (
            OomCause::Device {
                free: Bytes::mib(20)
            },
            Some(Bytes::mib(38))
        )
    );
    fixture.close();
}

#[test]
fn a_free_records_one_event_and_a_hit_calls_nothing() {
    let mut fixture = started_with(Bytes::mib(64));
    let first = fixture.alloc(Bytes::mib(8));
    for _ in 0..3 {
        let before = fixture.device.calls();
        let next = fixture.alloc(Bytes::mib(4));
        assert_eq!(fixture.device.calls(), before);
        fixture.free(next);
        let after = fixture.device.calls();
        assert_eq!(
            (after.event_record, after.synchronize, after.event_query),
            (before.event_record + 1, 0, 0)
        );
    }
    assert_eq!(fixture.device.leaks().events, 1, "one event per stream");
    fixture.free(first);
    fixture.close();
}

#[test]
fn a_block_of_another_stream_is_taken_after_its_event() {
    let mut fixture = started_with(Bytes::mib(64));
    let (side, other) = (fixture.stream(), fixture.stream());
    let all = fixture.alloc_on(Bytes::mib(64), side);
    let address = all.ptr();
    fixture.device.busy(side, Nanos::millis(20)).unwrap();
    fixture.device.fill(side, all.range(), Tag(1)).unwrap();
    fixture.free(all);
    let before = fixture.device.calls();
    let taken = fixture.alloc_on(Bytes::mib(24), other);
    assert_eq!(
        (taken.ptr(), fixture.device.calls()),
        (address, before),
        "the host neither waits nor polls"
    );
    assert_eq!(
        fixture.free_for(side),
        [(address.offset(Bytes::mib(24)), Bytes::mib(40))]
    );
    fixture.device.fill(other, taken.range(), Tag(2)).unwrap();
    fixture.device.verify(other, taken.range(), Tag(2)).unwrap();
    fixture.close();
}

#[test]
fn lists_are_merged_until_a_block_fits() {
    let mut fixture = started_with(Bytes::mib(64));
    let (one, two) = (fixture.stream(), fixture.stream());
    let [first, second] = [one, two].map(|stream| fixture.alloc_on(Bytes::mib(32), stream));
    let address = first.ptr();
    fixture.free(first);
    fixture.free(second);
    assert_eq!(
        fixture.blocks().len(),
        2,
        "free for two streams, so not merged"
    );
    assert_eq!(fixture.alloc(Bytes::mib(64)).ptr(), address);
    assert_eq!(fixture.regions(), [Bytes::mib(64)]);
    fixture.close();
}

#[test]
fn a_third_stream_is_ordered_after_the_first_one_too() {
    let mut fixture = started_with(Bytes::mib(48));
    let [one, two, three] = [0; 3].map(|_| fixture.stream());
    let second = fixture.alloc_on(Bytes::mib(16), two);
    let first = fixture.alloc_on(Bytes::mib(32), one);
    fixture.free(second);
    fixture.device.busy(one, Nanos::millis(50)).unwrap();
    fixture.device.fill(one, first.range(), Tag(1)).unwrap();
    let last_of_first = first.ptr().offset(Bytes::mib(24));
    fixture.free(first);
    // Stream two takes over the block of stream one and leaves 8 MiB of it unused. Stream three
    // takes those from stream two.
    fixture.hold(Bytes::mib(40), two);
    let third = fixture.alloc_on(Bytes::mib(8), three);
    assert_eq!(third.ptr(), last_of_first);
    fixture.device.fill(three, third.range(), Tag(3)).unwrap();
    fixture.device.verify(three, third.range(), Tag(3)).unwrap();
    fixture.close();
}

#[test]
fn only_as_many_free_regions_are_released_as_the_maximum_requires() {
    let mut fixture = fixture(
        Bytes::gib(1),
        RmmPoolConfig {
            initial_pool_size: Some(Bytes::mib(100)),
            maximum_pool_size: Some(Bytes::mib(300)),
        },
    );
    let live = [100, 100, 100].map(|size| fixture.alloc(Bytes::mib(size)));
    assert_eq!(fixture.regions(), [100, 100, 100].map(Bytes::mib));
    live.into_iter()
        .for_each(|allocation| fixture.free(allocation));
    assert_eq!(fixture.alloc(Bytes::mib(150)).size(), Bytes::mib(150));
    assert_eq!(fixture.regions().len(), 2, "two of the three are enough");
    let stats = fixture.allocator.stats();
    assert_eq!(
        (
            stats.num_device_free,
            stats.num_alloc_retries,
            stats.num_ooms
        ),
        (2, 1, 0)
    );
    fixture.close();
}

#[test]
fn without_a_maximum_the_pool_doubles_and_releases_nothing() {
    let mut fixture = started_with(Bytes::mib(128));
    let first = fixture.alloc(Bytes::mib(128));
    fixture.free(first);
    fixture.hold(Bytes::mib(129), StreamId::DEFAULT);
    fixture.hold(Bytes::mib(130), StreamId::DEFAULT);
    assert_eq!(fixture.regions(), [128, 129, 257].map(Bytes::mib));
    fixture.leave(Bytes::mib(64));
    assert_eq!(
        fixture.oom(Bytes::mib(160)).cause,
        OomCause::Device {
            free: Bytes::mib(64)
        }
    );
    assert_eq!(fixture.regions().len(), 3, "the first one is free");
    fixture.close();
}

#[test]
fn the_pool_exceeds_its_maximum_by_less_than_256_bytes_and_then_releases_nothing() {
    let mut fixture = fixture(
        Bytes::gib(1),
        RmmPoolConfig {
            initial_pool_size: Some(Bytes::ZERO),
            maximum_pool_size: Some(Bytes(1280)),
        },
    );
    fixture.hold(Bytes(256), StreamId::DEFAULT);
    fixture.hold(Bytes(512), StreamId::DEFAULT);
    fixture.hold(Bytes(256), StreamId::DEFAULT);
    let last = fixture.alloc(Bytes(256));
    assert_eq!(
        fixture.regions(),
        [640, 512, 256].map(Bytes),
        "128 B of the first region are too few"
    );
    fixture.free(last);
    assert_eq!(
        fixture.oom(Bytes(512)).cause,
        OomCause::Allocator { limit: Bytes(1280) }
    );
    assert_eq!(fixture.regions().len(), 3);
    fixture.close();
}

#[test]
fn a_shared_block_is_free_immediately_and_its_stream_waits_for_the_others() {
    let mut fixture = started_with(Bytes::mib(64));
    let side = fixture.stream();
    let shared = fixture.alloc(Bytes::mib(64));
    let address = shared.ptr();
    fixture.allocator.record_stream(&shared, side).unwrap();
    fixture.device.busy(side, Nanos::millis(20)).unwrap();
    fixture.device.fill(side, shared.range(), Tag(1)).unwrap();
    fixture.free(shared);
    assert_eq!(fixture.allocator.stats().active.all.current, 0);
    let next = fixture.alloc(Bytes::mib(64));
    assert_eq!(
        (next.ptr(), fixture.device.calls().synchronize),
        (address, 0)
    );
    fixture
        .device
        .fill(StreamId::DEFAULT, next.range(), Tag(2))
        .unwrap();
    fixture
        .device
        .verify(StreamId::DEFAULT, next.range(), Tag(2))
        .unwrap();
    fixture.close();
}

#[test]
fn memory_of_a_destroyed_stream_can_be_freed_and_reused() {
    let mut fixture = started_with(Bytes::mib(64));
    let (side, user) = (fixture.stream(), fixture.stream());
    let all = fixture.alloc_on(Bytes::mib(64), side);
    fixture.allocator.record_stream(&all, user).unwrap();
    fixture.device.destroy_stream(side).unwrap();
    fixture.device.busy(user, Nanos::millis(20)).unwrap();
    fixture.device.fill(user, all.range(), Tag(1)).unwrap();
    fixture.free(all);
    let next = fixture.alloc(Bytes::mib(64));
    fixture
        .device
        .fill(StreamId::DEFAULT, next.range(), Tag(2))
        .unwrap();
    fixture
        .device
        .verify(StreamId::DEFAULT, next.range(), Tag(2))
        .unwrap();
    fixture.close();
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// Each request gets the best fit of its own list, or else that of the first other list with
    /// one. If even merging does not help, it gets a region of the next size.
    #[test]
    fn every_request_is_served_as_in_rmm(
        program in prop::collection::vec(
            (any::<bool>(), 8_u32..27, 0.5..1.0_f64, 0_usize..3, any::<prop::sample::Index>()),
            1..120
        )
    ) {
        let maximum = Bytes::mib(900);
        let mut fixture = fixture(
            Bytes::gib(1),
            RmmPoolConfig {
                initial_pool_size: Some(Bytes::mib(1)),
                maximum_pool_size: Some(maximum),
            },
        );
        let streams = [StreamId::DEFAULT, fixture.stream(), fixture.stream()];
        for stream in streams {
            let first = fixture.alloc_on(Bytes(256), stream);
            fixture.free(first);
        }
        let mut live = Vec::new();
        for (frees, log, part, stream, which) in program {
            if frees && !live.is_empty() {
                let allocation = live.swap_remove(which.index(live.len()));
                fixture.free(allocation);
                continue;
            }
            let stream = streams[stream];
            let size = Bytes(((f64::from(1_u32 << log) * part) as u64).next_multiple_of(256));
            let best = |of| {
                fixture
                    .free_for(of)
                    .into_iter()
                    .filter(|&(_, chunk)| chunk >= size)
                    .min_by_key(|&(address, chunk)| (chunk, address))
            };
            let others = streams.into_iter().filter(|&other| other != stream);
            let expected = best(stream).or_else(|| others.into_iter().find_map(best));
            let (regions, reserved) =
                (fixture.regions().len(), fixture.regions().iter().copied().sum::<Bytes>());
            let Ok(allocation) = fixture.try_alloc(size, stream) else {
                prop_assert!(expected.is_none());
                continue;
            };
            prop_assert_eq!(allocation.size(), size);
            if let Some((address, _)) = expected {
                prop_assert_eq!(allocation.ptr(), address);
            } else if fixture.regions().len() == regions + 1 {
                let made = fixture.allocator.segment_at(allocation.ptr()).unwrap();
                let half_way =
                    Bytes((maximum - reserved).checked_round_up(Bytes(256)).unwrap().0 / 2);
                prop_assert_eq!((made.address, made.size), (allocation.ptr(), size.max(half_way)));
            }
            live.push(allocation);
        }
        fixture.close();
    }
}
