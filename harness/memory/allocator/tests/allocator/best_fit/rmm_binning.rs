//! The rules of RMM's bins: what they take, the order of their blocks, and when they fail.

use harness_allocator::allocator::Allocator as _;
use harness_allocator::allocator::rmm_binning::{RmmBinning, RmmBinningConfig};
use harness_allocator::allocator::rmm_pool::RmmPoolConfig;
use harness_allocator::device::StreamId;
use harness_allocator::units::Bytes;

use super::Fixture;

/// Bins with these exponents on a pool of this size, which cannot grow.
fn fixture(exponents: [u32; 2], pool: Bytes) -> Fixture<RmmBinning> {
    let [min_size_exponent, max_size_exponent] = exponents;
    let config = RmmBinningConfig {
        pool: RmmPoolConfig {
            initial_pool_size: Some(pool),
            maximum_pool_size: Some(pool),
        },
        min_size_exponent,
        max_size_exponent,
    };
    Fixture::new(RmmBinning::new(config), Bytes::gib(1))
}

#[test]
fn each_bin_takes_128_blocks_at_the_start_and_hands_out_whole_ones() {
    let mut fixture = fixture([8, 10], Bytes::mib(1));
    let small = fixture.alloc(Bytes(1));
    let next = fixture.alloc(Bytes(257));
    let beside = fixture.alloc(Bytes(1025));
    assert_eq!(
        [&small, &next, &beside].map(|allocation| allocation.size()),
        [256, 512, 1280].map(Bytes)
    );
    assert_eq!(next.ptr(), small.ptr().offset(Bytes(128 * 256)));
    let of_bins = Bytes(128 * (256 + 512 + 1024));
    assert_eq!(beside.ptr(), small.ptr().offset(of_bins));
    assert_eq!(fixture.blocks().len(), 3 * 128 + 2);
    for allocation in [small, next, beside] {
        fixture.free(allocation);
    }
    fixture.close();
}

#[test]
fn blocks_of_a_bin_leave_in_the_order_of_their_frees() {
    let mut fixture = fixture([8, 8], Bytes::kib(32));
    let mut blocks: Vec<_> = (0..128).map(|_| fixture.alloc(Bytes(1))).collect();
    let freed = [90, 3, 40].map(|position| {
        let block = blocks.swap_remove(position);
        let address = block.ptr();
        fixture.free(block);
        address
    });
    let again = freed.map(|_| fixture.alloc(Bytes(256)));
    assert_eq!(again.each_ref().map(|block| block.ptr()), freed);
    blocks
        .into_iter()
        .chain(again)
        .for_each(|block| fixture.free(block));
    fixture.close();
}

#[test]
fn a_bin_without_128_more_blocks_fails_although_the_pool_has_memory() {
    let mut fixture = fixture([20, 20], Bytes::mib(130));
    for _ in 0..128 {
        fixture.hold(Bytes::mib(1), StreamId::DEFAULT);
    }
    let oom = fixture.oom(Bytes(1));
    assert_eq!(
        (oom.segment, oom.largest_free_block),
        (Bytes::mib(128), Some(Bytes::mib(2)))
    );
    fixture.hold(Bytes::mib(2), StreamId::DEFAULT);
    fixture.close();
}

#[test]
fn a_pool_without_room_for_the_bins_serves_all_requests_and_says_that_rmm_fails() {
    let mut fixture = Fixture::new(RmmBinning::default(), Bytes::mib(64));
    let small = fixture.alloc(Bytes(1));
    assert_eq!(
        (small.size(), fixture.regions()),
        (Bytes(256), vec![Bytes::mib(32)])
    );
    let why = fixture.allocator.construction_failure().expect("no bins");
    assert!(
        why.starts_with("the bins need 992 MiB at the start"),
        "{why}"
    );
    fixture.free(small);
    fixture.close();
}
