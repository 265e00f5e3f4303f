//! The shared front: with one thread it decides as the plain allocator does, in every figure; with several real threads, each doing
//! everything, memory stays apart and the accounts stay right. The interleavings themselves are explored in the module's own tests.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::thread;

use harness_allocator::allocator::caching::{CachingAllocator, Config};
use harness_allocator::allocator::shared::{Cores, SharedAllocator};
use harness_allocator::allocator::{Allocation, Allocator, AllocatorError, MemoryFraction, PrivatePoolError, PrivatePoolId, Request};
use harness_allocator::device::sim::{SimConfig, SimDevice};
use harness_allocator::device::{Device, DeviceError, DevicePtr, StreamId, TestDevice};
use harness_allocator::stats::{BlockState, MemoryStats, PooledStat, SegmentInfo, Stat, StatKey};
use harness_allocator::units::Bytes;
use proptest::prelude::*;
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

const STREAMS: u32 = 3;

/// An operation. Indices choose among what is live.
#[derive(Clone, Debug)]
enum Op {
    Allocate { size: u64, stream: u32 },
    Free(prop::sample::Index),
    RecordStream(prop::sample::Index, u32),
    SynchronizeStream(u32),
    EmptyCache,
    SetFraction(f64),
    ResetPeaks,
}

fn operations() -> impl Strategy<Value = Vec<Op>> {
    let sizes = prop_oneof![0_u64..4_000, 500_000_u64..1_200_000, (1_u64 << 20)..(12 << 20), (10_u64..60).prop_map(|mib| mib << 20)];
    let any = any::<prop::sample::Index>;
    let operation = prop_oneof![
        40 => (sizes, 0..STREAMS).prop_map(|(size, stream)| Op::Allocate { size, stream }),
        28 => any().prop_map(Op::Free),
        8 => (any(), 0..STREAMS).prop_map(|(block, stream)| Op::RecordStream(block, stream)),
        4 => (0..STREAMS).prop_map(Op::SynchronizeStream),
        2 => Just(Op::EmptyCache),
        2 => (1_u32..=16).prop_map(|sixteenths| Op::SetFraction(f64::from(sixteenths) / 16.0)),
        1 => Just(Op::ResetPeaks),
    ];
    prop::collection::vec(operation, 1..150)
}

prop_compose! {
    fn configs()(
        split in proptest::option::of(20_u64..60),
        threshold in proptest::option::of(0.1_f64..0.9),
        expandable in any::<bool>(),
        divisions in prop::sample::select(vec![0_u64, 4]),
    ) -> Config {
        Config {
            max_split_size: split.map(Bytes::mib),
            garbage_collection_threshold: threshold,
            expandable_segments: expandable,
            roundup_power2_divisions: [divisions; 16],
            ..Config::default()
        }
    }
}

/// The plain allocator and the shared one, each on a device of its own, and what is live in both.
struct Pair {
    device: SimDevice,
    plain: CachingAllocator,
    shared: SharedAllocator<SimDevice>,
    live: Vec<(Allocation, DevicePtr)>,
}

impl Pair {
    fn new(config: &Config, capacity: Bytes, cores: Cores) -> Self {
        let make = || {
            let mut device = SimDevice::new(SimConfig::replay(capacity));
            (1..STREAMS).for_each(|_| drop(device.create_stream()));
            device
        };
        let shared = SharedAllocator::new(make(), config.clone(), cores);
        Self { device: make(), plain: CachingAllocator::new(config.clone()), shared, live: Vec::new() }
    }

    fn apply(&mut self, op: &Op) -> Result<(), TestCaseError> {
        let Self { device, plain, shared, live } = self;
        match op {
            &Op::Allocate { size, stream } => {
                let request = Request::new(Bytes(size)).on(StreamId(stream));
                match (plain.allocate(device, request), shared.allocate(request)) {
                    (Ok(one), Ok(other)) => {
                        prop_assert_eq!((one.ptr(), one.size(), one.requested()), (other.ptr(), other.size(), other.requested()));
                        live.push((one, other.ptr()));
                    }
                    (one, other) => prop_assert_eq!(one.err(), other.err()),
                }
            }
            Op::Free(index) if !live.is_empty() => {
                let (allocation, ptr) = live.swap_remove(index.index(live.len()));
                prop_assert_eq!(plain.free(device, allocation), Ok(()));
                prop_assert_eq!(shared.free(ptr), Ok(()));
            }
            &Op::RecordStream(index, stream) if !live.is_empty() => {
                let (allocation, ptr) = &live[index.index(live.len())];
                prop_assert_eq!(plain.record_stream(allocation, StreamId(stream)), Ok(()));
                prop_assert_eq!(shared.record_stream(*ptr, StreamId(stream)), Ok(()));
            }
            &Op::SynchronizeStream(stream) => {
                prop_assert_eq!(device.synchronize_stream(StreamId(stream)), shared.device().synchronize_stream(StreamId(stream)));
            }
            Op::EmptyCache => prop_assert_eq!(plain.empty_cache(device), shared.empty_cache()),
            &Op::SetFraction(fraction) => {
                let fraction = MemoryFraction::new(fraction).expect("in range");
                plain.set_memory_fraction(device, fraction);
                shared.set_memory_fraction(fraction);
            }
            Op::ResetPeaks => {
                plain.reset_peaks();
                shared.reset_peaks();
            }
            Op::Free(_) | Op::RecordStream(..) => {}
        }
        self.compare(matches!(op, Op::EmptyCache))
    }

    /// Every figure that the shared front promises. `looked`: all events have just been waited for, so nothing is active for want of a look.
    fn compare(&mut self, looked: bool) -> Result<(), TestCaseError> {
        let (one, other) = (self.plain.stats(), self.shared.stats());
        let calls = |device: &dyn TestDevice| {
            let calls = device.calls();
            [calls.malloc, calls.malloc_failures, calls.free, calls.create, calls.release]
        };
        prop_assert_eq!(calls(&self.device), calls(&*self.shared.device()));
        if self.shared.cores() == Cores::One {
            prop_assert_eq!(one, other);
            prop_assert_eq!(self.plain.snapshot(), self.shared.snapshot());
            return Ok(());
        }
        prop_assert_eq!((one.reserved_bytes, one.segment), (other.reserved_bytes, other.segment), "peaks included");
        let counts = |stats: &MemoryStats| {
            let MemoryStats { num_alloc_retries, num_ooms, num_sync_all_streams, num_device_alloc, num_device_free, .. } = *stats;
            [num_alloc_retries, num_ooms, num_sync_all_streams, num_device_alloc, num_device_free]
        };
        prop_assert_eq!(counts(&one), counts(&other));
        for (exact, bound) in [(one.allocated_bytes, other.allocated_bytes), (one.allocation, other.allocation)] {
            prop_assert_eq!(exact, PooledStat { all: with_peak_of(bound.all, exact.all), ..with_pool_peaks(bound, exact) });
            prop_assert!(exact.all.peak <= bound.all.peak && bound.all.peak <= bound.small_pool.peak + bound.large_pool.peak);
        }
        prop_assert!(one.active_bytes.all.peak <= other.active_bytes.all.peak);
        prop_assert!(one.requested_bytes.all.peak <= other.requested_bytes.all.peak);
        if looked {
            prop_assert_eq!(meaning(self.plain.snapshot()), meaning(self.shared.snapshot()));
            for name in ["active_bytes.all.current", "inactive_split_bytes.all.current", "inactive_split.all.current", "active.all.current"]
            {
                let key = StatKey::from_name(name).expect("a statistic");
                prop_assert_eq!(one.get(key), other.get(key), "{}", name);
            }
        }
        Ok(())
    }
}

/// A free block keeps what some owner of a part of it asked for last: which one, depends on the order in which its parts became free.
fn meaning(mut segments: Vec<SegmentInfo>) -> Vec<SegmentInfo> {
    let free = segments.iter_mut().flat_map(|segment| &mut segment.blocks).filter(|block| block.state == BlockState::Inactive);
    free.for_each(|block| block.requested = Bytes::ZERO);
    segments
}

fn with_peak_of(stat: Stat, other: Stat) -> Stat {
    Stat { peak: other.peak, ..stat }
}

fn with_pool_peaks(stat: PooledStat, other: PooledStat) -> PooledStat {
    let small_pool = with_peak_of(stat.small_pool, other.small_pool);
    PooledStat { small_pool, large_pool: with_peak_of(stat.large_pool, other.large_pool), ..stat }
}

proptest! {
    #[test]
    fn with_one_thread_a_core_for_each_stream_decides_as_one_allocator_for_all(config in configs(), ops in operations()) {
        let config = Config { garbage_collection_threshold: None, ..config };
        let mut pair = Pair::new(&config, Bytes::mib(128), Cores::PerStream);
        ops.iter().try_for_each(|op| pair.apply(op))?;
        pair.apply(&Op::EmptyCache)?;
    }

    #[test]
    fn with_one_core_every_figure_is_the_plain_allocators(config in configs(), ops in operations()) {
        let mut pair = Pair::new(&config, Bytes::mib(128), Cores::One);
        ops.iter().try_for_each(|op| pair.apply(op))?;
    }
}

fn on_80_gib(cores: Cores) -> SharedAllocator<SimDevice> {
    SharedAllocator::new(SimDevice::new(SimConfig::default()), Config::default(), cores)
}

#[test]
fn a_pointer_that_is_not_live_is_named_in_the_error() {
    let allocator = on_80_gib(Cores::PerStream);
    let not_live = |ptr| Err(DeviceError::InvalidFree { ptr, place: Default::default() });
    let foreign = DevicePtr(0x1234_5678_9000);
    assert_eq!(allocator.free(foreign), not_live(foreign));
    let ptr = allocator.allocate(Request::new(Bytes::mib(3))).expect("there is room").ptr();
    let inside = ptr.offset(Bytes(512));
    assert_eq!((allocator.free(inside), allocator.record_stream(inside, StreamId(1))), (not_live(inside), not_live(inside)));
    assert_eq!((allocator.free(ptr), allocator.free(ptr)), (Ok(()), not_live(ptr)));
    assert_eq!(allocator.record_stream(ptr, StreamId(1)), not_live(ptr));
    assert_eq!((allocator.free(DevicePtr::NULL), allocator.record_stream(DevicePtr::NULL, StreamId(1))), (Ok(()), Ok(())));
    let nothing = allocator.allocate(Request::new(Bytes::ZERO)).expect("nothing always fits");
    assert_eq!(allocator.free_allocation(nothing), Ok(()));
    let allocation = allocator.allocate(Request::new(Bytes(1))).expect("there is room");
    let ptr = allocation.ptr();
    assert_eq!((allocator.free(ptr), allocator.free_allocation(allocation)), (Ok(()), not_live(ptr)));
}

#[test]
fn what_needs_one_core_says_so_or_gets_it() {
    let pool = PrivatePoolId(1);
    let refused = on_80_gib(Cores::PerStream).begin_pool(pool).expect_err("there is no core for all streams");
    assert!(matches!(refused, PrivatePoolError::Device(DeviceError::Unavailable { .. })));
    assert!(refused.to_string().contains("Cores::One"), "{refused}");
    let one = on_80_gib(Cores::One);
    one.begin_pool(pool).expect("one core has private pools");
    let ptr = one.allocate(Request::new(Bytes(1))).expect("there is room").ptr();
    one.end_pool(pool).expect("it is open");
    assert_eq!(one.snapshot()[0].private_pool, Some(1));
    one.free(ptr).expect("it is live");
    one.release_pool(pool).expect("it is closed");
    assert_eq!((one.snapshot().len(), one.stats().reserved_bytes.all.current), (0, 0));
    let config = Config { garbage_collection_threshold: Some(0.5), ..Config::default() };
    let collecting = SharedAllocator::new(SimDevice::new(SimConfig::default()), config, Cores::PerStream);
    assert_eq!(collecting.cores(), Cores::One);
}

/// What the threads of the stress test share.
struct Stress {
    allocator: SharedAllocator<SimDevice>,
    /// Live ranges, as those who have them know.
    live: Mutex<BTreeMap<u64, u64>>,
    /// Allocations on their way to another thread.
    exchange: Mutex<Vec<DevicePtr>>,
}

impl Stress {
    fn allocate(&self, request: Request) -> Option<DevicePtr> {
        let allocation = match self.allocator.allocate(request) {
            Ok(allocation) => allocation,
            Err(AllocatorError::OutOfMemory(_)) => return None,
            Err(error) => panic!("{error}"),
        };
        let (start, end) = (allocation.ptr().0, allocation.ptr().0 + allocation.size().0);
        let mut live = self.live.lock().expect("no holder panics");
        let before = live.range(..end).next_back();
        assert!(before.is_none_or(|(&other, &length)| other + length <= start), "{start:#x} is handed out twice");
        live.insert(start, end - start);
        Some(allocation.ptr())
    }

    fn free(&self, ptr: DevicePtr) {
        self.live.lock().expect("no holder panics").remove(&ptr.0).expect("it is live");
        self.allocator.free(ptr).expect("it is live");
    }

    fn work(&self, seed: u64, operations: u32) {
        let mut random = ChaCha8Rng::seed_from_u64(seed);
        let mut own = Vec::new();
        for _ in 0..operations {
            let stream = StreamId(random.random_range(0..STREAMS));
            match random.random_range(0..1_000) {
                0..=479 => {
                    let largest = [2_000_u64, 900_000, 9 << 20, 40 << 20][random.random_range(0..4)];
                    own.extend(self.allocate(Request::new(Bytes(random.random_range(1..=largest))).on(stream)));
                }
                480..=799 if !own.is_empty() => self.free(own.swap_remove(random.random_range(0..own.len()))),
                800..=889 if !own.is_empty() => self.exchange.lock().expect("no holder panics").extend(own.pop()),
                890..=979 => {
                    let taken = self.exchange.lock().expect("no holder panics").pop();
                    taken.into_iter().for_each(|ptr| self.free(ptr));
                }
                980..=993 if !own.is_empty() => {
                    let ptr = own[random.random_range(0..own.len())];
                    self.allocator.record_stream(ptr, stream).expect("it is live");
                }
                994 => self.allocator.empty_cache().expect("the device is sound"),
                995 => self.allocator.device().synchronize().expect("the device is sound"),
                996 => drop(self.allocator.snapshot()),
                _ => assert!(self.allocator.stats().active_bytes.all.current <= self.allocator.stats().reserved_bytes.all.peak),
            }
        }
        own.into_iter().for_each(|ptr| self.free(ptr));
    }
}

#[test]
fn four_real_threads_do_everything_at_once_and_the_accounts_are_right() {
    const SEED: u64 = 0x5eed;
    println!("seed {SEED:#x}");
    for (cores, expandable_segments) in [(Cores::PerStream, false), (Cores::PerStream, true), (Cores::One, false)] {
        let mut device = SimDevice::new(SimConfig::replay(Bytes::mib(512)));
        (1..STREAMS).for_each(|_| drop(device.create_stream()));
        let config = Config { expandable_segments, ..Config::default() };
        let allocator = SharedAllocator::new(device, config, cores);
        let stress = Arc::new(Stress { allocator, live: Mutex::default(), exchange: Mutex::default() });
        thread::scope(|scope| {
            for thread in 0..4 {
                let stress = Arc::clone(&stress);
                scope.spawn(move || stress.work(SEED + thread, 10_000));
            }
        });
        std::mem::take(&mut *stress.exchange.lock().expect("no holder panics")).into_iter().for_each(|ptr| stress.free(ptr));
        let (stats, segments) = (stress.allocator.stats(), stress.allocator.snapshot());
        assert_eq!(stats.allocated_bytes.all.current, 0);
        assert_eq!(stats.reserved_bytes.all.current, segments.iter().map(|segment| segment.size.0).sum::<u64>());
        let blocks = segments.iter().flat_map(|segment| &segment.blocks);
        let active: u64 = blocks.filter(|block| block.state != BlockState::Inactive).map(|block| block.size.0).sum();
        assert_eq!(stats.active_bytes.all.current, active);
        stress.allocator.close().expect("the device is sound");
        let leaks = stress.allocator.device().leaks();
        assert_eq!((leaks.allocations, leaks.reservations, leaks.bytes, leaks.events), (0, 0, Bytes::ZERO, 0));
    }
}

#[test]
fn ten_thousand_short_lived_streams_cost_the_same_as_the_first() {
    for cores in [Cores::One, Cores::PerStream] {
        let allocator = on_80_gib(cores);
        for _ in 0..10_000 {
            let stream = allocator.device().create_stream().expect("streams can be made");
            let allocation = allocator.allocate(Request::new(Bytes::mib(3)).on(stream)).expect("there is room");
            allocator.free(allocation.ptr()).expect("it is live");
            allocator.release_stream(stream).expect("the device is sound");
            allocator.device().destroy_stream(stream).expect("it is there");
            assert_eq!(allocator.stats().reserved_bytes.all.current, 0);
        }
        assert_eq!(allocator.device().calls().memory_calls(), 20_000);
        assert_eq!(allocator.stats().allocation.all.allocated, 10_000);
        allocator.close().expect("nothing is live");
    }
}

#[test]
fn a_panic_with_the_device_in_hand_does_the_allocator_no_harm() {
    let allocator = on_80_gib(Cores::PerStream);
    let panicked = thread::scope(|scope| {
        let careless = scope.spawn(|| {
            let _device = allocator.device();
            panic!("for the test");
        });
        careless.join().is_err()
    });
    assert!(panicked);
    let allocation = allocator.allocate(Request::new(Bytes::mib(3))).expect("a miss goes to the driver");
    allocator.free(allocation.ptr()).expect("it is live");
    assert_eq!(allocator.empty_cache(), Ok(()));
    assert_eq!((allocator.device().calls().malloc, allocator.stats().reserved_bytes.all.current), (1, 0));
}
