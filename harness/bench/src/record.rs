//! What a night of benchmarks leaves behind: plain, versioned data that reports are rendered from and later nights are compared with.
//!
//! Three parts are kept apart. [`Machine`] is what must be equal for two nights to be compared at all. [`Conditions`] is what the machine was
//! like that night; it decides whether the night may become a baseline. [`Build`] is what was measured, and may differ: that is the question.

use std::collections::BTreeMap;
use std::fmt;

use harness_allocator::device::{Clock, CostFigure};
use harness_allocator::units::Bytes;
use serde::{Deserialize, Serialize};

pub use harness_base::shard::Shard;

/// The version that this build writes.
pub const BENCH_RECORD_VERSION: u32 = 3;

/// One run of `harness bench`, as written to `night.json`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct NightRecord {
    /// [`BENCH_RECORD_VERSION`] of the writer.
    pub version: u32,
    /// Version of the harness that wrote it.
    pub harness: String,
    /// When it began, in UTC, as in `2026-11-20T02:17:00Z`. Nights are ordered by it.
    pub started: String,
    /// How long it took, in milliseconds.
    pub took_ms: u64,
    /// Every random choice comes from this.
    pub seed: u64,
    /// A command that does the same again.
    pub reproduce: String,
    /// Which part of the suites this is, where they were divided among machines.
    pub shard: Option<Shard>,
    /// What was measured.
    pub build: Build,
    /// Where.
    pub machine: Machine,
    /// In what state the machine was.
    pub conditions: Conditions,
    /// In the order of their names.
    pub suites: Vec<SuiteRecord>,
    /// Against the baseline, as it was when the night ended: later nights and thinning do not change it.
    pub comparison: Option<Comparison>,
}

/// What was measured. `None`: it is not known.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Build {
    /// The commit that the harness was built from.
    pub commit: Option<String>,
    /// Whether there were changes beside the commit.
    pub dirty: Option<bool>,
}

/// What must be equal for two nights to be compared. `None`: it could not be read.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Machine {
    /// The device as a user would recognise it: `NVIDIA H200`, `simulated`.
    pub device: String,
    /// Whose clock the device runs on.
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

/// What the machine was like during the night.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Conditions {
    /// Free memory of the device at the start.
    pub free_at_start: Option<Bytes>,
    /// The GPU's state before, between suites, and after; empty on a simulated device.
    pub gpu: Vec<GpuState>,
    /// Why its figures are not to be trusted as a baseline: other processes on the GPU, throttling, a busy processor. Empty: uncontended.
    pub contended: Vec<String>,
    /// What the simulated device charges for each operation, with sources; empty on a real device.
    pub cost_figures: Vec<CostFigure>,
}

/// A GPU at one moment, as NVML reads it; nothing is ever set. `None`: it could not be read.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct GpuState {
    /// Milliseconds since the night began.
    pub at_ms: u64,
    /// Clock of the streaming multiprocessors, in MHz.
    pub sm_mhz: Option<u32>,
    /// Clock of the memory, in MHz.
    pub memory_mhz: Option<u32>,
    /// Power drawn, in milliwatts.
    pub power_mw: Option<u32>,
    /// In degrees Celsius.
    pub temperature: Option<u32>,
    /// Why clocks are held down, if they are.
    pub throttle_reasons: Vec<String>,
    /// Other processes with memory on the device.
    pub other_processes: Option<u32>,
}

/// One suite of the night.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct SuiteRecord {
    /// The file's name without ending.
    pub name: String,
    /// Its `about:`.
    pub about: String,
    /// A hash of what is measured: suites of one name with different hashes are not compared.
    pub hash: String,
    /// A change smaller than this share is never flagged; 0.05 is 5 %.
    pub threshold: f64,
    /// Rounds done.
    pub rounds: u32,
    /// Why there were no more.
    pub stopped: Stopped,
    /// What the harness adds to one timed region: the median of empty ones, in picoseconds of the host's clock.
    pub overhead_ps: u64,
    /// What a fixed piece of integer arithmetic took in each round, in picoseconds of the host's clock: what the processor's own clock and
    /// other programs did to the figures. The median of those between visits; before version 3 it was timed once, at the start of the round.
    pub yardstick_ps: Vec<u64>,
    /// Which allocator each arm is: arms of one allocator run the same code. Since version 3; an arm that is not in it is not known.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub allocators: BTreeMap<String, String>,
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
    /// Who did it.
    pub arm: String,
    /// What the figures are.
    pub quantity: Quantity,
    /// What came of it.
    pub outcome: EntryOutcome,
}

impl Entry {
    /// Group and point, as in `hit, 2 MiB`: with the arm and the suite's name it identifies the entry from night to night.
    #[must_use]
    pub fn case(&self) -> String {
        match &self.point {
            Some(point) => format!("{}, {point}", self.group),
            None => self.group.clone(),
        }
    }
}

/// A point of an axis.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Point {
    /// What the axis shows, as in `size` or `segments`.
    pub axis: String,
    /// Where.
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
    /// Bytes.
    Memory,
}

impl Quantity {
    /// Whether it is a time.
    #[must_use]
    pub const fn is_time(self) -> bool {
        !matches!(self, Self::Memory)
    }
}

/// What came of an entry.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum EntryOutcome {
    /// Figures.
    Measured(Measured),
    /// It did not do what it should: broken.
    Failed {
        /// What was seen.
        reason: String,
    },
    /// It could not be done here.
    Skipped {
        /// Why.
        reason: String,
    },
}

/// Figures of an entry: smaller is better.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Measured {
    /// Operations that one sample is the mean of: as many as it takes for the harness's own overhead to be small beside them.
    pub batch: u64,
    /// Samples by round, each for one operation, in the unit of the entry's [`Quantity`]. A round is empty where the entry was skipped in it, or
    /// done by another shard; there are none at all in a night of which only medians are kept.
    pub rounds: Vec<Vec<u64>>,
    /// Of host times, the yardstick of each round beside the visit: the lesser of those before and after it. Since version 3; where there is
    /// none, that of the suite's round stands for it.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub yardstick_ps: Vec<u64>,
    /// What they come to.
    pub summary: EntrySummary,
}

/// What samples come to, in the unit of the entry's [`Quantity`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct EntrySummary {
    /// How many samples there were.
    pub count: u64,
    /// The median of all.
    pub median: u64,
    /// The median absolute deviation from it, unscaled.
    pub mad: u64,
    /// The 99th percentile by nearest rank, from 100 samples on.
    pub p99: Option<u64>,
    /// The least.
    pub min: u64,
    /// The greatest.
    pub max: u64,
    /// The median's 95 % confidence interval over rounds; equal to the median where the figures are deterministic.
    pub low: u64,
    /// Its upper end.
    pub high: u64,
}

/// One night against another.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Comparison {
    /// When the baseline began.
    pub base_started: String,
    /// The baseline's commit.
    pub base_build: Build,
    /// What differs between the two machines, in words; empty unless the user asked for a comparison across machines.
    pub across: Vec<String>,
    /// Entries that both have, in the order of the new night.
    pub changes: Vec<Change>,
    /// Entries that the baseline does not have.
    pub new: Vec<EntryName>,
    /// Entries that only the baseline has.
    pub missing: Vec<EntryName>,
    /// Suites of both whose definitions differ, which are not compared.
    pub redefined: Vec<String>,
    /// Suites that the baseline has not, and that are compared with an earlier night instead. Since version 2.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub earlier: Vec<EarlierBase>,
    /// Suites of which all allocators changed together, by more than the suite's threshold or so that changes of single ones cannot be told.
    /// Since version 3.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub drifts: Vec<CommonDrift>,
}

/// What every allocator of a suite changed by at least: the machine did it, or code that all share.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct CommonDrift {
    /// The suite.
    pub suite: String,
    /// Of which figures.
    pub quantity: Quantity,
    /// New over old: what the allocator that changed least did, in the median over its entries.
    pub ratio: f64,
    /// How many allocators.
    pub allocators: usize,
    /// Entries that would have been flagged if the allocators had not changed together, and are [`ChangeVerdict::Untested`] so.
    pub untold: usize,
}

/// A suite that is compared with another night than the others.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct EarlierBase {
    /// The suite.
    pub suite: String,
    /// When that night began.
    pub started: String,
}

/// What identifies an entry from night to night.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct EntryName {
    /// The suite.
    pub suite: String,
    /// See [`Entry::case`].
    pub case: String,
    /// Who did it.
    pub arm: String,
    /// What the figures are.
    pub quantity: Quantity,
}

/// An entry in two nights.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Change {
    /// Which entry.
    pub entry: EntryName,
    /// The conclusion.
    pub verdict: ChangeVerdict,
    /// The figures, where both nights have some.
    pub figures: Option<ChangeFigures>,
}

/// How an entry changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ChangeVerdict {
    /// More time or memory: surely, and by more than the suite's threshold.
    Worse,
    /// Less of it, on the same terms.
    Better,
    /// No more than the threshold, or not surely.
    Same,
    /// It failed this night and did not before.
    Broken,
    /// It failed before and does not any more.
    Mended,
    /// It failed both nights.
    StillBroken,
    /// Both have figures, and nothing follows from them: of too few rounds, measured while the machine did other work, or changed by no more
    /// than all allocators of the suite did together. Since version 2; earlier versions called it [`ChangeVerdict::Same`].
    Untested,
    /// One of the nights skipped it.
    NotCompared,
}

/// The figures of a change. Ratios are new over old, times corrected by the yardstick where they are host times.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct ChangeFigures {
    /// Median of the baseline.
    pub base: u64,
    /// Median of the new night.
    pub new: u64,
    /// The ratio that was judged.
    pub ratio: f64,
    /// Lower end of its 95 % confidence interval.
    pub low: f64,
    /// Upper end.
    pub high: f64,
    /// The probability of a difference this large where there is none, corrected for the number of entries.
    pub p: f64,
}
