//! The cases: one match arm per measure in [`visit()`].
//!
//! A visit runs a case once on one arm: a fresh allocator, some samples in a short slice of time,
//! everything released. [`super::execute`] decides how often a case is visited.

mod calls;
mod library;
mod scenario;
mod start_up;
mod threads;
pub(super) mod torch;
mod trace;
pub(super) mod visit;

use std::sync::atomic::Ordering;

use harness_allocator::device::Clock;

use self::visit::{Fault, Reading, Visit, device_time};
use super::{clock, record::Quantity, suite::Measure};

/// Visits a case once. A new measure does not compile until it appears here and in [`quantity`].
pub(super) fn visit(measure: &Measure, visit: &mut Visit<'_>) -> Result<Vec<Reading>, Fault> {
    if visit.interrupt.load(Ordering::Relaxed) {
        return Err(Fault::Interrupted);
    }
    if let Some(library) = visit.arm.as_library() {
        library.check_file()?;
    }
    if let Some(timed) = visit
        .arm
        .as_library()
        .and_then(|library| library::visit(visit, library, measure))
    {
        return timed;
    }
    match measure {
        Measure::Latency { size, case } => calls::latency(visit, *size, *case),
        Measure::Trace { events } => trace::visit(visit, events),
        Measure::Scenario(scenario) => scenario::visit(visit, scenario),
        Measure::Recovery { size } => calls::recovery(visit, *size),
        Measure::Pipeline { size } => calls::pipeline(visit, *size),
        Measure::EmptyCache { segments, size } => calls::empty_cache(visit, *segments, *size),
        Measure::Threads { count, size } => threads::visit(visit, *count, *size),
        Measure::RecordStream { streams, size } => calls::record_stream(visit, *streams, *size),
        Measure::StartUp => start_up::visit(visit),
    }
}

pub(super) const fn quantity(measure: &Measure, clock: Clock) -> Quantity {
    match measure {
        Measure::Latency { .. }
        | Measure::Scenario(_)
        | Measure::Recovery { .. }
        | Measure::EmptyCache { .. }
        | Measure::RecordStream { .. } => clock::quantity(clock),
        Measure::Pipeline { .. } => device_time(clock),
        Measure::Trace { .. } | Measure::Threads { .. } | Measure::StartUp => Quantity::HostTime,
    }
}
