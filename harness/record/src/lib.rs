//! What a run leaves behind: plain, versioned data that reports are rendered from, on any machine, at any time.

use std::collections::BTreeMap;
use std::fmt;
use std::path::{Component, Path};

pub use harness_allocator::device::CostFigure;
use harness_allocator::device::{DeviceCalls, DeviceInfo, DeviceMemory};
use harness_allocator::stats::{MemoryStats, PoolKind};
use harness_allocator::units::{Bytes, Nanos};
use serde::{Deserialize, Serialize};

pub mod cause;
pub mod claim;
pub mod event;
pub mod faulted;
pub mod invariant;
pub mod recovery;
pub mod timeline;

pub use cause::{Cause, CauseKind, causes};
pub use claim::{Claim, ClaimFigure, ClaimVerdict};
pub use event::{Collector, Event};
pub use faulted::{FaultedArm, FaultedCase, FaultedEnd, FaultedRuns, NotTried};
pub use invariant::Invariant;
pub use recovery::{Attempt, HostUse, Recovery, Trained};

/// The version that this build writes.
pub const RECORD_VERSION: u32 = 1;

/// All runs of one call of `harness run`, as written to `records.json`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Records {
    /// [`RECORD_VERSION`] of the writer.
    pub version: u32,
    /// Version of the harness that wrote it.
    pub harness: String,
    /// In the order in which they ran: repetitions outermost, allocators of one scenario interleaved within.
    pub runs: Vec<RunRecord>,
    /// What was planned but did not start, in order: empty unless something ended the session early.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub not_started: Vec<PlannedRun>,
}

impl Records {
    /// Whether everything planned was run to its end.
    #[must_use]
    pub fn is_complete(&self) -> bool {
        self.not_started.is_empty() && !self.runs.iter().any(|run| run.verdict == Verdict::Interrupted)
    }
}

/// A run before it starts.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PlannedRun {
    /// The name of the scenario.
    pub scenario: String,
    /// The allocator's name, with its settings where it has any.
    pub allocator: String,
    /// The number of the repetition, from 0.
    pub repetition: u32,
}

/// One scenario, once, on one device with one allocator.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RunRecord {
    /// The scenario that ran.
    pub scenario: ScenarioInfo,
    /// The device that it ran on.
    pub device: DeviceInfo,
    /// With which allocator: the name of the arm, unique in the scenario.
    pub allocator: String,
    /// Its settings, in the form of `PYTORCH_ALLOC_CONF`, where it has other than its own.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub settings: Option<String>,
    /// Whether the arm was added by the user, so that what the scenario expects of its own arms is noted and not judged.
    #[serde(default, skip_serializing_if = "is_false")]
    pub only_observed: bool,
    /// Every random choice comes from this.
    pub seed: u64,
    /// The number of the repetition, from 0.
    pub repetition: u32,
    /// A command that does the same again.
    pub reproduce: String,
    /// Whether every operation was audited. Older builds did not keep it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub audited: Option<bool>,
    /// Whether it was done once more, on a device of its own and without any check, for its times.
    #[serde(default, skip_serializing_if = "is_false")]
    pub timed: bool,
    /// How the run ended.
    pub verdict: Verdict,
    /// What each step did. Steps inside `repeat` appear once an iteration.
    pub steps: Vec<StepRecord>,
    /// Steps that ran but are not in the list, where there were too many of them: the first and the last ones are kept.
    #[serde(default)]
    pub unrecorded_steps: u64,
    /// Figures of its claim, taken behind the last step.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub figures: Vec<ClaimFigure>,
    /// The accounts over time, within steps too: what the picture shows. Of a long run, the extremes of each of many equal stretches.
    pub curve: Vec<CurvePoint>,
    /// How long the operations took.
    pub timings: Timings,
    /// Calls that the scenario made to the device.
    pub calls: DeviceCalls,
    /// The allocator's counters when the last step was done.
    pub stats: MemoryStats,
    /// What the simulated device charges for each operation; empty on a real device.
    #[serde(default)]
    pub cost_figures: Vec<CostFigure>,
}

/// How a note begins about something that a scenario expects and an observed run did not meet.
pub const NOT_JUDGED: &str = "observed, not judged: ";

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde calls it with a reference")]
const fn is_false(value: &bool) -> bool {
    !*value
}

/// What a scenario says of itself.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ScenarioInfo {
    /// The file's name without ending.
    pub name: String,
    /// The file, as the user named it.
    pub path: String,
    /// The text of its `about:`.
    pub about: String,
    /// The memory it ran in.
    pub memory: Bytes,
    /// What it puts to the test.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub claim: Option<Claim>,
}

impl ScenarioInfo {
    /// The scenario's identity: see [`scenario_id`].
    #[must_use]
    pub fn id(&self) -> String {
        scenario_id(Path::new(&self.path), &self.name)
    }
}

/// Identifies a scenario by its name and its folder. The folder is relative to the last folder named `scenarios` in the path, or else to the current folder.
#[must_use]
pub fn scenario_id(path: &Path, name: &str) -> String {
    let folder = path.parent().unwrap_or(Path::new(""));
    let folder = std::env::current_dir().ok().and_then(|current| folder.strip_prefix(current).ok()).unwrap_or(folder);
    let parts: Vec<_> = folder.components().filter(|part| *part != Component::CurDir).map(|part| part.as_os_str().to_string_lossy()).collect();
    let root = parts.iter().rposition(|part| part == "scenarios").map_or(0, |index| index + 1);
    let parts = parts[root..].iter().map(AsRef::as_ref);
    parts.chain([name]).collect::<Vec<&str>>().join("/")
}

/// How a run ended.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Verdict {
    /// Everything expected was seen.
    Passed,
    /// Something expected was not seen, or an invariant did not hold.
    Failed {
        /// What was seen first.
        first: Violation,
        /// What else was seen at the same step.
        rest: Vec<Violation>,
    },
    /// Something was not, as the scenario says beforehand.
    FailedAsExpected {
        /// Why, as the scenario says it.
        reason: String,
        /// What was seen first.
        first: Violation,
        /// What else was seen at the same step.
        rest: Vec<Violation>,
    },
    /// It did not run.
    Skipped {
        /// Why it did not run.
        reason: String,
    },
    /// Other processes disturbed the device, so that what was seen says nothing about the allocator.
    Contended {
        /// What they did, in words.
        reason: String,
    },
    /// It was stopped before its end: by the user, or because the harness was ended.
    Interrupted,
}

/// Something that should hold and does not.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Violation {
    /// The number of the step after which it was seen; 0 before the first.
    pub step: u32,
    /// The place in the scenario, if one line is to blame.
    pub at: Option<SourceLine>,
    /// The rule that is broken.
    pub rule: Rule,
    /// What was expected, in words or figures.
    pub expected: String,
    /// What was seen instead.
    pub seen: String,
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(at) = &self.at {
            write!(f, "{at}: ")?;
        }
        write!(f, "{}: expected {}, seen {}", self.rule, self.expected, self.seen)
    }
}

/// What a violation violates.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Rule {
    /// An always-checked invariant.
    Invariant(Invariant),
    /// An `expect` step, an `expect:` of a step, or one of the scenario's `invariants:`.
    Expectation,
    /// An expectation between allocators, judged when all that it names have run.
    BetweenArms,
    /// The scenario says that the run fails, and it passed.
    ExpectedFailure,
    /// `expect_violation:` named an invariant and the run kept it.
    ExpectedViolation,
    /// A device or an allocator failed otherwise than for lack of memory.
    DeviceFailure,
    /// A step did not end within its time limit.
    TimeLimit,
    /// A fault of the scenario struck no call, or did not end the run as it should.
    Fault,
}

impl fmt::Display for Rule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Invariant(invariant) => write!(f, "invariant {invariant}"),
            Self::Expectation => f.write_str("expectation"),
            Self::BetweenArms => f.write_str("expectation between allocators"),
            Self::ExpectedFailure => f.write_str("expected failure"),
            Self::ExpectedViolation => f.write_str("expected violation"),
            Self::DeviceFailure => f.write_str("device failure"),
            Self::TimeLimit => f.write_str("time limit"),
            Self::Fault => f.write_str("fault"),
        }
    }
}

/// A place in a scenario file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SourceLine {
    /// The file, as the user named it.
    pub path: String,
    /// The line, from 1.
    pub line: u32,
    /// The column, from 1.
    pub column: u32,
}

impl fmt::Display for SourceLine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}:{}", self.path, self.line, self.column)
    }
}

/// What one step did.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct StepRecord {
    /// Counted from 1 over the whole run.
    pub number: u32,
    /// Line of the step in the scenario.
    pub line: u32,
    /// The step's key in YAML, for example `alloc`.
    pub kind: String,
    /// The step in a few words, for example `activations, 600 MiB`.
    pub text: String,
    /// Which pass of the loops around it this was, for example `i = 3`; `None` outside of loops.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub iteration: Option<String>,
    /// What the size of a request came to.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub size: Option<Bytes>,
    /// How the step ended.
    pub outcome: Outcome,
    /// The accounts after it.
    pub accounts: Accounts,
    /// How long it took on the device's clock, in a timed run; `None` where there was none.
    pub duration: Option<Nanos>,
    /// What the step counted of itself, by metric name: amounts in bytes, times in nanoseconds, counts.
    pub reports: BTreeMap<String, u64>,
    /// Remarks, for example why a request failed.
    pub notes: Vec<String>,
    /// Tables, for example of what pins each segment.
    pub tables: Vec<Table>,
    /// Where a request failed for good: what was known at that moment, before the step gave anything back. Older builds did not keep it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub shortage: Option<Shortage>,
    /// Of a step with recovery policies, what they did.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub recovery: Option<Recovery>,
}

/// A request that failed for good, and where the memory was at that moment.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Shortage {
    /// What was asked for.
    pub requested: Bytes,
    /// The stream that it was for.
    pub stream: u32,
    /// What the allocator could not do without, before rounding: less than requested, where new pages join memory that is free.
    pub lacking: Bytes,
    /// What it would have taken from the driver, in whole segments or pages.
    pub asked: Bytes,
    /// The limit that the memory fraction sets, where that refused and the driver was not asked.
    pub limit: Option<Bytes>,
    /// The limit that the program has set on its own requests, where that refused and the allocator was not asked.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub program_limit: Option<Bytes>,
    /// The call of the device that a fault refused, where it is the one that the request failed at.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub injected: Option<RefusedCall>,
    /// The accounts of the program at that moment. What other programs and processes of the run held is part of `device.pressure` here.
    pub accounts: Accounts,
    /// `inactive_split_bytes.all.current` at that moment.
    pub inactive_split: Bytes,
    /// What was free in the allocator, apart by who may have it. Private pools that the request is not served from are left out. `None` where
    /// the driver keeps the memory and does not tell in what pieces.
    pub lanes: Option<Vec<Lane>>,
    /// What was free in private pools that the request is not served from.
    #[serde(default, skip_serializing_if = "Pieces::is_empty")]
    pub other_private_pools: Pieces,
    /// Names of the scenario's streams, by their numbers.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub streams: BTreeMap<u32, String>,
    /// Segments whose free memory cannot go back to the driver because something in them is live: those with the most, at most ten.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub pinned: Vec<PinnedSegment>,
    /// The others of that kind.
    #[serde(default, skip_serializing_if = "UnlistedSegments::is_empty")]
    pub pinned_unlisted: UnlistedSegments,
}

/// A call of the device that was made to fail for lack of memory.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RefusedCall {
    /// The process of the scenario that made it; `None`: the main one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub process: Option<String>,
    /// The call, by the driver's name.
    pub call: String,
    /// Which of its kind, counted from 1.
    pub number: u64,
}

/// A segment with free memory that cannot go back to the driver because something in it is live.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PinnedSegment {
    /// Small or large blocks, where the allocator keeps them apart.
    pub pool: Option<PoolKind>,
    /// The stream that it serves; `None` where it serves several.
    pub stream: Option<u32>,
    /// The length of the segment.
    pub size: Bytes,
    /// What is free in it; of an expandable segment without the pages that are wholly free.
    pub free: Bytes,
    /// What is live in it, in the order of addresses: at most ten.
    pub holders: Vec<Holder>,
    /// Live blocks of holders that are not listed.
    pub other_blocks: u64,
}

/// A buffer of a scenario, or all buffers of one workload, in one segment.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Holder {
    /// The name of the buffer, or of the workload's step.
    pub name: String,
    /// The line of the step that made it.
    pub line: u32,
    /// How many live blocks of it the segment has.
    pub blocks: u64,
    /// Their bytes, rounded as the allocator rounds.
    pub bytes: Bytes,
}

/// Pinned segments that are counted and not listed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct UnlistedSegments {
    /// How many there are.
    pub count: u64,
    /// What is free in them.
    pub free: Bytes,
}

impl UnlistedSegments {
    /// Whether there are none.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.count == 0
    }
}

/// Memory of an allocator that is of use to the same requests, and to no others without further ado.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Lane {
    /// Small or large blocks, where the allocator keeps them apart.
    pub pool: Option<PoolKind>,
    /// The stream that it is for.
    pub stream: u32,
    /// What can be handed out at once.
    pub free: Pieces,
    /// Freed, but waiting for other streams.
    pub waiting: Pieces,
}

/// A number of pieces of memory, and their sizes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Pieces {
    /// How many there are.
    pub count: u64,
    /// The sum of their sizes.
    pub bytes: Bytes,
    /// The size of the largest.
    pub largest: Bytes,
}

impl Pieces {
    /// Whether there is none.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.count == 0
    }

    /// Adds a piece of that size.
    pub fn add(&mut self, size: Bytes) {
        self.count += 1;
        self.bytes += size;
        self.largest = self.largest.max(size);
    }
}

/// How a step ended. Running out of memory is data here, not a failure of the harness.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Outcome {
    /// Done; nothing more to say.
    Done,
    /// A request was served, after that many retries of a recovery policy.
    Fits {
        /// Retries by the policy, not by the allocator.
        retries: u32,
    },
    /// A request failed for good.
    OutOfMemory,
    /// Something that should hold did not; the verdict says what.
    Failed,
}

/// A table inside a step's record.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Table {
    /// One line above it.
    pub title: String,
    /// Heads of the columns.
    pub columns: Vec<String>,
    /// As many cells a row as there are columns.
    pub rows: Vec<Vec<String>>,
}

/// The accounts at one point: the allocator's counters and the device's own word.
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
    /// `num_alloc_retries`: how often the allocator gave its cache back because the driver refused.
    pub retries: u64,
    /// `num_ooms`.
    pub ooms: u64,
    /// The device's memory, NVML's view included.
    pub device: DeviceMemory,
}

/// One point of the picture.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CurvePoint {
    /// Its number among all points of the run, those that were left out included. Older builds did not keep it.
    #[serde(default)]
    pub at: u64,
    /// The step it belongs to.
    pub step: u32,
    /// Rounded bytes handed out.
    pub allocated: Bytes,
    /// The same with what was freed and waits for an event. Older builds did not keep it.
    #[serde(default)]
    pub active: Option<Bytes>,
    /// Bytes held from the driver.
    pub reserved: Bytes,
    /// Device used, less the context overhead.
    pub used: Bytes,
    /// `num_ooms` and `num_alloc_retries` so far, so that a picture can mark where they rose.
    pub ooms: u64,
    /// As `ooms`, for the allocator's own retries.
    pub retries: u64,
}

/// How long operations took, on the device's clock (see [`DeviceInfo::clock`]: simulated and measured times are never mixed).
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Timings {
    /// Successful `allocate` calls.
    pub allocate: Samples,
    /// `free` calls.
    pub free: Samples,
    /// `empty_cache` calls.
    pub empty_cache: Samples,
    /// From the first step to the end of the last one, in a run in which the device sees the scenario's own calls only.
    pub scenario: Nanos,
    /// Time in what had to be tried again: tries that a policy repeated, with the recovery behind each, and whole requests in which the
    /// allocator had to give cache back before the device served them. Requests that are refused for good are no part of it.
    pub lost_to_retry: Nanos,
}

/// Durations of one operation.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Samples {
    /// How many there were.
    pub count: u64,
    /// Those that were kept: all of them up to a bound, then a seeded reservoir.
    pub kept: Vec<Nanos>,
}

#[cfg(test)]
mod id_tests {
    use super::*;

    #[test]
    fn scenarios_with_one_name_in_different_folders_have_different_ids() {
        let id = |path: &str| scenario_id(Path::new(path), "empty_cache");
        assert_eq!(id("scenarios/empty_cache.yaml"), "empty_cache");
        assert_eq!(id("./scenarios/claims/empty_cache.yaml"), "claims/empty_cache");
        assert_eq!(id("/home/me/scenarios/claims/empty_cache.yaml"), "claims/empty_cache");
        assert_eq!(id("own/empty_cache.yaml"), "own/empty_cache");
        assert_eq!(id("empty_cache.yaml"), "empty_cache");
    }
}
