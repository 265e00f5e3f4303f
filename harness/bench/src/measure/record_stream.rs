//! Memory used by other streams: allocation, `record_stream` for each of them, free.

use harness_allocator::allocator::Request;
use harness_allocator::device::StreamId;
use harness_allocator::units::Bytes;

use super::visit::{Fault, Reading, TestBench, Visit};
use crate::clock::Timer;
use crate::provider::MemoryLimit;

pub(super) fn visit(visit: &mut Visit<'_>, streams: u64, size: Bytes) -> Result<Vec<Reading>, Fault> {
    let (timer, request) = (visit.timer(), Request::new(size));
    visit.bench(MemoryLimit::Reported, |bench, visit| {
        let others: Vec<StreamId> = (0..streams).map(|_| bench.device.create_stream()).collect::<Result<_, _>>()?;
        let measured = cycles(visit, bench, timer, request, &others);
        // The allocator must release its events of these streams before the streams are destroyed.
        bench.device.synchronize()?;
        bench.allocator.close(&mut *bench.device)?;
        for stream in others {
            bench.device.destroy_stream(stream)?;
        }
        measured
    })
}

fn cycles(
    visit: &mut Visit<'_>,
    bench: &mut TestBench,
    timer: Timer,
    request: Request,
    others: &[StreamId],
) -> Result<Vec<Reading>, Fault> {
    cycle(bench, timer, request, others, 4)?;
    let batch = visit.batch(timer, |batch| cycle(bench, timer, request, others, batch))?;
    let samples = visit.sample(timer, |_| Ok(cycle(bench, timer, request, others, batch)? / batch))?;
    Ok(vec![Reading::time(timer, batch, samples)])
}

fn cycle(bench: &mut TestBench, timer: Timer, request: Request, others: &[StreamId], batch: u64) -> Result<u64, Fault> {
    let TestBench { device, allocator } = bench;
    let (done, time) = timer.time(&mut **device, |device| -> Result<(), Fault> {
        for _ in 0..batch {
            let allocation = allocator.allocate(device, request)?;
            for &stream in others {
                allocator.record_stream(&allocation, stream)?;
            }
            allocator.free(device, allocation)?;
        }
        Ok(())
    });
    done.map(|()| time)
}
