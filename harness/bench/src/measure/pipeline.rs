//! Device time of a loop of allocation, fill and free, between events on its stream. This shows device waits that an allocator
//! causes, even if the host's calls return immediately.

use harness_allocator::allocator::Request;
use harness_allocator::device::{EventId, StreamId, Tag};
use harness_allocator::units::Bytes;

use super::visit::{Fault, Reading, TestBench, Visit, device_time};
use crate::provider::MemoryLimit;

/// Turns per sample: enough to make the loop's ends negligible.
pub(super) const TURNS: u64 = 20;

pub(super) fn visit(visit: &mut Visit<'_>, size: Bytes) -> Result<Vec<Reading>, Fault> {
    let (timer, quantity) = (visit.timer(), device_time(visit.provider.clock()));
    let samples = visit.bench(MemoryLimit::Reported, |bench, visit| {
        let events = (bench.device.create_timed_event()?, bench.device.create_timed_event()?);
        let measured =
            turns(bench, events, Request::new(size)).and_then(|_warm_up| visit.sample(timer, |_| turns(bench, events, Request::new(size))));
        bench.device.destroy_event(events.0)?;
        bench.device.destroy_event(events.1)?;
        measured
    })?;
    Ok(vec![Reading { part: None, quantity, batch: TURNS, samples: Ok(samples) }])
}

/// The device's time for one turn.
fn turns(bench: &mut TestBench, (start, end): (EventId, EventId), request: Request) -> Result<u64, Fault> {
    bench.device.synchronize()?;
    bench.device.record_event(start, StreamId::DEFAULT)?;
    for turn in 0..TURNS {
        let allocation = bench.allocate(request)?;
        bench.device.fill(StreamId::DEFAULT, allocation.range(), Tag(turn))?;
        bench.free(allocation)?;
    }
    bench.device.record_event(end, StreamId::DEFAULT)?;
    bench.device.synchronize_event(end)?;
    Ok(bench.device.elapsed(start, end)?.0.saturating_mul(1000) / TURNS)
}
