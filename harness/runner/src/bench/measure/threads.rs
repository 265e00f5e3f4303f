//! Several threads at one allocator: the time of one allocation and its free, for all threads together.
//!
//! Any allocator stands behind one lock, and all threads use one stream. PyTorch's is measured behind its shared front too, each thread with a
//! stream of its own: with one core for all streams, as PyTorch has one mutex a device, and with a core for each stream.

use std::sync::{Barrier, Mutex, PoisonError};
use std::thread;

use harness_allocator::allocator::Request;
use harness_allocator::allocator::caching::Config;
use harness_allocator::allocator::shared::{Cores, SharedAllocator};
use harness_allocator::device::StreamId;
use harness_allocator::units::Bytes;

use super::{Fault, Reading, Visit};
use crate::bench::clock::{Stopwatch, Timer};
use crate::bench::workshop::Wall;

/// Pairs that all threads do together in one sample: long beside the start of threads, which is not timed, and their meeting, which is.
const PAIRS: u64 = 20_000;

pub(super) fn visit(visit: &mut Visit<'_>, count: u64, size: Bytes) -> Result<Vec<Reading>, Fault> {
    let each = PAIRS.div_ceil(count);
    let reading = |part, samples| Reading { part, ..Reading::time(Timer::Host, each * count, samples) };
    let locked = visit.bench(Wall::HostPath, |bench, visit| {
        visit.sample(Timer::Host, |_| {
            let shared = Mutex::new(&mut *bench);
            together(count, each, |_| {
                let allocation = shared.lock().unwrap_or_else(PoisonError::into_inner).allocate(Request::new(size))?;
                Ok(shared.lock().unwrap_or_else(PoisonError::into_inner).free(allocation)?)
            })
        })
    })?;
    let mut readings = vec![reading(None, locked)];
    if let Some(config) = visit.arm.effective() {
        for (part, cores) in [("shared front, one core", Cores::One), ("shared front, a core for each stream", Cores::PerStream)] {
            readings.push(reading(Some(part), shared_front(visit, config.clone(), cores, count, each, size)?));
        }
    }
    Ok(readings)
}

fn shared_front(visit: &mut Visit<'_>, config: Config, cores: Cores, count: u64, each: u64, size: Bytes) -> Result<Vec<u64>, Fault> {
    let mut device = visit.workshop.lend(visit.memory, Wall::HostPath)?;
    let mut streams = vec![StreamId::DEFAULT];
    for _ in 1..count {
        streams.push(device.create_stream()?);
    }
    let allocator = SharedAllocator::new(device, config, cores);
    let samples = visit.sample(Timer::Host, |_| {
        together(count, each, |thread| {
            let stream = streams.get(thread).copied().unwrap_or_default();
            let allocation = allocator.allocate(Request { size, stream })?;
            Ok(allocator.free(allocation.ptr())?)
        })
    });
    allocator.device().synchronize()?;
    allocator.close()?;
    let mut device = allocator.device();
    for stream in streams.into_iter().skip(1) {
        device.destroy_stream(stream)?;
    }
    let leaks = device.leaks();
    if leaks.is_empty() { samples } else { Err(Fault::Failed(format!("left on the device at the end: {leaks}"))) }
}

/// The time of one of `each` pairs that each of `count` threads does, from the moment that all are there to the end of the last. The first
/// pair of each fills the cache before that.
fn together(count: u64, each: u64, pair: impl Fn(usize) -> Result<(), Fault> + Sync) -> Result<u64, Fault> {
    let threads = usize::try_from(count).unwrap_or(usize::MAX);
    let barrier = Barrier::new(threads.saturating_add(1));
    let work = |thread: usize| {
        let warm = pair(thread);
        barrier.wait();
        warm?;
        (0..each).try_for_each(|_| pair(thread))
    };
    thread::scope(|scope| {
        let work = &work;
        let workers: Vec<_> = (0..threads).map(|thread| scope.spawn(move || work(thread))).collect();
        barrier.wait();
        let watch = Stopwatch::start();
        let panicked = |_| Err(Fault::Failed("a thread panicked".to_owned()));
        let done: Vec<Result<(), Fault>> = workers.into_iter().map(|worker| worker.join().unwrap_or_else(panicked)).collect();
        let time = watch.elapsed_ps();
        done.into_iter().collect::<Result<(), Fault>>()?;
        Ok(time / (each * count))
    })
}
