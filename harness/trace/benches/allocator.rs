//! What an operation of the built-in caching allocator costs on the host. No device is timed: after the first pass everything is a cache hit.
//! Compare figures of one run with each other: the machine's speed drifts. Throughput is in operations: one allocation or one free.
//!
//! * `free blocks/…`: does a hit cost more where more free blocks stand in the pool? It may grow as a logarithm does.
//! * `segments/…`: does a hit cost more where more segments are held? It must not, but for caches of the processor that overflow.
//! * `streams/…`: does a hit cost more where more streams have memory? It must not; `far` streams have numbers too large for a table.
//! * `traces/…`: what does an operation cost in programs? Each trace says below what it asks.

use std::hint::black_box;
use std::io::Read;
use std::time::Duration;

use criterion::measurement::WallTime;
use criterion::{BenchmarkGroup, BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use flate2::read::GzDecoder;
use harness_allocator::allocator::caching::{CachingAllocator, Config};
use harness_allocator::allocator::{Allocation, Allocator, Request};
use harness_allocator::device::StreamId;
use harness_allocator::device::sim::{SimConfig, SimDevice};
use harness_allocator::units::Bytes;
use harness_trace::execute::{ByHandle, Executor, Unobserved};
use harness_trace::trace::{self, TraceEvent};

/// What the traces were recorded on.
const CAPACITY: Bytes = Bytes::gib(80);

/// An allocator, the device under it, and what it has handed out for good.
struct World {
    device: SimDevice,
    allocator: CachingAllocator,
    live: Vec<Allocation>,
}

impl World {
    fn new() -> Self {
        let device = SimDevice::new(SimConfig::replay(CAPACITY));
        Self { device, allocator: CachingAllocator::default(), live: Vec::new() }
    }

    fn allocate(&mut self, request: Request) -> Allocation {
        self.allocator.allocate(&mut self.device, request).expect("there is room")
    }

    /// Allocates so many pairs of blocks and frees the first of each, so that no two free blocks can become one.
    fn stand_free(&mut self, pairs: u64, size: impl Fn(u64) -> Bytes) {
        let mut free = Vec::new();
        for pair in 0..pairs {
            free.push(self.allocate(Request::new(size(pair))));
            let kept = self.allocate(Request::new(size(pair)));
            self.live.push(kept);
        }
        for allocation in free {
            self.free(allocation);
        }
    }

    fn free(&mut self, allocation: Allocation) {
        self.allocator.free(&mut self.device, allocation).expect("it is ours");
    }

    /// One allocation and one free of each request: cache hits.
    fn hits(&mut self, requests: &[Request]) {
        for &request in requests {
            let allocation = self.allocate(black_box(request));
            self.free(black_box(allocation));
        }
    }
}

/// Short measurements: what they tell is a few nanoseconds, and a pass takes microseconds.
fn group<'a>(criterion: &'a mut Criterion, name: &str) -> BenchmarkGroup<'a, WallTime> {
    let mut group = criterion.benchmark_group(name);
    group.sample_size(20).warm_up_time(Duration::from_millis(200)).measurement_time(Duration::from_millis(500));
    group
}

fn measure(group: &mut BenchmarkGroup<'_, WallTime>, id: BenchmarkId, world: &mut World, requests: &[Request]) {
    group.throughput(Throughput::Elements(2 * requests.len() as u64));
    world.hits(requests);
    group.bench_function(id, |bencher| bencher.iter(|| world.hits(requests)));
}

/// Block sizes in no order, from 512 B to 32 KiB.
fn scattered(number: u64) -> Bytes {
    Bytes(512 * (1 + (number.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 58)))
}

fn free_blocks(criterion: &mut Criterion) {
    let mut group = group(criterion, "free blocks");
    let requests: Vec<Request> = (0..1000).map(|number| Request::new(scattered(number))).collect();
    for free in [1_000, 100_000, 1_000_000] {
        let mut world = World::new();
        world.stand_free(free, scattered);
        measure(&mut group, BenchmarkId::from_parameter(free), &mut world, &requests);
    }
    group.finish();
}

fn segments(criterion: &mut Criterion) {
    let mut group = group(criterion, "segments");
    let requests = vec![Request::new(Bytes::mib(1)); 1000];
    for segments in [1, 100, 10_000] {
        let mut world = World::new();
        // Two blocks fill a segment.
        world.stand_free(segments, |_| Bytes::mib(1));
        measure(&mut group, BenchmarkId::from_parameter(segments), &mut world, &requests);
    }
    group.finish();
}

fn streams(criterion: &mut Criterion) {
    let mut group = group(criterion, "streams");
    for (name, first, streams) in [("near", 0, 1), ("near", 0, 16), ("near", 0, 256), ("far", 1 << 20, 256)] {
        let on = |stream: u32| Request::new(Bytes::kib(1)).on(StreamId(first + stream));
        let requests: Vec<Request> = (0..1024).map(|number| on(number % streams)).collect();
        measure(&mut group, BenchmarkId::new(name, streams), &mut World::new(), &requests);
    }
    group.finish();
}

/// Runs each trace over and over in both configurations.
fn traces(criterion: &mut Criterion) {
    let mut group = group(criterion, "traces");
    for (name, events) in all_traces() {
        for (mode, expandable_segments) in [("default", false), ("expandable", true)] {
            let config = Config { expandable_segments, ..Config::default() };
            let mut device = SimDevice::new(SimConfig::replay(CAPACITY));
            let mut allocator = CachingAllocator::new(config);
            let mut executor = Executor::new(&events, &mut device).expect("the trace is one of a program");
            let mut target = ByHandle { device: &mut device, allocator: &mut allocator };
            let mut pass = || executor.pass(&mut target, &mut Unobserved).expect("the simulated device does not fail");
            group.throughput(Throughput::Elements(pass().operations()));
            group.bench_function(BenchmarkId::new(name, mode), |bencher| bencher.iter(&mut pass));
        }
    }
    group.finish();
}

/// The traces of the suite `traces` of `harness bench`.
fn all_traces() -> Vec<(&'static str, Vec<TraceEvent>)> {
    macro_rules! traces {
        ($($name:literal)*) => {
            vec![$(($name, packed(include_bytes!(concat!("../../../scenarios/bench/traces/", $name, ".txt.gz"))))),*]
        };
    }
    traces![
        // What does the shortest way through cost, small and large?
        "small_loop" "large_loop"
        // What do splitting and merging cost in order? And in no order, in 1000 sizes?
        "small_batch_1000live" "small_batch_1000live_random"
        // What does a program cost that uses one pool, the other, or both?
        "small" "large" "mixed"
        // Steps of training: activations come in order and go in reverse.
        "train"
        // A cache of keys and values that grows block by block.
        "kv"
        // Lifetimes that leave many holes.
        "frag"
        // Who walks 4000 holes that are all too small?
        "holes"
        // Do four streams cost more than one?
        "mixed_4streams"
    ]
}

fn packed(trace: &[u8]) -> Vec<TraceEvent> {
    let mut text = String::new();
    GzDecoder::new(trace).read_to_string(&mut text).expect("the trace is packed text");
    trace::parse(&text).expect("the trace is one")
}

criterion_group!(benches, free_blocks, segments, streams, traces);
criterion_main!(benches);
