use std::convert::Infallible;

use harness_allocator::device::{Clock, DeviceError};
use harness_allocator::{allocator::Allocation, units::Bytes};
use harness_trace::execute::{
    ByHandle, Executor, Kind, OperationCounts, OperationObserver, OperationOutcome, PrepareError,
    Target, Unobserved,
};
use harness_trace::trace::TraceEvent;

use super::visit::{Fault, Reading, TestBench, Visit};
use crate::{clock::Stopwatch, provider::MemoryLimit};

pub(super) fn visit(visit: &mut Visit<'_>, events: &[TraceEvent]) -> Result<Vec<Reading>, Fault> {
    visit.bench(MemoryLimit::HostPath, |bench, visit| {
        let mut executor = Executor::new(events, &mut *bench.device).map_err(not_prepared)?;
        let measured = passes(visit, bench, &mut executor);
        for stream in executor.streams().made() {
            bench.device.destroy_stream(stream)?;
        }
        measured
    })
}

pub(super) fn not_prepared(error: PrepareError) -> Fault {
    match error {
        PrepareError::Device(error) => error.into(),
        error @ (PrepareError::IdReused { .. } | PrepareError::TooManyStreams { .. }) => {
            Fault::Failed(error.to_string())
        }
    }
}

#[derive(Default)]
pub(super) struct Peak {
    pub(super) reserved: u64,
    pub(super) unused: u64,
}

impl<T: Target> OperationObserver<T> for Peak {
    type Error = Infallible;

    fn after(
        &mut self,
        _: usize,
        kind: Kind,
        _: OperationOutcome,
        target: &mut T,
    ) -> Result<(), Infallible> {
        if kind == Kind::Allocate {
            let stats = target.stats();
            let reserved = stats.reserved_bytes.all.current;
            if reserved > self.reserved {
                *self = Self {
                    reserved,
                    unused: reserved.saturating_sub(stats.allocated_bytes.all.current),
                };
            }
        }
        Ok(())
    }
}

/// The first pass fills the cache and measures the trace's memory; it is not timed.
fn passes(
    visit: &mut Visit<'_>,
    bench: &mut TestBench,
    executor: &mut Executor<Allocation>,
) -> Result<Vec<Reading>, Fault> {
    let mut peak = Peak::default();
    let mut target = ByHandle {
        device: &mut *bench.device,
        allocator: &mut *bench.allocator,
    };
    let counts = executor
        .pass(&mut target, &mut peak)
        .map_err(DeviceError::from)?;
    serves_all(&counts, visit.memory)?;
    let samples = visit.sample(Clock::Measured, |_| {
        let watch = Stopwatch::start();
        // A fragmented cache may serve fewer requests than a fresh one, so each pass counts its own
        // operations.
        let done = executor
            .pass(&mut target, &mut Unobserved)
            .map_err(DeviceError::from)?;
        Ok(watch.elapsed_ps() / done.operations().max(1))
    })?;
    Ok([Reading::time(
        Clock::Measured,
        counts.operations().max(1),
        samples,
    )]
    .into_iter()
    .chain(Reading::peak(peak.reserved, peak.unused))
    .collect())
}

pub(super) fn serves_all(counts: &OperationCounts, memory: Bytes) -> Result<(), Fault> {
    let (requests, refused) = (counts.allocations, counts.refused);
    if refused == 0 {
        return Ok(());
    }
    let reason = format!(
        "{refused} of the trace's {requests} requests do not fit in {memory}, so its times are not \
         comparable"
    );
    Err(Fault::OutOfMemory(reason))
}
