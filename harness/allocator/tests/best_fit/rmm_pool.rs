//! RMM's figures.

use harness_allocator::allocator::rmm_pool::{Config, RmmPool};
use harness_allocator::allocator::{Allocator, OomCause};
use harness_allocator::device::{StreamId, Tag};
use harness_allocator::units::{Bytes, Nanos};
use proptest::prelude::*;

use super::Bench;

fn bench(memory: Bytes, config: Config) -> Bench<RmmPool> {
    Bench::new(RmmPool::new(config), memory)
}

/// A pool with this much from the start.
fn started_with(initial: Bytes) -> Bench<RmmPool> {
    bench(Bytes::gib(1), Config { initial_pool_size: Some(initial), ..Config::default() })
}

#[test]
fn the_initial_pool_is_half_of_what_is_free_at_the_first_request() {
    let mut bench = bench(Bytes::gib(1), Config::default());
    bench.leave(Bytes::mib(600));
    assert_eq!(bench.alloc(Bytes(1)).size(), Bytes(256));
    assert_eq!(bench.regions(), [Bytes::mib(300)]);
    bench.close();
}

#[test]
fn a_block_is_cut_to_the_request_whatever_is_left() {
    let mut bench = started_with(Bytes::mib(2));
    let first = bench.alloc(Bytes(Bytes::mib(2).0 - 256));
    assert_eq!(first.size(), Bytes(Bytes::mib(2).0 - 256));
    assert_eq!(bench.alloc(Bytes(7)).ptr(), first.ptr().offset(first.size()), "the last 256 B of the pool");
    bench.close();
}

#[test]
fn the_pool_grows_half_way_to_its_maximum_or_by_a_larger_request() {
    let mut bench = bench(Bytes::gib(1), Config { initial_pool_size: Some(Bytes::mib(100)), maximum_pool_size: Some(Bytes::mib(900)) });
    bench.hold(Bytes::mib(101), StreamId::DEFAULT);
    bench.hold(Bytes::mib(299), StreamId::DEFAULT);
    assert_eq!(bench.regions(), [100, 400].map(Bytes::mib), "half of the 800 MiB that were left");
    bench.hold(Bytes::mib(300), StreamId::DEFAULT);
    assert_eq!(bench.regions(), [100, 400, 300].map(Bytes::mib), "half-way would have been 200");
    assert_eq!(bench.oom(Bytes::mib(201)).cause, OomCause::Fraction { limit: Bytes::mib(900) });
    bench.close();
}

#[test]
fn growth_that_the_driver_refuses_is_halved_down_to_the_request() {
    let mut bench = started_with(Bytes::ZERO);
    bench.leave(Bytes::mib(150));
    bench.hold(Bytes::mib(90), StreamId::DEFAULT);
    assert_eq!((bench.regions(), bench.device.calls().malloc), (vec![Bytes::mib(128)], 3), "512, 256 and 128 MiB");
    bench.leave(Bytes::mib(20));
    let oom = bench.oom(Bytes::mib(39));
    assert_eq!((oom.cause, oom.largest_free_block), (OomCause::Device { free: Bytes::mib(20) }, Some(Bytes::mib(38))));
    bench.close();
}

#[test]
fn a_free_records_one_event_and_a_hit_calls_nothing() {
    let mut bench = started_with(Bytes::mib(64));
    let first = bench.alloc(Bytes::mib(8));
    for _ in 0..3 {
        let before = bench.device.calls();
        let next = bench.alloc(Bytes::mib(4));
        assert_eq!(bench.device.calls(), before);
        bench.free(next);
        let after = bench.device.calls();
        assert_eq!((after.event_record, after.synchronize, after.event_query), (before.event_record + 1, 0, 0));
    }
    assert_eq!(bench.device.leaks().events, 1, "one event for each stream");
    bench.free(first);
    bench.close();
}

#[test]
fn another_streams_block_is_taken_behind_its_event_and_the_rest_stays_with_it() {
    let mut bench = started_with(Bytes::mib(64));
    let (side, other) = (bench.stream(), bench.stream());
    let all = bench.alloc_on(Bytes::mib(64), side);
    let address = all.ptr();
    bench.device.busy(side, Nanos::millis(20)).unwrap();
    bench.device.fill(side, all.range(), Tag(1)).unwrap();
    bench.free(all);
    let before = bench.device.calls();
    let taken = bench.alloc_on(Bytes::mib(24), other);
    assert_eq!((taken.ptr(), bench.device.calls()), (address, before), "the host neither waits nor asks");
    assert_eq!(bench.free_for(side), [(address.offset(Bytes::mib(24)), Bytes::mib(40))]);
    bench.device.fill(other, taken.range(), Tag(2)).unwrap();
    bench.device.verify(other, taken.range(), Tag(2)).unwrap();
    bench.close();
}

#[test]
fn lists_are_merged_until_a_block_fits() {
    let mut bench = started_with(Bytes::mib(64));
    let (one, two) = (bench.stream(), bench.stream());
    let [first, second] = [one, two].map(|stream| bench.alloc_on(Bytes::mib(32), stream));
    let address = first.ptr();
    bench.free(first);
    bench.free(second);
    assert_eq!(bench.blocks().len(), 2, "free for two streams, and so apart");
    assert_eq!(bench.alloc(Bytes::mib(64)).ptr(), address);
    assert_eq!(bench.regions(), [Bytes::mib(64)]);
    bench.close();
}

#[test]
fn a_third_stream_is_ordered_behind_the_first_one_too() {
    let mut bench = started_with(Bytes::mib(48));
    let [one, two, three] = [0; 3].map(|_| bench.stream());
    let second = bench.alloc_on(Bytes::mib(16), two);
    let first = bench.alloc_on(Bytes::mib(32), one);
    bench.free(second);
    bench.device.busy(one, Nanos::millis(50)).unwrap();
    bench.device.fill(one, first.range(), Tag(1)).unwrap();
    let last_of_first = first.ptr().offset(Bytes::mib(24));
    bench.free(first);
    // Stream two takes over what stream one had, and leaves 8 MiB of it unused: stream three takes those from stream two.
    bench.hold(Bytes::mib(40), two);
    let third = bench.alloc_on(Bytes::mib(8), three);
    assert_eq!(third.ptr(), last_of_first);
    bench.device.fill(three, third.range(), Tag(3)).unwrap();
    bench.device.verify(three, third.range(), Tag(3)).unwrap();
    bench.close();
}

#[test]
fn wholly_free_blocks_go_back_where_the_maximum_is_in_the_way_and_no_more_of_them_than_it_takes() {
    let mut bench = bench(Bytes::gib(1), Config { initial_pool_size: Some(Bytes::mib(100)), maximum_pool_size: Some(Bytes::mib(300)) });
    let live = [100, 100, 100].map(|size| bench.alloc(Bytes::mib(size)));
    assert_eq!(bench.regions(), [100, 100, 100].map(Bytes::mib));
    live.into_iter().for_each(|allocation| bench.free(allocation));
    assert_eq!(bench.alloc(Bytes::mib(150)).size(), Bytes::mib(150));
    assert_eq!(bench.regions().len(), 2, "two of the three made room");
    let stats = bench.allocator.stats();
    assert_eq!((stats.num_device_free, stats.num_alloc_retries, stats.num_ooms), (2, 1, 0));
    bench.close();
}

#[test]
fn wholly_free_blocks_go_back_where_the_device_has_no_room() {
    let mut bench = bench(Bytes::gib(1), Config { initial_pool_size: Some(Bytes::mib(128)), ..Config::default() });
    let first = bench.alloc(Bytes::mib(128));
    bench.free(first);
    bench.leave(Bytes::mib(64));
    bench.hold(Bytes::mib(160), StreamId::DEFAULT);
    assert_eq!(bench.regions(), [Bytes::mib(160)]);
    bench.close();
}

#[test]
fn a_block_that_others_use_is_free_at_once_and_its_own_stream_waits_for_them() {
    let mut bench = started_with(Bytes::mib(64));
    let side = bench.stream();
    let shared = bench.alloc(Bytes::mib(64));
    let address = shared.ptr();
    bench.allocator.record_stream(&shared, side).unwrap();
    bench.device.busy(side, Nanos::millis(20)).unwrap();
    bench.device.fill(side, shared.range(), Tag(1)).unwrap();
    bench.free(shared);
    assert_eq!(bench.allocator.stats().active.all.current, 0);
    let next = bench.alloc(Bytes::mib(64));
    assert_eq!((next.ptr(), bench.device.calls().synchronize), (address, 0));
    bench.device.fill(StreamId::DEFAULT, next.range(), Tag(2)).unwrap();
    bench.device.verify(StreamId::DEFAULT, next.range(), Tag(2)).unwrap();
    bench.close();
}

#[test]
fn memory_of_a_stream_that_is_no_more_can_be_freed_and_taken() {
    let mut bench = started_with(Bytes::mib(64));
    let (side, user) = (bench.stream(), bench.stream());
    let all = bench.alloc_on(Bytes::mib(64), side);
    bench.allocator.record_stream(&all, user).unwrap();
    bench.device.destroy_stream(side).unwrap();
    bench.device.busy(user, Nanos::millis(20)).unwrap();
    bench.device.fill(user, all.range(), Tag(1)).unwrap();
    bench.free(all);
    let next = bench.alloc(Bytes::mib(64));
    bench.device.fill(StreamId::DEFAULT, next.range(), Tag(2)).unwrap();
    bench.device.verify(StreamId::DEFAULT, next.range(), Tag(2)).unwrap();
    bench.close();
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// Each request gets the best fit of its own list; else that of the first other list that has one; else, without any merge that
    /// helps, a region of the size that is next.
    #[test]
    fn every_request_is_served_from_where_rmm_would_serve_it(
        program in prop::collection::vec((any::<bool>(), 8_u32..27, 0.5..1.0_f64, 0_usize..3, any::<prop::sample::Index>()), 1..120)
    ) {
        let maximum = Bytes::mib(900);
        let mut bench = bench(Bytes::gib(1), Config { initial_pool_size: Some(Bytes::mib(1)), maximum_pool_size: Some(maximum) });
        let streams = [StreamId::DEFAULT, bench.stream(), bench.stream()];
        let start = bench.alloc(Bytes(256));
        bench.free(start);
        let mut live = Vec::new();
        for (frees, log, part, stream, which) in program {
            if frees && !live.is_empty() {
                let allocation = live.swap_remove(which.index(live.len()));
                bench.free(allocation);
                continue;
            }
            let stream = streams[stream];
            let size = Bytes(((f64::from(1_u32 << log) * part) as u64).next_multiple_of(256));
            let best = |of| bench.free_for(of).into_iter().filter(|&(_, chunk)| chunk >= size).min_by_key(|&(address, chunk)| (chunk, address));
            let others = streams.into_iter().filter(|&other| other != stream);
            let expected = best(stream).or_else(|| others.into_iter().find_map(best));
            let (regions, reserved) = (bench.regions().len(), bench.regions().iter().copied().sum::<Bytes>());
            let Ok(allocation) = bench.try_alloc(size, stream) else {
                prop_assert!(expected.is_none());
                continue;
            };
            prop_assert_eq!(allocation.size(), size);
            if let Some((address, _)) = expected {
                prop_assert_eq!(allocation.ptr(), address);
            } else if bench.regions().len() == regions + 1 {
                let made = bench.allocator.segment_at(allocation.ptr()).unwrap();
                let half_way = Bytes((maximum - reserved).0 / 2).checked_round_up(Bytes(256)).unwrap();
                prop_assert_eq!((made.address, made.size), (allocation.ptr(), size.max(half_way)));
            }
            live.push(allocation);
        }
        bench.close();
    }
}
