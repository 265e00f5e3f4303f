use proptest::prelude::*;

use super::*;
use crate::allocator::{Allocator, PrivatePools};
use crate::device::sim::{SimConfig, SimDevice};
use crate::device::{Device, StreamId};
use crate::stats::BlockInfo;

/// A step of a program: a free and an allocation.
#[derive(Clone, Debug)]
struct Step {
    free: Option<prop::sample::Index>,
    size: u64,
    stream: u32,
    private: bool,
}

fn a_step() -> impl Strategy<Value = Step> {
    let size = prop_oneof![1_u64..4096, 1_u64 << 19..3 << 20, 9_u64 << 20..40 << 20];
    (
        any::<Option<prop::sample::Index>>(),
        size,
        0..2_u32,
        any::<bool>(),
    )
        .prop_map(|(free, size, stream, private)| Step {
            free,
            size,
            stream,
            private,
        })
}

fn run(
    steps: &[Step],
    allocator: &mut CachingAllocator,
    device: &mut SimDevice,
    live: &mut Vec<Allocation>,
) {
    for step in steps {
        if let Some(free) = step.free.filter(|_| !live.is_empty()) {
            let freed = live.remove(free.index(live.len()));
            allocator.free(device, freed).expect("it is live");
        }
        let pool = step.private.then_some(PrivatePoolId(3));
        pool.into_iter()
            .for_each(|pool| allocator.begin(pool).expect("no pool is open"));
        live.extend(allocator.allocate(
            device,
            Request::new(Bytes(step.size)).on(StreamId(step.stream)),
        ));
        pool.into_iter()
            .for_each(|pool| allocator.end(pool).expect("it is open"));
    }
    live.sort_by_key(Allocation::ptr);
}

/// Clears the requested size of free blocks. Memory that is mapped again keeps its last figure, but
/// snapshots do not contain unmapped memory.
fn without_past_requests(mut segments: Vec<SegmentInfo>) -> Vec<SegmentInfo> {
    let blocks = segments.iter_mut().flat_map(|segment| &mut segment.blocks);
    blocks
        .filter(|block| block.state == BlockState::Inactive)
        .for_each(|block| block.requested = Bytes::ZERO);
    segments
}

proptest! {
    #[test]
    fn a_restored_allocator_behaves_like_the_original(
        expandable in any::<bool>(),
        before in prop::collection::vec(a_step(), 0..60),
        after in prop::collection::vec(a_step(), 0..60),
    ) {
        let config = Config { expandable_segments: expandable, ..Config::default() };
        let mut device = SimDevice::new(SimConfig::replay(Bytes::mib(400)));
        device.create_stream().expect("it can be made");
        let (mut allocator, mut live) = (CachingAllocator::new(config.clone()), Vec::new());
        run(&before, &mut allocator, &mut device, &mut live);
        let (segments, reservations) = (allocator.snapshot(), allocator.reservations());
        // Snapshots do not contain an expandable segment without memory, which a refused request
        // leaves.
        let has_memory = |range: &MemoryRange| {
            segments.iter().any(|segment| {
                (range.start.0..range.start.0 + range.len.0).contains(&segment.address.0)
            })
        };
        prop_assume!(reservations.iter().all(has_memory));
        let (mut restored, mut restored_live) =
            CachingAllocator::restore(config, &segments, &reservations)
                .expect("an allocator had this state");
        prop_assert_eq!(restored.snapshot(), segments);
        let current = |stats: crate::stats::MemoryStats| {
            [
                stats.allocated_bytes,
                stats.reserved_bytes,
                stats.requested_bytes,
                stats.inactive_split_bytes,
                stats.segment,
                stats.active,
            ]
            .map(|stat| [stat.all.current, stat.small_pool.current, stat.large_pool.current])
        };
        prop_assert_eq!(current(restored.stats()), current(allocator.stats()));
        let mut same_device = device.clone();
        run(&after, &mut allocator, &mut device, &mut live);
        run(&after, &mut restored, &mut same_device, &mut restored_live);
        prop_assert_eq!(
            without_past_requests(restored.snapshot()),
            without_past_requests(allocator.snapshot())
        );
        prop_assert_eq!(current(restored.stats()), current(allocator.stats()));
        let addresses = |live: &[Allocation]| live.iter().map(Allocation::ptr).collect::<Vec<_>>();
        prop_assert_eq!(addresses(&restored_live), addresses(&live));
    }
}

#[test]
fn a_large_piece_of_a_state_with_other_settings_is_not_released_as_a_segment() {
    let mut device = SimDevice::new(SimConfig::replay(Bytes::mib(120)));
    let mut allocator = CachingAllocator::default();
    let mut allocate = |mib: u64| allocator.allocate(&mut device, Request::new(Bytes::mib(mib)));
    let whole = allocate(100).expect("it fits");
    allocator.free(&mut device, whole).expect("it is live");
    let mut allocate = |mib: u64| allocator.allocate(&mut device, Request::new(Bytes::mib(mib)));
    let (piece, _kept) = (
        allocate(40).expect("it fits"),
        allocate(40).expect("it fits"),
    );
    allocator.free(&mut device, piece).expect("it is live");
    let config = Config {
        max_split_size: Some(Bytes::mib(32)),
        ..Config::default()
    };
    let (mut restored, live) = CachingAllocator::restore(config, &allocator.snapshot(), &[])
        .expect("an allocator had this state");
    assert!(
        restored
            .allocate(&mut device, Request::new(Bytes::mib(50)))
            .is_err_and(|error| error.is_out_of_memory())
    );
    assert_eq!(
        (live.len(), restored.stats().reserved_bytes.all.current),
        (1, 100 << 20)
    );
}

#[test]
fn an_impossible_state_is_refused() {
    let block = |address, size, state| BlockInfo {
        address: DevicePtr(address),
        size: Bytes(size),
        stream: StreamId::DEFAULT,
        requested: Bytes(size),
        state,
    };
    let segment = |address, size, blocks: &[BlockInfo]| SegmentInfo {
        address: DevicePtr(address),
        size: Bytes(size),
        stream: Some(StreamId::DEFAULT),
        pool: PoolKind::Small,
        private_pool: None,
        expandable: false,
        blocks: blocks.to_vec(),
    };
    let refusal = |segments: &[SegmentInfo]| {
        CachingAllocator::restore(Config::default(), segments, &[]).expect_err("no such state")
    };
    let (free, live, pending) = (
        BlockState::Inactive,
        BlockState::Allocated,
        BlockState::PendingFree,
    );
    let (at, segment_at) = (DevicePtr(4608), DevicePtr(4096));
    assert_eq!(
        refusal(&[segment(4096, 1024, &[block(4096, 512, live)])]),
        RestoreError::BlocksDoNotTile {
            segment: segment_at,
            at
        }
    );
    let halves = |first, second| {
        segment(
            4096,
            1024,
            &[block(4096, 512, first), block(4608, 512, second)],
        )
    };
    assert_eq!(
        refusal(&[halves(free, free)]),
        RestoreError::FreeNeighbours { at }
    );
    assert_eq!(
        refusal(&[halves(free, pending)]),
        RestoreError::PendingFree { at }
    );
    assert_eq!(
        refusal(&[halves(free, live), halves(free, live)]),
        RestoreError::SegmentsOverlap { at: segment_at }
    );
    let expandable = SegmentInfo {
        expandable: true,
        ..halves(free, live)
    };
    assert_eq!(
        refusal(&[expandable]),
        RestoreError::NotReserved { at: segment_at }
    );
    let shared = SegmentInfo {
        stream: None,
        ..halves(free, live)
    };
    assert_eq!(
        refusal(&[shared]),
        RestoreError::NoStream { at: segment_at }
    );
}
