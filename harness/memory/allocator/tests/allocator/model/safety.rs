//! Cases in which PyTorch corrupts memory or aborts and this allocator stays consistent. Also
//! random programs with expandable segments, private pools, several streams and external memory:
//! nothing overlaps, every counter equals the structure, and all memory is released.
//!
//! The device refuses races and accesses to unmapped memory, so every fill and verify is a check.

use std::collections::BTreeMap;

use harness_allocator::allocator::caching::{CachingAllocator, Config};
use harness_allocator::allocator::{
    Allocation, Allocator, AllocatorError, PrivatePoolId, PrivatePools, Request,
};
use harness_allocator::device::sim::{SimConfig, SimDevice};
use harness_allocator::device::{Device, DeviceError, EventId, Leaks, StreamId, Tag, TestDevice};
use harness_allocator::stats::{BlockState, PoolKind};
use harness_allocator::units::{Bytes, Nanos};
use proptest::prelude::*;

use super::{Op, POOLS, STREAMS, configs, operations};

const POOL: PrivatePoolId = PrivatePoolId(7);

/// An allocator with expandable segments and its device.
struct Fixture {
    device: SimDevice,
    allocator: CachingAllocator,
}

impl Fixture {
    fn new() -> Self {
        Self::with(Bytes::mib(400))
    }

    fn with(memory: Bytes) -> Self {
        let config = Config {
            expandable_segments: true,
            ..Config::default()
        };
        Self {
            device: SimDevice::new(SimConfig::replay(memory)),
            allocator: CachingAllocator::new(config),
        }
    }

    fn allocate(&mut self, mib: u64) -> Allocation {
        self.allocator
            .allocate(&mut self.device, Request::new(Bytes::mib(mib)))
            .expect("there is room")
    }

    fn free(&mut self, allocation: Allocation) {
        self.allocator
            .free(&mut self.device, allocation)
            .expect("it is live");
    }

    fn empty_cache(&mut self) {
        self.allocator
            .empty_cache(&mut self.device)
            .expect("the device works");
    }

    fn reserved(&self) -> Bytes {
        Bytes(self.allocator.stats().reserved_bytes.all.current)
    }

    /// Releases a pool that has the block `live`. The block keeps its contents and its address
    /// range, and all memory is released after it.
    fn release_beside(mut self, live: Allocation, kept: Bytes) {
        let tag = Tag(0x5eed_5eed_5eed_5eed);
        self.device
            .fill(StreamId::DEFAULT, live.range(), tag)
            .expect("it is ours");
        self.allocator
            .release(&mut self.device, POOL)
            .expect("no context is open");
        self.empty_cache();
        assert_eq!(
            self.reserved(),
            kept,
            "only the pages of the live block stay"
        );
        let other = self.allocate(200);
        let (first, second) = (live.range(), other.range());
        assert!(
            first.end() <= second.start || second.end() <= first.start,
            "{first:?} and {second:?} overlap"
        );
        self.device
            .fill(StreamId::DEFAULT, second, Tag(1))
            .expect("it is ours");
        self.device
            .verify(StreamId::DEFAULT, live.range(), tag)
            .expect("the contents are unchanged");
        assert_structure(&self.allocator, &[&live, &other]).expect("all accounts agree");
        self.free(live);
        self.free(other);
        self.empty_cache();
        assert_eq!(
            (self.reserved(), self.allocator.snapshot()),
            (Bytes::ZERO, Vec::new())
        );
        self.allocator
            .close(&mut self.device)
            .expect("the device works");
        assert_eq!(self.device.leaks(), Leaks::default());
    }
}

/// PyTorch counts one segment for the call that mapped 120 MiB, and subtracts one for the range
/// that the release of the pool unmaps. At zero it deletes the pool, and the free of the live block
/// reads freed memory.
#[test]
fn a_released_pool_with_a_live_block_survives_a_partial_unmap() {
    let mut fixture = Fixture::new();
    fixture.allocator.begin(POOL).expect("a new pool");
    let large = fixture.allocate(110);
    let live = fixture.allocate(5);
    fixture.allocator.end(POOL).expect("it is open");
    assert_eq!(
        fixture.allocator.stats().num_device_alloc,
        1,
        "one call has mapped both"
    );
    fixture.free(large);
    fixture.release_beside(live, Bytes::mib(20));
}

/// The same count in the other direction: one call, two unmapped ranges, and PyTorch's assertion
/// `cudaMalloc_count > 0` ends the process.
#[test]
fn two_ranges_mapped_by_one_call_can_be_unmapped() {
    let mut fixture = Fixture::new();
    fixture.allocator.begin(POOL).expect("a new pool");
    let whole = fixture.allocate(120);
    fixture.free(whole);
    let (front, live, back) = (
        fixture.allocate(40),
        fixture.allocate(5),
        fixture.allocate(75),
    );
    fixture.allocator.end(POOL).expect("it is open");
    assert_eq!(
        fixture.allocator.stats().num_device_alloc,
        1,
        "one call has mapped all of it"
    );
    fixture.free(front);
    fixture.free(back);
    fixture.release_beside(live, Bytes::mib(20));
}

/// PyTorch's sum wraps to zero, and it allocates blocks of no bytes that share an address.
#[test]
fn a_size_whose_rounding_exceeds_64_bits_is_too_large() {
    for expandable_segments in [false, true] {
        let mut device = SimDevice::new(SimConfig::replay(Bytes::mib(64)));
        let mut allocator = CachingAllocator::new(Config {
            expandable_segments,
            ..Config::default()
        });
        for size in [u64::MAX, u64::MAX - 511, u64::MAX - (2 << 20) + 2] {
            let answer = allocator.allocate(&mut device, Request::new(Bytes(size)));
            assert!(
                matches!(answer, Err(AllocatorError::TooLarge { requested: Bytes(asked), .. })
                    if asked == size),
                "{size}: {answer:?}"
            );
        }
        assert_eq!(
            (allocator.snapshot(), device.calls()),
            (Vec::new(), Default::default())
        );
    }
}

/// PyTorch requests such pages, and the driver refuses the first one (`cuMemCreate` requires a
/// multiple of the granularity).
#[test]
fn an_unsuitable_page_size_is_refused_at_every_memory_size() {
    let config = Config {
        expandable_segments: true,
        large_segment_size: Bytes::mib(11),
        ..Config::default()
    };
    for memory in [Bytes::gib(1), Bytes::gib(60 << 10)] {
        let mut device = SimDevice::new(SimConfig::replay(memory));
        let mut allocator = CachingAllocator::new(config.clone());
        let unavailable = DeviceError::Unavailable {
            what: "expandable segments with pages of 11 MiB".to_owned(),
            why:
                "this device maps memory in multiples of 2 MiB; set large_segment_size_mb to such \
                 a multiple"
                    .to_owned(),
        };
        assert_eq!(
            allocator.check_device(&mut device),
            Err(unavailable.clone())
        );
        let answer = allocator.allocate(&mut device, Request::new(Bytes::mib(5)));
        assert_eq!(answer, Err(AllocatorError::Device(unavailable)));
        assert_eq!(
            (allocator.snapshot(), device.leaks()),
            (Vec::new(), Leaks::default())
        );
    }
}

#[test]
fn too_few_addresses_for_a_segment_is_out_of_memory() {
    let mut fixture = Fixture::with(Bytes::gib(1000 << 20));
    assert_eq!(fixture.allocator.check_device(&mut fixture.device), Ok(()));
    let answer = fixture
        .allocator
        .allocate(&mut fixture.device, Request::new(Bytes::mib(5)));
    assert!(
        matches!(answer, Err(AllocatorError::OutOfMemory(_))),
        "{answer:?}"
    );
}

#[test]
fn the_missing_pages_of_a_huge_request_are_limited_to_64_bits() {
    const LARGEST: Bytes = Bytes(u64::MAX - (2 << 20) + 1);
    const PAGE: u64 = 20 << 20;
    let mut fixture = Fixture::new();
    // Once without mapped memory, and once with a free page that would be a part of it.
    for cached in [0, 15] {
        if cached > 0 {
            let block = fixture.allocate(cached);
            fixture.free(block);
        }
        let answer = fixture
            .allocator
            .allocate(&mut fixture.device, Request::new(LARGEST));
        let Err(AllocatorError::OutOfMemory(oom)) = answer else {
            panic!("{answer:?}")
        };
        assert_eq!(
            (oom.requested, oom.missing, oom.segment),
            (LARGEST, LARGEST, Bytes(u64::MAX / PAGE * PAGE))
        );
    }
}

#[test]
fn memory_below_one_large_page_serves_small_requests_and_an_emptied_cache() {
    let mut fixture = Fixture::with(Bytes::mib(19));
    fixture.empty_cache();
    let free = fixture.device.free_memory().expect("the device answers");
    let largest = fixture.allocator.largest_request(&fixture.device, free);
    assert_eq!(
        largest,
        PoolKind::LARGEST_SMALL,
        "a large block needs a page of 20 MiB"
    );
    let block = fixture
        .allocator
        .allocate(&mut fixture.device, Request::new(largest))
        .expect("it fits");
    let answer = fixture
        .allocator
        .allocate(&mut fixture.device, Request::new(largest + Bytes(1)));
    assert!(
        matches!(answer, Err(AllocatorError::OutOfMemory(_))),
        "{answer:?}"
    );
    fixture.free(block);
    fixture.empty_cache();
    assert_eq!(fixture.reserved(), Bytes::ZERO);
}

/// The device refuses to unmap memory that may be in use.
#[test]
fn a_retry_waits_for_work_before_it_unmaps_cached_pages() {
    let mut fixture = Fixture::new();
    let stream = fixture.device.create_stream().expect("streams can be made");
    let cached = fixture
        .allocator
        .allocate(
            &mut fixture.device,
            Request::new(Bytes::mib(300)).on(stream),
        )
        .expect("there is room");
    fixture
        .device
        .busy(stream, Nanos::millis(20))
        .expect("the stream is there");
    fixture
        .device
        .fill(stream, cached.range(), Tag(1))
        .expect("it is ours");
    fixture.free(cached);
    let large = fixture.allocate(200);
    let stats = fixture.allocator.stats();
    assert_eq!(
        (stats.num_alloc_retries, stats.num_ooms, fixture.reserved()),
        (1, 0, Bytes::mib(200)),
        "300 MiB were released for it"
    );
    fixture
        .device
        .fill(StreamId::DEFAULT, large.range(), Tag(2))
        .expect("no other stream uses it");
    fixture.free(large);
}

/// The invariants after every operation.
fn assert_structure(
    allocator: &CachingAllocator,
    live: &[&Allocation],
) -> Result<(), TestCaseError> {
    let (segments, stats) = (allocator.snapshot(), allocator.stats());
    let mut blocks = BTreeMap::new();
    let mut end = 0;
    for segment in &segments {
        prop_assert!(
            segment.address.0 >= end,
            "segments overlap at {}",
            segment.address
        );
        end = segment.address.0;
        for block in &segment.blocks {
            prop_assert_eq!(
                block.address.0,
                end,
                "a gap or an overlap in the segment at {}",
                segment.address
            );
            end += block.size.0;
            blocks.insert(block.address, (segment.pool, *block));
        }
        prop_assert_eq!(
            end,
            segment.address.0 + segment.size.0,
            "the blocks do not fill the segment at {}",
            segment.address
        );
    }
    for allocation in live.iter().filter(|allocation| !allocation.is_null()) {
        let block = blocks
            .get(&allocation.ptr())
            .map(|(_, block)| (block.state, block.size, block.stream));
        prop_assert_eq!(
            block,
            Some((
                BlockState::Allocated,
                allocation.size(),
                allocation.stream()
            )),
            "at {}",
            allocation.ptr()
        );
    }
    for pool in [PoolKind::Small, PoolKind::Large] {
        let sum = |states: &[BlockState]| -> (u64, u64) {
            let of_pool = blocks
                .values()
                .filter(|(kind, block)| *kind == pool && states.contains(&block.state));
            of_pool.fold((0, 0), |(count, bytes), (_, block)| {
                (count + 1, bytes + block.size.0)
            })
        };
        let now = |stat: &harness_allocator::stats::PooledStat| match pool {
            PoolKind::Small => stat.small_pool.current,
            PoolKind::Large => stat.large_pool.current,
        };
        let (allocated, active) = (
            &[BlockState::Allocated][..],
            &[BlockState::Allocated, BlockState::PendingFree][..],
        );
        prop_assert_eq!(
            (now(&stats.allocation), now(&stats.allocated_bytes)),
            sum(allocated)
        );
        prop_assert_eq!((now(&stats.active), now(&stats.active_bytes)), sum(active));
        let reserved: u64 = segments
            .iter()
            .filter(|segment| segment.pool == pool)
            .map(|segment| segment.size.0)
            .sum();
        prop_assert_eq!(now(&stats.reserved_bytes), reserved);
        prop_assert_eq!(
            (now(&stats.segment), now(&stats.inactive_split)),
            (0, 0),
            "expandable memory has no inactive splits"
        );
    }
    let handed_out = live
        .iter()
        .filter(|allocation| !allocation.is_null())
        .count() as u64;
    prop_assert_eq!(stats.allocation.all.current, handed_out);
    Ok(())
}

/// A program on the allocator alone. As in a correct program, an event orders the uses of a block
/// by two streams.
struct Program {
    device: SimDevice,
    allocator: CachingAllocator,
    event: EventId,
    /// Each with its tag and the stream that wrote it.
    live: Vec<(Allocation, Tag, StreamId)>,
    open: Vec<u32>,
    released: Vec<u32>,
    tags: u64,
}

impl Program {
    fn new(config: Config, capacity: Bytes) -> Result<Self, DeviceError> {
        let mut device = SimDevice::new(SimConfig::replay(capacity));
        for _ in 1..STREAMS {
            device.create_stream()?;
        }
        let event = device.create_event()?;
        let allocator = CachingAllocator::new(config);
        Ok(Self {
            device,
            allocator,
            event,
            live: Vec::new(),
            open: Vec::new(),
            released: Vec::new(),
            tags: 0,
        })
    }

    fn fill(&mut self, allocation: &Allocation, stream: StreamId) -> Result<Tag, DeviceError> {
        self.tags += 1;
        let tag = Tag(self.tags);
        if !allocation.is_null() {
            self.device.fill(stream, allocation.range(), tag)?;
        }
        Ok(tag)
    }

    fn apply(&mut self, op: &Op) -> Result<(), DeviceError> {
        match op {
            &Op::Allocate { size, stream } => {
                let stream = StreamId(stream);
                match self
                    .allocator
                    .allocate(&mut self.device, Request::new(Bytes(size)).on(stream))
                {
                    Ok(allocation) => {
                        let tag = self.fill(&allocation, stream)?;
                        self.live.push((allocation, tag, stream));
                    }
                    Err(AllocatorError::Device(error)) => return Err(error),
                    Err(AllocatorError::OutOfMemory(_) | AllocatorError::TooLarge { .. }) => {}
                }
            }
            Op::Free(index) if !self.live.is_empty() => {
                let (allocation, tag, writer) = self.live.swap_remove(index.index(self.live.len()));
                if !allocation.is_null() {
                    self.device.verify(writer, allocation.range(), tag)?;
                }
                self.allocator.free(&mut self.device, allocation)?;
            }
            Op::RecordStream(index, stream) if !self.live.is_empty() => {
                let (allocation, _, writer) = self.live.swap_remove(index.index(self.live.len()));
                let stream = StreamId(*stream);
                self.device.record_event(self.event, writer)?;
                self.device.wait_event(stream, self.event)?;
                self.allocator.record_stream(&allocation, stream)?;
                let tag = self.fill(&allocation, stream)?;
                self.live.push((allocation, tag, stream));
            }
            Op::SynchronizeStream(stream) => self.device.synchronize_stream(StreamId(*stream))?,
            Op::Synchronize => self.device.synchronize()?,
            Op::EmptyCache => self.allocator.empty_cache(&mut self.device)?,
            // External memory instead: the comparison with the plain model covers the limit.
            Op::SetFraction(fraction) => {
                let total = self.device.info().total.0;
                self.device
                    .set_external_memory(Bytes((total as f64 * (1.0 - fraction)) as u64))?;
            }
            Op::ResetPeaks => self.allocator.reset_peaks(),
            Op::Begin(pool) if !self.open.contains(pool) && !self.released.contains(pool) => {
                self.allocator
                    .begin(PrivatePoolId(*pool))
                    .expect("it is not open");
                self.open.push(*pool);
            }
            Op::End(pool) if self.open.contains(pool) => {
                self.allocator
                    .end(PrivatePoolId(*pool))
                    .expect("it is open");
                self.open.retain(|open| open != pool);
            }
            Op::Release(pool) if self.open.is_empty() && !self.released.contains(pool) => {
                self.allocator
                    .begin(PrivatePoolId(*pool))
                    .expect("it is not open");
                self.allocator
                    .end(PrivatePoolId(*pool))
                    .expect("it is open");
                self.allocator
                    .release(&mut self.device, PrivatePoolId(*pool))
                    .expect("no context is open");
                self.released.push(*pool);
            }
            Op::Free(_) | Op::RecordStream(..) | Op::Begin(_) | Op::End(_) | Op::Release(_) => {}
        }
        Ok(())
    }

    /// Releases everything: blocks, pools, cache.
    fn finish(mut self) -> Result<(), TestCaseError> {
        let failed = |error: DeviceError| TestCaseError::fail(error.to_string());
        for pool in 0..POOLS {
            self.apply(&Op::End(pool)).map_err(failed)?;
        }
        while let Some((allocation, tag, writer)) = self.live.pop() {
            if !allocation.is_null() {
                self.device
                    .verify(writer, allocation.range(), tag)
                    .map_err(failed)?;
            }
            self.allocator
                .free(&mut self.device, allocation)
                .map_err(failed)?;
        }
        for pool in 0..POOLS {
            self.apply(&Op::Release(pool)).map_err(failed)?;
        }
        self.allocator
            .empty_cache(&mut self.device)
            .map_err(failed)?;
        let stats = self.allocator.stats();
        prop_assert_eq!(
            (stats.reserved_bytes.all.current, stats.active.all.current),
            (0, 0)
        );
        prop_assert_eq!(self.allocator.snapshot(), Vec::new());
        self.allocator.close(&mut self.device).map_err(failed)?;
        self.device.destroy_event(self.event).map_err(failed)?;
        for stream in 1..STREAMS {
            self.device
                .destroy_stream(StreamId(stream))
                .map_err(failed)?;
        }
        self.device
            .set_external_memory(Bytes::ZERO)
            .map_err(failed)?;
        prop_assert_eq!(self.device.leaks(), Leaks::default());
        Ok(())
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 500, failure_persistence: None,
        ..ProptestConfig::default() })]

    #[test]
    fn expandable_segments_keep_all_invariants_in_random_programs(
        config in configs(),
        pages in 6_u64..20,
        capacity in 2_u64..13,
        operations in operations(),
    ) {
        // Drivers map whole pages of 2 MiB. Settings that depend on the page size follow it.
        let large = Bytes::mib(2 * pages);
        let config = Config {
            expandable_segments: true,
            large_segment_size: large,
            max_split_size: config.max_split_size.map(|size| size.max(large)),
            max_non_split_rounding: config.max_non_split_rounding.max(large),
            quirks: Default::default(),
            ..config
        };
        let mut program =
            Program::new(config, Bytes::mib(32 * capacity)).expect("streams can be made");
        for op in &operations {
            program.apply(op).map_err(|error| TestCaseError::fail(format!("{op:?}: {error}")))?;
            let live: Vec<&Allocation> =
                program.live.iter().map(|(allocation, ..)| allocation).collect();
            assert_structure(&program.allocator, &live)?;
        }
        program.finish()?;
    }
}
