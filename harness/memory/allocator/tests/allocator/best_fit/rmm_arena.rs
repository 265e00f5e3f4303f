//! The rules of RMM's arena: superblocks, and when the host waits.

use harness_allocator::allocator::rmm_arena::{RmmArena, RmmArenaConfig};
use harness_allocator::allocator::{Allocation, Allocator as _, MemoryFraction, OomCause};
use harness_allocator::device::StreamId;
use harness_allocator::units::Bytes;

use super::Fixture;

fn fixture(arena_size: Option<Bytes>) -> Fixture<RmmArena> {
    Fixture::new(RmmArena::new(RmmArenaConfig { arena_size }), Bytes::mib(64))
}

/// The distance between the starts of two allocations.
fn distance(from: &Allocation, to: &Allocation) -> Bytes {
    Bytes(to.ptr().0 - from.ptr().0)
}

#[test]
fn half_of_the_free_memory_is_one_region_that_never_grows() {
    let mut fixture = fixture(None);
    let first = fixture.alloc(Bytes(1));
    assert_eq!(first.size(), Bytes(256));
    let limit = Bytes::mib(32);
    assert_eq!(
        fixture.oom(limit).cause,
        OomCause::Allocator { limit },
        "the device has as much free"
    );
    assert_eq!(fixture.regions(), [limit]);
    fixture.free(first);
    fixture.close();
}

#[test]
fn a_failed_request_names_the_limit_that_refused_it_and_no_call_of_the_driver() {
    let mut fixture = fixture(None);
    let fraction = |part| MemoryFraction::new(part).expect("a part of the device");
    (fixture.allocator).set_memory_fraction(&*fixture.device, fraction(0.25));
    let oom = fixture.oom(Bytes::mib(20));
    let limit = Bytes::mib(16);
    assert_eq!(oom.cause, OomCause::Fraction { limit });
    fixture.hold(Bytes::mib(1), StreamId::DEFAULT);
    (fixture.allocator).set_memory_fraction(&*fixture.device, fraction(0.125));
    let oom = fixture.oom(Bytes::mib(20));
    assert_eq!(
        oom.to_string(),
        "out of memory: 20 MiB requested (20 MiB needed), the allocator's own limit is 16 MiB; \
         1 MiB allocated, 16 MiB reserved, so 15 MiB reserved but unallocated, in pieces of at \
         most 15 MiB for this stream and size"
    );
    fixture.close();
}

#[test]
fn small_requests_of_two_streams_lie_in_two_superblocks() {
    let mut fixture = fixture(None);
    let side = fixture.stream();
    let first = fixture.alloc(Bytes(1));
    let other = fixture.alloc_on(Bytes(1), side);
    let next = fixture.alloc(Bytes(1));
    let large = fixture.alloc_on(Bytes::mib(5), side);
    assert_eq!(
        [&other, &next, &large].map(|allocation| distance(&first, allocation)),
        [Bytes::mib(1), Bytes(256), Bytes::mib(2)]
    );
    for allocation in [first, other, next, large] {
        fixture.free(allocation);
    }
    fixture.close();
}

#[test]
fn a_stream_keeps_its_free_superblocks_until_a_request_fails() {
    let mut fixture = fixture(Some(Bytes::mib(4)));
    let side = fixture.stream();
    let blocks = [1, 1].map(|size| fixture.alloc_on(Bytes::mib(size), side));
    let start = blocks[0].ptr();
    blocks.into_iter().for_each(|block| fixture.free(block));
    let before = fixture.device.calls().synchronize;
    let beside = fixture.alloc(Bytes::mib(2));
    assert_eq!(
        (beside.ptr(), fixture.device.calls().synchronize),
        (start.offset(Bytes::mib(2)), before)
    );
    let of_side = fixture.alloc(Bytes::mib(2));
    assert_eq!(
        (of_side.ptr(), fixture.device.calls().synchronize),
        (start, before + 1),
        "the request failed, and the host waited for the device"
    );
    fixture.free(beside);
    fixture.free(of_side);
    fixture.close();
}

#[test]
fn the_host_waits_for_the_stream_of_a_large_free_and_after_a_failure_of_any_free() {
    let mut fixture = fixture(Some(Bytes::mib(8)));
    let mut waits_of_free = |size: Bytes, fails_before: bool| {
        let allocation = fixture.alloc_on(size, StreamId::DEFAULT);
        if fails_before {
            fixture.oom(Bytes::mib(9));
        }
        let before = fixture.device.calls().synchronize;
        fixture.free(allocation);
        fixture.device.calls().synchronize - before
    };
    let (small, large) = (Bytes::mib(1), Bytes::mib(1) + Bytes(1));
    assert_eq!(
        [
            waits_of_free(small, false),
            waits_of_free(large, false),
            waits_of_free(small, true),
            waits_of_free(large, true)
        ],
        [0, 1, 1, 1]
    );
    fixture.close();
}
