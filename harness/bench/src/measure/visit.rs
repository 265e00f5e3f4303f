//! Shared by all measures: a device with a fresh allocator for one visit, samples, and the ways a
//! visit can fail.

use std::borrow::Cow;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use harness_allocator::allocator::{Allocation, Allocator, AllocatorError, AllocatorSpec, Request};
use harness_allocator::device::{Clock, DeviceError, StreamId, TestDevice};
use harness_allocator::units::Bytes;
use serde::{Deserialize, Serialize};

use crate::clock::{Stopwatch, quantity};
use crate::provider::{DeviceProvider, MemoryLimit};
use crate::record::Quantity;

/// Host time for the samples of one visit, in nanoseconds: short, so that arms take turns often.
/// The first sample is always taken.
pub(super) const SLICE_NS: u64 = 2_000_000;
pub(super) const MOST_SAMPLES: usize = 50;
/// A timed region is at least this many times as long as its timing overhead, if operations can be
/// timed together. 1 % keeps the promised 2 % even if the clock is slow for a moment.
const REGION_BY_OVERHEAD: u64 = 100;
/// Regions measured per batch size. The shortest decides, because an interruption only makes a
/// region longer, and rarely hits all five.
const TRIES: usize = 5;
const MOST_BATCH: u64 = 1 << 20;

pub(crate) struct Visit<'a> {
    pub(crate) provider: &'a mut dyn DeviceProvider,
    pub(crate) arm: &'a AllocatorSpec,
    pub(crate) memory: Bytes,
    pub(crate) overhead_ps: u64,
    /// Operations per region, found in the first visit.
    pub(crate) batch: &'a mut Option<u64>,
    pub(crate) interrupt: &'a Arc<AtomicBool>,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Reading {
    /// The part of the case, if it has several.
    pub(crate) part: Option<Cow<'static, str>>,
    pub(crate) quantity: Quantity,
    pub(crate) batch: u64,
    /// `Err`: why this part cannot be measured here.
    pub(crate) samples: Result<Vec<u64>, String>,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Fault {
    /// It misbehaved.
    Failed(String),
    /// It does not fit in the suite's memory.
    OutOfMemory(String),
    /// It cannot run here.
    Skipped(String),
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
            AllocatorError::OutOfMemory(_) | AllocatorError::TooLarge { .. } => {
                Self::OutOfMemory(error.to_string())
            }
        }
    }
}

/// The quantity of a time between two events.
pub(super) const fn device_time(clock: Clock) -> Quantity {
    if matches!(clock, Clock::Measured) {
        Quantity::DeviceTime
    } else {
        Quantity::ModelTime
    }
}

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

    /// Closes the allocator, which may hold events of these streams, and destroys the streams.
    pub(super) fn close_with(&mut self, streams: Vec<StreamId>) -> Result<(), DeviceError> {
        self.device.synchronize()?;
        self.allocator.close(&mut *self.device)?;
        streams
            .into_iter()
            .try_for_each(|stream| self.device.destroy_stream(stream))
    }

    fn close(mut self) -> Result<(), Fault> {
        self.device.synchronize()?;
        self.allocator.close(&mut *self.device)?;
        let leaks = self.device.leaks();
        if leaks.is_empty() {
            Ok(())
        } else {
            Err(Fault::Failed(format!("leaked on the device: {leaks}")))
        }
    }
}

/// The arm as `--allocator` takes it, without its name in the suite.
pub(super) fn for_shell(arm: &AllocatorSpec) -> String {
    let kind = arm.kind_name();
    arm.settings()
        .map_or_else(|| kind.to_owned(), |settings| format!("{kind}({settings})"))
}

impl Visit<'_> {
    /// Runs `body` with a device and a fresh allocator, then releases everything, even if `body`
    /// fails.
    pub(super) fn bench<T>(
        &mut self,
        limit: MemoryLimit,
        body: impl FnOnce(&mut TestBench, &mut Self) -> Result<T, Fault>,
    ) -> Result<T, Fault> {
        let allocator = self.provider.allocator(self.arm);
        self.bench_of(allocator, limit, body)
    }

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
        // The first failure explains the leak, so it wins.
        let value = done?;
        closed.map(|()| value)
    }

    /// Takes samples for a slice of time, or one on a virtual clock. Each is the time of one
    /// operation.
    pub(super) fn sample(
        &mut self,
        clock: Clock,
        mut take: impl FnMut(&mut Self) -> Result<u64, Fault>,
    ) -> Result<Vec<u64>, Fault> {
        let watch = Stopwatch::start();
        let mut samples = vec![take(self)?];
        while clock == Clock::Measured
            && samples.len() < MOST_SAMPLES
            && watch.elapsed_ns() < SLICE_NS
        {
            if self.interrupt.load(Ordering::Relaxed) {
                return Err(Fault::Interrupted);
            }
            samples.push(take(self)?);
        }
        Ok(samples)
    }

    /// Takes such samples as the only reading of a case. Each is the time of `batch` operations,
    /// divided by their number.
    pub(super) fn timed(
        &mut self,
        clock: Clock,
        batch: u64,
        take: impl FnMut(&mut Self) -> Result<u64, Fault>,
    ) -> Result<Vec<Reading>, Fault> {
        Ok(vec![Reading::time(clock, batch, self.sample(clock, take)?)])
    }

    /// Operations to time together, determined in the first visit.
    pub(super) fn batch(
        &mut self,
        clock: Clock,
        region: impl FnMut(u64) -> Result<u64, Fault>,
    ) -> Result<u64, Fault> {
        if let Some(batch) = *self.batch {
            return Ok(batch);
        }
        let is_measured = clock == Clock::Measured;
        let batch = if is_measured {
            batch_of(self.overhead_ps.saturating_mul(REGION_BY_OVERHEAD), region)?
        } else {
            1
        };
        Ok(*self.batch.insert(batch))
    }
}

/// The smallest power of two of operations whose region takes at least `length` picoseconds without
/// interruption.
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
    pub(super) fn time(clock: Clock, batch: u64, samples: Vec<u64>) -> Self {
        Self {
            part: None,
            quantity: quantity(clock),
            batch,
            samples: Ok(samples),
        }
    }

    pub(super) fn memory(part: &'static str, bytes: u64) -> Self {
        Self {
            part: Some(part.into()),
            quantity: Quantity::Memory,
            batch: 1,
            samples: Ok(vec![bytes]),
        }
    }

    /// The peak of reserved memory, and the bytes of it that were not allocated then.
    pub(super) fn peak(reserved: u64, unused: u64) -> [Self; 2] {
        [
            Self::memory("peak reserved", reserved),
            Self::memory("not allocated at the peak", unused),
        ]
    }
}

#[cfg(test)]
mod tests;
