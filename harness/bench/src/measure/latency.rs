//! The latency of one allocation, by what the allocator has cached.

use harness_allocator::allocator::Request;
use harness_allocator::units::Bytes;

use super::visit::{Fault, Reading, TestBench, Visit};
use crate::clock::Timer;
use crate::provider::MemoryLimit;
use crate::suite::LatencyCase;

pub(super) fn visit(visit: &mut Visit<'_>, size: Bytes, case: LatencyCase) -> Result<Vec<Reading>, Fault> {
    let (timer, request) = (visit.timer(), Request::new(size));
    let (batch, samples) = match case {
        LatencyCase::Hit => hits(visit, timer, request)?,
        LatencyCase::Miss => (1, misses(visit, timer, request)?),
        LatencyCase::AfterEmptyCache => (1, after_empty_cache(visit, timer, request)?),
    };
    Ok(vec![Reading::time(timer, batch, samples)])
}

/// Pairs of an allocation and its free, after one untimed pair.
fn hits(visit: &mut Visit<'_>, timer: Timer, request: Request) -> Result<(u64, Vec<u64>), Fault> {
    visit.bench(MemoryLimit::Reported, |bench, visit| {
        pairs(bench, timer, request, 1)?;
        let batch = visit.batch(timer, |batch| pairs(bench, timer, request, batch))?;
        let samples = visit.sample(timer, |_| Ok(pairs(bench, timer, request, batch)? / batch))?;
        Ok((batch, samples))
    })
}

fn pairs(bench: &mut TestBench, timer: Timer, request: Request, batch: u64) -> Result<u64, Fault> {
    let TestBench { device, allocator } = bench;
    let (done, time) = timer.time(&mut **device, |device| -> Result<(), Fault> {
        for _ in 0..batch {
            let allocation = allocator.allocate(device, request)?;
            allocator.free(device, allocation)?;
        }
        Ok(())
    });
    done.map(|()| time)
}

/// First allocations of fresh allocators.
fn misses(visit: &mut Visit<'_>, timer: Timer, request: Request) -> Result<Vec<u64>, Fault> {
    visit.sample(timer, |visit| visit.bench(MemoryLimit::Reported, |bench, _| one(bench, timer, request)))
}

/// Allocations of one allocator, each after everything was released.
fn after_empty_cache(visit: &mut Visit<'_>, timer: Timer, request: Request) -> Result<Vec<u64>, Fault> {
    visit.bench(MemoryLimit::Reported, |bench, visit| {
        one(bench, timer, request)?;
        visit.sample(timer, |_| {
            bench.empty_cache()?;
            one(bench, timer, request)
        })
    })
}

/// Times one allocation but not its free.
fn one(bench: &mut TestBench, timer: Timer, request: Request) -> Result<u64, Fault> {
    let TestBench { device, allocator } = bench;
    let (allocation, time) = timer.time(&mut **device, |device| allocator.allocate(device, request));
    bench.free(allocation?)?;
    Ok(time)
}
