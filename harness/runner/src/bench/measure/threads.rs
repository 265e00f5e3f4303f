//! Several threads at one allocator, which stands behind one lock, as PyTorch's does: the time of one allocation and its free, for all
//! threads together.

use std::sync::{Barrier, Mutex, PoisonError};
use std::thread;

use harness_allocator::allocator::Request;
use harness_allocator::units::Bytes;

use super::{Bench, Fault, Reading, Visit};
use crate::bench::clock::{Stopwatch, Timer};
use crate::bench::workshop::Wall;

/// Pairs that all threads do together in one sample: long beside the start of threads, which is not timed, and their meeting, which is.
const PAIRS: u64 = 20_000;

pub(super) fn visit(visit: &mut Visit<'_>, count: u64, size: Bytes) -> Result<Vec<Reading>, Fault> {
    let each = PAIRS.div_ceil(count);
    let samples =
        visit.bench(Wall::HostPath, |bench, visit| visit.sample(Timer::Host, |_| together(bench, count, each, Request::new(size))))?;
    Ok(vec![Reading::time(Timer::Host, each * count, samples)])
}

/// The time of one pair, from the moment that all threads are there to the end of the last.
fn together(bench: &mut Bench, count: u64, each: u64, request: Request) -> Result<u64, Fault> {
    let shared = Mutex::new(bench);
    let barrier = Barrier::new(usize::try_from(count).unwrap_or(usize::MAX).saturating_add(1));
    let work = || {
        barrier.wait();
        for _ in 0..each {
            let allocation = shared.lock().unwrap_or_else(PoisonError::into_inner).allocate(request)?;
            shared.lock().unwrap_or_else(PoisonError::into_inner).free(allocation)?;
        }
        Ok(())
    };
    thread::scope(|scope| {
        let threads: Vec<_> = (0..count).map(|_| scope.spawn(work)).collect();
        barrier.wait();
        let watch = Stopwatch::start();
        let done: Vec<Result<(), Fault>> = threads
            .into_iter()
            .map(|thread| thread.join().unwrap_or_else(|_| Err(Fault::Failed("a thread panicked".to_owned()))))
            .collect();
        let time = watch.elapsed_ps();
        done.into_iter().collect::<Result<(), Fault>>()?;
        Ok(time / (each * count))
    })
}
