//! The host's monotonic clock, for benchmarks: what a region of our own code takes on this machine, and what reading the clock adds to it.
//!
//! Beside it only `replay --bench` and the monitor of the machine read the host's clock: a simulated device keeps the time of its model, and a
//! real one is asked.

use std::hint::black_box;
use std::time::Instant;

use harness_allocator::device::{Clock, TestDevice};

use super::record::Quantity;
use super::summary::median;

/// Empty regions that the overhead is the median of.
const EMPTY_REGIONS: usize = 10_001;

/// Time since some moment, on the host's monotonic clock.
#[derive(Clone, Copy, Debug)]
pub struct Stopwatch(Instant);

impl Stopwatch {
    /// Starts now.
    #[must_use]
    pub fn start() -> Self {
        Self(Instant::now())
    }

    /// Picoseconds since then, counted in the nanoseconds that the clock has.
    #[must_use]
    pub fn elapsed_ps(self) -> u64 {
        u64::try_from(self.0.elapsed().as_nanos()).unwrap_or(u64::MAX).saturating_mul(1000)
    }

    /// Nanoseconds since then.
    #[must_use]
    pub fn elapsed_ns(self) -> u64 {
        self.elapsed_ps() / 1000
    }
}

/// What a region is timed by.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Timer {
    /// The host's monotonic clock.
    Host,
    /// The virtual clock of a simulated device.
    Virtual,
}

impl Timer {
    /// For calls to a device with this clock: a model's calls take the time of the model.
    pub(super) const fn of(clock: Clock) -> Self {
        match clock {
            Clock::Simulated => Self::Virtual,
            Clock::Measured => Self::Host,
        }
    }

    /// What its figures are.
    pub(super) const fn quantity(self) -> Quantity {
        match self {
            Self::Host => Quantity::HostTime,
            Self::Virtual => Quantity::ModelTime,
        }
    }

    /// Times a region, in picoseconds.
    pub(super) fn time<R>(self, device: &mut dyn TestDevice, region: impl FnOnce(&mut dyn TestDevice) -> R) -> (R, u64) {
        match self {
            Self::Host => {
                let watch = Stopwatch::start();
                let result = region(device);
                (result, watch.elapsed_ps())
            }
            Self::Virtual => {
                let start = device.now();
                let result = region(device);
                (result, device.now().saturating_sub(start).0.saturating_mul(1000))
            }
        }
    }
}

/// What timing adds to one region of the host's clock: the median of empty ones, in picoseconds.
#[must_use]
pub fn overhead_ps() -> u64 {
    let mut samples: Vec<u64> = (0..EMPTY_REGIONS)
        .map(|_| {
            let watch = Stopwatch::start();
            black_box(());
            watch.elapsed_ps()
        })
        .collect();
    median(&mut samples).unwrap_or_default()
}
