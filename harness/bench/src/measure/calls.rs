//! The times of single calls of an allocator: allocations by what it has cached, frees of memory
//! that other streams use, `empty_cache`, recovery from a failing request, and the device time of a
//! loop.

use harness_allocator::allocator::{Allocation, Allocator, AllocatorError, Request};
use harness_allocator::device::{Clock, EventId, StreamId, Tag};
use harness_allocator::units::Bytes;

use super::visit::{Fault, Reading, TestBench, Visit, device_time};
use crate::{clock::time, provider::MemoryLimit, suite::LatencyCase};

/// The latency of one allocation, by what the allocator has cached: pairs of an allocation and its
/// free, first allocations of fresh allocators, or allocations of one allocator that each follow
/// the release of everything.
pub(super) fn latency(
    visit: &mut Visit<'_>,
    size: Bytes,
    case: LatencyCase,
) -> Result<Vec<Reading>, Fault> {
    let (clock, request) = (visit.provider.clock(), Request::new(size));
    match case {
        LatencyCase::Hit => visit.bench(MemoryLimit::Reported, |bench, visit| {
            cycles(visit, 1, |batch| {
                cycle(bench, clock, request, batch, |_, _| Ok(()))
            })
        }),
        LatencyCase::Miss => visit.timed(clock, 1, |visit| {
            visit.bench(MemoryLimit::Reported, |bench, _| one(bench, clock, request))
        }),
        LatencyCase::AfterEmptyCache => visit.bench(MemoryLimit::Reported, |bench, visit| {
            one(bench, clock, request)?;
            visit.timed(clock, 1, |_| {
                bench.empty_cache()?;
                one(bench, clock, request)
            })
        }),
    }
}

fn one(bench: &mut TestBench, clock: Clock, request: Request) -> Result<u64, Fault> {
    let TestBench { device, allocator } = bench;
    let (allocation, time) = time(clock, &mut **device, |device| {
        allocator.allocate(device, request)
    });
    bench.free(allocation?)?;
    Ok(time)
}

/// Samples of a cycle, after some untimed ones. `cycle` makes a number of cycles and returns their
/// time.
fn cycles(
    visit: &mut Visit<'_>,
    untimed: u64,
    mut cycle: impl FnMut(u64) -> Result<u64, Fault>,
) -> Result<Vec<Reading>, Fault> {
    let clock = visit.provider.clock();
    cycle(untimed)?;
    let batch = visit.batch(clock, &mut cycle)?;
    visit.timed(clock, batch, |_| Ok(cycle(batch)? / batch))
}

fn cycle(
    bench: &mut TestBench,
    clock: Clock,
    request: Request,
    batch: u64,
    used: impl Fn(&mut dyn Allocator, &Allocation) -> Result<(), Fault>,
) -> Result<u64, Fault> {
    let TestBench { device, allocator } = bench;
    let (done, time) = time(clock, &mut **device, |device| -> Result<(), Fault> {
        for _ in 0..batch {
            let allocation = allocator.allocate(device, request)?;
            used(&mut **allocator, &allocation)?;
            allocator.free(device, allocation)?;
        }
        Ok(())
    });
    done.map(|()| time)
}

/// Memory used by other streams: allocation, `record_stream` for each of them, free.
pub(super) fn record_stream(
    visit: &mut Visit<'_>,
    streams: u64,
    size: Bytes,
) -> Result<Vec<Reading>, Fault> {
    let clock = visit.provider.clock();
    visit.bench(MemoryLimit::Reported, |bench, visit| {
        let others: Vec<StreamId> = (0..streams)
            .map(|_| bench.device.create_stream())
            .collect::<Result<_, _>>()?;
        let measured = cycles(visit, 4, |batch| {
            cycle(
                bench,
                clock,
                Request::new(size),
                batch,
                |allocator, allocation| {
                    others
                        .iter()
                        .try_for_each(|&stream| Ok(allocator.record_stream(allocation, stream)?))
                },
            )
        });
        bench.close_with(others)?;
        measured
    })
}

pub(super) fn empty_cache(
    visit: &mut Visit<'_>,
    segments: u64,
    size: Bytes,
) -> Result<Vec<Reading>, Fault> {
    let clock = visit.provider.clock();
    visit.bench(MemoryLimit::Reported, |bench, visit| {
        visit.timed(clock, 1, |_| {
            let live: Vec<Allocation> = (0..segments)
                .map(|_| bench.allocate(Request::new(size)))
                .collect::<Result<_, _>>()?;
            live.into_iter()
                .try_for_each(|allocation| bench.free(allocation))?;
            let TestBench { device, allocator } = bench;
            let (emptied, time) =
                time(clock, &mut **device, |device| allocator.empty_cache(device));
            emptied?;
            Ok(time)
        })
    })
}

pub(super) fn recovery(visit: &mut Visit<'_>, size: Bytes) -> Result<Vec<Reading>, Fault> {
    let clock = visit.provider.clock();
    // More requests than fit, even without rounding.
    let most = visit.memory.0 / size.0 + 1;
    visit.timed(clock, 1, |visit| {
        visit.bench(MemoryLimit::Enforced, |bench, _| {
            let live = fill(bench, Request::new(size), most)?;
            let TestBench { device, allocator } = bench;
            let (recovered, time) = time(
                clock,
                &mut **device,
                |device| -> Result<Vec<Allocation>, Fault> {
                    match allocator.allocate(device, Request::new(size)) {
                        Err(error) if error.is_out_of_memory() => {}
                        Err(error) => return Err(error.into()),
                        Ok(_) => return Err(Fault::Failed(
                            "a request succeeded that failed before, although nothing was freed"
                                .to_owned(),
                        )),
                    }
                    let half = live.len().div_ceil(2);
                    live.into_iter()
                        .try_for_each(|allocation| allocator.free(device, allocation))?;
                    allocator.empty_cache(device)?;
                    let again = (0..half).map(|_| allocator.allocate(device, Request::new(size)));
                    again
                        .collect::<Result<_, _>>()
                        .map_err(|error| match error {
                            AllocatorError::Device(error) => error.into(),
                            error => Fault::Failed(format!(
                                "half of the freed memory cannot be allocated again: {error}"
                            )),
                        })
                },
            );
            recovered?
                .into_iter()
                .try_for_each(|allocation| bench.free(allocation))?;
            Ok(time)
        })
    })
}

pub(super) fn fill<A: Allocator + ?Sized>(
    bench: &mut TestBench<A>,
    request: Request,
    most: u64,
) -> Result<Vec<Allocation>, Fault> {
    let mut live = Vec::new();
    loop {
        match bench.allocate(request) {
            Ok(allocation) => live.push(allocation),
            Err(error) if error.is_out_of_memory() && !live.is_empty() => return Ok(live),
            Err(error) => return Err(error.into()),
        }
        if live.len() as u64 > most {
            return Err(Fault::Failed(format!(
                "{most} × {} were allocated, more than the device has",
                request.size
            )));
        }
    }
}

/// Turns per sample: enough to make the loop's ends negligible.
pub(super) const TURNS: u64 = 20;

/// Device time of a loop of allocation, fill and free, between events on its stream.
pub(super) fn pipeline(visit: &mut Visit<'_>, size: Bytes) -> Result<Vec<Reading>, Fault> {
    let (clock, quantity) = (visit.provider.clock(), device_time(visit.provider.clock()));
    let samples = visit.bench(MemoryLimit::Reported, |bench, visit| {
        let events = (
            bench.device.create_timed_event()?,
            bench.device.create_timed_event()?,
        );
        let measured = turns(bench, events, Request::new(size))
            .and_then(|_warm_up| visit.sample(clock, |_| turns(bench, events, Request::new(size))));
        bench.device.destroy_event(events.0)?;
        bench.device.destroy_event(events.1)?;
        measured
    })?;
    Ok(vec![Reading {
        part: None,
        quantity,
        batch: TURNS,
        samples: Ok(samples),
    }])
}

fn turns(
    bench: &mut TestBench,
    (start, end): (EventId, EventId),
    request: Request,
) -> Result<u64, Fault> {
    bench.device.synchronize()?;
    bench.device.record_event(start, StreamId::DEFAULT)?;
    for turn in 0..TURNS {
        let allocation = bench.allocate(request)?;
        bench
            .device
            .fill(StreamId::DEFAULT, allocation.range(), Tag(turn))?;
        bench.free(allocation)?;
    }
    bench.device.record_event(end, StreamId::DEFAULT)?;
    bench.device.synchronize_event(end)?;
    Ok(bench.device.elapsed(start, end)?.0.saturating_mul(1000) / TURNS)
}
