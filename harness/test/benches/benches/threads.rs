//! Throughput of [`SharedAllocator`] with 1 to 8 host threads; every operation is a cache hit.
//! Compare the figures of one run with each other.

use std::time::{Duration, Instant};
use std::{hint::black_box, sync::Barrier, thread};

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use harness_allocator::allocator::{Request, caching::CachingAllocator, shared::SharedAllocator};
use harness_allocator::device::sim::{SimConfig, SimDevice};
use harness_allocator::device::{Device, StreamId};
use harness_allocator::units::Bytes;

const THREADS: [u32; 4] = [1, 2, 4, 8];
/// The sizes that a thread allocates in turn: small, large, odd. It frees the oldest first.
const SIZES: [Bytes; 6] = [
    Bytes(512),
    Bytes::mib(2),
    Bytes(70_000),
    Bytes::mib(8),
    Bytes(4_096),
    Bytes(1_100_000),
];
/// Allocations per round. Each round ends with as many frees.
const LIVE: u64 = 48;

fn allocator() -> SharedAllocator<SimDevice> {
    let mut device = SimDevice::new(SimConfig::default());
    (1..THREADS[3]).for_each(|_| drop(device.create_stream()));
    SharedAllocator::new(CachingAllocator::default(), device)
}

/// Allocates and frees by address. The first round fills the cache.
fn rounds(allocator: &SharedAllocator<SimDevice>, stream: StreamId, count: u64) {
    let mut live = Vec::with_capacity(LIVE as usize);
    for _ in 0..count {
        for size in SIZES.iter().cycle().take(LIVE as usize) {
            live.push(
                allocator
                    .allocate(Request::new(*size).on(stream))
                    .expect("there is room")
                    .ptr(),
            );
        }
        live.drain(..)
            .for_each(|ptr| allocator.free(black_box(ptr)).expect("it is live"));
    }
}

/// The time from when all threads are ready until the last one ends.
fn time(
    allocator: &SharedAllocator<SimDevice>,
    threads: u32,
    own_stream: bool,
    count: u64,
) -> Duration {
    let ready = Barrier::new(threads as usize + 1);
    thread::scope(|scope| {
        let workers: Vec<_> = (0..threads)
            .map(|thread| {
                let (stream, ready) = (StreamId(if own_stream { thread } else { 0 }), &ready);
                scope.spawn(move || {
                    rounds(allocator, stream, 2);
                    ready.wait();
                    rounds(allocator, stream, count);
                })
            })
            .collect();
        ready.wait();
        let start = Instant::now();
        workers
            .into_iter()
            .for_each(|worker| worker.join().expect("no thread panics"));
        start.elapsed()
    })
}

fn threads(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("threads");
    group
        .sample_size(10)
        .warm_up_time(Duration::from_millis(500))
        .measurement_time(Duration::from_secs(2));
    for (case, own_stream) in [("a stream per thread", true), ("one stream", false)] {
        for threads in THREADS {
            let allocator = allocator();
            group.throughput(Throughput::Elements(u64::from(threads) * 2 * LIVE));
            group.bench_function(BenchmarkId::new(case, threads), |bencher| {
                bencher.iter_custom(|count| time(&allocator, threads, own_stream, count));
            });
        }
    }
    group.finish();
}

criterion_group!(benches, threads);
criterion_main!(benches);
