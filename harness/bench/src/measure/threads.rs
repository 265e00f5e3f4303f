//! Several threads on one allocator: the time of one allocation and its free, for all threads
//! together.
//!
//! The allocator is behind one lock, as in PyTorch, and all threads use one stream.

use std::sync::{Barrier, Mutex};
use std::thread;

use harness_allocator::sync::lock;
use harness_allocator::{allocator::Request, device::Clock, units::Bytes};

use super::visit::{Fault, Reading, Visit};
use crate::{clock::Stopwatch, provider::MemoryLimit};

/// Pairs per sample for all threads together. A sample takes tens of milliseconds, because the
/// scheduler needs some to place woken threads on processors.
const PAIRS: u64 = 200_000;

pub(super) fn visit(visit: &mut Visit<'_>, count: u64, size: Bytes) -> Result<Vec<Reading>, Fault> {
    let each = PAIRS.div_ceil(count);
    visit.bench(MemoryLimit::HostPath, |bench, visit| {
        visit.timed(Clock::Measured, each * count, |_| {
            let shared = Mutex::new(&mut *bench);
            together(count, each, || {
                let allocation = lock(&shared).allocate(Request::new(size))?;
                Ok(lock(&shared).free(allocation)?)
            })
        })
    })
}

/// The time per pair, from the first thread's start to the last one's end. Each of `count` threads
/// makes `each` pairs. A first pair per thread fills the cache. The threads take the times, because
/// the starting thread may not run while all processors are busy.
fn together(
    count: u64,
    each: u64,
    pair: impl Fn() -> Result<(), Fault> + Sync,
) -> Result<u64, Fault> {
    let threads = usize::try_from(count).unwrap_or(usize::MAX);
    let (barrier, watch) = (Barrier::new(threads), Stopwatch::start());
    let work = || {
        let warm = pair();
        barrier.wait();
        let begin = watch.elapsed_ps();
        warm?;
        (0..each).try_for_each(|_| pair())?;
        Ok((begin, watch.elapsed_ps()))
    };
    let all = || {
        thread::scope(|scope| {
            let work = &work;
            let workers: Vec<_> = (0..threads).map(|_| scope.spawn(work)).collect();
            workers
                .into_iter()
                .map(|worker| worker.join().unwrap_or_else(|_| Err(panicked())))
                .collect::<Result<Vec<(u64, u64)>, Fault>>()
        })
    };
    // A waiting thread counts as waiting for a processor. The monitor attributes the calling
    // thread's waits to other programs, so another thread waits.
    let done = thread::scope(|scope| scope.spawn(all).join().unwrap_or_else(|_| Err(panicked())))?;
    let (begin, end) = done.iter().fold((u64::MAX, 0), |(begin, end), times| {
        (begin.min(times.0), end.max(times.1))
    });
    Ok(end.saturating_sub(begin) / (each * count))
}

fn panicked() -> Fault {
    Fault::Failed("a thread panicked".to_owned())
}
