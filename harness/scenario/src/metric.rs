//! What a scenario can look at: [`Metric`], resolved from its name once, when the scenario is checked.

use std::fmt;
use std::sync::Arc;

use harness_allocator::device::{DeviceCalls, DeviceMemory};
use harness_allocator::stats::{MemoryStats, StatKey};
use harness_allocator::units::Nanos;
use harness_language::expression::{self, Dimension, Quantity, Unit};

/// A value that expectations and sizes refer to.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Metric {
    /// An account as it stands now: `reserved_bytes.all.current`, `device.used`, `time.now`.
    Now(Account),
    /// An account as it stood at a `measure` step, or before the first step: `before.device.used`, `start.device.used`.
    At(MeasureName, Account),
    /// What a step counted of itself: `storm.failed_request`.
    Report(StepName, ReportKey),
    /// The present value of a loop's variable: `i`.
    Variable(VariableName, Unit),
    /// How much an account has grown since this place was reached the last time: `growth(reserved)`.
    Growth(GrowthSite, Account),
    /// A counter of another program's allocator: `server.reserved`.
    Program(ProgramName, StatKey),
    /// A figure of a process: `worker.reserved`, `worker.device.process`.
    Process(ProcessName, Account),
    /// A counter of torch.cuda.memory_stats() of a program that an `exec` step ran: `training.allocated.peak`.
    Torch(StepName, StatKey),
    /// A figure of one rank of a data-parallel training: `training.rank1.final_batch`.
    Rank(StepName, usize, RankFigure),
    /// A metric of the run with another allocator, known when all have run: `expandable.reserved.peak`.
    Arm(String, Box<Metric>),
}

/// What is told of one rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum RankFigure {
    /// What it counted of itself.
    Report(ReportKey),
    /// A counter of its allocator, when the training was over.
    Stat(StatKey),
}

impl RankFigure {
    /// What each rank counts of itself.
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

impl fmt::Display for RankFigure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Report(key) => key.fmt(f),
            Self::Stat(key) => key.fmt(f),
        }
    }
}

/// Numbers the places where `growth(…)` is written, in the order of the file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct GrowthSite(pub u32);

/// Something that should hold: one comparison.
pub type Expectation = expression::Expectation<Metric>;
/// An amount of memory that may depend on what happened before.
pub type Amount = expression::Amount<Metric>;
/// A formula of metrics.
pub type Expression = expression::Expression<Metric>;

/// The measure taken before the first step.
pub(crate) const START: &str = "start";
/// The stream that always exists.
pub(crate) const DEFAULT_STREAM: &str = "default";

impl Quantity for Metric {
    fn dimension(&self) -> Dimension {
        self.unit().into()
    }
}

impl Metric {
    /// What its values are.
    #[must_use]
    pub fn unit(&self) -> Unit {
        match self {
            Self::Now(account) | Self::At(_, account) | Self::Growth(_, account) | Self::Process(_, account) => account.unit(),
            Self::Report(_, key) | Self::Rank(_, _, RankFigure::Report(key)) => key.unit(),
            Self::Variable(_, unit) => *unit,
            Self::Program(_, key) | Self::Torch(_, key) | Self::Rank(_, _, RankFigure::Stat(key)) => Account::Stat(*key).unit(),
            Self::Arm(_, metric) => metric.unit(),
        }
    }

    /// The account that it is read from, if it is one.
    #[must_use]
    pub const fn account(&self) -> Option<Account> {
        match self {
            Self::Now(account) | Self::At(_, account) | Self::Growth(_, account) => Some(*account),
            Self::Program(_, key) | Self::Torch(_, key) => Some(Account::Stat(*key)),
            // Processes and ranks tell their figures by themselves.
            Self::Rank(..) | Self::Report(..) | Self::Variable(..) | Self::Arm(..) | Self::Process(..) => None,
        }
    }
}

impl fmt::Display for Metric {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Now(account) => account.fmt(f),
            Self::At(measure, account) => write!(f, "{measure}.{account}"),
            Self::Report(step, key) => write!(f, "{step}.{key}"),
            Self::Variable(name, _) => name.fmt(f),
            Self::Growth(_, account) => write!(f, "growth({account})"),
            Self::Program(program, key) => write!(f, "{program}.{key}"),
            Self::Process(process, account) => write!(f, "{process}.{account}"),
            Self::Torch(step, key) => write!(f, "{step}.{key}"),
            Self::Rank(step, rank, figure) => write!(f, "{step}.rank{rank}.{figure}"),
            Self::Arm(arm, metric) => write!(f, "{arm}.{metric}"),
        }
    }
}

/// A buffer as a step names it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BufferRef {
    /// The name in front of the brackets.
    pub name: BufferName,
    /// Which element, where there are many of that name: a whole number when the step runs.
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

/// Everything that accounts are read from, at one moment: what a `measure` step keeps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Readings {
    /// The allocator's counters.
    pub stats: MemoryStats,
    /// The device's memory; `None` where it was not asked for.
    pub memory: Option<DeviceMemory>,
    /// Calls made to the device.
    pub calls: DeviceCalls,
    /// The device's clock.
    pub now: Nanos,
}

impl Readings {
    /// The value of an account, in its unit; `None` where the device cannot tell.
    #[must_use]
    pub fn get(&self, account: Account) -> Option<u64> {
        let Self { stats, memory, calls, now } = self;
        let metric = match account {
            Account::Stat(key) => return Some(stats.get(key)),
            Account::Device(metric) => metric,
        };
        Some(match metric {
            DeviceMetric::Used => memory.as_ref()?.used.get(),
            DeviceMetric::Free => memory.as_ref()?.free.get(),
            DeviceMetric::Total => memory.as_ref()?.total.get(),
            DeviceMetric::ContextOverhead => memory.as_ref()?.context_overhead.get(),
            DeviceMetric::ExternalMemory => memory.as_ref()?.pressure.get(),
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

/// An account that exists at any point of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Account {
    /// A counter of the allocator.
    Stat(StatKey),
    /// Something the device says.
    Device(DeviceMetric),
}

impl Account {
    /// Whether it belongs to one process, and changes only when that process does something.
    #[must_use]
    pub const fn is_of_one_process(self) -> bool {
        match self {
            Self::Stat(_) => true,
            Self::Device(metric) => match metric {
                DeviceMetric::Process
                | DeviceMetric::MallocCalls
                | DeviceMetric::MallocFailures
                | DeviceMetric::FreeCalls
                | DeviceMetric::MemoryCalls
                | DeviceMetric::Synchronizations => true,
                DeviceMetric::Used
                | DeviceMetric::Free
                | DeviceMetric::Total
                | DeviceMetric::ContextOverhead
                | DeviceMetric::ExternalMemory
                | DeviceMetric::Now => false,
            },
        }
    }

    /// Every one, the allocator's counters first.
    pub fn all() -> impl Iterator<Item = Self> {
        StatKey::all().map(Self::Stat).chain(DeviceMetric::ALL.iter().map(|&metric| Self::Device(metric)))
    }

    /// Reads a name, in full or short: `reserved` is `reserved_bytes.all.current`, and `reserved.peak` is `reserved_bytes.all.peak`.
    #[must_use]
    pub fn from_name(name: &str) -> Option<Self> {
        let key = StatKey::from_name(name).or_else(|| StatKey::from_name(&Self::in_full(name)?));
        key.map(Self::Stat).or_else(|| DeviceMetric::from_name(name).map(Self::Device))
    }

    /// The names that have short forms: a family of bytes, over all pools.
    pub const SHORT: [&'static str; 5] = ["allocated", "reserved", "active", "inactive_split", "requested"];

    fn in_full(name: &str) -> Option<String> {
        let (family, field) = name.split_once('.').unwrap_or((name, "current"));
        Self::SHORT.contains(&family).then(|| format!("{family}_bytes.all.{field}"))
    }

    /// What its values are.
    #[must_use]
    pub fn unit(self) -> Unit {
        match self {
            Self::Stat(key) if key.is_bytes() => Unit::Bytes,
            Self::Stat(_) => Unit::Count,
            Self::Device(metric) => metric.unit(),
        }
    }
}

impl fmt::Display for Account {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Stat(key) => key.fmt(f),
            Self::Device(metric) => metric.fmt(f),
        }
    }
}

/// Earlier names of metrics, with their names today.
const RENAMED: &[(&str, &str)] = &[("device.pressure", "device.external_memory"), ("recomputed_words", "recomputed_tokens")];

/// The name that a metric has today.
fn current_name(name: &str) -> &str {
    RENAMED.iter().find(|(old, _)| *old == name).map_or(name, |(_, new)| new)
}

/// Declares metrics once: variant, name in scenarios, unit and what it is.
macro_rules! metrics {
    ($(#[$meta:meta])* $type:ident { $($variant:ident = $name:literal, $unit:ident: $about:literal;)* }) => {
        $(#[$meta])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub enum $type { $(#[doc = $about] $variant,)* }

        impl $type {
            /// Every one, in the order of the reference.
            pub const ALL: &'static [Self] = &[$(Self::$variant),*];

            /// Its name in scenarios and records.
            #[must_use]
            pub const fn name(self) -> &'static str {
                match self { $(Self::$variant => $name),* }
            }

            /// What its values are.
            #[must_use]
            pub const fn unit(self) -> Unit {
                match self { $(Self::$variant => Unit::$unit),* }
            }

            /// What it is, in a sentence for the reference.
            #[must_use]
            pub const fn about(self) -> &'static str {
                match self { $(Self::$variant => $about),* }
            }

            /// Reads a name.
            #[must_use]
            pub fn from_name(name: &str) -> Option<Self> {
                match current_name(name) { $($name => Some(Self::$variant),)* _ => None }
            }
        }

        impl fmt::Display for $type {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(self.name())
            }
        }
    };
}

metrics! {
    /// What the device says, apart from the allocator.
    DeviceMetric {
        Used = "device.used", Bytes: "Used on the whole device, as NVML reports it: context overhead, this process and all others.";
        Free = "device.free", Bytes: "What the next device allocation could take at most.";
        Total = "device.total", Bytes: "All of the device's memory: the scenario's `needs.memory`.";
        ContextOverhead = "device.context_overhead", Bytes: "Device used before the first allocation of this process.";
        ExternalMemory = "device.external_memory", Bytes: "Memory that `external_memory` steps hold.";
        Process = "device.process", Bytes: "What NVML attributes to this process; an expectation on it fails where NVML cannot tell.";
        MallocCalls = "device.malloc_calls", Count: "Driver allocations asked for, failed ones included.";
        MallocFailures = "device.malloc_failures", Count: "Driver allocations that failed for lack of memory.";
        FreeCalls = "device.free_calls", Count: "Driver frees.";
        MemoryCalls = "device.memory_calls", Count: "Driver allocations and frees together, pages and calls to the driver's pools included: what a cache exists to avoid.";
        Synchronizations = "device.synchronizations", Count: "Waits of the host for an event, a stream or the whole device.";
        Now = "time.now", Time: "Time since the device was opened, on the device's clock: virtual on a simulated device.";
    }
}

metrics! {
    /// What steps count of themselves. A step that runs again, in a `repeat`, replaces its figures.
    ReportKey {
        Time = "time", Time: "How long the step took.";
        Attempts = "attempts", Count: "Times the work was tried: 1 and one for each retry of the recovery policy.";
        Retries = "retries", Count: "Retries by the recovery policy (the allocator's own are `num_alloc_retries`).";
        RetriesWithoutProgress = "retries_without_progress", Count: "Retries that asked for no less and had no more room than the failed try before them.";
        RetryTime = "retry_time", Time: "Failed tries and recovery together: what a step without a failure would not have spent.";
        Ooms = "ooms", Count: "Requests that failed for good.";
        FreedBlocks = "freed_blocks", Count: "Blocks that the step freed.";
        FreedBytes = "freed_bytes", Bytes: "Bytes that the step freed: allocated bytes for `free`, reserved bytes for `empty_cache`.";
        Operations = "operations", Count: "Requests and frees that the storm made.";
        Allocations = "allocations", Count: "Requests that were served.";
        Frees = "frees", Count: "Blocks freed on the way.";
        FailedRequest = "failed_request", Bytes: "Size of the first request that failed; 0 where none did.";
        FailedOperation = "failed_operation", Count: "Number of the operation that failed first, counted from 1; 0 where none did.";
        ReservedAtFailure = "reserved_at_failure", Bytes: "Reserved when that request failed; 0 where none did.";
        AllocatedAtFailure = "allocated_at_failure", Bytes: "Allocated when that request failed; 0 where none did.";
        LargestFreeAtFailure = "largest_free_at_failure", Bytes: "The largest free block that request could have taken from the cache; 0 where none failed.";
        DeviceFreeAtFailure = "device_free_at_failure", Bytes: "Free on the device when that request failed; 0 where none did.";
        LiveBlocks = "live_blocks", Count: "Blocks still live at the end.";
        LiveBytes = "live_bytes", Bytes: "Requested bytes of the blocks still live at the end.";
        PeakLiveBytes = "peak_live_bytes", Bytes: "The most requested bytes that were live at once.";
        PinnedSegments = "pinned_segments", Count: "Segments that live blocks of the storm keep from going back to the driver.";
        PinningBlocks = "pinning_blocks", Count: "Live blocks of the storm in those segments.";
        PinningBytes = "pinning_bytes", Bytes: "Allocated bytes of those blocks.";
        FreeInPinnedSegments = "free_in_pinned_segments", Bytes: "Free bytes in those segments, which cannot go back to the driver.";
        GrownBytes = "grown_bytes", Bytes: "Bytes by which sites have grown since the measure; what others shrank by is not taken off.";
        GrownSites = "grown_sites", Count: "Sites that hold more than at the measure.";
        FreeSegments = "free_segments", Count: "Segments without any live block, which `empty_cache` gives back.";
        Iterations = "iterations", Count: "Iterations that completed, of a training or of a loop.";
        FirstBatch = "first_batch", Count: "Batch of the first iteration tried.";
        FinalBatch = "final_batch", Count: "Samples in memory at once in the last iteration that completed; 0 where none did.";
        EffectiveBatch = "effective_batch", Count: "Samples whose gradients were added up for one update, in the last iteration that completed; 0 where none did.";
        Throughput = "throughput", Count: "Samples per second, rounded down, of the iterations that completed, over the time of all tries; 0 where none did.";
        Served = "served", Count: "Requests that were served to their end.";
        Evicted = "evicted", Count: "Times a request gave its cache up for another one.";
        PeakRunning = "peak_running", Count: "The most requests that were served at once.";
        RecomputedTokens = "recomputed_tokens", Count: "Tokens whose keys and values were evicted and computed again.";
        ExitCode = "exit_code", Count: "The program's exit code; 128 + n where signal n ended it.";
        Processes = "processes", Count: "Processes of the program that used the GPU.";
        PeakReserved = "peak_reserved", Bytes: "The most bytes that a process of the program held of the GPU.";
        MallocCalls = "malloc_calls", Count: "Driver allocations that the program asked for, failed ones included.";
        MallocFailures = "malloc_failures", Count: "Driver allocations that failed for lack of memory, injected failures included.";
        InjectedFailures = "injected_failures", Count: "Driver allocations that failed because `fail` asks for it.";
        FreeCalls = "free_calls", Count: "Driver frees of the program.";
        RetainedAfterOom = "retained_after_oom", Bytes: "The most allocated bytes that a failed try left behind: 0 where nothing leaks.";
        GivenBack = "given_back", Bytes: "Cached bytes that recovery policies gave back to the driver.";
        Collectives = "collectives", Count: "All-reduces and broadcasts of a data-parallel training that every rank joined; of one rank, those that it called.";
        UnequalBatches = "unequal_batches", Count: "Iterations in which the ranks' batches differed, so that the mean over ranks is not that over samples.";
        WaitedForRanks = "waited_for_ranks", Time: "The most that a rank of a data-parallel training waited for slower ones, as those that tried again; of one rank, what it waited.";
        HostPeak = "host_peak", Bytes: "The most bytes of host memory that were held at once for what is kept there (`spill_to_host`).";
        HostCopied = "host_copied", Bytes: "Bytes that were copied to that memory and back, failed tries included.";
    }
}

/// Declares kinds of names, which cannot be taken for each other.
macro_rules! names {
    ($($(#[doc = $doc:literal])+ $type:ident;)*) => {$(
        $(#[doc = $doc])+
        #[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub struct $type {
            index: u32,
            name: Arc<str>,
        }

        impl $type {
            pub(crate) fn new(index: usize, name: &str) -> Self {
                Self { index: u32::try_from(index).unwrap_or(u32::MAX), name: name.into() }
            }

            /// Its number, counted from 0 in order of appearance, for tables indexed by it.
            #[must_use]
            pub const fn index(&self) -> usize {
                self.index as usize
            }

            /// As the scenario says it.
            #[must_use]
            pub fn name(&self) -> &str {
                &self.name
            }
        }

        impl fmt::Display for $type {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(&self.name)
            }
        }
    )*};
}

names! {
    /// A buffer: memory that a scenario holds by name.
    BufferName;
    /// A stream. Number 0 is `default`, the others follow in the order of `streams:`.
    StreamName;
    /// An event.
    EventName;
    /// The `id` of a step that reports, or whose blocks outlive it.
    StepName;
    /// A measure. Number 0 is `start`, taken before the first step.
    MeasureName;
    /// The variable of a `for`.
    VariableName;
    /// A program besides the main one, with an allocator of its own. Numbers begin with 0.
    ProgramName;
    /// A process besides the main one, on the same device. Numbers begin with 0.
    ProcessName;
    /// A private pool of memory, as a CUDA graph has one.
    PoolName;
}

impl ReportKey {
    /// Whether it comes from a clock: a timed run tells it, and no other.
    #[must_use]
    pub const fn is_timed(self) -> bool {
        matches!(self.unit(), Unit::Time) || matches!(self, Self::Throughput)
    }
}

impl MeasureName {
    /// The measure taken before the first step.
    #[must_use]
    pub fn start() -> Self {
        Self::new(0, START)
    }
}
