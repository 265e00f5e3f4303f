//! The host's monotonic clock: times regions of our own code, and measures its own overhead.
//!
//! Only `replay --bench` and the monitor of the machine also read the host's clock.

use std::{hint::black_box, time::Instant};

use harness_allocator::device::{Clock, TestDevice};

use super::{record::Quantity, summary::median};

/// Number of empty regions in the overhead's median.
const EMPTY_REGIONS: usize = 10_001;

#[derive(Clone, Copy, Debug)]
pub struct Stopwatch(Instant);

impl Stopwatch {
    pub fn start() -> Self {
        Self(Instant::now())
    }

    /// Elapsed picoseconds, with the clock's resolution of nanoseconds.
    pub fn elapsed_ps(self) -> u64 {
        u64::try_from(self.0.elapsed().as_nanos())
            .unwrap_or(u64::MAX)
            .saturating_mul(1000)
    }

    pub fn elapsed_ns(self) -> u64 {
        self.elapsed_ps() / 1000
    }
}

pub(super) const fn quantity(clock: Clock) -> Quantity {
    if matches!(clock, Clock::Measured) {
        Quantity::HostTime
    } else {
        Quantity::ModelTime
    }
}

pub(super) fn time<R>(
    clock: Clock,
    device: &mut dyn TestDevice,
    region: impl FnOnce(&mut dyn TestDevice) -> R,
) -> (R, u64) {
    match clock {
        Clock::Measured => {
            let watch = Stopwatch::start();
            let result = region(device);
            (result, watch.elapsed_ps())
        }
        Clock::Simulated => {
            let start = device.now();
            let result = region(device);
            (
                result,
                device.now().saturating_sub(start).0.saturating_mul(1000),
            )
        }
    }
}

/// Overhead of timing one region on the host's clock: the median of empty regions, in picoseconds.
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
