//! TensorFlow's figures.

use std::collections::BTreeMap;

use harness_allocator::allocator::bfc::{BfcAllocator, Config};
use harness_allocator::allocator::{Allocator, MemoryFraction, OomCause};
use harness_allocator::device::{DevicePtr, StreamId};
use harness_allocator::units::{Bytes, Nanos};
use proptest::prelude::*;

use super::Bench;

fn bench(memory: Bytes, config: Config) -> Bench<BfcAllocator> {
    Bench::new(BfcAllocator::new(config), memory)
}

fn default(memory: Bytes) -> Bench<BfcAllocator> {
    bench(memory, Config::default())
}

#[test]
fn sizes_are_multiples_of_256_bytes() {
    let mut bench = default(Bytes::gib(1));
    for (asked, charged) in [(1, 256), (256, 256), (257, 512), (1000, 1024)] {
        assert_eq!(bench.alloc(Bytes(asked)).size(), Bytes(charged));
    }
    bench.close();
}

#[test]
fn regions_double_from_2_mib_on_and_a_larger_request_doubles_until_it_fits() {
    let mut bench = default(Bytes::gib(1));
    for _ in 0..3 {
        bench.hold(Bytes::mib(2), StreamId::DEFAULT);
    }
    assert_eq!(bench.regions(), [2, 4].map(Bytes::mib), "the third one is cut from the second region");
    bench.hold(Bytes::mib(33), StreamId::DEFAULT);
    bench.hold(Bytes::mib(40), StreamId::DEFAULT);
    bench.hold(Bytes::mib(65), StreamId::DEFAULT);
    // 8 was next: doubled to 64 for the 33, which counts as the doubling; so the 40 get 64 again, and then 128 is next.
    assert_eq!(bench.regions(), [2, 4, 64, 64, 128].map(Bytes::mib));
    bench.close();
}

#[test]
fn a_chunk_is_cut_if_it_is_twice_the_request_or_wastes_128_mib() {
    for (asked, charged) in [
        (Bytes::mib(128), Bytes::mib(128)),
        (Bytes(Bytes::mib(128).0 + 256), Bytes(Bytes::mib(128).0 + 256)),
        (Bytes(Bytes::mib(384).0), Bytes::mib(384)),
        (Bytes(Bytes::mib(384).0 + 256), Bytes::mib(512)),
    ] {
        let mut bench = default(Bytes::gib(1));
        let all = bench.alloc(Bytes::mib(512));
        bench.free(all);
        assert_eq!(bench.alloc(asked).size(), charged, "{asked} of 512 MiB");
        bench.close();
    }
    let mut bench = default(Bytes::gib(1));
    let all = bench.alloc(Bytes::mib(2));
    bench.free(all);
    let most = bench.alloc(Bytes(Bytes::mib(1).0 + 256));
    assert_eq!(most.size(), Bytes::mib(2), "less than twice the request: handed out whole");
    bench.close();
}

#[test]
fn the_first_extension_that_fails_tries_nine_tenths_again_and_again() {
    let mut bench = default(Bytes::gib(1));
    bench.leave(Bytes::mib(50));
    let mut expected = Bytes::mib(64);
    while expected > Bytes::mib(50) {
        expected = Bytes(expected.0 / 10 * 9).checked_round_up(Bytes(256)).unwrap();
    }
    let taken = bench.alloc(Bytes::mib(40));
    assert_eq!((bench.regions(), bench.device.calls().malloc), (vec![expected], 4), "64, 57.6, 51.8 and 46.7 MiB");
    assert_eq!(taken.size(), expected);
    assert_eq!(bench.allocator.stats().num_alloc_retries, 0, "nothing had to be given back for it");
    bench.close();
}

#[test]
fn later_extensions_that_fail_try_the_request_itself_and_no_more() {
    let mut bench = default(Bytes::gib(1));
    bench.leave(Bytes::mib(10));
    assert!(matches!(bench.oom(Bytes::mib(12)).cause, OomCause::Device { free } if free == Bytes::mib(10)));
    let before = bench.device.calls().malloc;
    bench.leave(Bytes::mib(12));
    bench.hold(Bytes::mib(12), StreamId::DEFAULT);
    assert_eq!((bench.regions(), bench.device.calls().malloc - before), (vec![Bytes::mib(12)], 2), "16 MiB, then 12 MiB");
    bench.close();
}

#[test]
fn nine_tenths_are_tried_once_even_where_that_found_a_region() {
    let mut bench = default(Bytes::gib(1));
    bench.leave(Bytes::mib(50));
    bench.hold(Bytes::mib(40), StreamId::DEFAULT);
    let before = bench.device.calls().malloc;
    bench.leave(Bytes::mib(50));
    bench.hold(Bytes::mib(45), StreamId::DEFAULT);
    assert_eq!((bench.regions()[1], bench.device.calls().malloc - before), (Bytes::mib(45), 2), "64 MiB, then 45 MiB");
    bench.close();
}

#[test]
fn without_growth_the_first_region_is_the_whole_limit() {
    let mut bench = bench(Bytes::gib(1), Config { allow_growth: false, memory_limit: Some(Bytes::mib(300)), ..Config::default() });
    bench.hold(Bytes(4), StreamId::DEFAULT);
    assert_eq!(bench.regions(), [Bytes::mib(300)]);
    assert_eq!(bench.oom(Bytes::mib(300)).cause, OomCause::Fraction { limit: Bytes::mib(300) });
    assert_eq!(bench.device.calls().malloc, 1, "the limit refuses without asking the driver");
    bench.close();
}

#[test]
fn the_last_region_is_what_the_limit_leaves() {
    let mut bench = default(Bytes::gib(1));
    bench.allocator.set_memory_fraction(&*bench.device, MemoryFraction::new(10.0 / 1024.0).unwrap());
    for _ in 0..5 {
        bench.hold(Bytes::mib(2), StreamId::DEFAULT);
    }
    assert_eq!(bench.regions(), [2, 4, 4].map(Bytes::mib));
    assert_eq!(bench.oom(Bytes(1)).cause, OomCause::Fraction { limit: Bytes::mib(10) });
    bench.close();
}

/// 64 MiB that are free in regions of 2 + 4 + 8 + 16 + 32 MiB, of 64 MiB in all.
fn full_of_small_regions(config: Config) -> Bench<BfcAllocator> {
    let mut bench = bench(Bytes::mib(64), config);
    let live: Vec<_> = [2, 4, 8, 16, 32].map(|size| bench.alloc(Bytes::mib(size))).into();
    assert_eq!(bench.regions(), [2, 4, 8, 16, 32].map(Bytes::mib));
    live.into_iter().for_each(|allocation| bench.free(allocation));
    bench
}

#[test]
fn garbage_collection_gives_free_regions_back_for_a_larger_one() {
    let mut bench = full_of_small_regions(Config::default());
    assert_eq!(bench.alloc(Bytes::mib(60)).size(), Bytes::mib(64));
    let stats = bench.allocator.stats();
    assert_eq!((stats.num_device_free, stats.num_alloc_retries, stats.num_ooms), (5, 1, 0));
    bench.close();
}

#[test]
fn garbage_is_not_collected_where_that_cannot_help() {
    let mut bench = full_of_small_regions(Config::default());
    let kept = bench.alloc(Bytes::mib(8));
    bench.oom(Bytes::mib(60));
    assert_eq!(bench.regions().len(), 5, "56 MiB could be had at most");
    bench.free(kept);
    bench.close();
}

#[test]
fn without_garbage_collection_regions_are_kept_for_good() {
    let mut bench = full_of_small_regions(Config { garbage_collection: false, ..Config::default() });
    let oom = bench.oom(Bytes::mib(60));
    assert_eq!((oom.reserved, oom.largest_free_block), (Bytes::mib(62), Some(Bytes::mib(32))));
    assert_eq!(bench.regions().len(), 5);
    bench.allocator.empty_cache(&mut *bench.device).unwrap();
    assert!(bench.regions().is_empty(), "who asks for it gets it");
    bench.close();
}

#[test]
fn what_nobody_has_used_is_free_for_all_streams() {
    let mut bench = default(Bytes::gib(1));
    let side = bench.stream();
    bench.hold(Bytes::kib(4), StreamId::DEFAULT);
    let calls = bench.device.calls();
    bench.hold(Bytes::kib(4), side);
    assert_eq!(bench.device.calls(), calls, "neither memory nor events were asked for");
    bench.close();
}

#[test]
fn another_stream_gets_freed_memory_once_an_event_has_been_seen_complete() {
    let mut bench = default(Bytes::gib(1));
    let (side, other) = (bench.stream(), bench.stream());
    let first = bench.alloc_on(Bytes::mib(2), side);
    let address = first.ptr();
    bench.device.busy(side, Nanos::millis(20)).unwrap();
    bench.free(first);
    let elsewhere = bench.alloc_on(Bytes::mib(2), other);
    assert_ne!(elsewhere.ptr(), address, "the stream is busy");
    bench.device.synchronize_stream(side).unwrap();
    let waits = bench.device.calls().synchronize;
    // The rest of the second region is large enough for one more, and nearer.
    bench.hold(Bytes::mib(2), other);
    let next = bench.alloc_on(Bytes::mib(2), other);
    assert_eq!((next.ptr(), bench.device.calls().synchronize), (address, waits));
    bench.close();
}

#[test]
fn the_same_stream_gets_its_memory_back_at_once() {
    let mut bench = default(Bytes::gib(1));
    let side = bench.stream();
    let first = bench.alloc_on(Bytes::mib(2), side);
    let address = first.ptr();
    bench.device.busy(side, Nanos::millis(20)).unwrap();
    let calls = bench.device.calls();
    bench.free(first);
    assert_eq!(bench.alloc_on(Bytes::mib(2), side).ptr(), address);
    assert_eq!(bench.device.calls(), calls);
    bench.close();
}

#[test]
fn rather_than_fail_the_host_waits_for_other_streams() {
    let mut bench = default(Bytes::mib(64));
    let side = bench.stream();
    let all = bench.alloc_on(Bytes::mib(64), side);
    bench.device.busy(side, Nanos::millis(20)).unwrap();
    bench.free(all);
    bench.hold(Bytes::mib(64), StreamId::DEFAULT);
    let stats = bench.allocator.stats();
    assert_eq!((stats.num_device_alloc, stats.num_sync_all_streams, stats.num_alloc_retries), (1, 1, 1));
    bench.close();
}

#[test]
fn memory_of_a_stream_that_is_no_more_is_free_for_all() {
    let mut bench = default(Bytes::mib(64));
    let side = bench.stream();
    let [idle, used] = [16, 16].map(|size| bench.alloc_on(Bytes::mib(size), side));
    let user = bench.stream();
    bench.allocator.record_stream(&used, user).unwrap();
    bench.free(idle);
    bench.device.destroy_stream(side).unwrap();
    bench.device.destroy_stream(user).unwrap();
    bench.free(used);
    assert_eq!(bench.allocator.stats().active.all.current, 0, "there is nobody to wait for");
    bench.hold(Bytes::mib(64), StreamId::DEFAULT);
    bench.close();
}

/// The bin of a size: 256 B · 2^i up to the next, the last one open.
fn bin(size: u64) -> u32 {
    (size / 256).ilog2().min(20)
}

#[test]
fn there_are_21_bins_of_doubling_sizes() {
    assert_eq!([256, 511, 512, 1023, 1024].map(bin), [0, 0, 1, 1, 2]);
    assert_eq!([Bytes::mib(256).0 - 1, Bytes::mib(256).0, Bytes::gib(70).0].map(bin), [19, 20, 20]);
}

/// TensorFlow's search, bin by bin.
fn bins_give(free: &[(DevicePtr, Bytes)], size: u64) -> Option<(DevicePtr, Bytes)> {
    let mut bins: BTreeMap<u32, Vec<(Bytes, DevicePtr)>> = BTreeMap::new();
    for &(address, chunk) in free {
        bins.entry(bin(chunk.0)).or_default().push((chunk, address));
    }
    bins.values_mut().for_each(|bin| bin.sort_unstable());
    let searched = bins.range(bin(size)..).flat_map(|(_, bin)| bin);
    searched.copied().find(|(chunk, _)| chunk.0 >= size).map(|(chunk, address)| (address, chunk))
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// One stream, as TensorFlow assumes: each request gets the chunk that the bins give, cut by the rule; or a region of the size that is next.
    #[test]
    fn every_request_gets_what_tensorflow_would_give(
        program in prop::collection::vec((any::<bool>(), 8_u32..27, 0.5..1.0_f64, any::<prop::sample::Index>()), 1..120)
    ) {
        let total = Bytes::gib(1);
        let mut bench = default(total);
        let mut live = Vec::new();
        let mut next_region = Bytes::mib(2).0;
        for (frees, log, part, which) in program {
            if frees && !live.is_empty() {
                let allocation = live.swap_remove(which.index(live.len()));
                bench.free(allocation);
                continue;
            }
            let size = ((f64::from(1_u32 << log) * part) as u64).next_multiple_of(256);
            let reserved = bench.regions().iter().copied().sum::<Bytes>();
            let free = bench.free_for(StreamId::DEFAULT);
            let expected = bins_give(&free, size);
            let calls = bench.device.calls();
            let Ok(allocation) = bench.try_alloc(Bytes(size), StreamId::DEFAULT) else {
                prop_assert!(expected.is_none() && Bytes(size) > total - reserved);
                // What the failing request gave back and tried is told by the tests above.
                break;
            };
            let chunk = match expected {
                Some((address, chunk)) => {
                    prop_assert_eq!((allocation.ptr(), bench.device.calls()), (address, calls));
                    chunk.0
                }
                None if reserved + Bytes(size) > total => break,
                None => {
                    let doubled = (0..).map(|n| next_region << n).find(|&region| region >= size).unwrap();
                    let region = doubled.min((total - reserved).0);
                    next_region = if doubled == next_region { doubled * 2 } else { doubled };
                    let made = bench.allocator.segment_at(allocation.ptr()).unwrap();
                    prop_assert_eq!((made.size.0, made.address), (region, allocation.ptr()));
                    region
                }
            };
            let cut = chunk >= 2 * size || chunk - size >= 128 << 20;
            prop_assert_eq!(allocation.size().0, if cut { size } else { chunk });
            live.push(allocation);
        }
        bench.close();
    }
}
