//! The figures that TensorFlow documents.

use std::collections::BTreeMap;

use harness_allocator::allocator::bfc::{BfcAllocator, BfcConfig};
use harness_allocator::allocator::{Allocator, MemoryFraction, OomCause};
use harness_allocator::device::{DevicePtr, StreamId};
use harness_allocator::units::{Bytes, Nanos};
use proptest::prelude::*;

use super::Fixture;

fn fixture(memory: Bytes, config: BfcConfig) -> Fixture<BfcAllocator> {
    Fixture::new(BfcAllocator::new(config), memory)
}

fn default(memory: Bytes) -> Fixture<BfcAllocator> {
    fixture(memory, BfcConfig::default())
}

#[test]
fn sizes_are_multiples_of_256_bytes() {
    let mut fixture = default(Bytes::gib(1));
    for (asked, charged) in [(1, 256), (256, 256), (257, 512), (1000, 1024)] {
        assert_eq!(fixture.alloc(Bytes(asked)).size(), Bytes(charged));
    }
    fixture.close();
}

#[test]
fn regions_double_from_2_mib_until_the_request_fits() {
    let mut fixture = default(Bytes::gib(1));
    for _ in 0..3 {
        fixture.hold(Bytes::mib(2), StreamId::DEFAULT);
    }
    assert_eq!(
        fixture.regions(),
        [2, 4].map(Bytes::mib),
        "the third one is cut from the second region"
    );
    fixture.hold(Bytes::mib(33), StreamId::DEFAULT);
    fixture.hold(Bytes::mib(40), StreamId::DEFAULT);
    fixture.hold(Bytes::mib(65), StreamId::DEFAULT);
    // The next region was 8 MiB: it doubled to 64 for the 33, which counts as the doubling. So the
    // 40 get 64 again, and then 128 is next.
    assert_eq!(fixture.regions(), [2, 4, 64, 64, 128].map(Bytes::mib));
    fixture.close();
}

#[test]
fn a_chunk_is_cut_if_it_is_twice_the_request_or_wastes_128_mib() {
    for (asked, charged) in [
        (Bytes::mib(128), Bytes::mib(128)),
        (
            Bytes(Bytes::mib(128).0 + 256),
            Bytes(Bytes::mib(128).0 + 256),
        ),
        (Bytes(Bytes::mib(384).0), Bytes::mib(384)),
        (Bytes(Bytes::mib(384).0 + 256), Bytes::mib(512)),
    ] {
        let mut fixture = default(Bytes::gib(1));
        let all = fixture.alloc(Bytes::mib(512));
        fixture.free(all);
        assert_eq!(fixture.alloc(asked).size(), charged, "{asked} of 512 MiB");
        fixture.close();
    }
    let mut fixture = default(Bytes::gib(1));
    let all = fixture.alloc(Bytes::mib(2));
    fixture.free(all);
    let most = fixture.alloc(Bytes(Bytes::mib(1).0 + 256));
    assert_eq!(
        most.size(),
        Bytes::mib(2),
        "less than twice the request: allocated whole"
    );
    fixture.close();
}

#[test]
fn a_refused_region_is_tried_again_at_nine_tenths_in_single_precision() {
    let mut fixture = default(Bytes::gib(1));
    for (request, region, calls) in [(40, 46.6562, 4), (45, 46.6562, 4)] {
        let before = fixture.device.calls().malloc;
        fixture.leave(Bytes::mib(50));
        let taken = fixture.alloc(Bytes::mib(request));
        let mebibytes = taken.size().0 as f64 / f64::from(1 << 20);
        assert_eq!(
            (
                format!("{mebibytes:.4}"),
                fixture.device.calls().malloc - before
            ),
            (format!("{region:.4}"), calls),
            "64, 57.6, 51.8 and 46.7 MiB, each time"
        );
        fixture.held.push(taken);
    }
    assert_eq!(
        fixture.allocator.stats().num_alloc_retries,
        0,
        "no region was released for it"
    );
    fixture.close();
}

#[test]
fn a_request_fails_if_the_last_size_above_it_is_refused() {
    let mut fixture = default(Bytes::gib(1));
    fixture.leave(Bytes::mib(12));
    let oom = fixture.oom(Bytes::mib(12));
    assert!(
        matches!(oom.cause, OomCause::Device { free } if free < oom.segment),
        "the driver was never asked for 12 MiB: {oom:?}"
    );
    fixture.close();
}

#[test]
fn without_growth_the_first_region_is_the_whole_limit() {
    let mut fixture = fixture(
        Bytes::gib(1),
        BfcConfig {
            allow_growth: false,
            memory_limit: Some(Bytes::mib(300)),
            ..BfcConfig::default()
        },
    );
    fixture.hold(Bytes(4), StreamId::DEFAULT);
    assert_eq!(fixture.regions(), [Bytes::mib(300)]);
    assert_eq!(
        fixture.oom(Bytes::mib(300)).cause,
        OomCause::Allocator {
            limit: Bytes::mib(300)
        }
    );
    assert_eq!(
        fixture.device.calls().malloc,
        1,
        "the limit refuses without asking the driver"
    );
    fixture.close();
}

#[test]
fn the_last_region_is_what_the_limit_leaves() {
    let mut fixture = default(Bytes::gib(1));
    fixture.allocator.set_memory_fraction(
        &*fixture.device,
        MemoryFraction::new(10.0 / 1024.0).unwrap(),
    );
    for _ in 0..5 {
        fixture.hold(Bytes::mib(2), StreamId::DEFAULT);
    }
    assert_eq!(fixture.regions(), [2, 4, 4].map(Bytes::mib));
    assert_eq!(
        fixture.oom(Bytes(1)).cause,
        OomCause::Fraction {
            limit: Bytes::mib(10)
        }
    );
    fixture.close();
}

/// Regions of 2 + 4 + 8 + 16 + 32 MiB, all free.
fn full_of_small_regions(config: BfcConfig) -> Fixture<BfcAllocator> {
    let mut fixture = fixture(Bytes::mib(64), config);
    let live: Vec<_> = [2, 4, 8, 16, 32]
        .map(|size| fixture.alloc(Bytes::mib(size)))
        .into();
    assert_eq!(fixture.regions(), [2, 4, 8, 16, 32].map(Bytes::mib));
    live.into_iter()
        .for_each(|allocation| fixture.free(allocation));
    fixture
}

#[test]
fn garbage_collection_releases_free_regions_for_a_larger_one() {
    let mut fixture = full_of_small_regions(BfcConfig::default());
    assert_eq!(fixture.alloc(Bytes::mib(60)).size(), Bytes::mib(64));
    let stats = fixture.allocator.stats();
    assert_eq!(
        (
            stats.num_device_free,
            stats.num_alloc_retries,
            stats.num_ooms
        ),
        (5, 1, 0)
    );
    fixture.close();
}

#[test]
fn garbage_is_not_collected_if_that_cannot_help() {
    let mut fixture = full_of_small_regions(BfcConfig::default());
    let kept = fixture.alloc(Bytes::mib(8));
    fixture.oom(Bytes::mib(60));
    assert_eq!(fixture.regions().len(), 5, "at most 56 MiB are available");
    fixture.free(kept);
    fixture.close();
}

#[test]
fn without_garbage_collection_regions_are_kept() {
    let mut fixture = full_of_small_regions(BfcConfig {
        garbage_collection: false,
        ..BfcConfig::default()
    });
    let oom = fixture.oom(Bytes::mib(60));
    assert_eq!(
        (oom.reserved, oom.largest_free_block),
        (Bytes::mib(62), Some(Bytes::mib(32)))
    );
    assert_eq!(fixture.regions().len(), 5);
    fixture.allocator.empty_cache(&mut *fixture.device).unwrap();
    assert!(fixture.regions().is_empty(), "`empty_cache` releases it");
    fixture.close();
}

#[test]
fn unused_memory_is_free_for_all_streams() {
    let mut fixture = default(Bytes::gib(1));
    let side = fixture.stream();
    fixture.hold(Bytes::kib(4), StreamId::DEFAULT);
    let calls = fixture.device.calls();
    fixture.hold(Bytes::kib(4), side);
    assert_eq!(fixture.device.calls(), calls, "the device was not called");
    fixture.close();
}

#[test]
fn another_stream_gets_freed_memory_after_an_event_is_complete() {
    let mut fixture = default(Bytes::gib(1));
    let (side, other) = (fixture.stream(), fixture.stream());
    let first = fixture.alloc_on(Bytes::mib(2), side);
    let address = first.ptr();
    fixture.device.busy(side, Nanos::millis(20)).unwrap();
    fixture.free(first);
    let elsewhere = fixture.alloc_on(Bytes::mib(2), other);
    assert_ne!(elsewhere.ptr(), address, "the stream is busy");
    fixture.device.synchronize_stream(side).unwrap();
    let waits = fixture.device.calls().synchronize;
    // The rest of the second region is large enough for one more, and a better fit.
    fixture.hold(Bytes::mib(2), other);
    let next = fixture.alloc_on(Bytes::mib(2), other);
    assert_eq!(
        (next.ptr(), fixture.device.calls().synchronize),
        (address, waits)
    );
    fixture.close();
}

#[test]
fn the_same_stream_reuses_its_memory_immediately() {
    let mut fixture = default(Bytes::gib(1));
    let side = fixture.stream();
    let first = fixture.alloc_on(Bytes::mib(2), side);
    let address = first.ptr();
    fixture.device.busy(side, Nanos::millis(20)).unwrap();
    let calls = fixture.device.calls();
    fixture.free(first);
    assert_eq!(fixture.alloc_on(Bytes::mib(2), side).ptr(), address);
    assert_eq!(fixture.device.calls(), calls);
    fixture.close();
}

#[test]
fn the_host_waits_for_other_streams_before_a_request_fails() {
    let mut fixture = default(Bytes::mib(64));
    let side = fixture.stream();
    let all = fixture.alloc_on(Bytes::mib(64), side);
    fixture.device.busy(side, Nanos::millis(20)).unwrap();
    fixture.free(all);
    fixture.hold(Bytes::mib(64), StreamId::DEFAULT);
    let stats = fixture.allocator.stats();
    assert_eq!(
        (
            stats.num_device_alloc,
            stats.num_sync_all_streams,
            stats.num_alloc_retries
        ),
        (1, 1, 1)
    );
    fixture.close();
}

#[test]
fn memory_of_a_destroyed_stream_is_free_for_all() {
    let mut fixture = default(Bytes::mib(64));
    let side = fixture.stream();
    let [idle, used] = [16, 16].map(|size| fixture.alloc_on(Bytes::mib(size), side));
    let user = fixture.stream();
    fixture.allocator.record_stream(&used, user).unwrap();
    fixture.free(idle);
    fixture.device.destroy_stream(side).unwrap();
    fixture.device.destroy_stream(user).unwrap();
    fixture.free(used);
    assert_eq!(
        fixture.allocator.stats().active.all.current,
        0,
        "there is no other stream to wait for"
    );
    fixture.hold(Bytes::mib(64), StreamId::DEFAULT);
    fixture.close();
}

/// The bin of a size: from 256 B · 2^i to the next; the last bin is open.
fn bin(size: u64) -> u32 {
    (size / 256).ilog2().min(20)
}

#[test]
fn there_are_21_bins_of_doubling_sizes() {
    assert_eq!([256, 511, 512, 1023, 1024].map(bin), [0, 0, 1, 1, 2]);
    assert_eq!(
        [Bytes::mib(256).0 - 1, Bytes::mib(256).0, Bytes::gib(70).0].map(bin),
        [19, 20, 20]
    );
}

/// TensorFlow's search, bin by bin.
fn bins_give(free: &[(DevicePtr, Bytes)], size: u64) -> Option<(DevicePtr, Bytes)> {
    let mut bins: BTreeMap<u32, Vec<(Bytes, DevicePtr)>> = BTreeMap::new();
    for &(address, chunk) in free {
        bins.entry(bin(chunk.0)).or_default().push((chunk, address));
    }
    bins.values_mut().for_each(|bin| bin.sort_unstable());
    let searched = bins.range(bin(size)..).flat_map(|(_, bin)| bin);
    searched
        .copied()
        .find(|(chunk, _)| chunk.0 >= size)
        .map(|(chunk, address)| (address, chunk))
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// One stream, as TensorFlow assumes. Each request gets the chunk that the bins give, cut by
    /// the rule, or a region of the next size.
    #[test]
    fn every_request_is_served_as_in_tensorflow(
        program in prop::collection::vec(
            (any::<bool>(), 8_u32..27, 0.5..1.0_f64, any::<prop::sample::Index>()), 1..120
        )
    ) {
        let total = Bytes::gib(1);
        let mut fixture = default(total);
        let mut live = Vec::new();
        let mut next_region = Bytes::mib(2).0;
        for (frees, log, part, which) in program {
            if frees && !live.is_empty() {
                let allocation = live.swap_remove(which.index(live.len()));
                fixture.free(allocation);
                continue;
            }
            let size = ((f64::from(1_u32 << log) * part) as u64).next_multiple_of(256);
            let reserved = fixture.regions().iter().copied().sum::<Bytes>();
            let free = fixture.free_for(StreamId::DEFAULT);
            let expected = bins_give(&free, size);
            let calls = fixture.device.calls();
            let Ok(allocation) = fixture.try_alloc(Bytes(size), StreamId::DEFAULT) else {
                prop_assert!(expected.is_none() && Bytes(size) > total - reserved);
                // The tests above cover the releases and attempts of a failing request.
                break;
            };
            let chunk = match expected {
                Some((address, chunk)) => {
                    prop_assert_eq!((allocation.ptr(), fixture.device.calls()), (address, calls));
                    chunk.0
                }
                None if reserved + Bytes(size) > total => break,
                None => {
                    let doubled =
                        (0..).map(|n| next_region << n).find(|&region| region >= size).unwrap();
                    let region = doubled.min((total - reserved).0);
                    next_region = if doubled == next_region { doubled * 2 } else { doubled };
                    let made = fixture.allocator.segment_at(allocation.ptr()).unwrap();
                    prop_assert_eq!((made.size.0, made.address), (region, allocation.ptr()));
                    region
                }
            };
            let cut = chunk >= 2 * size || chunk - size >= 128 << 20;
            prop_assert_eq!(allocation.size().0, if cut { size } else { chunk });
            live.push(allocation);
        }
        fixture.close();
    }
}
