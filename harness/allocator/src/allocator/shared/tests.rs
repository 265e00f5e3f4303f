//! Interleavings explored: every lock and atomic of the module is a point where the schedule may go over to another thread
//! ([shuttle](https://docs.rs/shuttle)). Schedules come from the seeds below; a failure prints the schedule, which `shuttle::replay` repeats.
//!
//! The device is the strict simulated one: its race detector says if memory is handed out while another stream works on it.

use std::collections::BTreeMap;
use std::ops::RangeInclusive;
use std::sync::{Arc, Mutex};

use shuttle::rand::{Rng, thread_rng};
use shuttle::scheduler::{PctScheduler, RandomScheduler, Scheduler};
use shuttle::{Runner, thread};

use super::{Cores, SharedAllocator};
use crate::allocator::caching::Config;
use crate::allocator::{Allocation, AllocatorError, MemoryFraction, Request};
use crate::device::sim::{SimConfig, SimDevice};
use crate::device::{Device, DeviceError, DevicePtr, MemoryRange, StreamId, Tag, TestDevice};
use crate::stats::{BlockState, MemoryStats, SegmentInfo};
use crate::units::Bytes;

/// Where schedules come from; more of them with another seed are as good.
const SEEDS: [u64; 2] = [1, 20_261_120];
/// The device's memory: two large segments and a little, so that threads run out of it.
const MEMORY: Bytes = Bytes::mib(48);
const STREAMS: u32 = 3;

/// Runs a test under schedules of both kinds: random ones, and random priorities with few changes (PCT,
/// <https://doi.org/10.1145/1736020.1736040>), which find bugs of few steps with a known probability.
fn explore(schedules: usize, test: impl Fn() + Clone + Send + Sync + 'static) {
    for seed in SEEDS {
        println!("{schedules} random and {schedules} PCT schedules from seed {seed}");
        run(RandomScheduler::new_from_seed(seed, schedules), test.clone());
        run(PctScheduler::new_from_seed(seed, 3, schedules), test.clone());
    }
}

fn run(scheduler: impl Scheduler + 'static, test: impl Fn() + Send + Sync + 'static) {
    let mut config = shuttle::Config::new();
    config.stack_size = 1 << 18;
    config.max_steps = shuttle::MaxSteps::None;
    // Atomics are explored as sequentially consistent ones; `addresses` says why weaker ones do.
    config.silence_warnings = true;
    Runner::new(scheduler, config).run(test);
}

/// The allocator and an account of what is handed out, kept by those who have it.
struct World {
    allocator: SharedAllocator<SimDevice>,
    /// Live ranges: start and length. Locked without a scheduling point in between.
    live: Mutex<BTreeMap<u64, u64>>,
    /// Allocations for any thread to take, use and free.
    exchange: Mutex<Vec<Item>>,
    limit: Bytes,
}

/// An allocation and the stream that worked on it last.
#[derive(Clone, Copy)]
struct Item {
    ptr: DevicePtr,
    size: Bytes,
    last: StreamId,
}

impl World {
    fn new(config: Config, cores: Cores, fraction: MemoryFraction) -> Arc<Self> {
        let device = SimDevice::new(SimConfig::replay(MEMORY));
        let allocator = SharedAllocator::new(device, config, cores);
        allocator.set_memory_fraction(fraction);
        for _ in 1..STREAMS {
            allocator.device().create_stream().expect("streams can be made");
        }
        let limit = fraction.limit(MEMORY).unwrap_or(MEMORY);
        Arc::new(Self { allocator, live: Mutex::default(), exchange: Mutex::default(), limit })
    }

    /// Allocates, checks that nobody else has any of it, and writes to it.
    fn allocate(&self, size: Bytes, stream: StreamId) -> Option<Item> {
        let allocation: Allocation = match self.allocator.allocate(Request { size, stream }) {
            Ok(allocation) => allocation,
            Err(AllocatorError::OutOfMemory(why)) => {
                assert!(why.allocated <= why.reserved && why.reserved <= self.limit, "{why}");
                return None;
            }
            Err(error) => panic!("{error}"),
        };
        let (start, end) = (allocation.ptr().0, allocation.ptr().0 + allocation.size().0);
        {
            let mut live = self.live.lock().expect("no holder panics");
            let before = live.range(..end).next_back();
            assert!(before.is_none_or(|(&other, &length)| other + length <= start), "{start:#x} is handed out twice");
            live.insert(start, end - start);
        }
        self.fill(allocation.range(), stream);
        Some(Item { ptr: allocation.ptr(), size: allocation.requested(), last: stream })
    }

    fn fill(&self, range: MemoryRange, stream: StreamId) {
        let filled = self.allocator.device().fill(stream, range, Tag(range.start.0));
        filled.expect("nobody else works on the memory");
    }

    fn free(&self, ptr: DevicePtr) {
        self.live.lock().expect("no holder panics").remove(&ptr.0).expect("it is live");
        self.allocator.free(ptr).expect("it is live");
    }

    /// Work of a stream on the memory, in order behind all work on it so far.
    fn use_on(&self, item: Item, stream: StreamId) -> Item {
        let Item { ptr, size, last } = item;
        {
            let mut device = self.allocator.device();
            let event = device.create_event().expect("events can be made");
            device.record_event(event, last).expect("the stream is there");
            device.wait_event(stream, event).expect("the stream is there");
            device.destroy_event(event).expect("the event is there");
        }
        self.allocator.record_stream(ptr, stream).expect("it is live");
        self.fill(MemoryRange::new(ptr, size), stream);
        Item { last: stream, ..item }
    }

    /// Some operations at random: hits, misses, frees of what others allocated, uses by other streams, and everything that concerns all.
    fn work(&self, operations: usize) {
        for _ in 0..operations {
            let stream = StreamId(thread_rng().gen_range(0..STREAMS));
            let taken = |world: &Self| {
                let mut exchange = world.exchange.lock().expect("no holder panics");
                let count = exchange.len();
                (count > 0).then(|| exchange.swap_remove(thread_rng().gen_range(0..count)))
            };
            match thread_rng().gen_range(0..16) {
                0..=6 => {
                    let sizes: RangeInclusive<u64> =
                        [1..=2_000, 700_000..=900_000, 1_500_000..=9_000_000, 10 << 20..=22 << 20][thread_rng().gen_range(0..4)].clone();
                    let made = self.allocate(Bytes(thread_rng().gen_range(sizes)), stream);
                    self.exchange.lock().expect("no holder panics").extend(made);
                }
                7..=10 => {
                    if let Some(item) = taken(self) {
                        self.free(item.ptr);
                    }
                }
                11..=12 => {
                    if let Some(item) = taken(self) {
                        let item = self.use_on(item, stream);
                        self.exchange.lock().expect("no holder panics").push(item);
                    }
                }
                13 => self.allocator.empty_cache().expect("the device is sound"),
                14 => self.check_stats(),
                _ => self.check_structure(),
            }
            let reserved = self.allocator.device().memory().map(|memory| memory.total - memory.free).expect("the device answers");
            assert!(reserved <= self.limit, "{reserved} held, {} allowed", self.limit);
        }
    }

    /// What must hold between the counters of one moment.
    fn check_stats(&self) {
        let stats = self.allocator.stats();
        let bytes = [stats.requested_bytes, stats.active_bytes, stats.reserved_bytes].map(|bytes| (bytes.all.current, bytes.all.peak));
        assert!(bytes.is_sorted(), "{bytes:?}");
        assert!(bytes.iter().all(|(current, peak)| current <= peak));
        assert!(stats.reserved_bytes.all.peak <= self.limit.0);
    }

    /// Segments and blocks of one moment lie side by side.
    fn check_structure(&self) {
        let segments = self.allocator.snapshot();
        assert!(segments.is_sorted_by(|one, next| one.address.offset(one.size) <= next.address), "segments overlap");
        for segment in segments {
            let blocks: Bytes = segment.blocks.iter().map(|block| block.size).sum();
            assert_eq!(blocks, segment.size);
        }
    }

    /// When all threads are done: counters, structure and the threads' own account agree, and everything goes back.
    fn settle(&self) {
        self.check_structure();
        let live = self.live.lock().expect("no holder panics").clone();
        let segments = self.allocator.snapshot();
        assert_eq!(allocated(&segments), live);
        compare(&self.allocator.stats(), &segments);
        let left = std::mem::take(&mut *self.exchange.lock().expect("no holder panics"));
        left.iter().for_each(|item| self.free(item.ptr));
        self.allocator.empty_cache().expect("the device is sound");
        let stats = self.allocator.stats();
        assert_eq!((stats.active_bytes.all.current, stats.reserved_bytes.all.current), (0, 0));
        assert!(self.allocator.snapshot().is_empty());
        for item in left {
            assert!(matches!(self.allocator.free(item.ptr), Err(DeviceError::InvalidFree { .. })), "freed twice");
        }
        self.allocator.close().expect("the device is sound");
        let leaks = self.allocator.device().leaks();
        assert_eq!((leaks.allocations, leaks.bytes, leaks.events), (0, Bytes::ZERO, 0));
    }
}

fn allocated(segments: &[SegmentInfo]) -> BTreeMap<u64, u64> {
    let blocks = segments.iter().flat_map(|segment| &segment.blocks).filter(|block| block.state == BlockState::Allocated);
    blocks.map(|block| (block.address.0, block.size.0)).collect()
}

/// Counters against structure.
fn compare(stats: &MemoryStats, segments: &[SegmentInfo]) {
    let blocks = || segments.iter().flat_map(|segment| &segment.blocks);
    let bytes = |of: fn(BlockState) -> bool| blocks().filter(|block| of(block.state)).map(|block| block.size.0).sum::<u64>();
    assert_eq!(stats.reserved_bytes.all.current, segments.iter().map(|segment| segment.size.0).sum::<u64>());
    assert_eq!(stats.allocated_bytes.all.current, bytes(|state| state == BlockState::Allocated));
    assert_eq!(stats.active_bytes.all.current, bytes(|state| state != BlockState::Inactive));
    assert_eq!(stats.active.all.current, blocks().filter(|block| block.state != BlockState::Inactive).count() as u64);
    let requested = blocks().filter(|block| block.state != BlockState::Inactive).map(|block| block.requested.0).sum::<u64>();
    assert_eq!(stats.requested_bytes.all.current, requested);
}

/// Threads that do everything, and then everything is in order.
fn many_threads(config: Config, cores: Cores, threads: usize, operations: usize, fraction: MemoryFraction) {
    let world = World::new(config, cores, fraction);
    let workers: Vec<_> = (0..threads)
        .map(|_| {
            let world = Arc::clone(&world);
            thread::spawn(move || world.work(operations))
        })
        .collect();
    for worker in workers {
        worker.join().expect("no thread panics");
    }
    world.settle();
}

fn expandable() -> Config {
    Config { expandable_segments: true, ..Config::default() }
}

#[test]
fn threads_on_several_streams_keep_memory_apart_and_accounts_right() {
    explore(150, || many_threads(Config::default(), Cores::PerStream, thread_rng().gen_range(2..=4), 8, MemoryFraction::ALL));
}

#[test]
fn so_do_threads_with_expandable_segments() {
    explore(150, || many_threads(expandable(), Cores::PerStream, thread_rng().gen_range(2..=3), 8, MemoryFraction::ALL));
}

#[test]
fn so_do_threads_on_one_core() {
    explore(100, || many_threads(Config::default(), Cores::One, thread_rng().gen_range(2..=4), 8, MemoryFraction::ALL));
}

#[test]
fn all_streams_together_stay_below_the_memory_fraction() {
    let half = MemoryFraction::new(0.5).expect("a share");
    explore(100, move || many_threads(Config::default(), Cores::PerStream, 3, 8, half));
}

#[test]
fn of_two_misses_at_once_only_one_goes_to_the_driver() {
    explore(200, || {
        let world = World::new(Config::default(), Cores::PerStream, MemoryFraction::ALL);
        let workers = [(); 2].map(|()| {
            let world = Arc::clone(&world);
            thread::spawn(move || world.allocate(Bytes(100), StreamId(1)).expect("there is room").ptr)
        });
        let [one, other] = workers.map(|worker| worker.join().expect("no thread panics"));
        assert_eq!(world.allocator.device().calls().malloc, 1, "the second found the first one's segment in the cache");
        world.free(one);
        world.free(other);
        world.settle();
    });
}

#[test]
fn a_request_that_finds_no_memory_takes_back_what_other_streams_keep() {
    explore(200, || {
        let world = World::new(Config::default(), Cores::PerStream, MemoryFraction::ALL);
        let kept = [(); 2].map(|()| world.allocate(Bytes::mib(18), StreamId(1)).expect("there is room"));
        kept.iter().for_each(|item| world.free(item.ptr));
        let hits = thread::spawn({
            let world = Arc::clone(&world);
            move || {
                for _ in 0..3 {
                    let item = world.allocate(Bytes(1000), StreamId(1)).expect("2 MiB stay");
                    world.free(item.ptr);
                }
            }
        });
        let large = world.allocate(Bytes::mib(44), StreamId(2)).expect("the other stream's cache makes room");
        hits.join().expect("no thread panics");
        world.free(large.ptr);
        let stats = world.allocator.stats();
        assert_eq!((stats.num_alloc_retries, stats.num_ooms), (1, 0));
        world.settle();
    });
}

#[test]
fn memory_that_another_stream_uses_is_not_handed_out_before_its_event_whoever_frees_it() {
    explore(200, || {
        let world = World::new(Config::default(), Cores::PerStream, MemoryFraction::ALL);
        let item = world.allocate(Bytes::mib(2), StreamId(1)).expect("there is room");
        let free = thread::spawn({
            let world = Arc::clone(&world);
            move || {
                world.use_on(item, StreamId(2));
                world.free(item.ptr);
            }
        });
        // The race detector would tell if this were the same memory, with nothing to order the two streams.
        let other = world.allocate(Bytes::mib(2), StreamId(1)).expect("there is room");
        free.join().expect("no thread panics");
        let third = world.allocate(Bytes::mib(2), StreamId(1)).expect("there is room");
        world.free(other.ptr);
        world.free(third.ptr);
        world.settle();
    });
}

#[test]
fn of_two_frees_of_one_pointer_one_is_told_that_it_is_not_live() {
    for shared in [false, true] {
        explore(100, move || {
            let world = World::new(Config::default(), Cores::PerStream, MemoryFraction::ALL);
            let item = world.allocate(Bytes::mib(2), StreamId(1)).expect("there is room");
            if shared {
                world.use_on(item, StreamId(2));
            }
            let frees = [(); 2].map(|()| {
                let world = Arc::clone(&world);
                thread::spawn(move || world.allocator.free(item.ptr).is_ok())
            });
            let done = frees.map(|free| free.join().expect("no thread panics"));
            assert_eq!(done.into_iter().filter(|&done| done).count(), 1);
            world.live.lock().expect("no holder panics").clear();
            world.settle();
        });
    }
}

#[test]
fn a_thousand_short_lived_streams_share_the_cores_of_a_few() {
    run(RandomScheduler::new_from_seed(SEEDS[0], 1), || {
        let allocator = SharedAllocator::new(SimDevice::new(SimConfig::replay(MEMORY)), Config::default(), Cores::PerStream);
        for _ in 0..1000 {
            let stream = allocator.device().create_stream().expect("streams can be made");
            let kept = allocator.allocate(Request::new(Bytes::mib(1)).on(stream)).expect("there is room");
            allocator.release_stream(stream).expect("the device is sound");
            allocator.device().destroy_stream(stream).expect("it is there");
            allocator.free(kept.ptr()).expect("it is live");
        }
        assert!(allocator.table.values().count() <= 64 + 2 * super::FEW_RELEASED, "{}", allocator.table.values().count());
        let stats = allocator.stats();
        assert_eq!((stats.allocation.all.allocated, stats.allocation.all.current), (1000, 0), "no core's figures are lost");
        allocator.close().expect("the device is sound");
    });
}

#[test]
fn a_stream_is_released_while_others_allocate() {
    explore(100, || {
        let world = World::new(Config::default(), Cores::PerStream, MemoryFraction::ALL);
        let worker = thread::spawn({
            let world = Arc::clone(&world);
            move || world.work(6)
        });
        for _ in 0..3 {
            let stream = world.allocator.device().create_stream().expect("streams can be made");
            if let Some(item) = world.allocate(Bytes::mib(1), stream) {
                world.free(item.ptr);
            }
            world.allocator.release_stream(stream).expect("the device is sound");
            world.allocator.device().destroy_stream(stream).expect("it is there");
        }
        worker.join().expect("no thread panics");
        world.settle();
    });
}
