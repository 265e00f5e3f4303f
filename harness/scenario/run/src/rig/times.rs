use harness_allocator::device::DeviceCalls;
use harness_allocator::units::{Bytes, Nanos};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

use super::{ProgramId, Rig};
use harness_record::{Samples, Timings};

/// Enough for a p99 that rests on a hundred samples.
const MOST_SAMPLES: usize = 10_000;

/// Keeps all samples up to a bound, then a uniform selection (Vitter's algorithm R,
/// <https://doi.org/10.1145/3147.3165>).
#[derive(Clone, Debug)]
pub(super) struct Reservoir {
    samples: Samples,
    rng: ChaCha8Rng,
}

impl Reservoir {
    fn new(seed: u64) -> Self {
        Self {
            samples: Samples::default(),
            rng: ChaCha8Rng::seed_from_u64(seed),
        }
    }

    pub(super) fn push(&mut self, duration: Nanos) {
        self.samples.count += 1;
        if self.samples.kept.len() < MOST_SAMPLES {
            self.samples.kept.push(duration);
            return;
        }
        let index = self.rng.random_range(0..self.samples.count);
        if let Some(slot) = self.samples.kept.get_mut(index as usize) {
            *slot = duration;
        }
    }
}

/// The measurements of a timed run, over all programs. Unused in a checked run.
pub(super) struct Times {
    pub(super) allocate: Reservoir,
    pub(super) free: Reservoir,
    pub(super) empty_cache: Reservoir,
    pub(super) scenario: Nanos,
    pub(super) step_began: Nanos,
    /// The number of nested paused steps.
    pub(super) paused: u32,
    lost_to_retry: Nanos,
    /// The call counts when an allocator's counters were last read.
    last_calls: DeviceCalls,
    /// The peak of the first program's reserved memory.
    peak_reserved: Bytes,
    unused_at_peak: Bytes,
}

impl Times {
    pub(super) fn new(seed: u64, calls: DeviceCalls) -> Self {
        let reservoir = |salt| Reservoir::new(seed ^ salt);
        Self {
            allocate: reservoir(1),
            free: reservoir(2),
            empty_cache: reservoir(3),
            scenario: Nanos::ZERO,
            step_began: Nanos::ZERO,
            paused: 0,
            lost_to_retry: Nanos::ZERO,
            last_calls: calls,
            peak_reserved: Bytes::ZERO,
            unused_at_peak: Bytes::ZERO,
        }
    }
}

impl Rig {
    pub fn add_lost_time(&mut self, lost: Nanos) {
        self.times.lost_to_retry += lost;
    }

    pub const fn lost_to_retry(&self) -> Nanos {
        self.times.lost_to_retry
    }

    /// The durations; zero except in a timed run.
    pub fn take_timings(&mut self) -> Timings {
        let take =
            |reservoir: &mut Reservoir| std::mem::replace(reservoir, Reservoir::new(0)).samples;
        if !self.is_timed() {
            return Timings::default();
        }
        Timings {
            allocate: take(&mut self.times.allocate),
            free: take(&mut self.times.free),
            empty_cache: take(&mut self.times.empty_cache),
            scenario: self.times.scenario,
            lost_to_retry: self.times.lost_to_retry,
        }
    }

    /// Reserved but unallocated bytes at the first program's first peak of reserved memory. Zero
    /// except in a timed run.
    pub const fn unused_at_peak(&self) -> Bytes {
        self.times.unused_at_peak
    }

    pub(super) fn start(&mut self) -> Nanos {
        if self.is_timed() {
            self.device.now()
        } else {
            Nanos::ZERO
        }
    }

    /// The time since [`Rig::start`] in a timed run, else zero.
    pub(super) fn since(&mut self, start: Nanos) -> Nanos {
        if self.is_timed() {
            self.device.now().saturating_sub(start)
        } else {
            Nanos::ZERO
        }
    }

    /// Records a served request. Reads the allocator's counters only if the driver was called, so a
    /// cache hit stays cheap.
    pub(super) fn timed_allocate(&mut self, duration: Nanos) {
        if !self.is_timed() {
            return;
        }
        self.times.allocate.push(duration);
        let calls = self.device.calls();
        if calls.memory_calls() == self.times.last_calls.memory_calls() {
            return;
        }
        self.times.last_calls = calls;
        let (program, _) = self.program_on_device();
        let stats = program.allocator.stats();
        let before = std::mem::replace(&mut program.retries, stats.num_alloc_retries);
        if stats.num_alloc_retries > before {
            self.times.lost_to_retry += duration;
        }
        let (reserved, allocated) = (
            Bytes(stats.reserved_bytes.all.current),
            Bytes(stats.allocated_bytes.all.current),
        );
        if self.entered == ProgramId::FIRST && reserved > self.times.peak_reserved {
            self.times.peak_reserved = reserved;
            self.times.unused_at_peak = reserved.saturating_sub(allocated);
        }
    }
}
