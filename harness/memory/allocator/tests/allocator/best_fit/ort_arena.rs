//! The rules in which ONNX Runtime's arena differs from TensorFlow's allocator.

use harness_allocator::allocator::Allocator as _;
use harness_allocator::allocator::bfc::BfcAllocator;
use harness_allocator::allocator::ort_arena::{ExtendStrategy, OrtArenaConfig};
use harness_allocator::device::StreamId;
use harness_allocator::units::Bytes;

use super::Fixture;

fn fixture(memory: Bytes, config: OrtArenaConfig) -> Fixture<BfcAllocator> {
    Fixture::new(BfcAllocator::onnx_runtime(config), memory)
}

#[test]
fn regions_double_from_1_mib_up_to_the_largest_extension() {
    let config = OrtArenaConfig {
        max_power_of_two_extend_bytes: Bytes::mib(4),
        ..OrtArenaConfig::default()
    };
    let mut fixture = fixture(Bytes::gib(1), config);
    for size in [1, 2, 4, 4, 20, 1].map(Bytes::mib) {
        fixture.hold(size, StreamId::DEFAULT);
    }
    assert_eq!(fixture.regions(), [1, 2, 4, 4, 32, 32].map(Bytes::mib));
    fixture.close();
}

#[test]
fn a_region_has_the_size_of_its_request_if_so_configured() {
    let config = OrtArenaConfig {
        arena_extend_strategy: ExtendStrategy::SameAsRequested,
        ..OrtArenaConfig::default()
    };
    let mut fixture = fixture(Bytes::gib(1), config);
    fixture.hold(Bytes(1), StreamId::DEFAULT);
    fixture.hold(Bytes::mib(3), StreamId::DEFAULT);
    assert_eq!(fixture.regions(), [Bytes(256), Bytes::mib(3)]);
    fixture.close();
}

#[test]
fn a_request_fails_although_free_regions_hold_the_memory() {
    let mut fixture = fixture(Bytes::mib(64), OrtArenaConfig::default());
    let side = fixture.alloc(Bytes::mib(30));
    fixture.free(side);
    fixture.oom(Bytes::mib(50));
    assert_eq!(fixture.regions(), [Bytes::mib(32)]);
    fixture.close();
}

#[test]
fn the_region_after_a_shrink_has_the_growth_chunk_size() {
    for (keeps_first_region, expected) in [(false, vec![2]), (true, vec![8, 2])] {
        let config = OrtArenaConfig {
            shrinkage_keeps_first_region: keeps_first_region,
            ..OrtArenaConfig::default()
        };
        let mut fixture = fixture(Bytes::mib(64), config);
        let first = fixture.alloc(Bytes::mib(8));
        let second = fixture.alloc(Bytes::mib(8));
        fixture.free(second);
        fixture.free(first);
        fixture.allocator.empty_cache(&mut *fixture.device).unwrap();
        if keeps_first_region {
            fixture.hold(Bytes::mib(8), StreamId::DEFAULT);
        }
        fixture.hold(Bytes(1), StreamId::DEFAULT);
        let expected: Vec<Bytes> = expected.into_iter().map(Bytes::mib).collect();
        assert_eq!(fixture.regions(), expected);
        fixture.close();
    }
}
