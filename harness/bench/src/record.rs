//! The record of a benchmark run: plain, versioned data. Reports are rendered from it, and later
//! runs are compared with it.
//!
//! [`MachineInfo`] and [`Conditions`] describe where it was measured, [`Build`] what was measured.
//! An entry has the figures of this build and those of the accepted build from the same rounds.

use std::{collections::BTreeMap, fmt};

use harness_allocator::device::{Clock, CostFigure};
use harness_allocator::units::Bytes;
use harness_base::words::count;
use serde::{Deserialize, Serialize};

pub use harness_base::shard::Shard;

/// The version that this build writes. Versions up to 3 are refused.
pub const BENCH_VERSION: u32 = 4;

/// The reason of an entry that was skipped because the time was used up. A later run begins with
/// its case.
pub const NOT_IN_TURN: &str = "not in turn: the budget was used up, and a later run begins with it";

/// A comparison with a larger share of unsure measured entries is inconclusive.
pub const MOST_UNSURE: f64 = 0.25;

/// One run of `harness bench`, as written to `benchmark.json`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct BenchRun {
    pub version: u32,
    pub harness: String,
    /// Start time in UTC, as in `2026-11-20T02:17:00Z`. Runs are ordered by it.
    pub started: String,
    pub took_ms: u64,
    pub seed: u64,
    /// A command that repeats the run.
    pub reproduce: String,
    pub shard: Option<Shard>,
    pub build: Build,
    pub accepted: Accepted,
    pub machine: MachineInfo,
    pub conditions: Conditions,
    /// `true` if all suites were requested, none by name.
    #[serde(default)]
    pub is_whole: bool,
    #[serde(default)]
    pub gate: Gate,
    pub suites: Vec<SuiteRecord>,
    /// The comparison made when the run ended.
    pub comparison: Option<BenchComparison>,
}

impl BenchRun {
    pub fn new(started: String, machine: MachineInfo) -> Self {
        Self {
            version: BENCH_VERSION,
            harness: env!("CARGO_PKG_VERSION").to_owned(),
            started,
            took_ms: 0,
            seed: 0,
            reproduce: String::new(),
            shard: None,
            build: Build::default(),
            accepted: Accepted::default(),
            machine,
            conditions: Conditions::default(),
            is_whole: false,
            gate: Gate::default(),
            suites: Vec::new(),
            comparison: None,
        }
    }

    pub fn entries(&self) -> impl Iterator<Item = (&SuiteRecord, &Entry)> {
        self.suites
            .iter()
            .flat_map(|suite| suite.entries.iter().map(move |entry| (suite, entry)))
    }

    pub fn failed(&self) -> usize {
        self.entries()
            .filter(|(_, entry)| matches!(entry.outcome, EntryResult::Failed { .. }))
            .count()
    }

    /// Returns whether entries were lost or redefined: since the accepted build, or if that was not
    /// measured since the earlier run.
    pub fn has_losses(&self) -> bool {
        let since_record = self
            .comparison
            .as_ref()
            .filter(|comparison| matches!(comparison.basis, Basis::Records { .. }));
        let is_ours = |name: &&EntryName| !name.arm.starts_with("torch");
        let lost = since_record
            .into_iter()
            .flat_map(|comparison| comparison.missing.iter().chain(&comparison.redefined))
            .filter(is_ours);
        !self.gate.lost.is_empty() || !self.gate.redefined.is_empty() || lost.count() > 0
    }

    /// Returns whether the accepted build was measured in the same rounds. The record of an earlier
    /// run shows changes, but is no basis for a verdict.
    pub fn is_side_by_side(&self) -> bool {
        self.comparison
            .as_ref()
            .is_some_and(|comparison| matches!(comparison.basis, Basis::SideBySide { .. }))
    }

    /// Returns whether an entry fails, is worse or broken side by side with the accepted build, or
    /// was lost since that.
    pub fn fails(&self) -> bool {
        let changes = self
            .comparison
            .iter()
            .flat_map(|comparison| &comparison.changes);
        let is_regression = self.is_side_by_side() && Counts::of(changes).is_regression();
        is_regression
            || self.failed() > 0
            || !self.gate.lost.is_empty()
            || !self.gate.redefined.is_empty()
    }

    /// The reason why the run supports no verdict.
    pub fn inconclusive(&self) -> Option<String> {
        if let (true, Some(why)) = (self.accepted.is_required, &self.accepted.missing) {
            return Some(format!("the accepted build was not measured: {why}"));
        }
        let changes = || {
            self.comparison
                .iter()
                .flat_map(|comparison| &comparison.changes)
                .filter(|change| !change.entry.quantity.is_exact())
        };
        let disturbed = changes()
            .filter(|change| change.verdict == Verdict::Unsure && change.reason.is_some())
            .count();
        if disturbed > 0 {
            let entries = count(disturbed, "measured entry");
            return Some(format!(
                "{entries} changed while other programs used the machine; measure again when \
                 nothing else runs"
            ));
        }
        let counts = Counts::of(changes());
        let unsure = counts.with(Verdict::Unsure);
        let all = unsure + counts.compared();
        (unsure as f64 > MOST_UNSURE * all as f64).then(|| {
            format!(
                "{unsure} of {all} measured entries are unsure; raise the budget, or \
                 free the machine"
            )
        })
    }

    /// Counts entries that the run had no time for.
    pub fn not_in_turn(&self) -> usize {
        self.entries()
            .filter(|(_, entry)| entry.outcome.reason() == Some(NOT_IN_TURN))
            .count()
    }

    /// Counts skipped entries and those that ran out of memory.
    pub fn skipped(&self) -> usize {
        self.entries()
            .filter(|(_, entry)| {
                matches!(
                    entry.outcome,
                    EntryResult::Skipped { .. } | EntryResult::OutOfMemory { .. }
                )
            })
            .count()
    }
}

/// Differences between the suites of a run and the accepted ones, as in `latency: hit, 2 MiB on
/// caching`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Gate {
    /// Accepted entries that the suites no longer have.
    pub lost: Vec<String>,
    /// Accepted entries that measure other work now.
    pub redefined: Vec<String>,
    /// Terms of the suites that the accepted ones replaced, as in `latency: threshold`.
    pub overridden: Vec<String>,
}

/// The accepted build: later builds are compared with it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Accepted {
    pub commit: Option<String>,
    /// Why it was not measured in this run; `None` if it was.
    pub missing: Option<String>,
    /// `true` if an accepted build is configured or was requested, so a run without it is
    /// inconclusive.
    #[serde(default)]
    pub is_required: bool,
}

/// The build that was measured. `None`: unknown.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Build {
    pub commit: Option<String>,
    /// `true` if the working tree had uncommitted changes.
    pub dirty: Option<bool>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MachineInfo {
    /// The device's name: `NVIDIA H200`, `simulated`.
    pub device: String,
    pub clock: Clock,
    pub memory: Option<Bytes>,
    pub uuid_hash: Option<String>,
    pub driver: Option<String>,
    /// Newest CUDA version that the driver supports.
    pub cuda: Option<String>,
    /// `true` if multi-instance mode is on.
    pub mig: Option<bool>,
    /// `true` if error correction is on.
    pub ecc: Option<bool>,
    pub cost_model: Option<String>,
    pub cpu: Option<String>,
    /// Processors available to this process.
    pub cores: u32,
    pub kernel: Option<String>,
    /// Compiler and profile, as in `rustc 1.95.0, dist`.
    pub compiler: String,
}

impl MachineInfo {
    /// The profile of the build, unless it is the one that optimizes everything. `None` without a
    /// known profile.
    pub fn other_profile(&self) -> Option<&str> {
        let (_, profile) = self.compiler.rsplit_once(", ")?;
        (profile != "dist").then_some(profile)
    }
}

/// The state of the machine during the run.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Conditions {
    pub free_at_start: Option<Bytes>,
    /// GPU states before, between and after suites; empty on a simulated device.
    pub gpu: Vec<GpuState>,
    /// Other users of the machine: processes on the GPU, throttling, a busy processor. Empty:
    /// uncontended.
    pub contended: Vec<String>,
    pub cost_figures: Vec<CostFigure>,
}

/// A GPU at one moment, as NVML reports it. `None`: the value could not be read. Clocks are in MHz,
/// power in milliwatts, the temperature in degrees Celsius.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct GpuState {
    /// Milliseconds since the run began.
    pub at_ms: u64,
    /// Streaming multiprocessor clock.
    pub sm_mhz: Option<u32>,
    pub memory_mhz: Option<u32>,
    pub power_mw: Option<u32>,
    pub temperature: Option<u32>,
    pub throttle_reasons: Vec<String>,
    /// Number of other processes with memory on the device.
    pub other_processes: Option<u32>,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct SuiteRecord {
    /// The file's stem.
    pub name: String,
    pub about: String,
    /// Measured times that change by a smaller share are never flagged; 0.05 is 5 %.
    pub threshold: f64,
    pub rounds: u32,
    pub stopped: Stopped,
    /// Overhead of one timed region in picoseconds of the host's clock: the median of empty
    /// regions.
    pub overhead_ps: u64,
    /// Sorted by case; the arms of a case are adjacent.
    pub entries: Vec<Entry>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Stopped {
    /// Every confidence interval is narrow enough.
    Precise,
    /// The time or the number of rounds is used up.
    Budget,
    /// A virtual clock returned the same figures each time.
    Deterministic,
    Interrupted,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Entry {
    /// The kind of case, as in `hit`. Entries with equal group and arm form a curve.
    pub group: String,
    pub point: Option<Point>,
    pub arm: String,
    pub quantity: Quantity,
    /// Hash of the measured work. Entries with equal names and different hashes are not compared.
    pub hash: String,
    pub outcome: EntryResult,
    /// The accepted build's outcome in the same rounds.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub accepted: Option<EntryResult>,
}

impl Entry {
    /// Group and point, as in `hit, 2 MiB`. Suite, case, arm and quantity identify an entry from
    /// run to run.
    pub fn case(&self) -> String {
        case_name(&self.group, self.point.as_ref())
    }
}

pub(crate) fn case_name(group: &str, point: Option<&Point>) -> String {
    point.map_or_else(|| group.to_owned(), |point| format!("{group}, {point}"))
}

#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Point {
    /// The axis, as in `size` or `segments`.
    pub axis: String,
    pub value: u64,
    pub bytes: bool,
}

impl fmt::Display for Point {
    /// `2 MiB`, `100 segments` or `1 segment`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (self.bytes, self.value) {
            (true, value) => write!(f, "{}", Bytes(value)),
            (false, 1) => write!(f, "1 {}", self.axis.strip_suffix('s').unwrap_or(&self.axis)),
            (false, value) => write!(f, "{value} {}", self.axis),
        }
    }
}

/// The unit of an entry's figures. Different quantities are never compared or shown in one table.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Quantity {
    /// Picoseconds of the host's monotonic clock; measured.
    HostTime,
    /// Picoseconds between two events of a real device; measured.
    DeviceTime,
    /// Picoseconds of a simulated device's virtual clock; a model.
    ModelTime,
    /// Bytes.
    Memory,
}

impl Quantity {
    pub const ALL: [Self; 4] = [
        Self::HostTime,
        Self::DeviceTime,
        Self::ModelTime,
        Self::Memory,
    ];

    pub const fn is_time(self) -> bool {
        !matches!(self, Self::Memory)
    }

    /// Returns whether equal code yields equal figures, so any difference counts.
    pub const fn is_exact(self) -> bool {
        matches!(self, Self::ModelTime | Self::Memory)
    }
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum EntryResult {
    /// It has figures.
    Measured(Measured),
    /// It did not fit in the suite's memory.
    OutOfMemory { reason: String },
    /// It misbehaved.
    Failed { reason: String },
    /// It cannot run here.
    Skipped { reason: String },
}

impl EntryResult {
    pub const fn measured(&self) -> Option<&Measured> {
        if let Self::Measured(measured) = self {
            Some(measured)
        } else {
            None
        }
    }

    pub fn reason(&self) -> Option<&str> {
        match self {
            Self::Measured(_) => None,
            Self::OutOfMemory { reason } | Self::Failed { reason } | Self::Skipped { reason } => {
                Some(reason)
            }
        }
    }
}

/// An entry's figures; smaller is better.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Measured {
    /// Operations per sample, enough to make the timing overhead small.
    pub batch: u64,
    /// Each round's median for one operation, in the unit of the entry's [`Quantity`]. `None`:
    /// skipped in that round.
    pub rounds: Vec<Option<u64>>,
    pub summary: EntrySummary,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct EntrySummary {
    pub count: u64,
    pub median: u64,
    /// Median absolute deviation, unscaled.
    pub mad: u64,
    /// 99th percentile by nearest rank, if there are at least 100 samples.
    pub p99: Option<u64>,
    pub min: u64,
    pub max: u64,
    /// Ends of the median's 95 % confidence interval over rounds; equal to the median for
    /// deterministic figures.
    pub low: u64,
    pub high: u64,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct BenchComparison {
    pub basis: Basis,
    /// Differences of the machine from that of the other run. They are shown; the runs are compared
    /// anyway.
    pub machine: Vec<String>,
    /// Number of consecutive contended runs, including this one.
    pub contended_runs: usize,
    pub changes: Vec<Change>,
    /// Entries that only this run has.
    pub new: Vec<EntryName>,
    /// Entries that only the other side has.
    pub missing: Vec<EntryName>,
    /// Entries whose measured work differs now.
    pub redefined: Vec<EntryName>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Basis {
    /// The accepted build, measured in the same run.
    SideBySide { commit: Option<String> },
    /// The record of an earlier run; `why` says why the accepted build was not measured.
    Records {
        started: String,
        build: Build,
        why: String,
    },
}

#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct EntryName {
    pub suite: String,
    pub case: String,
    pub arm: String,
    pub quantity: Quantity,
}

impl EntryName {
    pub fn of(suite: &SuiteRecord, entry: &Entry) -> Self {
        Self {
            suite: suite.name.clone(),
            case: entry.case(),
            arm: entry.arm.clone(),
            quantity: entry.quantity,
        }
    }
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Change {
    pub entry: EntryName,
    pub verdict: Verdict,
    /// The compared figures, if both sides have some.
    pub figures: Option<ChangeFigures>,
    /// Start of the earlier run that this entry is worse than, if it is not worse than the accepted
    /// build.
    pub worse_than_run: Option<String>,
    /// The first run of the current stretch of worse or better runs.
    pub since: Option<String>,
    pub reason: Option<String>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Verdict {
    /// More time or memory.
    Worse,
    /// Less time or memory.
    Better,
    /// No certain difference larger than the threshold.
    Same,
    /// The interval is too wide: it could hide a change of twice the threshold.
    Unsure,
    /// It fails or runs out of memory now, and did not before.
    Broken,
    /// It failed or ran out of memory before, and does not now.
    Fixed,
    /// It fails or runs out of memory as before.
    StillBroken,
    /// It cannot run here on one side.
    NotCompared,
}

impl Verdict {
    pub const ALL: [Self; 8] = [
        Self::Worse,
        Self::Better,
        Self::Same,
        Self::Unsure,
        Self::Broken,
        Self::Fixed,
        Self::StillBroken,
        Self::NotCompared,
    ];
}

#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct ChangeFigures {
    pub base: u64,
    pub new: u64,
    /// New over base; side by side, the typical ratio of a round.
    pub ratio: f64,
    /// Ends of the ratio's 99 % confidence interval.
    pub low: f64,
    pub high: f64,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Counts(BTreeMap<Verdict, usize>);

impl Counts {
    pub fn of<'a>(changes: impl IntoIterator<Item = &'a Change>) -> Self {
        let mut counts = BTreeMap::from(Verdict::ALL.map(|verdict| (verdict, 0)));
        for change in changes {
            *counts.entry(change.verdict).or_default() += 1;
        }
        Self(counts)
    }

    pub fn with(&self, verdict: Verdict) -> usize {
        self.0[&verdict]
    }

    /// Entries with a certain verdict.
    pub fn compared(&self) -> usize {
        self.0.values().sum::<usize>()
            - self.with(Verdict::Unsure)
            - self.with(Verdict::NotCompared)
    }

    pub fn is_regression(&self) -> bool {
        self.with(Verdict::Worse) + self.with(Verdict::Broken) > 0
    }
}
