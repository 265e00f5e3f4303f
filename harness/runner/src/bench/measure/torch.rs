//! PyTorch's own allocator as an arm: which cases it can do, and how it is asked.

use harness_allocator::units::Bytes;

use super::{Fault, MOST_SAMPLES, Reading, SLICE_NS};
use crate::bench::clock::Stopwatch;
use crate::bench::record::Quantity;
use crate::bench::suite::{LatencyCase, Measure};
use crate::bench::torch::{Answer, Question, Task};
use crate::bench::workshop::Workshop;

/// Pairs that are timed together in a hit: a call from Python takes about a microsecond, reading its clock a tenth of that.
const PAIRS: u64 = 1000;

/// The case as PyTorch is asked for it; `None` where it cannot do it.
pub(in crate::bench) const fn task(measure: &Measure) -> Option<Task> {
    match measure {
        Measure::Latency { size, case } => {
            let batch = if matches!(case, LatencyCase::Hit) { PAIRS } else { 1 };
            Some(Task::Latency { case: case.name(), size: *size, batch })
        }
        Measure::EmptyCache { segments, size } => Some(Task::EmptyCache { segments: *segments, size: *size }),
        Measure::Trace { .. }
        | Measure::Scenario(_)
        | Measure::Recovery { .. }
        | Measure::Threads { .. }
        | Measure::RecordStream { .. }
        | Measure::Pipeline { .. }
        | Measure::StartUp => None,
    }
}

/// Does a case once, as [`super::visit`] does with an allocator of ours.
pub(in crate::bench) fn visit(task: Task, memory: Bytes, workshop: &mut dyn Workshop) -> Result<Vec<Reading>, Fault> {
    let torch = match workshop.torch() {
        Some(Ok(torch)) => torch,
        Some(Err(reason)) => return Err(Fault::Skipped(reason)),
        None => return Err(Fault::Skipped("PyTorch was not asked for".to_owned())),
    };
    let batch = match task {
        Task::Latency { batch, .. } => batch,
        Task::EmptyCache { .. } => 1,
    };
    let watch = Stopwatch::start();
    let mut samples = Vec::new();
    while samples.is_empty() || (samples.len() < MOST_SAMPLES && watch.elapsed_ns() < SLICE_NS) {
        match torch.ask(&Question { task, memory }) {
            Answer::Samples { samples_ps } if samples_ps.is_empty() => return Err(Fault::Failed("PyTorch gave no samples".to_owned())),
            Answer::Samples { samples_ps } => samples.extend(samples_ps),
            Answer::Skipped { skipped } => return Err(Fault::Skipped(skipped)),
            Answer::Failed { failed } => return Err(Fault::Failed(failed)),
        }
    }
    Ok(vec![Reading { part: None, quantity: Quantity::HostTime, batch, samples }])
}
