//! The rules of CuPy's memory pool.

use harness_allocator::allocator::OomCause;
use harness_allocator::allocator::cupy_pool::{CupyPool, CupyPoolConfig};
use harness_allocator::device::StreamId;
use harness_allocator::units::Bytes;

use super::Fixture;

fn fixture(memory: Bytes, limit: Option<Bytes>) -> Fixture<CupyPool> {
    Fixture::new(CupyPool::new(CupyPoolConfig { limit }), memory)
}

#[test]
fn a_miss_allocates_exactly_the_rounded_request_from_the_driver() {
    let mut fixture = fixture(Bytes::mib(64), None);
    fixture.hold(Bytes(1), StreamId::DEFAULT);
    fixture.hold(Bytes(1_000), StreamId::DEFAULT);
    fixture.hold(Bytes(3_000_001), StreamId::DEFAULT);
    assert_eq!(
        fixture.regions(),
        [Bytes(512), Bytes(1_024), Bytes(3_000_320)]
    );
    fixture.close();
}

#[test]
fn a_free_chunk_is_cut_to_the_request_for_its_own_stream_only() {
    let mut fixture = fixture(Bytes::mib(64), None);
    let side = fixture.stream();
    let first = fixture.alloc(Bytes::mib(10));
    let address = first.ptr();
    fixture.free(first);
    let other = fixture.alloc_on(Bytes::mib(1), side);
    assert_ne!(other.ptr(), address);
    let own = fixture.alloc(Bytes::mib(1));
    assert_eq!((own.ptr(), own.size()), (address, Bytes::mib(1)));
    assert_eq!(
        fixture.free_for(StreamId::DEFAULT),
        [(address.offset(Bytes::mib(1)), Bytes::mib(9))]
    );
    fixture.close();
}

#[test]
fn a_chosen_chunk_is_taken_if_it_is_one_of_the_best_fits() {
    let mut fixture = fixture(Bytes::mib(64), None);
    let [low, high] = [Bytes::mib(2); 2].map(|size| fixture.alloc(size));
    let larger = fixture.alloc(Bytes::mib(4));
    let [first, second, third] = [low.ptr(), high.ptr(), larger.ptr()];
    [low, high, larger]
        .into_iter()
        .for_each(|allocation| fixture.free(allocation));
    fixture.allocator.choose(third);
    let taken = fixture.alloc(Bytes::mib(2));
    assert_eq!(
        taken.ptr(),
        first.min(second),
        "the larger one is no best fit"
    );
    fixture.free(taken);
    fixture.allocator.choose(first.max(second));
    assert_eq!(fixture.alloc(Bytes::mib(2)).ptr(), first.max(second));
    fixture.close();
}

#[test]
fn the_limit_releases_free_regions_of_all_streams_unless_the_request_exceeds_it() {
    let mut fixture = fixture(Bytes::mib(64), Some(Bytes::mib(16)));
    let side = fixture.stream();
    let cached = fixture.alloc_on(Bytes::mib(10), side);
    fixture.free(cached);
    let limit = Bytes::mib(16);
    assert_eq!(
        fixture.oom(Bytes::mib(17)).cause,
        OomCause::Allocator { limit }
    );
    assert_eq!(fixture.regions(), [Bytes::mib(10)], "nothing is released");
    fixture.hold(Bytes::mib(7), StreamId::DEFAULT);
    assert_eq!(fixture.regions(), [Bytes::mib(7)]);
    assert!(matches!(
        fixture.oom(Bytes::mib(10)).cause,
        OomCause::Allocator { .. }
    ));
    fixture.close();
}

#[test]
fn the_driver_is_asked_three_times_before_a_request_fails() {
    let mut fixture = fixture(Bytes::mib(64), None);
    fixture.hold(Bytes::mib(40), StreamId::DEFAULT);
    let before = fixture.device.calls();
    fixture.oom(Bytes::mib(40));
    let calls = fixture.device.calls();
    assert_eq!(
        (
            calls.malloc - before.malloc,
            calls.malloc_failures - before.malloc_failures
        ),
        (3, 3)
    );
    fixture.close();
}

#[test]
fn a_part_of_a_region_in_use_keeps_the_whole_region() {
    let mut fixture = fixture(Bytes::mib(64), None);
    let whole = fixture.alloc(Bytes::mib(40));
    fixture.free(whole);
    fixture.hold(Bytes::mib(1), StreamId::DEFAULT);
    let side = fixture.stream();
    assert!(fixture.try_alloc(Bytes::mib(30), side).is_err());
    fixture.close();
}
