//! The versioned records of runs. Reports are rendered from these records alone, on any machine.

use std::path::{Component, Path};
use std::{collections::BTreeMap, fmt};

use derive_more::Display;
pub use harness_allocator::device::CostFigure;
use harness_allocator::device::{DeviceCalls, DeviceInfo, DeviceMemory};
use harness_allocator::stats::{BlockState, MemoryStats, PoolKind};
use harness_allocator::units::{Bytes, Nanos};
use serde::{Deserialize, Serialize};

/// Declares an enum from a table: variant, name in scenarios and records, and description, which
/// the method `$about` returns.
macro_rules! described {
    ($(#[$attribute:meta])* $Enum:ident, $about:ident:
     $($variant:ident = $name:literal: $text:literal,)*) => {
        $(#[$attribute])*
        #[derive(
            Clone,
            Copy,
            Debug,
            PartialEq,
            Eq,
            PartialOrd,
            Ord,
            Hash,
            serde::Serialize,
            serde::Deserialize,
        )]
        pub enum $Enum { $(#[serde(rename = $name)] $variant,)* }

        impl $Enum {
            /// All variants, in the order of the checks.
            pub const ALL: &'static [Self] = &[$(Self::$variant),*];

            /// The name in scenarios, records and reports.
            pub const fn name(self) -> &'static str {
                match self { $(Self::$variant => $name),* }
            }

            pub const fn $about(self) -> &'static str {
                match self { $(Self::$variant => $text),* }
            }
        }

        impl std::fmt::Display for $Enum {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str(self.name())
            }
        }
    };
}

pub mod cause;
pub mod claim;
pub mod event;
pub mod faulted;
pub mod invariant;
pub mod recovery;
pub mod timeline;

pub use cause::{Cause, CauseKind, cause_names, causes};
pub use claim::{Claim, ClaimFigure, ClaimVerdict};
pub use event::{Collector, Event};
pub use faulted::{FaultOutcome, FaultedArm, FaultedCase, FaultedRuns, NotTried};
pub use invariant::Invariant;
pub use recovery::{Attempt, HostUse, Recovery, Trained};

/// The version of the record format that this build writes.
pub const RECORD_VERSION: u32 = 1;

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Records {
    /// [`RECORD_VERSION`] of the build that wrote the file.
    pub version: u32,
    pub harness: String,
    /// Runs in the order of execution. Repetitions are the outer loop; the allocators of a scenario
    /// take turns.
    pub runs: Vec<RunRecord>,
    /// Planned runs that did not start, in order. Empty unless the session ended early.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub not_started: Vec<PlannedRun>,
}

impl Records {
    /// Returns whether every planned run started and ended.
    pub fn is_complete(&self) -> bool {
        self.not_started.is_empty()
            && !self
                .runs
                .iter()
                .any(|run| run.verdict == Verdict::Interrupted)
    }
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PlannedRun {
    pub scenario: String,
    /// The allocator's name, followed by its settings if it has any.
    pub allocator: String,
    pub repetition: u32,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RunRecord {
    pub scenario: ScenarioInfo,
    pub device: DeviceInfo,
    pub allocator: String,
    /// Settings in the form of `PYTORCH_ALLOC_CONF`, if they differ from the allocator's defaults.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub settings: Option<String>,
    /// `true` if the user added this configuration. Its unmet expectations are noted and do not
    /// fail the run.
    #[serde(default, skip_serializing_if = "is_default")]
    pub only_observed: bool,
    pub seed: u64,
    pub repetition: u32,
    pub reproduce: String,
    /// `true` if the state was checked after every operation. Absent if the run did not start.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub audited: Option<bool>,
    /// `true` if the run was repeated on a new device without checks, to measure times.
    #[serde(default, skip_serializing_if = "is_default")]
    pub timed: bool,
    pub verdict: Verdict,
    /// The steps that ran. A step inside `repeat` has one entry per iteration.
    pub steps: Vec<StepRecord>,
    /// Number of steps that ran but are missing from `steps`. A long run keeps its first and last
    /// steps.
    #[serde(default)]
    pub unrecorded_steps: u64,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub figures: Vec<ClaimFigure>,
    /// Memory over time, including changes within steps. A long run keeps the minimum and maximum
    /// of equal intervals.
    pub curve: Vec<CurvePoint>,
    pub timings: Timings,
    pub calls: DeviceCalls,
    /// The allocator's counters after the last step.
    pub stats: MemoryStats,
    /// The figures of a run with several programs or processes. Absent for a run with one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub processes: Option<RunProcesses>,
    /// The simulated device's charge for each operation. Empty for a real device.
    #[serde(default)]
    pub cost_figures: Vec<CostFigure>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RunProcesses {
    /// The main process first. Processes that share a name, such as repetitions of a step, share an
    /// entry.
    pub each: Vec<ProcessFigures>,
    /// All at the same time, which may be less than the sum of the peaks.
    pub together: MemoryFigures,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProcessFigures {
    pub name: String,
    #[serde(flatten)]
    pub figures: MemoryFigures,
}

/// `None` is unknown.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct MemoryFigures {
    pub peak_reserved: Option<Bytes>,
    pub peak_allocated: Option<Bytes>,
    pub ooms: Option<u64>,
    pub retries: Option<u64>,
}

impl MemoryFigures {
    /// Returns the figures of two processes that ran one after the other.
    #[must_use]
    pub fn then(self, other: Self) -> Self {
        let counted = |a: Option<u64>, b: Option<u64>| Some(a? + b?);
        let peak = |a: Option<Bytes>, b: Option<Bytes>| Some(a?.max(b?));
        Self {
            peak_reserved: peak(self.peak_reserved, other.peak_reserved),
            peak_allocated: peak(self.peak_allocated, other.peak_allocated),
            ooms: counted(self.ooms, other.ooms),
            retries: counted(self.retries, other.retries),
        }
    }
}

/// Prefix of a note about an unmet expectation that does not fail the run.
pub const NOT_JUDGED: &str = "observed, not judged: ";

fn is_default<T: Default + PartialEq>(value: &T) -> bool {
    *value == T::default()
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ScenarioInfo {
    pub name: String,
    pub path: String,
    pub about: String,
    pub memory: Bytes,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub claim: Option<Claim>,
}

impl ScenarioInfo {
    /// The scenario's identity: see [`scenario_id`].
    pub fn id(&self) -> String {
        scenario_id(Path::new(&self.path), &self.name)
    }
}

/// Identifies a scenario by its name and its folder. The folder is relative to the last folder
/// named `scenarios` in the path, or else to the current folder.
pub fn scenario_id(path: &Path, name: &str) -> String {
    let folder = path.parent().unwrap_or(Path::new(""));
    let folder = std::env::current_dir()
        .ok()
        .and_then(|current| folder.strip_prefix(current).ok())
        .unwrap_or(folder);
    let parts: Vec<_> = folder
        .components()
        .filter(|part| *part != Component::CurDir)
        .map(|part| part.as_os_str().to_string_lossy())
        .collect();
    let root = parts
        .iter()
        .rposition(|part| part == "scenarios")
        .map_or(0, |index| index + 1);
    let parts = parts[root..].iter().map(AsRef::as_ref);
    parts.chain([name]).collect::<Vec<&str>>().join("/")
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Verdict {
    /// All expectations and invariants held.
    Passed,
    /// An expectation was not met, or an invariant did not hold. `rest` has the other violations at
    /// the same step.
    Failed {
        first: Violation,
        rest: Vec<Violation>,
    },
    /// The run failed, and the scenario expects this failure.
    FailedAsExpected {
        reason: String,
        first: Violation,
        rest: Vec<Violation>,
    },
    /// The run did not start.
    Skipped { reason: String, kind: SkipKind },
    /// Other processes used the device, so the result says nothing about the allocator. The reason
    /// describes their activity.
    Contended { reason: String },
    /// The user or the system stopped the run early.
    Interrupted,
}

impl Verdict {
    pub const fn violation(&self) -> Option<&Violation> {
        if let Self::Failed { first, .. } = self {
            Some(first)
        } else {
            None
        }
    }
}

/// Why a run did not start.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum SkipKind {
    /// The scenario has `skip:`, or an optional library was not built.
    OnPurpose,
    /// The scenario is for another kind of device or for other allocators.
    NotApplicable,
    /// The device is missing or too small, lacks a feature, or cannot run the scenario's programs.
    Insufficient,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Violation {
    /// The number of the last step before the check; 0 before the first step.
    pub step: u32,
    /// The place in the scenario file, if one line is responsible.
    pub at: Option<SourceLine>,
    pub rule: Rule,
    pub expected: String,
    pub seen: String,
}

impl Violation {
    /// A violation before the first step, or one that belongs to no step.
    pub fn before_steps(rule: Rule, expected: impl Into<String>, seen: impl Into<String>) -> Self {
        Self {
            step: 0,
            at: None,
            rule,
            expected: expected.into(),
            seen: seen.into(),
        }
    }
}

impl From<Violation> for Verdict {
    fn from(first: Violation) -> Self {
        Self::Failed {
            first,
            rest: Vec::new(),
        }
    }
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(at) = &self.at {
            write!(f, "{at}: ")?;
        }
        write!(
            f,
            "{}: expected {}, seen {}",
            self.rule, self.expected, self.seen
        )
    }
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, Display)]
#[serde(rename_all = "snake_case")]
pub enum Rule {
    #[display("invariant {_0}")]
    Invariant(Invariant),
    /// An `expect` step, the `expect:` key of a step, or an entry of the scenario's `invariants:`.
    #[display("expectation")]
    Expectation,
    /// An expectation that compares allocators, checked after all of them ran.
    #[display("expectation between allocators")]
    BetweenArms,
    /// The scenario expects a failure, but the run passed.
    #[display("expected failure")]
    ExpectedFailure,
    /// `expect_violation:` names an invariant, but the run did not violate it.
    #[display("expected violation")]
    ExpectedViolation,
    /// The device or the allocator failed for a reason other than lack of memory.
    #[display("device failure")]
    DeviceFailure,
    #[display("time limit")]
    TimeLimit,
    /// A fault of the scenario matched no call, or the run did not end as the fault requires.
    #[display("fault")]
    Fault,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, Display)]
#[display("{path}:{line}:{column}")]
pub struct SourceLine {
    pub path: String,
    pub line: u32,
    pub column: u32,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct StepRecord {
    /// Position of the step in the run, counted from 1.
    pub number: u32,
    pub line: u32,
    /// The step's YAML key, for example `alloc`.
    pub kind: String,
    /// A short description, for example `activations, 600 MiB`.
    pub text: String,
    /// The iteration of the enclosing loops, for example `i = 3`. `None` outside loops.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub iteration: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub size: Option<Bytes>,
    pub outcome: Outcome,
    /// The program or process that ran the step. `None` for the main process.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub process: Option<String>,
    /// The memory of that process after the step.
    pub accounts: Accounts,
    /// The figures of the program that an `exec` step ran. `accounts` describes the process that
    /// started it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub program: Option<MemoryFigures>,
    /// Duration on the device's clock. `None` if the run was not timed.
    pub duration: Option<Nanos>,
    /// Values that the step reports, by metric name: bytes, nanoseconds or counts.
    pub reports: BTreeMap<String, u64>,
    pub notes: Vec<String>,
    pub tables: Vec<Table>,
    /// The state when the request failed, before the step freed anything. Absent if no request
    /// failed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub failed_request: Option<FailedRequest>,
    /// The actions of the step's recovery policies.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub recovery: Option<Recovery>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FailedRequest {
    pub requested: Bytes,
    pub stream: u32,
    /// Memory that the allocator lacked, before rounding. Less than `requested` if new pages extend
    /// a free block.
    pub lacking: Bytes,
    /// Bytes requested from the driver, rounded to whole segments or pages.
    pub asked: Bytes,
    /// The limit of the memory fraction, if the fraction refused the request before the driver was
    /// called.
    pub limit: Option<Bytes>,
    /// The allocator's own limit, if it refused the request before the driver was called.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub allocator_limit: Option<Bytes>,
    /// The program's own limit, if it refused the request before the allocator was called.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub program_limit: Option<Bytes>,
    /// The device call that a fault failed, if the request failed there.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub injected: Option<RefusedCall>,
    /// Memory of the program at that moment. `device.external_memory` includes other programs and
    /// the run's other processes.
    pub accounts: Accounts,
    /// `inactive_split_bytes.all.current` at that moment.
    pub inactive_split: Bytes,
    /// Free memory of the allocator, grouped by the requests that can use it. Excludes private
    /// pools that do not serve the request. `None` if the driver manages the pool and does not
    /// report its blocks.
    pub lanes: Option<Vec<StreamPool>>,
    /// Free memory in private pools that do not serve the request.
    #[serde(default, skip_serializing_if = "Pieces::is_empty")]
    pub other_private_pools: Pieces,
    /// True if the recording does not contain the request's pool, so it is inferred.
    #[serde(default, skip_serializing_if = "is_default")]
    pub is_pool_inferred: bool,
    /// Names of the scenario's streams, by number.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub streams: BTreeMap<u32, String>,
    /// Segments with free memory that a live block keeps from being released. At most ten, the
    /// largest first.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub pinned: Vec<PinnedSegment>,
    /// The remaining segments of this kind.
    #[serde(default, skip_serializing_if = "is_default")]
    pub pinned_unlisted: UnlistedSegments,
    /// True if the allocator keeps a free segment although the driver refuses the request.
    #[serde(default, skip_serializing_if = "is_default")]
    pub keeps_free_segments: bool,
}

/// A device call that a fault failed with an out-of-memory error.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RefusedCall {
    /// The scenario's process that made the call. `None` for the main process.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub process: Option<String>,
    /// The call's name in the driver API.
    pub call: String,
    /// Position among the calls of this name, counted from 1.
    pub number: u64,
}

/// A segment with free memory that a live block keeps from being released.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PinnedSegment {
    /// `None` if the allocator does not separate small and large blocks.
    pub pool: Option<PoolKind>,
    /// The stream that the segment serves. `None` if it serves several.
    pub stream: Option<u32>,
    pub size: Bytes,
    /// Free bytes in the segment. Excludes pages of an expandable segment that are completely free.
    pub free: Bytes,
    /// Owners of the live blocks, in address order. At most ten.
    pub holders: Vec<Holder>,
    /// Number of live blocks whose owners are not listed.
    pub other_blocks: u64,
}

/// A scenario's buffer, or all buffers of one workload, in one segment.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Holder {
    pub name: String,
    /// The line of the step that allocated it.
    pub line: u32,
    /// Number of its live blocks in the segment.
    pub blocks: u64,
    /// Size of these blocks, rounded by the allocator.
    pub bytes: Bytes,
}

/// The count and free bytes of pinned segments that are not listed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct UnlistedSegments {
    pub count: u64,
    /// Free bytes in these segments.
    pub free: Bytes,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct StreamPool {
    /// `None` if the allocator does not separate small and large blocks.
    pub pool: Option<PoolKind>,
    pub stream: u32,
    /// Blocks that can be allocated now.
    pub free: Pieces,
    /// Freed blocks that wait for events of other streams.
    pub waiting: Pieces,
}

impl StreamPool {
    pub fn new(pool: Option<PoolKind>, stream: u32) -> Self {
        let (free, waiting) = (Pieces::default(), Pieces::default());
        Self {
            pool,
            stream,
            free,
            waiting,
        }
    }

    /// Counts a block unless it is allocated.
    pub fn add(&mut self, state: BlockState, size: Bytes) {
        match state {
            BlockState::Inactive => self.free.add(size),
            BlockState::PendingFree => self.waiting.add(size),
            BlockState::Allocated => {}
        }
    }
}

/// A number of blocks with their total and largest size.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Pieces {
    pub count: u64,
    pub bytes: Bytes,
    pub largest: Bytes,
}

impl Pieces {
    pub const fn is_empty(&self) -> bool {
        self.count == 0
    }

    pub fn add(&mut self, size: Bytes) {
        self.count += 1;
        self.bytes += size;
        self.largest = self.largest.max(size);
    }
}

impl FromIterator<Bytes> for Pieces {
    fn from_iter<T: IntoIterator<Item = Bytes>>(sizes: T) -> Self {
        let mut pieces = Self::default();
        sizes.into_iter().for_each(|size| pieces.add(size));
        pieces
    }
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Outcome {
    /// The step ended without a failed request.
    #[default]
    Done,
    /// The request succeeded after this many retries by the recovery policy. Retries inside the
    /// allocator do not count.
    Fits { retries: u32 },
    /// The request failed after all retries.
    OutOfMemory,
    /// An expectation or invariant failed; the verdict names it.
    Failed,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Table {
    pub title: String,
    pub columns: Vec<String>,
    /// Rows with one cell per column.
    pub rows: Vec<Vec<String>>,
}

/// Memory at one moment: the allocator's counters and the device's figures.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Accounts {
    /// `requested_bytes.all.current`.
    pub requested: Bytes,
    /// `allocated_bytes.all.current`.
    pub allocated: Bytes,
    /// `active_bytes.all.current`.
    pub active: Bytes,
    /// `reserved_bytes.all.current`.
    pub reserved: Bytes,
    /// `allocated_bytes.all.peak`.
    pub peak_allocated: Bytes,
    /// `reserved_bytes.all.peak`.
    pub peak_reserved: Bytes,
    /// `num_alloc_retries`: how often the driver refused and the allocator released its cache.
    pub retries: u64,
    /// `num_ooms`.
    pub ooms: u64,
    /// The device's memory, including NVML's view.
    pub device: DeviceMemory,
}

impl Accounts {
    pub const fn new(stats: &MemoryStats, device: DeviceMemory) -> Self {
        Self {
            requested: Bytes(stats.requested_bytes.all.current),
            allocated: Bytes(stats.allocated_bytes.all.current),
            active: Bytes(stats.active_bytes.all.current),
            reserved: Bytes(stats.reserved_bytes.all.current),
            peak_allocated: Bytes(stats.allocated_bytes.all.peak),
            peak_reserved: Bytes(stats.reserved_bytes.all.peak),
            retries: stats.num_alloc_retries,
            ooms: stats.num_ooms,
            device,
        }
    }
}

/// Sums over all programs and processes of the run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CurvePoint {
    /// Its position among all points of the run, including dropped ones.
    pub at: u64,
    /// The step during which it was taken.
    pub step: u32,
    /// Allocated bytes, rounded by the allocator.
    pub allocated: Bytes,
    /// Allocated bytes plus freed blocks that wait for an event.
    pub active: Bytes,
    /// Bytes reserved from the driver.
    pub reserved: Bytes,
    /// Device memory in use, without the contexts.
    pub used: Bytes,
    /// `num_ooms` so far. A picture marks each increase.
    pub ooms: u64,
    /// `num_alloc_retries` so far.
    pub retries: u64,
}

/// Durations on the device's clock. [`DeviceInfo::clock`] says whether they are measured or
/// simulated; the two are never mixed.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Timings {
    /// Successful `allocate` calls.
    pub allocate: Samples,
    pub free: Samples,
    pub empty_cache: Samples,
    /// From the start of the first step to the end of the last. Only runs whose device serves the
    /// scenario alone have it.
    pub scenario: Nanos,
    /// Time lost to attempts that failed and were repeated, including their recovery, and to
    /// requests that made the allocator release its cache. Requests that failed for good do not
    /// count.
    pub lost_to_retry: Nanos,
}

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Samples {
    pub count: u64,
    /// The kept samples: all up to a limit, then a seeded reservoir.
    pub kept: Vec<Nanos>,
}

#[cfg(test)]
mod id_tests {
    use super::*;

    #[test]
    fn scenarios_with_one_name_in_different_folders_have_different_ids() {
        let id = |path: &str| scenario_id(Path::new(path), "empty_cache");
        assert_eq!(id("scenarios/empty_cache.yaml"), "empty_cache");
        assert_eq!(
            id("./scenarios/claims/empty_cache.yaml"),
            "claims/empty_cache"
        );
        assert_eq!(
            id("/home/me/scenarios/claims/empty_cache.yaml"),
            "claims/empty_cache"
        );
        assert_eq!(id("own/empty_cache.yaml"), "own/empty_cache");
        assert_eq!(id("empty_cache.yaml"), "empty_cache");
    }
}
