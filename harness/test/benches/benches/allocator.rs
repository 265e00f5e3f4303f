//! Measures the host time of the built-in caching allocator. No device is timed: after the first
//! pass, every request is a cache hit. Compare only figures of one run, because the machine's speed
//! drifts. One operation is one allocation or one free.
//!
//! * `free blocks/…`: cost of a hit with more free blocks in the pool. It may grow
//!   logarithmically.
//! * `segments/…`: cost of a hit with more segments. It must not grow, except for processor cache
//!   misses.
//! * `streams/…`: cost of a hit with more streams that have memory. It must not grow. `far` uses
//!   stream numbers too large for a table.
//! * `traces/…`: cost per operation of real programs. The table below explains each trace.

use std::{hint::black_box, io::Read, time::Duration};

use criterion::{
    BenchmarkGroup, BenchmarkId, Criterion, Throughput, criterion_group, criterion_main,
    measurement::WallTime,
};
use flate2::read::GzDecoder;
use harness_allocator::allocator::caching::{CachingAllocator, Config};
use harness_allocator::allocator::{Allocation, Allocator, Request};
use harness_allocator::device::StreamId;
use harness_allocator::device::sim::{SimConfig, SimDevice};
use harness_allocator::units::Bytes;
use harness_trace::execute::{ByHandle, Executor, Unobserved};
use harness_trace::trace::{self, TraceEvent};

/// The memory of the recorded device.
const CAPACITY: Bytes = Bytes::gib(80);

/// An allocator, its device, and its permanent allocations.
struct World {
    device: SimDevice,
    allocator: CachingAllocator,
    live: Vec<Allocation>,
}

impl World {
    fn new() -> Self {
        let device = SimDevice::new(SimConfig::replay(CAPACITY));
        Self {
            device,
            allocator: CachingAllocator::default(),
            live: Vec::new(),
        }
    }

    fn allocate(&mut self, request: Request) -> Allocation {
        self.allocator
            .allocate(&mut self.device, request)
            .expect("there is room")
    }

    /// Allocates pairs of blocks and frees the first of each, so free blocks cannot merge.
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
        self.allocator
            .free(&mut self.device, allocation)
            .expect("it is ours");
    }

    /// Allocates and frees each size once: cache hits.
    fn hits(&mut self, requests: &[Request]) {
        for &request in requests {
            let allocation = self.allocate(black_box(request));
            self.free(black_box(allocation));
        }
    }
}

/// Measures briefly: a pass takes microseconds, and differences of nanoseconds matter.
fn group<'a>(criterion: &'a mut Criterion, name: &str) -> BenchmarkGroup<'a, WallTime> {
    let mut group = criterion.benchmark_group(name);
    group
        .sample_size(20)
        .warm_up_time(Duration::from_millis(200))
        .measurement_time(Duration::from_millis(500));
    group
}

fn measure(
    group: &mut BenchmarkGroup<'_, WallTime>,
    id: BenchmarkId,
    world: &mut World,
    requests: &[Request],
) {
    group.throughput(Throughput::Elements(2 * requests.len() as u64));
    world.hits(requests);
    group.bench_function(id, |bencher| bencher.iter(|| world.hits(requests)));
}

/// Block sizes in random order, from 512 B to 32 KiB.
fn scattered(number: u64) -> Bytes {
    Bytes(512 * (1 + (number.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 58)))
}

fn free_blocks(criterion: &mut Criterion) {
    let mut group = group(criterion, "free blocks");
    let requests: Vec<Request> = (0..1000)
        .map(|number| Request::new(scattered(number)))
        .collect();
    for free in [1_000, 100_000, 1_000_000] {
        let mut world = World::new();
        world.stand_free(free, scattered);
        measure(
            &mut group,
            BenchmarkId::from_parameter(free),
            &mut world,
            &requests,
        );
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
        measure(
            &mut group,
            BenchmarkId::from_parameter(segments),
            &mut world,
            &requests,
        );
    }
    group.finish();
}

fn streams(criterion: &mut Criterion) {
    let mut group = group(criterion, "streams");
    for (name, first, streams) in [
        ("near", 0, 1),
        ("near", 0, 16),
        ("near", 0, 256),
        ("far", 1 << 20, 256),
    ] {
        let on = |stream: u32| Request::new(Bytes::kib(1)).on(StreamId(first + stream));
        let requests: Vec<Request> = (0..1024).map(|number| on(number % streams)).collect();
        measure(
            &mut group,
            BenchmarkId::new(name, streams),
            &mut World::new(),
            &requests,
        );
    }
    group.finish();
}

/// Repeats each trace in both configurations.
fn traces(criterion: &mut Criterion) {
    let mut group = group(criterion, "traces");
    for (name, events) in all_traces() {
        for (mode, expandable_segments) in [("default", false), ("expandable", true)] {
            let config = Config {
                expandable_segments,
                ..Config::default()
            };
            let mut device = SimDevice::new(SimConfig::replay(CAPACITY));
            let mut allocator = CachingAllocator::new(config);
            let mut executor =
                Executor::new(&events, &mut device).expect("the trace is one of a program");
            let mut target = ByHandle {
                device: &mut device,
                allocator: &mut allocator,
            };
            let mut pass = || {
                executor
                    .pass(&mut target, &mut Unobserved)
                    .expect("the simulated device does not fail")
            };
            group.throughput(Throughput::Elements(pass().operations()));
            group.bench_function(BenchmarkId::new(name, mode), |bencher| {
                bencher.iter(&mut pass)
            });
        }
    }
    group.finish();
}

/// The traces of the `traces` suite of `harness bench`.
fn all_traces() -> Vec<(&'static str, Vec<TraceEvent>)> {
    macro_rules! traces {
        ($($name:literal)*) => {
            vec![$(($name, packed(include_bytes!(concat!(
                "../../../../scenarios/bench/traces/", $name, ".txt.gz"
            ))))),*]
        };
    }
    traces![
        // Shortest path, small and large.
        "small_loop" "large_loop"
        // Splitting and merging in order, and with 1,000 sizes at random.
        "small_batch_1000live" "small_batch_1000live_random"
        // Programs that use the small pool, the large pool, or both.
        "small" "large" "mixed"
        // Training steps: activations are freed in reverse order.
        "train"
        // A key-value cache that grows block by block.
        "kv"
        // Lifetimes that leave many gaps.
        "frag"
        // 4,000 free blocks that are all too small.
        "holes"
        // Four streams.
        "mixed_4streams"
    ]
}

fn packed(trace: &[u8]) -> Vec<TraceEvent> {
    let mut text = String::new();
    GzDecoder::new(trace)
        .read_to_string(&mut text)
        .expect("the trace is packed text");
    trace::parse(&text).expect("the trace is one")
}

criterion_group!(benches, free_blocks, segments, streams, traces);
criterion_main!(benches);
