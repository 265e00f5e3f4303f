//! A program replayed under many settings, and by other allocators: [`Grid`].

use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::{panic, thread};

use harness_allocator::allocator::caching::{ConfError, Config};
use harness_allocator::allocator::{AllocatorKind, AllocatorSpec};
use harness_allocator::device::sim::GRANULARITY;
use harness_allocator::units::{Bytes, Nanos};
use harness_trace::program::{Placement, Prepared, ProgramError, RecordedProgram, Replayed, Setup};
use serde::Serialize;

use crate::least::{Least, least_memory};

/// More than any device has.
pub const UNLIMITED: Bytes = Bytes::gib(1024);

/// Settings that are tried, as `PYTORCH_ALLOC_CONF` would hold them: each alone, then those that go together. Thresholds of the garbage collection
/// come with a fraction, without which they do nothing.
pub const SETTINGS: [&str; 24] = [
    "",
    "expandable_segments:True",
    "max_split_size_mb:32",
    "max_split_size_mb:64",
    "max_split_size_mb:128",
    "max_split_size_mb:256",
    "max_split_size_mb:512",
    "roundup_power2_divisions:4",
    "roundup_power2_divisions:8",
    "roundup_power2_divisions:16",
    "large_segment_size_mb:32",
    "large_segment_size_mb:64",
    "garbage_collection_threshold:0.6,per_process_memory_fraction:0.98",
    "garbage_collection_threshold:0.8,per_process_memory_fraction:0.98",
    "garbage_collection_threshold:0.9,per_process_memory_fraction:0.98",
    "expandable_segments:True,max_split_size_mb:128",
    "expandable_segments:True,max_split_size_mb:512",
    "expandable_segments:True,roundup_power2_divisions:8",
    "expandable_segments:True,large_segment_size_mb:64",
    "expandable_segments:True,garbage_collection_threshold:0.8,per_process_memory_fraction:0.98",
    "max_split_size_mb:128,roundup_power2_divisions:8",
    "max_split_size_mb:512,roundup_power2_divisions:8",
    "max_split_size_mb:128,garbage_collection_threshold:0.8,per_process_memory_fraction:0.98",
    "max_split_size_mb:512,garbage_collection_threshold:0.8,per_process_memory_fraction:0.98",
];

/// Allocators beside PyTorch's that are tried.
pub const OTHER_ALLOCATORS: [AllocatorKind; 4] =
    [AllocatorKind::Bfc, AllocatorKind::RmmPool, AllocatorKind::AsyncPool, AllocatorKind::Direct];

/// An allocator with settings that a program is replayed with.
#[derive(Clone, Debug, PartialEq)]
#[allow(missing_docs, reason = "the names say what they are")]
pub struct Configuration {
    /// The settings as they were given or recorded; of another allocator its name.
    pub name: String,
    pub allocator: AllocatorSpec,
}

impl Configuration {
    /// PyTorch's allocator under these settings.
    ///
    /// # Errors
    /// [`ConfError`].
    pub fn of_settings(conf: &str) -> Result<Self, ConfError> {
        Ok(Self { name: conf.to_owned(), allocator: AllocatorSpec::caching(Config::parse(conf)?) })
    }

    /// Another allocator.
    #[must_use]
    pub fn of_allocator(kind: AllocatorKind) -> Self {
        Self { name: kind.name().to_owned(), allocator: kind.into() }
    }

    /// Those that a program recorded under these settings is tried with: its own first, then those of the grid that differ from it, then the other
    /// allocators.
    #[must_use]
    pub fn grid(recorded: &Config) -> Vec<Self> {
        let own = Self { name: recorded.to_string(), allocator: AllocatorSpec::caching(recorded.clone()) };
        let settings = SETTINGS.iter().filter_map(|conf| Self::of_settings(conf).ok());
        let others = OTHER_ALLOCATORS.into_iter().map(Self::of_allocator);
        let mut all = vec![own];
        for configuration in settings.chain(others) {
            if !all.iter().any(|known| known.allocator.is_equivalent_to(&configuration.allocator)) {
                all.push(configuration);
            }
        }
        all
    }

    /// Whether it is PyTorch's allocator.
    #[must_use]
    pub const fn is_pytorchs(&self) -> bool {
        self.allocator.is_pytorch()
    }
}

/// How a program ended under one configuration.
#[derive(Clone, Debug, PartialEq)]
pub struct Ending {
    /// What it ran with.
    pub configuration: Configuration,
    /// In the memory that the device has.
    pub replayed: Replayed,
    /// How much memory would have been enough, where that was asked for.
    pub least: Option<Least>,
    /// The most that is allocated at one time; with the least memory, on a device that refuses nothing.
    pub peak_allocated: Bytes,
}

/// What of an ending goes into the document that `harness advise --format json` prints. Bytes, counts, and the model's nanoseconds.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[allow(missing_docs, reason = "the names say what they are")]
pub struct EndingRecord {
    /// The settings, or the name of another allocator.
    pub conf: String,
    pub oom: bool,
    /// The index of the snapshot's event whose request is refused first, though the recording served it or ended with it.
    pub oom_event: Option<u32>,
    pub peak_reserved: u64,
    pub peak_allocated: u64,
    pub num_alloc_retries: u64,
    pub num_ooms: u64,
    pub device_allocs: u64,
    #[serde(flatten)]
    pub more: Option<MoreOfEnding>,
}

/// What is not printed where only some settings were asked for.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[allow(missing_docs, reason = "the names say what they are")]
pub struct MoreOfEnding {
    pub oom_request: Option<u64>,
    /// The most that was reserved and not allocated when the driver had just been asked for memory.
    pub peak_unused: u64,
    pub driver_calls: u64,
    /// By the cost model of the simulated device: not measured.
    pub modelled_driver_ns: u64,
    pub least_memory: Option<u64>,
}

impl Ending {
    /// Whether every request was served that the recording served, and the one that ended it.
    #[must_use]
    pub const fn fits(&self) -> bool {
        self.replayed.oom.is_none()
    }

    /// For a document.
    #[must_use]
    pub fn record(&self, with_more: bool) -> EndingRecord {
        let Replayed { oom, stats, calls, driver_time, peak_unused, .. } = &self.replayed;
        let more = || MoreOfEnding {
            oom_request: oom.map(|refused| refused.requested.0),
            peak_unused: peak_unused.0,
            driver_calls: calls.memory_calls(),
            modelled_driver_ns: driver_time.0,
            least_memory: self.least.map(|least| least.enough.0),
        };
        EndingRecord {
            conf: self.configuration.name.clone(),
            oom: oom.is_some(),
            oom_event: oom.map(|refused| refused.event),
            peak_reserved: stats.reserved_bytes.all.peak,
            peak_allocated: stats.allocated_bytes.all.peak,
            num_alloc_retries: stats.num_alloc_retries,
            num_ooms: stats.num_ooms,
            device_allocs: stats.num_device_alloc,
            more: with_more.then(more),
        }
    }

    /// The driver's calls and what the model says they cost.
    #[must_use]
    pub fn price(&self) -> (u64, Nanos) {
        (self.replayed.calls.memory_calls(), self.replayed.driver_time)
    }
}

/// A program, prepared once, and the device it is to run on.
#[derive(Debug)]
pub struct Grid<'a> {
    prepared: &'a Prepared<'a>,
    memory: Bytes,
}

impl<'a> Grid<'a> {
    /// A grid over a program on a device of that memory.
    #[must_use]
    pub const fn new(prepared: &'a Prepared<'a>, memory: Bytes) -> Self {
        Self { prepared, memory }
    }

    /// The program.
    #[must_use]
    pub const fn program(&self) -> &'a RecordedProgram {
        self.prepared.program()
    }

    /// Replays the program under each configuration, on all cores, and tells `progress` of each that is done. The endings stand in the order of the
    /// configurations. `with_least` looks for the least memory as well, which takes some ten replays more of each.
    ///
    /// # Errors
    /// [`ProgramError`] of the first configuration that cannot be replayed at all.
    pub fn run(
        &self,
        configurations: &[Configuration],
        with_least: bool,
        progress: &(dyn Fn() + Sync),
    ) -> Result<Vec<Ending>, ProgramError> {
        in_parallel(configurations, |configuration| {
            let replayed = self.replay(configuration, self.memory)?;
            let least = if with_least { Some(self.least(configuration)?) } else { None };
            progress();
            let here = Bytes(replayed.stats.allocated_bytes.all.peak);
            let (least, peak_allocated) = least.map_or((None, here), |(least, peak)| (Some(least), peak));
            Ok(Ending { configuration: configuration.clone(), replayed, least, peak_allocated })
        })
    }

    /// Replays the program under one configuration.
    ///
    /// # Errors
    /// [`ProgramError`].
    pub fn replay(&self, configuration: &Configuration, memory: Bytes) -> Result<Replayed, ProgramError> {
        self.prepared.replay(&Setup { allocator: configuration.allocator.clone(), memory, placement: Placement::Rising })
    }

    /// The least memory with which the program ends well under a configuration, by bisection in steps of half a percent, of 2 MiB at least; and
    /// the most that it has allocated at one time.
    ///
    /// # Errors
    /// [`ProgramError`].
    pub fn least(&self, configuration: &Configuration) -> Result<(Least, Bytes), ProgramError> {
        let unlimited = self.replay(configuration, UNLIMITED)?.stats;
        let peak = Bytes(unlimited.reserved_bytes.all.peak);
        // What limits itself to a share of the device needs a larger one.
        let fraction = configuration.allocator.effective().map_or(1.0, |config| config.memory_fraction.get());
        let high = Bytes((peak.0 as f64 / fraction.max(0.01)) as u64 + GRANULARITY.0);
        let low = Bytes(unlimited.allocated_bytes.all.peak).max(self.program().reserved_at_start());
        let step = Bytes((high.0 / 200).next_multiple_of(GRANULARITY.0));
        let least = least_memory(low, high, step, |memory| match self.replay(configuration, memory) {
            Ok(replayed) => Ok(replayed.oom.is_none()),
            Err(ProgramError::TooLittleMemory { .. }) => Ok(false),
            Err(error) => Err(error),
        })?;
        Ok((least, Bytes(unlimited.allocated_bytes.all.peak)))
    }
}

/// Does something with each item on all cores. The answers stand in the order of the items; of several errors the one of the first item is told.
///
/// # Errors
/// What `act` says.
pub fn in_parallel<T: Sync, R: Send, E: Send>(items: &[T], act: impl Fn(&T) -> Result<R, E> + Sync) -> Result<Vec<R>, E> {
    in_parallel_by(thread::available_parallelism().map_or(1, usize::from), items, act)
}

/// [`in_parallel`] with at most so many at a time.
///
/// # Errors
/// What `act` says.
pub fn in_parallel_by<T: Sync, R: Send, E: Send>(most: usize, items: &[T], act: impl Fn(&T) -> Result<R, E> + Sync) -> Result<Vec<R>, E> {
    let workers = most.clamp(1, items.len().max(1));
    let next = AtomicUsize::new(0);
    let answers: Vec<Mutex<Option<Result<R, E>>>> = items.iter().map(|_| Mutex::new(None)).collect();
    thread::scope(|scope| {
        let work = || {
            while let Some((item, answer)) =
                Some(next.fetch_add(1, Ordering::Relaxed)).and_then(|at| Some((items.get(at)?, answers.get(at)?)))
            {
                let found = act(item);
                *answer.lock().unwrap_or_else(std::sync::PoisonError::into_inner) = Some(found);
            }
        };
        let others: Vec<_> = (1..workers).map(|_| scope.spawn(work)).collect();
        work();
        for other in others {
            if let Err(panic) = other.join() {
                panic::resume_unwind(panic);
            }
        }
    });
    answers.into_iter().filter_map(|answer| answer.into_inner().unwrap_or_else(std::sync::PoisonError::into_inner)).collect()
}
