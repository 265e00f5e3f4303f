//! [`Metric`]: the values that expectations and sizes use. Names are resolved once, by the check.

use std::{fmt, sync::Arc};

use derive_more::Display;
use harness_allocator::device::{DeviceCalls, DeviceMemory};
use harness_allocator::stats::{MemoryStats, StatKey};
use harness_allocator::{named_enum, units::Nanos};
use serde::{Deserialize, Serialize};

use harness_language::expression::{self, Dimension, Quantity, Unit};

#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Display)]
pub enum Metric {
    Now(Account),
    /// The value at a `measure` step, or before the first step: `before.device.used`,
    /// `start.device.used`.
    #[display("{_0}.{_1}")]
    At(MeasureName, Account),
    #[display("{_0}.{_1}")]
    Report(StepName, ReportKey),
    #[display("{_0}")]
    Variable(VariableName, Unit),
    /// The growth of an account since the last evaluation of the same expression:
    /// `growth(reserved)`.
    #[display("growth({_1})")]
    Growth(GrowthSite, Account),
    #[display("{_0}.{_1}")]
    Program(ProgramName, StatKey),
    #[display("{_0}.{_1}")]
    Process(ProcessName, Account),
    /// A counter of `torch.cuda.memory_stats()` of the program of an `exec` step:
    /// `training.allocated.peak`.
    #[display("{_0}.{_1}")]
    Torch(StepName, StatKey),
    #[display("{_0}.rank{_1}.{_2}")]
    Rank(StepName, usize, RankFigure),
    /// A metric of the run with another allocator: `expandable.reserved.peak`. It is known after
    /// all allocators have run.
    #[display("{_0}.{_1}")]
    Arm(String, Box<Metric>),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Display)]
pub enum RankFigure {
    Report(ReportKey),
    /// A counter of its allocator at the end of the training.
    Stat(StatKey),
}

impl RankFigure {
    pub const REPORTS: &'static [ReportKey] = &[
        ReportKey::FinalBatch,
        ReportKey::EffectiveBatch,
        ReportKey::Attempts,
        ReportKey::Retries,
        ReportKey::RetryTime,
        ReportKey::Ooms,
        ReportKey::GivenBack,
        ReportKey::Collectives,
        ReportKey::WaitedForRanks,
    ];
}

/// The number of a `growth(…)` in the order of the file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct GrowthSite(pub u32);

pub type Expectation = expression::ExpectationOf<Metric>;
pub type Amount = expression::AmountOf<Metric>;
pub type Expression = expression::ExpressionOf<Metric>;

pub(crate) const START: &str = "start";
pub(crate) const DEFAULT_STREAM: &str = "default";

impl Quantity for Metric {
    fn dimension(&self) -> Dimension {
        self.unit().into()
    }
}

impl Metric {
    pub fn unit(&self) -> Unit {
        match self {
            Self::Now(account)
            | Self::At(_, account)
            | Self::Growth(_, account)
            | Self::Process(_, account) => account.unit(),
            Self::Report(_, key) | Self::Rank(_, _, RankFigure::Report(key)) => key.unit(),
            Self::Variable(_, unit) => *unit,
            Self::Program(_, key)
            | Self::Torch(_, key)
            | Self::Rank(_, _, RankFigure::Stat(key)) => Account::Stat(*key).unit(),
            Self::Arm(_, metric) => metric.unit(),
        }
    }

    pub const fn account(&self) -> Option<Account> {
        match self {
            Self::Now(account) | Self::At(_, account) | Self::Growth(_, account) => Some(*account),
            Self::Program(_, key) | Self::Torch(_, key) => Some(Account::Stat(*key)),
            // Processes and ranks report their figures themselves.
            Self::Rank(..)
            | Self::Report(..)
            | Self::Variable(..)
            | Self::Arm(..)
            | Self::Process(..) => None,
        }
    }
}

/// A buffer as a step names it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BufferRef {
    pub name: BufferName,
    pub index: Option<Expression>,
}

impl fmt::Display for BufferRef {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.index {
            None => self.name.fmt(f),
            Some(index) => write!(f, "{}[{index}]", self.name),
        }
    }
}

/// The values of all accounts at one moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Readings {
    pub stats: MemoryStats,
    /// `None` if it was not queried.
    pub memory: Option<DeviceMemory>,
    pub calls: DeviceCalls,
    pub now: Nanos,
}

impl Readings {
    /// The value of an account in its unit; `None` if the device does not report it.
    pub fn get(&self, account: Account) -> Option<u64> {
        let Self {
            stats,
            memory,
            calls,
            now,
        } = self;
        let metric = match account {
            Account::Stat(key) => return Some(stats.get(key)),
            Account::Device(metric) => metric,
        };
        Some(match metric {
            DeviceMetric::Used => memory.as_ref()?.used.get(),
            DeviceMetric::Free => memory.as_ref()?.free.get(),
            DeviceMetric::Total => memory.as_ref()?.total.get(),
            DeviceMetric::ContextOverhead => memory.as_ref()?.context_overhead.get(),
            DeviceMetric::ExternalMemory => memory.as_ref()?.external_memory.get(),
            DeviceMetric::Process => memory.as_ref()?.process?.get(),
            DeviceMetric::MallocCalls => calls.malloc,
            DeviceMetric::MallocFailures => calls.malloc_failures,
            DeviceMetric::FreeCalls => calls.free,
            DeviceMetric::MemoryCalls => calls.memory_calls(),
            DeviceMetric::Synchronizations => calls.synchronize,
            DeviceMetric::Now => now.get(),
        })
    }
}

/// A value that exists at any point of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Display)]
pub enum Account {
    Stat(StatKey),
    Device(DeviceMetric),
}

impl Account {
    /// Returns whether it belongs to one process and changes only with calls of this process.
    pub const fn is_of_one_process(self) -> bool {
        match self {
            Self::Stat(_) => true,
            Self::Device(metric) => !matches!(
                metric,
                DeviceMetric::Used
                    | DeviceMetric::Free
                    | DeviceMetric::Total
                    | DeviceMetric::ContextOverhead
                    | DeviceMetric::ExternalMemory
                    | DeviceMetric::Now
            ),
        }
    }

    pub fn all() -> impl Iterator<Item = Self> {
        StatKey::all()
            .map(Self::Stat)
            .chain(DeviceMetric::ALL.iter().map(|&metric| Self::Device(metric)))
    }

    /// Parses a full or short name: `reserved` is `reserved_bytes.all.current`, `reserved.peak` is
    /// `reserved_bytes.all.peak`.
    pub fn from_name(name: &str) -> Option<Self> {
        let key = StatKey::from_name(name).or_else(|| StatKey::from_name(&Self::in_full(name)?));
        key.map(Self::Stat)
            .or_else(|| DeviceMetric::from_name(name).map(Self::Device))
    }

    /// Short names of counters in bytes over all pools.
    pub const SHORT: [&'static str; 5] = [
        "allocated",
        "reserved",
        "active",
        "inactive_split",
        "requested",
    ];

    fn in_full(name: &str) -> Option<String> {
        let (family, field) = name.split_once('.').unwrap_or((name, "current"));
        Self::SHORT
            .contains(&family)
            .then(|| format!("{family}_bytes.all.{field}"))
    }

    pub fn unit(self) -> Unit {
        match self {
            Self::Stat(key) if key.is_bytes() => Unit::Bytes,
            Self::Stat(_) => Unit::Count,
            Self::Device(metric) => metric.unit(),
        }
    }
}

macro_rules! metrics {
    ($(#[$meta:meta])* $type:ident {
        $($variant:ident = $name:literal, $unit:ident: $about:literal;)*
    }) => {
        named_enum! {
            $(#[$meta])*
            #[derive(Serialize, Deserialize)]
            $type { $(#[doc = $about] #[serde(rename = $name)] $variant = $name,)* }
        }

        impl $type {
            pub const fn unit(self) -> Unit {
                match self { $(Self::$variant => Unit::$unit),* }
            }

            /// Describes it in one sentence for the reference.
            pub const fn about(self) -> &'static str {
                match self { $(Self::$variant => $about),* }
            }
        }
    };
}

metrics! {
    /// Metrics of the device.
    DeviceMetric {
        Used = "device.used", Bytes: "Used memory of the whole device, as NVML reports it: context \
             overhead, this process and all others.";
        Free = "device.free", Bytes: "Largest amount that the next device allocation can take.";
        Total = "device.total", Bytes: "Memory of the device: the scenario's `needs.memory`.";
        ContextOverhead = "device.context_overhead", Bytes: "Used memory of the device before the \
             first allocation of this process.";
        ExternalMemory = "device.external_memory", Bytes: "Memory that `external_memory` steps \
             use.";
        Process = "device.process", Bytes: "Memory that NVML attributes to this process. An \
             expectation on it fails if NVML does not report it.";
        MallocCalls = "device.malloc_calls", Count: "Driver allocations, including failed ones.";
        MallocFailures = "device.malloc_failures", Count: "Driver allocations that failed because \
             memory ran out.";
        FreeCalls = "device.free_calls", Count: "Driver frees.";
        MemoryCalls = "device.memory_calls", Count: "Driver allocations and frees, including pages \
             and calls to the driver's pools. A cache exists to avoid them.";
        Synchronizations = "device.synchronizations", Count: "Waits of the host for an event, a \
             stream or the device.";
        Now = "time.now", Time: "Time since the device was opened, on the device's clock. The \
             clock of a simulated device is virtual.";
    }
}

metrics! {
    /// Figures of steps. A step that runs again in a loop replaces its figures.
    ReportKey {
        Time = "time", Time: "Duration of the step.";
        Attempts = "attempts", Count: "Attempts: 1, plus one for each retry of the recovery \
             policy.";
        Retries = "retries", Count: "Retries of the recovery policy. Retries of the allocator \
             itself are `num_alloc_retries`.";
        RetriesWithoutProgress = "retries_without_progress", Count: "Retries that request as much \
             as the failed attempt before, without more free memory.";
        RetryTime = "retry_time", Time: "Duration of failed attempts and recovery.";
        Ooms = "ooms", Count: "Requests that failed.";
        FreedBlocks = "freed_blocks", Count: "Blocks that the step freed.";
        FreedBytes = "freed_bytes", Bytes: "Freed memory: allocated bytes for `free`, reserved \
             bytes for `empty_cache`.";
        Operations = "operations", Count: "Requests and frees.";
        Allocations = "allocations", Count: "Requests that were served.";
        Frees = "frees", Count: "Frees during the step.";
        FailedRequest = "failed_request", Bytes: "Size of the first failed request; 0 if none \
             failed.";
        FailedOperation = "failed_operation", Count: "Number of the first failed operation, \
             counted from 1; 0 if none failed.";
        ReservedAtFailure = "reserved_at_failure", Bytes: "Reserved memory when the first request \
             failed; 0 if none failed.";
        AllocatedAtFailure = "allocated_at_failure", Bytes: "Allocated memory when the first \
             request failed; 0 if none failed.";
        LargestFreeAtFailure = "largest_free_at_failure", Bytes: "Largest free block in the cache \
             that the first failed request could use; 0 if none failed.";
        DeviceFreeAtFailure = "device_free_at_failure", Bytes: "Free memory of the device when the \
             first request failed; 0 if none failed.";
        LiveBlocks = "live_blocks", Count: "Live blocks at the end of the step.";
        LiveBytes = "live_bytes", Bytes: "Requested bytes of the live blocks at the end of the \
             step.";
        PeakLiveBytes = "peak_live_bytes", Bytes: "Largest sum of requested bytes that was live at \
             the same time.";
        PinnedSegments = "pinned_segments", Count: "Segments that cannot be released because of \
             live blocks of the storm.";
        PinningBlocks = "pinning_blocks", Count: "Live blocks of the storm in those segments.";
        PinningBytes = "pinning_bytes", Bytes: "Allocated bytes of those blocks.";
        FreeInPinnedSegments = "free_in_pinned_segments", Bytes: "Free bytes in those segments, \
             which cannot be released to the driver.";
        GrownBytes = "grown_bytes", Bytes: "Growth of all sites that grew since the measure. Sites \
             that shrank are not subtracted.";
        GrownSites = "grown_sites", Count: "Sites that grew since the measure.";
        FreeSegments = "free_segments", Count: "Segments without live blocks, which `empty_cache` \
             releases.";
        Iterations = "iterations", Count: "Completed iterations of a training or a loop.";
        FirstBatch = "first_batch", Count: "Batch of the first attempted iteration.";
        FinalBatch = "final_batch", Count: "Samples in memory at the same time in the last \
             completed iteration; 0 if none completed.";
        EffectiveBatch = "effective_batch", Count: "Samples per update, with accumulated \
             gradients, in the last completed iteration; 0 if none completed.";
        Throughput = "throughput", Count: "Samples of completed iterations per second of all \
             attempts, rounded down; 0 if none completed.";
        Served = "served", Count: "Completed requests.";
        Evicted = "evicted", Count: "Evictions of a request's cache for another request.";
        PeakRunning = "peak_running", Count: "Largest number of requests that ran at the same \
             time.";
        RecomputedTokens = "recomputed_tokens", Count: "Tokens whose keys and values were evicted \
             and computed again.";
        ExitCode = "exit_code", Count: "Exit code of the program; 128 + n if signal n ended it.";
        Processes = "processes", Count: "Processes of the program that used the GPU.";
        PeakReserved = "peak_reserved", Bytes: "Largest amount of GPU memory that a process of the \
             program used.";
        MallocCalls = "malloc_calls", Count: "Driver allocations of the program, including failed \
             ones.";
        MallocFailures = "malloc_failures", Count: "Driver allocations that failed because memory \
             ran out, including injected failures.";
        InjectedFailures = "injected_failures", Count: "Driver allocations that failed because of \
             `fail`.";
        FreeCalls = "free_calls", Count: "Driver frees of the program.";
        RetainedAfterOom = "retained_after_oom", Bytes: "Largest amount of allocated memory that a \
             failed attempt leaked; 0 if nothing leaks.";
        GivenBack = "given_back", Bytes: "Cached bytes that recovery policies released to the \
             driver.";
        Collectives = "collectives", Count: "All-reduces and broadcasts that every rank joined; \
             for one rank, those that it called.";
        UnequalBatches = "unequal_batches", Count: "Iterations with different batches on the \
             ranks, so that the mean over ranks is not the mean over samples.";
        WaitedForRanks = "waited_for_ranks", Time: "Longest time that a rank waited for slower \
             ranks, for example during their retries; for one rank, its own waiting time.";
        HostPeak = "host_peak", Bytes: "Largest amount of host memory that `spill_to_host` used.";
        HostCopied = "host_copied", Bytes: "Bytes copied to host memory and back, including failed \
             attempts.";
    }
}

/// Declares types of names, which the compiler keeps apart.
macro_rules! names {
    ($($(#[doc = $doc:literal])+ $type:ident;)*) => {$(
        $(#[doc = $doc])+
        #[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Display)]
        #[display("{name}")]
        pub struct $type {
            index: u32,
            name: Arc<str>,
        }

        impl $type {
            pub(crate) fn new(index: usize, name: &str) -> Self {
                Self { index: u32::try_from(index).unwrap_or(u32::MAX), name: name.into() }
            }

            /// Its number in order of appearance, counted from 0.
            pub const fn index(&self) -> usize {
                self.index as usize
            }

            pub fn name(&self) -> &str {
                &self.name
            }
        }
    )*};
}

names! {
    /// A buffer.
    BufferName;
    /// A stream. Number 0 is `default`; the others follow in the order of `streams:`.
    StreamName;
    /// An event.
    EventName;
    /// The `id` of a step.
    StepName;
    /// A measure. Number 0 is `start`, before the first step.
    MeasureName;
    /// The variable of a `for`.
    VariableName;
    /// An additional program.
    ProgramName;
    /// An additional process.
    ProcessName;
    /// A private pool.
    PoolName;
}

impl ReportKey {
    /// Returns whether it depends on a clock. Only timed runs report it.
    pub const fn is_timed(self) -> bool {
        matches!(self.unit(), Unit::Time) || matches!(self, Self::Throughput)
    }
}

impl MeasureName {
    pub fn start() -> Self {
        Self::new(0, START)
    }
}
