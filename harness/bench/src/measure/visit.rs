//! What all measures share: a device with a fresh allocator for the time of a visit, samples, and how a visit can fail.

use std::borrow::Cow;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use harness_allocator::allocator::{Allocation, Allocator, AllocatorError, AllocatorSpec, Request};
use harness_allocator::device::{Clock, Device, DeviceError, TestDevice};
use harness_allocator::units::Bytes;
use serde::{Deserialize, Serialize};

use crate::clock::{Stopwatch, Timer};
use crate::provider::{DeviceProvider, MemoryLimit};
use crate::record::Quantity;

/// Host time that one visit may spend on samples, in nanoseconds: short, so that arms take turns often; the first sample is always taken.
pub(super) const SLICE_NS: u64 = 2_000_000;
/// Most samples of one visit.
pub(super) const MOST_SAMPLES: usize = 50;
/// A timed region should be this many times as long as what timing adds to it, where operations can be timed together: 1 %, so that the
/// promise of 2 % also holds when the clock has a bad moment.
const REGION_BY_OVERHEAD: u64 = 100;
/// Regions of each number of operations, of which the least decides: an interruption only ever makes a region longer, and five are not
/// all interrupted.
const TRIES: usize = 5;
/// Most operations of one region.
const MOST_BATCH: u64 = 1 << 20;

/// Who does a case, with what, and what is known from earlier visits.
pub(crate) struct Visit<'a> {
    pub(crate) provider: &'a mut dyn DeviceProvider,
    pub(crate) arm: &'a AllocatorSpec,
    /// The memory that the suite needs.
    pub(crate) memory: Bytes,
    /// What timing adds to a region of the host's clock.
    pub(crate) overhead_ps: u64,
    /// Operations of one region, found in the first visit.
    pub(crate) batch: &'a mut Option<u64>,
    /// Set when the user wants it to stop.
    pub(crate) interrupt: &'a Arc<AtomicBool>,
}

/// Samples of one quantity.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Reading {
    /// What it is of the case, where the case has several.
    pub(crate) part: Option<Cow<'static, str>>,
    pub(crate) quantity: Quantity,
    /// Operations that one sample is the mean of.
    pub(crate) batch: u64,
    /// Or why this part of the case cannot be had here.
    pub(crate) samples: Result<Vec<u64>, String>,
}

/// Why a case has no figures.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Fault {
    /// It did not do what it should.
    Failed(String),
    /// It does not fit in the memory that the suite gives it.
    OutOfMemory(String),
    /// It cannot be done here.
    Skipped(String),
    /// The user wants it to stop.
    Interrupted,
}

impl From<DeviceError> for Fault {
    fn from(error: DeviceError) -> Self {
        match error {
            DeviceError::Unavailable { .. } => Self::Skipped(error.to_string()),
            _ => Self::Failed(error.to_string()),
        }
    }
}

impl From<AllocatorError> for Fault {
    fn from(error: AllocatorError) -> Self {
        match error {
            AllocatorError::Device(error) => error.into(),
            AllocatorError::OutOfMemory(_) | AllocatorError::TooLarge { .. } => Self::OutOfMemory(error.to_string()),
        }
    }
}

/// What the time between two events is.
pub(super) const fn device_time(clock: Clock) -> Quantity {
    match clock {
        Clock::Simulated => Quantity::ModelTime,
        Clock::Measured => Quantity::DeviceTime,
    }
}

/// A device and a fresh allocator on it.
pub(super) struct TestBench<A: ?Sized = dyn Allocator> {
    pub(super) device: Box<dyn TestDevice>,
    pub(super) allocator: Box<A>,
}

impl<A: Allocator + ?Sized> TestBench<A> {
    pub(super) fn allocate(&mut self, request: Request) -> Result<Allocation, AllocatorError> {
        self.allocator.allocate(&mut *self.device, request)
    }

    pub(super) fn free(&mut self, allocation: Allocation) -> Result<(), DeviceError> {
        self.allocator.free(&mut *self.device, allocation)
    }

    pub(super) fn empty_cache(&mut self) -> Result<(), DeviceError> {
        self.allocator.empty_cache(&mut *self.device)
    }

    /// Gives everything back; something that stays is the allocator's failure.
    fn close(mut self) -> Result<(), Fault> {
        self.device.synchronize()?;
        self.allocator.close(&mut *self.device)?;
        let leaks = self.device.leaks();
        if leaks.is_empty() { Ok(()) } else { Err(Fault::Failed(format!("left on the device at the end: {leaks}"))) }
    }
}

/// The arm as `--allocator` takes it, whatever the suite calls it.
pub(super) fn for_shell(arm: &AllocatorSpec) -> String {
    let kind = arm.kind_name();
    arm.settings().map_or_else(|| kind.to_owned(), |settings| format!("{kind}({settings})"))
}

impl Visit<'_> {
    /// What calls to the device are timed by.
    pub(super) fn timer(&self) -> Timer {
        Timer::of(self.provider.clock())
    }

    /// Does something with a device and a fresh allocator, and gives everything back, whatever came of it.
    pub(super) fn bench<T>(
        &mut self,
        limit: MemoryLimit,
        body: impl FnOnce(&mut TestBench, &mut Self) -> Result<T, Fault>,
    ) -> Result<T, Fault> {
        let allocator = self.provider.allocator(self.arm);
        self.bench_of(allocator, limit, body)
    }

    /// The same with a fresh allocator of the caller's.
    pub(super) fn bench_of<A: Allocator + ?Sized, T>(
        &mut self,
        allocator: Box<A>,
        limit: MemoryLimit,
        body: impl FnOnce(&mut TestBench<A>, &mut Self) -> Result<T, Fault>,
    ) -> Result<T, Fault> {
        let device = self.provider.device(self.memory, limit)?;
        let mut bench = TestBench { device, allocator };
        let done = body(&mut bench, self);
        let closed = bench.close();
        // Why it failed first explains what was left behind, not the other way round.
        let value = done?;
        closed.map(|()| value)
    }

    /// Takes samples for a slice of time, on a virtual clock one. Each is the time of one operation.
    pub(super) fn sample(&mut self, timer: Timer, mut take: impl FnMut(&mut Self) -> Result<u64, Fault>) -> Result<Vec<u64>, Fault> {
        let watch = Stopwatch::start();
        let mut samples = vec![take(self)?];
        while timer == Timer::Host && samples.len() < MOST_SAMPLES && watch.elapsed_ns() < SLICE_NS {
            if self.interrupt.load(Ordering::Relaxed) {
                return Err(Fault::Interrupted);
            }
            samples.push(take(self)?);
        }
        Ok(samples)
    }

    /// How many operations to time together, settled in the first visit.
    pub(super) fn batch(&mut self, timer: Timer, region: impl FnMut(u64) -> Result<u64, Fault>) -> Result<u64, Fault> {
        if let Some(batch) = *self.batch {
            return Ok(batch);
        }
        let batch = match timer {
            Timer::Host => batch_of(self.overhead_ps.saturating_mul(REGION_BY_OVERHEAD), region)?,
            Timer::Virtual => 1,
        };
        *self.batch = Some(batch);
        Ok(batch)
    }
}

/// The least power of two of operations that make a region so long, in picoseconds, also where nothing interrupts it: doubled until the
/// least of some regions is.
fn batch_of(length: u64, mut region: impl FnMut(u64) -> Result<u64, Fault>) -> Result<u64, Fault> {
    let mut batch = 1;
    'doubling: while batch < MOST_BATCH {
        for _ in 0..TRIES {
            if region(batch)? < length {
                batch *= 2;
                continue 'doubling;
            }
        }
        break;
    }
    Ok(batch)
}

impl Reading {
    /// The times of a case, by that timer.
    pub(super) fn time(timer: Timer, batch: u64, samples: Vec<u64>) -> Self {
        Self { part: None, quantity: timer.quantity(), batch, samples: Ok(samples) }
    }

    /// One amount of memory.
    pub(super) fn memory(part: &'static str, bytes: u64) -> Self {
        Self { part: Some(part.into()), quantity: Quantity::Memory, batch: 1, samples: Ok(vec![bytes]) }
    }

    /// Times that cannot be had here for this reason.
    pub(super) fn no_time(timer: Timer, reason: &str) -> Self {
        Self { part: None, quantity: timer.quantity(), batch: 1, samples: Err(reason.to_owned()) }
    }

    /// The same of memory.
    pub(super) fn no_memory(part: &'static str, reason: String) -> Self {
        Self { part: Some(part.into()), quantity: Quantity::Memory, batch: 1, samples: Err(reason) }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    /// Operations of 20 ns, the first of them cold, and 1 ms for whatever else the processor did in the regions of these numbers.
    fn regions(interrupted: &[u64]) -> impl FnMut(u64) -> Result<u64, Fault> {
        let mut count = 0;
        move |batch| {
            count += 1;
            let cold = if count == 1 { 3_000_000 } else { 0 };
            let interruption = if interrupted.contains(&count) { 1_000_000_000 } else { 0 };
            Ok(batch * 20_000 + cold + interruption)
        }
    }

    #[test]
    fn an_interruption_does_not_settle_how_many_operations_are_timed_together() {
        let length = 3_000_000;
        assert_eq!(batch_of(length, regions(&[])).unwrap(), 256, "128 take 2.56 µs, 256 take 5.12 µs");
        for interrupted in [&[1][..], &[2], &[3, 4], &[5, 6, 7, 8], &[1, 2, 4, 6, 8, 10, 12]] {
            assert_eq!(batch_of(length, regions(interrupted)).unwrap(), 256, "{interrupted:?}");
        }
        assert_eq!(batch_of(u64::MAX, regions(&[])).unwrap(), MOST_BATCH, "it ends");
    }

    #[test]
    fn a_fault_of_a_region_is_told() {
        assert_eq!(batch_of(1, |_| Err(Fault::Interrupted)), Err(Fault::Interrupted));
    }
}
