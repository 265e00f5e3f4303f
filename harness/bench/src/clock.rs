//! The host's monotonic clock, for benchmarks: what a region of our own code takes on this machine, what reading the clock adds to it, and
//! a yardstick that shows how fast the processor was at that moment.
//!
//! Beside it only `replay_bench` and the monitor of a night read the host's clock: a simulated device keeps the time of its model, and a real
//! one is asked.

use std::hint::black_box;
use std::time::Instant;

use harness_allocator::device::{Clock, TestDevice};

use super::record::Quantity;
use super::summary::median;

/// Steps that the yardstick is told for.
const YARDSTICK_STEPS: u64 = 200_000;
/// So many of them are done: some hundredths of a millisecond on today's processors, short beside a visit, so that one fits between any two.
const STEPS_DONE: u64 = YARDSTICK_STEPS / 10;

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

/// What a fixed piece of integer arithmetic takes, in picoseconds, from timing a tenth of it: each step needs the one before, so that it
/// measures the processor's clock and what other programs take of it. The step is SplitMix64 (<https://doi.org/10.1145/2714064.2660195>).
#[must_use]
pub fn yardstick_ps() -> u64 {
    let watch = Stopwatch::start();
    let mut state = black_box(1_u64);
    for _ in 0..STEPS_DONE {
        state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        state = (state ^ (state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        state = (state ^ (state >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        state ^= state >> 31;
    }
    black_box(state);
    watch.elapsed_ps() * (YARDSTICK_STEPS / STEPS_DONE)
}
