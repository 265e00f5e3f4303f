//! Passes over an allocation trace: the time of one operation on the host, and the memory that it took.

use harness_trace::trace::TraceEvent;

use super::program::{Pass, Program};
use super::{Bench, Fault, Reading, Visit};
use crate::clock::{Stopwatch, Timer};
use crate::provider::MemoryLimit;

pub(super) fn visit(visit: &mut Visit<'_>, events: &[TraceEvent]) -> Result<Vec<Reading>, Fault> {
    visit.bench(MemoryLimit::HostPath, |bench, visit| {
        let mut program = Program::new(events, &mut *bench.device)?;
        let measured = passes(visit, bench, &mut program);
        for stream in program.streams() {
            bench.device.destroy_stream(stream)?;
        }
        measured
    })
}

/// The first pass fills the cache and tells what memory the trace takes; it is not timed.
fn passes(visit: &mut Visit<'_>, bench: &mut Bench, program: &mut Program) -> Result<Vec<Reading>, Fault> {
    let (mut peak, mut unused) = (0, 0);
    let Bench { device, allocator } = bench;
    let Pass { operations, requests, refused } = program.pass(&mut **device, &mut **allocator, |allocator| {
        let stats = allocator.stats();
        let reserved = stats.reserved_bytes.all.current;
        if reserved > peak {
            (peak, unused) = (reserved, reserved.saturating_sub(stats.allocated_bytes.all.current));
        }
    })?;
    if refused > 0 {
        let memory = visit.memory;
        let reason =
            format!("{refused} of the trace's {requests} requests do not fit in {memory}: an allocator that serves less is no faster");
        return Err(Fault::OutOfMemory(reason));
    }
    let samples = visit.sample(Timer::Host, |_| {
        let watch = Stopwatch::start();
        // A cache that was cut up can serve fewer requests than a fresh one, so each pass counts its own operations.
        let done = program.pass(&mut **device, &mut **allocator, |_| {})?;
        Ok(watch.elapsed_ps() / done.operations.max(1))
    })?;
    Ok(vec![
        Reading::time(Timer::Host, operations.max(1), samples),
        Reading::memory("peak reserved", peak),
        Reading::memory("not allocated at the peak", unused),
    ])
}
