//! User libraries, where host time is measured. A call to a library crosses a process boundary,
//! which takes longer than most allocations. The library's process therefore runs the timed
//! operations itself and returns the time of the library's functions; the device time of their CUDA
//! calls is added ([`LibraryAllocator::time`]). Cases that cannot be timed this way are skipped
//! with the reason.

use std::collections::BTreeMap;

use harness_allocator::allocator::library::wire::{LibraryOperation, LibraryProgram};
use harness_allocator::allocator::library::{LibraryAllocator, LibrarySpec};
use harness_allocator::allocator::{Allocation, Request};
use harness_allocator::device::{Clock, DeviceError, StreamId};
use harness_allocator::units::Bytes;
use harness_trace::execute::{ByHandle, Executor};
use harness_trace::trace::TraceEvent;

use super::calls::fill;
use super::trace::{Peak, not_prepared, serves_all};
use super::visit::{Fault, Reading, TestBench, Visit};
use crate::provider::MemoryLimit;
use crate::suite::{LatencyCase, Measure};

type Bench = TestBench<LibraryAllocator>;

/// Visits a case that needs special handling for a library; `None` if the general code fits. Model
/// times are those of the device calls, from any process.
pub(super) fn visit(
    visit: &mut Visit<'_>,
    library: &LibrarySpec,
    measure: &Measure,
) -> Option<Result<Vec<Reading>, Fault>> {
    let is_measured = visit.provider.clock() == Clock::Measured;
    Some(match measure {
        Measure::Trace { events } => trace(visit, library, events),
        Measure::Threads { .. } => Err(Fault::Skipped(
            "its process calls it from one thread".to_owned(),
        )),
        _ if !is_measured => return None,
        Measure::Pipeline { .. } => Err(Fault::Skipped(
            "the device would wait for the calls between processes".to_owned(),
        )),
        Measure::Latency { size, case } => latency(visit, library, *size, *case),
        Measure::Recovery { size } => recovery(visit, library, *size),
        Measure::EmptyCache { segments, size } => empty_cache(visit, library, *segments, *size),
        Measure::RecordStream { streams, size } => record_stream(visit, library, *streams, *size),
        Measure::Scenario(_) | Measure::StartUp => return None,
    })
}

const fn request(slot: u32, size: Bytes) -> LibraryOperation {
    LibraryOperation::Allocate {
        slot,
        size: size.0,
        stream: StreamId::DEFAULT.0,
    }
}

fn fresh(library: &LibrarySpec) -> Box<LibraryAllocator> {
    Box::new(LibraryAllocator::new(library.clone()))
}

const FREE: LibraryOperation = LibraryOperation::Free { slot: 0 };

/// Runs a program and returns its time in picoseconds. Exactly the requests in `expected` may fail.
fn time(bench: &mut Bench, program: LibraryProgram, expected: &[u64]) -> Result<u64, Fault> {
    let TestBench { device, allocator } = bench;
    let timed = allocator.time(&mut **device, program)?;
    match timed
        .refused
        .iter()
        .find(|refused| !expected.contains(refused))
    {
        Some(refused) => Err(Fault::OutOfMemory(format!(
            "timed request {} failed",
            refused + 1
        ))),
        None if timed.refused.len() < expected.len() => Err(Fault::Failed(
            "a request succeeded that failed before, although nothing was freed".to_owned(),
        )),
        None => Ok(timed.nanos.saturating_mul(1000)),
    }
}

/// Samples from one fresh library. The program starts and ends with no live allocation.
fn samples(
    visit: &mut Visit<'_>,
    library: &LibrarySpec,
    program: &LibraryProgram,
) -> Result<Vec<Reading>, Fault> {
    let clock = visit.provider.clock();
    visit.bench_of(fresh(library), MemoryLimit::Reported, |bench, visit| {
        visit.timed(clock, 1, |_| time(bench, program.clone(), &[]))
    })
}

/// Samples with enough turns to hide the cost of reading the clock, after one untimed turn.
fn turns(
    bench: &mut Bench,
    visit: &mut Visit<'_>,
    turn: &[LibraryOperation],
) -> Result<Vec<Reading>, Fault> {
    let clock = visit.provider.clock();
    let program = |times| LibraryProgram {
        before: turn.to_vec(),
        timed: turn.to_vec(),
        times,
    };
    let batch = visit.batch(clock, |batch| time(bench, program(batch), &[]))?;
    visit.timed(clock, batch, |_| {
        Ok(time(bench, program(batch), &[])? / batch)
    })
}

fn latency(
    visit: &mut Visit<'_>,
    library: &LibrarySpec,
    size: Bytes,
    case: LatencyCase,
) -> Result<Vec<Reading>, Fault> {
    let (clock, one) = (visit.provider.clock(), request(0, size));
    let program = |before: &[LibraryOperation]| LibraryProgram {
        before: before.to_vec(),
        timed: vec![one],
        times: 1,
    };
    match case {
        LatencyCase::Hit => {
            visit.bench_of(fresh(library), MemoryLimit::Reported, |bench, visit| {
                turns(bench, visit, &[one, FREE])
            })
        }
        LatencyCase::Miss => visit.timed(clock, 1, |visit| {
            visit.bench_of(fresh(library), MemoryLimit::Reported, |bench, _| {
                time(bench, program(&[]), &[])
            })
        }),
        LatencyCase::AfterEmptyCache => samples(
            visit,
            library,
            &program(&[one, FREE, LibraryOperation::EmptyCache]),
        ),
    }
}

fn empty_cache(
    visit: &mut Visit<'_>,
    library: &LibrarySpec,
    segments: u64,
    size: Bytes,
) -> Result<Vec<Reading>, Fault> {
    let slots = slots(segments);
    let before = slots
        .clone()
        .map(|slot| request(slot, size))
        .chain(slots.map(|slot| LibraryOperation::Free { slot }))
        .collect();
    samples(
        visit,
        library,
        &LibraryProgram {
            before,
            timed: vec![LibraryOperation::EmptyCache],
            times: 1,
        },
    )
}

/// `count` slots; a suite has far fewer than 2^32.
fn slots(count: u64) -> std::ops::Range<u32> {
    0..u32::try_from(count).unwrap_or(u32::MAX)
}

fn record_stream(
    visit: &mut Visit<'_>,
    library: &LibrarySpec,
    streams: u64,
    size: Bytes,
) -> Result<Vec<Reading>, Fault> {
    visit.bench_of(fresh(library), MemoryLimit::Reported, |bench, visit| {
        let others: Vec<StreamId> = (0..streams)
            .map(|_| bench.device.create_stream())
            .collect::<Result<_, _>>()?;
        let uses = others.iter().map(|stream| LibraryOperation::RecordStream {
            slot: 0,
            stream: stream.0,
        });
        let turn: Vec<LibraryOperation> = [request(0, size)]
            .into_iter()
            .chain(uses)
            .chain([FREE])
            .collect();
        let measured = turns(bench, visit, &turn);
        bench.close_with(others)?;
        measured
    })
}

fn recovery(
    visit: &mut Visit<'_>,
    library: &LibrarySpec,
    size: Bytes,
) -> Result<Vec<Reading>, Fault> {
    let clock = visit.provider.clock();
    visit.timed(clock, 1, |visit| {
        // Another fresh library determines how many requests fit.
        let fitting = visit.bench_of(fresh(library), MemoryLimit::Enforced, |bench, visit| {
            fitting(bench, size, visit.memory)
        })?;
        let all = slots(fitting);
        let before: Vec<LibraryOperation> = all.clone().map(|slot| request(slot, size)).collect();
        let refused = request(all.end, size);
        let frees = all.clone().map(|slot| LibraryOperation::Free { slot });
        let half = slots(fitting.div_ceil(2)).map(|slot| request(slot, size));
        let timed = [refused]
            .into_iter()
            .chain(frees)
            .chain([LibraryOperation::EmptyCache])
            .chain(half)
            .collect();
        visit.bench_of(fresh(library), MemoryLimit::Enforced, |bench, _| {
            time(
                bench,
                LibraryProgram {
                    before,
                    timed,
                    times: 1,
                },
                &[fitting],
            )
        })
    })
}

fn fitting(bench: &mut Bench, size: Bytes, memory: Bytes) -> Result<u64, Fault> {
    let live = fill(bench, Request::new(size), memory.0 / size.0 + 1)?;
    let count = live.len() as u64;
    live.into_iter()
        .try_for_each(|allocation| bench.free(allocation))?;
    bench.empty_cache()?;
    Ok(count)
}

/// The first pass fills the cache and measures the trace's memory. Its operations go through the
/// harness and are not timed.
fn trace(
    visit: &mut Visit<'_>,
    library: &LibrarySpec,
    events: &[TraceEvent],
) -> Result<Vec<Reading>, Fault> {
    operations(events.iter().copied())?;
    visit.bench_of(fresh(library), MemoryLimit::HostPath, |bench, visit| {
        let mut executor: Executor<Allocation> =
            Executor::new(events, &mut *bench.device).map_err(not_prepared)?;
        let mut peak = Peak::default();
        let mut target = ByHandle {
            device: &mut *bench.device,
            allocator: &mut *bench.allocator,
        };
        let counts = executor
            .pass(&mut target, &mut peak)
            .map_err(DeviceError::from)?;
        let made: Vec<StreamId> = executor.streams().made().collect();
        let measured = serves_all(&counts, visit.memory).and_then(|()| {
            let timed = operations(
                events
                    .iter()
                    .map(|&event| executor.streams().on_device(event)),
            )?;
            let program = LibraryProgram {
                before: Vec::new(),
                timed,
                times: 1,
            };
            let count = counts.operations().max(1);
            let samples = visit.sample(Clock::Measured, |_| {
                Ok(time(bench, program.clone(), &[])? / count)
            })?;
            Ok([Reading::time(Clock::Measured, count, samples)]
                .into_iter()
                .chain(Reading::peak(peak.reserved, peak.unused))
                .collect())
        });
        bench.close_with(made)?;
        measured
    })
}

/// A trace as operations of a library's process.
fn operations(events: impl Iterator<Item = TraceEvent>) -> Result<Vec<LibraryOperation>, Fault> {
    let (mut slots, mut vacant, mut made): (BTreeMap<u64, u32>, Vec<u32>, u32) =
        (BTreeMap::new(), Vec::new(), 0);
    let mut operations = Vec::new();
    for event in events {
        match event {
            TraceEvent::Allocate {
                size: Bytes::ZERO, ..
            } => {}
            TraceEvent::Allocate { id, size, stream } => {
                let slot = vacant.pop().unwrap_or_else(|| {
                    made += 1;
                    made - 1
                });
                slots.insert(id, slot);
                operations.push(LibraryOperation::Allocate {
                    slot,
                    size: size.0,
                    stream: stream.0,
                });
            }
            TraceEvent::Free { id } => {
                if let Some(slot) = slots.remove(&id) {
                    vacant.push(slot);
                    operations.push(LibraryOperation::Free { slot });
                }
            }
            TraceEvent::RecordStream { id, stream } => {
                operations.extend(slots.get(&id).map(|&slot| LibraryOperation::RecordStream {
                    slot,
                    stream: stream.0,
                }));
            }
            TraceEvent::SynchronizeStream(stream) => {
                operations.push(LibraryOperation::SynchronizeStream(stream.0))
            }
            TraceEvent::Synchronize => operations.push(LibraryOperation::Synchronize),
            TraceEvent::EmptyCache => operations.push(LibraryOperation::EmptyCache),
            TraceEvent::ResetPeaks => {}
            TraceEvent::SetFraction(_)
            | TraceEvent::ExternalMemory(_)
            | TraceEvent::BeginPool(_)
            | TraceEvent::EndPool(_)
            | TraceEvent::ReleasePool(_) => {
                return Err(Fault::Skipped(format!(
                    "the trace has `{event}`, which the library interface does not have"
                )));
            }
        }
    }
    operations.extend(
        slots
            .into_values()
            .map(|slot| LibraryOperation::Free { slot }),
    );
    Ok(operations)
}
