//! The shared allocator. With one thread every figure equals that of the plain allocator. With four
//! threads allocations never overlap and the counters stay right.

use std::sync::{Arc, Mutex};
use std::{collections::BTreeMap, thread};

use harness_allocator::allocator::caching::{CachingAllocator, Config};
use harness_allocator::allocator::shared::{Locked, SharedAllocator};
use harness_allocator::allocator::{
    Allocation, Allocator, AllocatorError, MemoryFraction, Request,
};
use harness_allocator::device::sim::{SimConfig, SimDevice};
use harness_allocator::device::{Device, DeviceError, DevicePtr, StreamId, TestDevice};
use harness_allocator::{stats::BlockState, units::Bytes};
use proptest::prelude::*;
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

const STREAMS: u32 = 3;

/// An operation. Indices choose a live allocation.
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
    let sizes = prop_oneof![
        0_u64..4_000,
        500_000_u64..1_200_000,
        (1_u64 << 20)..(12 << 20),
        (10_u64..60).prop_map(|mib| mib << 20)
    ];
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

/// The plain and the shared allocator, each on its own device, and the live allocations of both.
struct Pair {
    device: SimDevice,
    plain: CachingAllocator,
    shared: SharedAllocator<SimDevice>,
    live: Vec<(Allocation, DevicePtr)>,
}

impl Pair {
    fn new(config: &Config, capacity: Bytes) -> Self {
        let make = || {
            let mut device = SimDevice::new(SimConfig::replay(capacity));
            (1..STREAMS).for_each(|_| drop(device.create_stream()));
            device
        };
        let shared = SharedAllocator::new(CachingAllocator::new(config.clone()), make());
        Self {
            device: make(),
            plain: CachingAllocator::new(config.clone()),
            shared,
            live: Vec::new(),
        }
    }

    fn apply(&mut self, op: &Op) -> Result<(), TestCaseError> {
        let Self {
            device,
            plain,
            shared,
            live,
        } = self;
        match op {
            &Op::Allocate { size, stream } => {
                let request = Request::new(Bytes(size)).on(StreamId(stream));
                match (plain.allocate(device, request), shared.allocate(request)) {
                    (Ok(one), Ok(other)) => {
                        prop_assert_eq!(
                            (one.ptr(), one.size(), one.requested()),
                            (other.ptr(), other.size(), other.requested())
                        );
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
                prop_assert_eq!(
                    device.synchronize_stream(StreamId(stream)),
                    shared.lock().device.synchronize_stream(StreamId(stream))
                );
            }
            Op::EmptyCache => prop_assert_eq!(plain.empty_cache(device), shared.empty_cache()),
            &Op::SetFraction(fraction) => {
                let fraction = MemoryFraction::new(fraction).expect("in range");
                plain.set_memory_fraction(device, fraction);
                let Locked {
                    allocator, device, ..
                } = &mut *shared.lock();
                allocator.set_memory_fraction(device, fraction);
            }
            Op::ResetPeaks => {
                plain.reset_peaks();
                shared.lock().allocator.reset_peaks();
            }
            Op::Free(_) | Op::RecordStream(..) => {}
        }
        self.compare()
    }

    fn compare(&self) -> Result<(), TestCaseError> {
        let calls = |device: &dyn TestDevice| {
            let calls = device.calls();
            [
                calls.malloc,
                calls.malloc_failures,
                calls.free,
                calls.create,
                calls.release,
            ]
        };
        prop_assert_eq!(calls(&self.device), calls(&self.shared.lock().device));
        prop_assert_eq!(self.plain.stats(), self.shared.stats());
        prop_assert_eq!(self.plain.snapshot(), self.shared.snapshot());
        Ok(())
    }
}

proptest! {
    #[test]
    fn with_one_thread_every_figure_equals_that_of_the_plain_allocator(
        config in configs(), ops in operations()
    ) {
        let mut pair = Pair::new(&config, Bytes::mib(128));
        ops.iter().try_for_each(|op| pair.apply(op))?;
    }
}

fn on_80_gib() -> SharedAllocator<SimDevice> {
    SharedAllocator::new(
        CachingAllocator::default(),
        SimDevice::new(SimConfig::default()),
    )
}

#[test]
fn an_error_names_the_pointer_that_is_not_live() {
    let allocator = on_80_gib();
    let not_live = |ptr| {
        Err(DeviceError::InvalidFree {
            ptr,
            place: Default::default(),
        })
    };
    let foreign = DevicePtr(0x1234_5678_9000);
    assert_eq!(allocator.free(foreign), not_live(foreign));
    let ptr = allocator
        .allocate(Request::new(Bytes::mib(3)))
        .expect("there is room")
        .ptr();
    let inside = ptr.offset(Bytes(512));
    assert_eq!(
        (
            allocator.free(inside),
            allocator.record_stream(inside, StreamId(1))
        ),
        (not_live(inside), not_live(inside))
    );
    assert_eq!(
        (allocator.free(ptr), allocator.free(ptr)),
        (Ok(()), not_live(ptr))
    );
    assert_eq!(allocator.record_stream(ptr, StreamId(1)), not_live(ptr));
    assert_eq!(
        (
            allocator.free(DevicePtr::NULL),
            allocator.record_stream(DevicePtr::NULL, StreamId(1))
        ),
        (Ok(()), Ok(()))
    );
    let empty = allocator
        .allocate(Request::new(Bytes::ZERO))
        .expect("an empty request always succeeds");
    assert!(empty.is_null());
}

/// The state that the threads of the stress test share.
struct Stress {
    allocator: SharedAllocator<SimDevice>,
    /// The live ranges, start and size, as the threads know them.
    live: Mutex<BTreeMap<u64, u64>>,
    /// Allocations for another thread to free.
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
        assert!(
            before.is_none_or(|(&other, &length)| other + length <= start),
            "{start:#x} is handed out twice"
        );
        live.insert(start, end - start);
        Some(allocation.ptr())
    }

    fn free(&self, ptr: DevicePtr) {
        self.live
            .lock()
            .expect("no holder panics")
            .remove(&ptr.0)
            .expect("it is live");
        self.allocator.free(ptr).expect("it is live");
    }

    fn work(&self, seed: u64, operations: u32) {
        let mut random = ChaCha8Rng::seed_from_u64(seed);
        let mut own = Vec::new();
        for _ in 0..operations {
            let stream = StreamId(random.random_range(0..STREAMS));
            match random.random_range(0..1_000) {
                0..=479 => {
                    let largest =
                        [2_000_u64, 900_000, 9 << 20, 40 << 20][random.random_range(0..4)];
                    own.extend(self.allocate(
                        Request::new(Bytes(random.random_range(1..=largest))).on(stream),
                    ));
                }
                480..=799 if !own.is_empty() => {
                    self.free(own.swap_remove(random.random_range(0..own.len())))
                }
                800..=889 if !own.is_empty() => self
                    .exchange
                    .lock()
                    .expect("no holder panics")
                    .extend(own.pop()),
                890..=979 => {
                    let taken = self.exchange.lock().expect("no holder panics").pop();
                    taken.into_iter().for_each(|ptr| self.free(ptr));
                }
                980..=993 if !own.is_empty() => {
                    let ptr = own[random.random_range(0..own.len())];
                    self.allocator
                        .record_stream(ptr, stream)
                        .expect("it is live");
                }
                994 => self.allocator.empty_cache().expect("the device is sound"),
                995 => self
                    .allocator
                    .lock()
                    .device
                    .synchronize()
                    .expect("the device is sound"),
                996 => drop(self.allocator.snapshot()),
                _ => assert!(
                    self.allocator.stats().active_bytes.all.current
                        <= self.allocator.stats().reserved_bytes.all.peak
                ),
            }
        }
        own.into_iter().for_each(|ptr| self.free(ptr));
    }
}

#[test]
fn four_threads_never_share_memory_and_the_counters_stay_right() {
    const SEED: u64 = 0x5eed;
    println!("seed {SEED:#x}");
    for expandable_segments in [false, true] {
        let mut device = SimDevice::new(SimConfig::replay(Bytes::mib(512)));
        (1..STREAMS).for_each(|_| drop(device.create_stream()));
        let config = Config {
            expandable_segments,
            ..Config::default()
        };
        let allocator = SharedAllocator::new(CachingAllocator::new(config), device);
        let stress = Arc::new(Stress {
            allocator,
            live: Mutex::default(),
            exchange: Mutex::default(),
        });
        thread::scope(|scope| {
            for thread in 0..4 {
                let stress = Arc::clone(&stress);
                scope.spawn(move || stress.work(SEED + thread, 10_000));
            }
        });
        std::mem::take(&mut *stress.exchange.lock().expect("no holder panics"))
            .into_iter()
            .for_each(|ptr| stress.free(ptr));
        let (stats, segments) = (stress.allocator.stats(), stress.allocator.snapshot());
        assert_eq!(stats.allocated_bytes.all.current, 0);
        assert_eq!(
            stats.reserved_bytes.all.current,
            segments.iter().map(|segment| segment.size.0).sum::<u64>()
        );
        let blocks = segments.iter().flat_map(|segment| &segment.blocks);
        let active: u64 = blocks
            .filter(|block| block.state != BlockState::Inactive)
            .map(|block| block.size.0)
            .sum();
        assert_eq!(stats.active_bytes.all.current, active);
        stress.allocator.close().expect("the device is sound");
        let leaks = stress.allocator.lock().device.leaks();
        assert_eq!(
            (
                leaks.allocations,
                leaks.reservations,
                leaks.bytes,
                leaks.events
            ),
            (0, 0, Bytes::ZERO, 0)
        );
    }
}

#[test]
fn the_allocator_survives_a_panic_of_a_thread_that_holds_the_lock() {
    let allocator = on_80_gib();
    let panicked = thread::scope(|scope| {
        let careless = scope.spawn(|| {
            let _lock = allocator.lock();
            panic!("for the test");
        });
        careless.join().is_err()
    });
    assert!(panicked);
    let allocation = allocator
        .allocate(Request::new(Bytes::mib(3)))
        .expect("the driver serves a miss");
    allocator.free(allocation.ptr()).expect("it is live");
    assert_eq!(allocator.empty_cache(), Ok(()));
    let calls = allocator.lock().device.calls();
    assert_eq!(
        (calls.malloc, allocator.stats().reserved_bytes.all.current),
        (1, 0)
    );
}
