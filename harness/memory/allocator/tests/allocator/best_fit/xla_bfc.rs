//! The rules in which XLA's allocator differs from TensorFlow's.

use harness_allocator::allocator::Allocation;
use harness_allocator::allocator::bfc::BfcAllocator;
use harness_allocator::allocator::xla_bfc::XlaBfcConfig;
use harness_allocator::device::StreamId;
use harness_allocator::units::Bytes;

use super::Fixture;

const MEMORY: Bytes = Bytes::mib(64);

fn fixture(config: XlaBfcConfig) -> Fixture<BfcAllocator> {
    Fixture::new(BfcAllocator::xla(config), MEMORY)
}

/// The bytes from an allocation to the end of the memory at `end`.
fn below(end: u64, allocation: &Allocation) -> Bytes {
    Bytes(end - allocation.ptr().0)
}

#[test]
fn three_quarters_of_the_memory_are_one_region_that_is_filled_from_its_end() {
    let mut fixture = fixture(XlaBfcConfig::default());
    let first = fixture.alloc(Bytes::mib(1));
    let end = first.range().end().0;
    assert_eq!(fixture.regions(), [Bytes::mib(48)]);
    let second = fixture.alloc(Bytes::mib(3));
    assert_eq!(below(end, &second), Bytes::mib(4));
    fixture.oom(Bytes::mib(45));
    fixture.hold(Bytes::mib(44), StreamId::DEFAULT);
    fixture.free(first);
    fixture.free(second);
    fixture.close();
}

#[test]
fn the_highest_of_equal_chunks_comes_first_and_the_gap_last() {
    let mut fixture = fixture(XlaBfcConfig::default());
    let blocks = [1, 2, 1, 2, 1, 40].map(|size| fixture.alloc(Bytes::mib(size)));
    let end = blocks[0].range().end().0;
    let [a, first, b, second, c, rest] = blocks;
    fixture.free(first);
    fixture.free(second);
    let highest = fixture.alloc(Bytes::mib(2));
    assert_eq!(below(end, &highest), Bytes::mib(3));
    // The gap has 1 MiB too, but the chunk of 2 MiB is cut.
    let half = fixture.alloc(Bytes::mib(1));
    assert_eq!(below(end, &half), Bytes::mib(5));
    for block in [a, b, c, rest, highest, half] {
        fixture.free(block);
    }
    fixture.close();
}

#[test]
fn without_preallocation_regions_double_and_are_filled_from_their_start() {
    let mut fixture = fixture(XlaBfcConfig {
        preallocate: false,
        ..XlaBfcConfig::default()
    });
    let first = fixture.alloc(Bytes::mib(1));
    let second = fixture.alloc(Bytes(1));
    assert_eq!(second.ptr(), first.range().end());
    fixture.hold(Bytes::mib(3), StreamId::DEFAULT);
    assert_eq!(fixture.regions(), [2, 4].map(Bytes::mib));
    fixture.free(first);
    fixture.free(second);
    fixture.close();
}
