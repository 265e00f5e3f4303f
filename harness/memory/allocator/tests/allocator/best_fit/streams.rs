//! Random programs on several streams. The device refuses every access that is not ordered after
//! the one before it.

use harness_allocator::allocator::ort_arena::OrtArenaConfig;
use harness_allocator::allocator::xla_bfc::XlaBfcConfig;
use harness_allocator::allocator::{
    Allocation, Allocator, bfc::BfcAllocator, cupy_pool::CupyPool, rmm_arena::RmmArena,
    rmm_binning::RmmBinning, rmm_binning::RmmBinningConfig, rmm_pool::RmmPool,
};
use harness_allocator::device::{StreamId, Tag};
use harness_allocator::stats::BlockState;
use harness_allocator::units::{Bytes, Nanos};
use proptest::{prelude::*, sample::Index};

use super::Fixture;

#[derive(Clone, Debug)]
enum Op {
    Alloc(usize, u64),
    Free(Index),
    /// Another stream writes an allocation after its own stream. The allocator records the use, and
    /// the memory is freed during that work.
    UseOn(Index, usize),
    Verify(Index),
    Busy(usize),
    Synchronize(usize),
    EmptyCache,
    Leave(u64),
}

fn op() -> impl Strategy<Value = Op> {
    let stream = || 0_usize..4;
    prop_oneof![
        8 => (stream(), 1_u64..12_000_000).prop_map(|(stream, size)| Op::Alloc(stream, size)),
        6 => any::<Index>().prop_map(Op::Free),
        2 => (any::<Index>(), stream()).prop_map(|(which, stream)| Op::UseOn(which, stream)),
        1 => any::<Index>().prop_map(Op::Verify),
        3 => stream().prop_map(Op::Busy),
        1 => stream().prop_map(Op::Synchronize),
        1 => Just(Op::EmptyCache),
        1 => (0_u64..64).prop_map(Op::Leave),
    ]
}

/// Runs a program. The device reports a race as an error, and so does memory that was overwritten.
fn run(allocator: impl Allocator, program: &[Op]) -> Result<(), TestCaseError> {
    let mut fixture = Fixture::new(allocator, Bytes::mib(64));
    let streams = [
        StreamId::DEFAULT,
        fixture.stream(),
        fixture.stream(),
        fixture.stream(),
    ];
    let mut live: Vec<(Allocation, Tag)> = Vec::new();
    for (n, op) in program.iter().enumerate() {
        let tag = Tag(n as u64 + 1);
        match op {
            Op::Alloc(stream, size) => {
                if let Ok(allocation) = fixture.try_alloc(Bytes(*size), streams[*stream]) {
                    fixture
                        .device
                        .fill(streams[*stream], allocation.range(), tag)
                        .map_err(|error| TestCaseError::fail(error.to_string()))?;
                    live.push((allocation, tag));
                }
            }
            Op::Free(which) if !live.is_empty() => {
                let (allocation, _) = live.swap_remove(which.index(live.len()));
                fixture.free(allocation);
            }
            Op::UseOn(which, stream) if !live.is_empty() => {
                let (allocation, _) = live.swap_remove(which.index(live.len()));
                let other = streams[*stream];
                let event = fixture.device.create_event().unwrap();
                fixture
                    .device
                    .record_event(event, allocation.stream())
                    .unwrap();
                fixture.device.wait_event(other, event).unwrap();
                fixture.device.destroy_event(event).unwrap();
                fixture.device.busy(other, Nanos::micros(500)).unwrap();
                fixture.device.fill(other, allocation.range(), tag).unwrap();
                fixture.allocator.record_stream(&allocation, other).unwrap();
                fixture.free(allocation);
            }
            Op::Verify(which) if !live.is_empty() => {
                let (allocation, tag) = &live[which.index(live.len())];
                fixture
                    .device
                    .verify(allocation.stream(), allocation.range(), *tag)
                    .map_err(|error| TestCaseError::fail(error.to_string()))?;
            }
            Op::Busy(stream) => fixture
                .device
                .busy(streams[*stream], Nanos::micros(500))
                .unwrap(),
            Op::Synchronize(stream) => fixture.device.synchronize_stream(streams[*stream]).unwrap(),
            Op::EmptyCache => fixture.allocator.empty_cache(&mut *fixture.device).unwrap(),
            Op::Leave(mib) => {
                let memory = fixture.device.memory().unwrap();
                let most = memory.free + memory.external_memory;
                fixture
                    .device
                    .set_external_memory(most.saturating_sub(Bytes::mib(*mib)))
                    .unwrap();
            }
            _ => {}
        }
        check_structure(&fixture, live.len())?;
    }
    for (allocation, tag) in live {
        fixture
            .device
            .verify(allocation.stream(), allocation.range(), tag)
            .map_err(|error| TestCaseError::fail(error.to_string()))?;
        fixture.free(allocation);
    }
    fixture.allocator.empty_cache(&mut *fixture.device).unwrap();
    prop_assert!(fixture.regions().is_empty());
    fixture.close();
    Ok(())
}

/// Checks that blocks tile regions, free neighbors of one stream are merged, and the counters are
/// the sums.
fn check_structure<A: Allocator>(fixture: &Fixture<A>, live: usize) -> Result<(), TestCaseError> {
    let merges = fixture.allocator.merges_free_neighbours();
    let (mut active, mut inactive_split) = (0, 0);
    for region in fixture.allocator.snapshot() {
        let mut next = region.address;
        for block in &region.blocks {
            prop_assert_eq!((block.address, next.0 % 256), (next, 0));
            next = next.offset(block.size);
            match block.state {
                BlockState::Inactive if region.blocks.len() > 1 => inactive_split += block.size.0,
                BlockState::Inactive => {}
                BlockState::Allocated | BlockState::PendingFree => active += block.size.0,
            }
        }
        prop_assert_eq!(next, region.address.offset(region.size));
        let free = |state| state == BlockState::Inactive;
        let unmerged = |pair: &[harness_allocator::stats::BlockInfo]| {
            free(pair[0].state) && free(pair[1].state) && pair[0].stream == pair[1].stream
        };
        prop_assert!(!merges || !region.blocks.windows(2).any(unmerged));
    }
    let stats = fixture.allocator.stats();
    prop_assert_eq!(
        (
            stats.active_bytes.all.current,
            stats.inactive_split_bytes.all.current
        ),
        (active, inactive_split)
    );
    prop_assert_eq!(stats.allocation.all.current, live as u64);
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(256))]

    #[test]
    fn bfc_never_reuses_memory_that_another_stream_uses(
        program in prop::collection::vec(op(), 1..150)
    ) {
        run(BfcAllocator::default(), &program)?;
    }

    #[test]
    fn rmm_pool_never_reuses_memory_that_another_stream_uses(
        program in prop::collection::vec(op(), 1..150)
    ) {
        run(RmmPool::default(), &program)?;
    }

    #[test]
    fn rmm_arena_never_reuses_memory_that_another_stream_uses(
        program in prop::collection::vec(op(), 1..150)
    ) {
        run(RmmArena::default(), &program)?;
    }

    #[test]
    fn rmm_binning_never_reuses_memory_that_another_stream_uses(
        program in prop::collection::vec(op(), 1..150)
    ) {
        // These bins take 24 MiB of 64.
        let config = RmmBinningConfig {
            min_size_exponent: 16,
            max_size_exponent: 17,
            ..RmmBinningConfig::default()
        };
        run(RmmBinning::new(config), &program)?;
    }

    #[test]
    fn ort_arena_never_reuses_memory_that_another_stream_uses(
        program in prop::collection::vec(op(), 1..150)
    ) {
        run(BfcAllocator::onnx_runtime(OrtArenaConfig::default()), &program)?;
    }

    #[test]
    fn xla_bfc_never_reuses_memory_that_another_stream_uses(
        program in prop::collection::vec(op(), 1..150)
    ) {
        run(BfcAllocator::xla(XlaBfcConfig::default()), &program)?;
    }

    #[test]
    fn cupy_pool_never_reuses_memory_that_another_stream_uses(
        program in prop::collection::vec(op(), 1..150)
    ) {
        run(CupyPool::default(), &program)?;
    }
}
