//! What a benchmark run leaves behind: plain, versioned data that reports are rendered from and later runs are compared with.
//!
//! [`Machine`] and [`Conditions`] say where and in what state of the machine it was measured, [`Build`] what was measured. An entry has the
//! figures of this build and, side by side in the same rounds, those of the accepted build.

#![allow(missing_docs, reason = "fields whose names or types say all have no comment")]

use std::fmt;

use harness_allocator::device::{Clock, CostFigure};
use harness_allocator::units::Bytes;
use serde::{Deserialize, Serialize};

pub use harness_base::shard::Shard;

/// The version that this build writes. Versions up to 3 had another form and are refused.
pub const BENCH_VERSION: u32 = 4;

/// One run of `harness bench`, as written to `benchmark.json`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct BenchRun {
    /// [`BENCH_VERSION`] of the writer.
    pub version: u32,
    /// Version of the harness that wrote it.
    pub harness: String,
    /// When it began, in UTC, as in `2026-11-20T02:17:00Z`. Runs are ordered by it.
    pub started: String,
    /// How long it took, in milliseconds.
    pub took_ms: u64,
    /// Every random choice comes from this.
    pub seed: u64,
    /// A command that does the same again.
    pub reproduce: String,
    /// Which part of the suites this is, where they were divided among machines.
    pub shard: Option<Shard>,
    pub build: Build,
    pub accepted: Accepted,
    pub machine: Machine,
    pub conditions: Conditions,
    /// In the order of their names.
    pub suites: Vec<SuiteRecord>,
    /// What changed, as it was known when the run ended.
    pub comparison: Option<Comparison>,
}

impl BenchRun {
    /// A run of unknown builds on this machine, without suites.
    #[must_use]
    pub fn new(started: String, machine: Machine) -> Self {
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
            suites: Vec::new(),
            comparison: None,
        }
    }

    /// All entries, each with its suite.
    pub fn entries(&self) -> impl Iterator<Item = (&SuiteRecord, &Entry)> {
        self.suites.iter().flat_map(|suite| suite.entries.iter().map(move |entry| (suite, entry)))
    }

    /// How many entries failed.
    #[must_use]
    pub fn failed(&self) -> usize {
        self.entries().filter(|(_, entry)| matches!(entry.outcome, Outcome::Failed { .. })).count()
    }

    /// How many entries were skipped, those that ran out of memory included.
    #[must_use]
    pub fn skipped(&self) -> usize {
        self.entries().filter(|(_, entry)| matches!(entry.outcome, Outcome::Skipped { .. } | Outcome::OutOfMemory { .. })).count()
    }
}

/// The accepted build, whose figures are the measure of later ones.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Accepted {
    /// Its commit, where one was accepted.
    pub commit: Option<String>,
    /// Why it was not measured side by side. `None`: it was.
    pub missing: Option<String>,
}

/// What was measured. `None`: it is not known.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Build {
    /// The commit that the harness was built from.
    pub commit: Option<String>,
    /// Whether there were changes beside the commit.
    pub dirty: Option<bool>,
}

/// Where a run was measured. `None`: it could not be read.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Machine {
    /// The device as a user would recognise it: `NVIDIA H200`, `simulated`.
    pub device: String,
    pub clock: Clock,
    /// All memory of the device.
    pub memory: Option<Bytes>,
    /// A hash of the GPU's UUID.
    pub uuid_hash: Option<String>,
    /// Version of the kernel driver.
    pub driver: Option<String>,
    /// CUDA version that the driver supports.
    pub cuda: Option<String>,
    /// Whether multi-instance mode is on.
    pub mig: Option<bool>,
    /// Whether error correction is on.
    pub ecc: Option<bool>,
    /// The cost model or measured profile of a simulated device: its name and version.
    pub cost_model: Option<String>,
    /// Model of the processor.
    pub cpu: Option<String>,
    /// Processors that this process may use.
    pub cores: u32,
    /// The operating system's kernel: name and release.
    pub kernel: Option<String>,
    /// Compiler and profile that the harness was built with, as in `rustc 1.95.0, release`.
    pub compiler: String,
}

/// What the machine was like during the run.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Conditions {
    /// Free memory of the device at the start.
    pub free_at_start: Option<Bytes>,
    /// The GPU's state before, between suites, and after; empty on a simulated device.
    pub gpu: Vec<GpuState>,
    /// What else used the machine: other processes on the GPU, throttling, a busy processor. Empty: uncontended.
    pub contended: Vec<String>,
    /// What the simulated device charges for each operation, with sources; empty on a real device.
    pub cost_figures: Vec<CostFigure>,
}

/// A GPU at one moment, as NVML reads it; nothing is ever set. `None`: it could not be read. Clocks are in MHz, power in milliwatts, the
/// temperature in degrees Celsius.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct GpuState {
    /// Milliseconds since the run began.
    pub at_ms: u64,
    /// Clock of the streaming multiprocessors.
    pub sm_mhz: Option<u32>,
    pub memory_mhz: Option<u32>,
    pub power_mw: Option<u32>,
    pub temperature: Option<u32>,
    /// Why clocks are held down, if they are.
    pub throttle_reasons: Vec<String>,
    /// How many other processes have memory on the device.
    pub other_processes: Option<u32>,
}

/// One suite of a run.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct SuiteRecord {
    /// The file's name without ending.
    pub name: String,
    /// What its file says it is about.
    pub about: String,
    /// A change of a measured time by less than this share is never flagged; 0.05 is 5 %.
    pub threshold: f64,
    pub rounds: u32,
    pub stopped: Stopped,
    /// What the harness adds to one timed region: the median of empty ones, in picoseconds of the host's clock.
    pub overhead_ps: u64,
    /// By case, arms of one case next to each other.
    pub entries: Vec<Entry>,
}

/// Why a suite did no more rounds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Stopped {
    /// Every confidence interval is as narrow as the suite asks.
    Precise,
    /// The time or the number of rounds allowed was used up.
    Budget,
    /// The device's clock is virtual and gives the same figures each time.
    Deterministic,
    /// The user stopped it.
    Interrupted,
}

/// A case done by an arm.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Entry {
    /// What kind of case it is, as in `hit`: entries of one group and arm make a curve.
    pub group: String,
    /// Where on the group's axis it is, if the group has one.
    pub point: Option<Point>,
    /// Name of the allocator with its settings.
    pub arm: String,
    pub quantity: Quantity,
    /// A hash of what is measured: entries of one name with different hashes are not compared.
    pub hash: String,
    pub outcome: Outcome,
    /// The outcome with the accepted build, in the same rounds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub accepted: Option<Outcome>,
}

impl Entry {
    /// Group and point, as in `hit, 2 MiB`: with the arm and the suite's name it identifies the entry from run to run.
    #[must_use]
    pub fn case(&self) -> String {
        case_name(&self.group, self.point.as_ref())
    }
}

/// Group and point, as in `hit, 2 MiB`.
pub(crate) fn case_name(group: &str, point: Option<&Point>) -> String {
    point.map_or_else(|| group.to_owned(), |point| format!("{group}, {point}"))
}

/// A point of an axis.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Point {
    /// What the axis shows, as in `size` or `segments`.
    pub axis: String,
    pub value: u64,
    /// Whether the value is an amount of memory.
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

/// What an entry's figures are. Those of different quantities are never compared, and never stand in one table.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Quantity {
    /// Picoseconds of the host's monotonic clock: code that ran on this machine, measured.
    HostTime,
    /// Picoseconds between two events of a real device, measured.
    DeviceTime,
    /// Picoseconds of a simulated device's virtual clock: a model, not measured.
    ModelTime,
    /// Amounts of memory, in bytes.
    Memory,
}

impl Quantity {
    /// In the order in which they are shown.
    pub const ALL: [Self; 4] = [Self::HostTime, Self::DeviceTime, Self::ModelTime, Self::Memory];

    /// Whether it is a time, in picoseconds.
    #[must_use]
    pub const fn is_time(self) -> bool {
        !matches!(self, Self::Memory)
    }

    /// Whether the same code gives the same figure each time: any difference is one of the code.
    #[must_use]
    pub const fn is_exact(self) -> bool {
        matches!(self, Self::ModelTime | Self::Memory)
    }
}

/// What came of an entry. A reason says what was seen.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Outcome {
    /// It has figures.
    Measured(Measured),
    /// It did not fit in the memory that the suite gives it.
    OutOfMemory { reason: String },
    /// It did not do what it should: broken.
    Failed { reason: String },
    /// It could not be done here.
    Skipped { reason: String },
}

impl Outcome {
    /// The figures, if there are some.
    #[must_use]
    pub const fn measured(&self) -> Option<&Measured> {
        if let Self::Measured(measured) = self { Some(measured) } else { None }
    }

    /// Why there are no figures.
    #[must_use]
    pub fn reason(&self) -> Option<&str> {
        match self {
            Self::Measured(_) => None,
            Self::OutOfMemory { reason } | Self::Failed { reason } | Self::Skipped { reason } => Some(reason),
        }
    }
}

/// Figures of an entry: smaller is better.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Measured {
    /// Operations that one sample is the mean of: as many as it takes for the harness's own overhead to be small beside them.
    pub batch: u64,
    /// The median of each round's samples, for one operation, in the unit of the entry's [`Quantity`]. `None` where it was skipped in that
    /// round.
    pub rounds: Vec<Option<u64>>,
    /// What all samples come to.
    pub summary: EntrySummary,
}

/// What samples come to, in the unit of the entry's [`Quantity`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct EntrySummary {
    /// How many samples there were.
    pub count: u64,
    pub median: u64,
    /// The median absolute deviation from the median, unscaled.
    pub mad: u64,
    /// The 99th percentile by nearest rank, from 100 samples on.
    pub p99: Option<u64>,
    pub min: u64,
    pub max: u64,
    /// Lower end of the median's 95 % confidence interval over rounds; equal to the median where the figures are deterministic.
    pub low: u64,
    /// Its upper end.
    pub high: u64,
}

/// What changed from the accepted build, or from an earlier run.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Comparison {
    pub basis: Basis,
    /// What differs of the machine from that of the run compared with, in words: shown, and no reason not to compare.
    pub machine: Vec<String>,
    /// How many runs in a row were contended, this one included.
    pub contended_runs: usize,
    /// Entries that both have, in the order of the run.
    pub changes: Vec<Change>,
    /// Entries that only this run has.
    pub new: Vec<EntryName>,
    /// Entries that only the other side has.
    pub missing: Vec<EntryName>,
    /// Entries of both that measure something else now.
    pub redefined: Vec<EntryName>,
}

/// What entries were compared with.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Basis {
    /// The accepted build, measured in the same run.
    SideBySide {
        /// Its commit, where that is known.
        commit: Option<String>,
    },
    /// The record of an earlier run, because there was no accepted build to measure.
    Records {
        /// When that run began.
        started: String,
        /// What that run measured.
        build: Build,
        /// Why the accepted build was not measured.
        why: String,
    },
}

/// What identifies an entry from run to run.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct EntryName {
    pub suite: String,
    pub case: String,
    pub arm: String,
    pub quantity: Quantity,
}

impl EntryName {
    /// The name of an entry of a suite.
    #[must_use]
    pub fn of(suite: &SuiteRecord, entry: &Entry) -> Self {
        Self { suite: suite.name.clone(), case: entry.case(), arm: entry.arm.clone(), quantity: entry.quantity }
    }
}

/// How an entry compares.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Change {
    pub entry: EntryName,
    pub verdict: Verdict,
    /// The figures that the verdict was drawn from, where both sides have some.
    pub figures: Option<ChangeFigures>,
    /// Where it is worse than an earlier run, and not than the accepted build: when that run began.
    pub worse_than_run: Option<String>,
    /// Where it is worse or better: the first run of the present stretch of such runs.
    pub since: Option<String>,
    /// Where there is more to say: why something broke or was not compared.
    pub reason: Option<String>,
}

/// The conclusion about an entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Verdict {
    /// More time or memory.
    Worse,
    /// Less time or memory.
    Better,
    /// No difference that is certain and larger than the threshold.
    Same,
    /// The interval is so wide that a change of twice the threshold could hide in it.
    Unsure,
    /// It fails or runs out of memory, and did not.
    Broken,
    /// It failed or ran out of memory, and does not any more.
    Fixed,
    /// It fails or runs out of memory as before.
    StillBroken,
    /// One side could not do it here.
    NotCompared,
}

/// The figures of a change.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct ChangeFigures {
    /// The median of what it is compared with.
    pub base: u64,
    /// The median of this run.
    pub new: u64,
    /// New over base. Side by side, the typical ratio of a round.
    pub ratio: f64,
    /// Lower end of the ratio's 99 % confidence interval.
    pub low: f64,
    /// Its upper end.
    pub high: f64,
}

/// How many entries came out how: one number for each [`Verdict`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Counts {
    pub worse: usize,
    pub better: usize,
    pub same: usize,
    pub unsure: usize,
    pub broken: usize,
    pub fixed: usize,
    pub still_broken: usize,
    pub not_compared: usize,
}

impl Counts {
    /// How many of these changes have each verdict.
    #[must_use]
    pub fn of<'a>(changes: impl IntoIterator<Item = &'a Change>) -> Self {
        let mut counts = Self::default();
        for change in changes {
            *match change.verdict {
                Verdict::Worse => &mut counts.worse,
                Verdict::Better => &mut counts.better,
                Verdict::Same => &mut counts.same,
                Verdict::Unsure => &mut counts.unsure,
                Verdict::Broken => &mut counts.broken,
                Verdict::Fixed => &mut counts.fixed,
                Verdict::StillBroken => &mut counts.still_broken,
                Verdict::NotCompared => &mut counts.not_compared,
            } += 1;
        }
        counts
    }

    /// Entries of which it is known whether they changed.
    #[must_use]
    pub const fn compared(self) -> usize {
        self.worse + self.better + self.same + self.broken + self.fixed + self.still_broken
    }

    /// Whether something became worse or broke.
    #[must_use]
    pub const fn is_regression(self) -> bool {
        self.worse + self.broken > 0
    }
}
