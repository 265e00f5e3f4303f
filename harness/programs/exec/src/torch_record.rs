//! [`TorchRecord`]: what torch, or another library in its place, reports about its allocator and
//! about the end of a process.

use std::collections::BTreeMap;

use harness_allocator::stats::{MemoryStats, StatKey};
use harness_allocator::units::Bytes;
use harness_base::words::count;
use harness_trace::snapshot::RecordedHostMemory;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

/// The key of torch's statistics with the allocated peak.
pub const PEAK_ALLOCATED: &str = "allocated_bytes.all.peak";

/// torch's own statistics.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TorchRecord {
    pub version: String,
    /// The library that reports this in place of torch. Then the statistics are those that it
    /// publishes, under the names of torch, and the others are unknown.
    #[serde(default, rename = "library", skip_serializing_if = "Option::is_none")]
    pub other_library: Option<OtherLibrary>,
    pub rank: Option<String>,
    /// When the process started, in clock ticks since the host's start.
    #[serde(default, skip_serializing)]
    pub started: u64,
    /// `true` if an OutOfMemoryError ended the process: the program did not catch it, or exited
    /// while it handled it.
    pub ended_out_of_memory: bool,
    /// `true` if the program exited while it handled the exception that ended the process.
    #[serde(default)]
    pub caught: bool,
    /// `true` if the program exited with code 0 while it handled an out of memory error.
    #[serde(default)]
    pub ended_in_handler: bool,
    /// `true` if the error of a library that could not create a handle, a plan or a module ended
    /// the process.
    #[serde(default)]
    pub ended_by_library: bool,
    /// The last line of another exception that ended the process, a thread or a test.
    pub error: Option<String>,
    /// `torch.cuda.memory_stats()` of each used device, by index. Peaks are those of the whole
    /// process, also if the program reset them.
    pub memory_stats: BTreeMap<String, Map<String, Value>>,
    #[serde(default)]
    pub statistics: Statistics,
    /// How often the program reset its peaks.
    #[serde(default)]
    pub resets: u64,
    /// Peaks and counters before the resets, by device.
    #[serde(default, skip_serializing)]
    pub earlier: BTreeMap<String, Map<String, Value>>,
    /// `torch.cuda.host_memory_stats()` at exit, if the process used page-locked memory and this
    /// version of torch counts it. Of a killed process, those before the last reset of peaks.
    pub host_memory_stats: Option<Map<String, Value>>,
    /// Why there are no statistics.
    pub problem: Option<String>,
    /// The last lines of the traceback, if an exception ended the process.
    #[serde(default)]
    pub traceback: Vec<String>,
    /// A slow module of torch that the process imported late.
    #[serde(default, skip_serializing)]
    pub late_import: Option<String>,
    /// With `--values cpu`.
    pub not_computed: Option<NotComputed>,
    /// How an inference engine divides the memory, in one of its workers.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub engine: Option<InferenceEngine>,
    /// The engines and compilers that the hook adapted to the simulated GPU.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub engines: Vec<AdaptedEngine>,
}

/// A library other than torch that uses the GPU, or the names of several, then without a version.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct OtherLibrary {
    pub name: String,
    pub allocator: String,
    /// The version of each, by name.
    #[serde(default)]
    pub versions: BTreeMap<String, String>,
    /// How many of its out of memory errors reached the program. `None` if that is unknown, because
    /// Python before 3.12 does not show errors that a program catches.
    pub errors: Option<u64>,
}

/// What raises an out of memory error in a program.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum Caller {
    #[default]
    Torch,
    /// Another library. It may request the same memory several times.
    Library { name: String, shows_errors: bool },
    /// The program itself calls CUDA.
    Program,
}

/// How complete the statistics of torch are.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Statistics {
    /// torch reported them when the process exited.
    #[default]
    Reported,
    /// The process was killed or skipped Python's exit handlers. The memory of torch's allocator
    /// has its statistics at that moment.
    Kept,
    /// The process was killed or skipped Python's exit handlers. The statistics are those of an
    /// earlier moment.
    AtLeast,
}

/// Bytes of memory by what an inference engine uses it for, as it found them at its start.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct InferenceEngine {
    /// `vLLM` or `SGLang`.
    pub name: String,
    pub memory: u64,
    /// The share of the memory that the engine may use. SGLang leaves the graphs to the rest.
    pub requested: u64,
    pub weights: u64,
    /// Weights, lasting buffers, and what libraries other than torch allocate.
    pub consumed: u64,
    /// The peak of vLLM's profile run beyond that.
    pub activations: Option<u64>,
    pub graphs: u64,
    pub graphs_estimated: Option<u64>,
    pub kv_cache: u64,
    pub blocks: u64,
    pub block_tokens: u64,
    /// Free after the start.
    pub free: u64,
}

/// An engine or compiler whose modules the hook changes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct AdaptedEngine {
    pub name: String,
    /// `None` if Python has no metadata of the package.
    pub version: Option<String>,
    /// The first and the last tested version.
    pub tested: [String; 2],
    /// Modules, or other parts, that lack what the hook changes.
    pub unchanged: Vec<String>,
}

impl AdaptedEngine {
    /// Describes an engine that was not tested or could not be changed.
    pub fn warning(&self) -> Option<String> {
        let [first, last] = &self.tested;
        let version = self.version.as_deref();
        let is_tested = version
            .is_some_and(|version| (release(first)..=release(last)).contains(&release(version)));
        if is_tested && self.unchanged.is_empty() {
            return None;
        }
        let tested = if first == last {
            first.clone()
        } else {
            format!("{first} to {last}")
        };
        let unchanged = if self.unchanged.is_empty() {
            String::new()
        } else {
            format!("; not adapted: {}", self.unchanged.join(", "))
        };
        Some(format!(
            "{} {} may differ from a run on a real GPU (tested: {tested}){unchanged}",
            self.name,
            version.unwrap_or("of unknown version")
        ))
    }
}

/// The numbers of a version up to its suffix: `0.7.2.post1` and `0.7.2+cu130` are release `0.7.2`.
fn release(version: &str) -> Vec<u64> {
    let public = version.split('+').next().unwrap_or_default();
    public
        .split('.')
        .map_while(|part| part.parse().ok())
        .collect()
}

impl InferenceEngine {
    /// The uses of the memory and their amounts.
    pub fn parts(&self) -> Vec<(&'static str, String)> {
        let others = Bytes(self.consumed.saturating_sub(self.weights));
        let estimated = self.graphs_estimated.map_or_else(String::new, |estimated| {
            format!(" ({} estimated)", Bytes(estimated))
        });
        let mut parts = vec![
            (
                "requested",
                format!("{} of {}", Bytes(self.requested), Bytes(self.memory)),
            ),
            ("weights", Bytes(self.weights).to_string()),
            ("buffers and libraries", others.to_string()),
        ];
        parts.extend(
            self.activations
                .map(|peak| ("activations in the profile run", Bytes(peak).to_string())),
        );
        parts.extend([
            ("CUDA graphs", format!("{}{estimated}", Bytes(self.graphs))),
            (
                "KV cache",
                format!(
                    "{} ({} of {})",
                    Bytes(self.kv_cache),
                    count(self.blocks, "block"),
                    count(self.block_tokens, "token")
                ),
            ),
            ("free after the start", Bytes(self.free).to_string()),
        ]);
        parts
    }
}

/// Work whose results the CPU did not compute.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct NotComputed {
    /// Launches of kernels and graphs outside of PyTorch's operations, for example by compiled
    /// code.
    pub kernels: u64,
    /// Operations that the CPU lacks, with their number.
    pub operations: BTreeMap<String, u64>,
    pub beyond_limit: u64,
}

impl TorchRecord {
    /// The record of a process whose Python has no hook.
    pub(crate) fn unnamed() -> Self {
        Self {
            version: String::new(),
            other_library: None,
            rank: None,
            started: 0,
            ended_out_of_memory: false,
            caught: false,
            ended_in_handler: false,
            ended_by_library: false,
            error: None,
            memory_stats: BTreeMap::new(),
            statistics: Statistics::AtLeast,
            resets: 0,
            earlier: BTreeMap::new(),
            host_memory_stats: None,
            problem: None,
            traceback: Vec::new(),
            late_import: None,
            not_computed: None,
            engine: None,
            engines: Vec::new(),
        }
    }

    /// Adds the statistics in the memory of the allocator, if torch could not report any, and those
    /// before the program's resets.
    pub(crate) fn complete(mut self, kept: Option<Vec<MemoryStats>>) -> Self {
        if let Some(kept) = kept.filter(|_| self.statistics == Statistics::AtLeast) {
            let is_used = |(_, stats): &(usize, MemoryStats)| *stats != MemoryStats::default();
            let of_device = |(device, stats): (usize, MemoryStats)| {
                (
                    device.to_string(),
                    StatKey::all()
                        .map(|key| (key.to_string(), stats.get(key).into()))
                        .collect(),
                )
            };
            self.memory_stats = kept
                .into_iter()
                .enumerate()
                .filter(is_used)
                .map(of_device)
                .collect();
            self.statistics = Statistics::Kept;
        }
        for (device, earlier) in std::mem::take(&mut self.earlier) {
            let stats = self.memory_stats.entry(device).or_default();
            for (name, before) in earlier {
                let [before, after] = [Some(&before), stats.get(&name)]
                    .map(|value| value.and_then(Value::as_u64).unwrap_or(0));
                stats.insert(
                    name.clone(),
                    if name.ends_with(".peak") {
                        before.max(after)
                    } else {
                        before + after
                    }
                    .into(),
                );
            }
        }
        self
    }

    /// The page-locked memory of the process, if known.
    pub fn host_memory(&self) -> Option<RecordedHostMemory> {
        RecordedHostMemory::of(&self.version, |name| {
            self.host_memory_stats.as_ref()?.get(name)?.as_u64()
        })
    }

    /// Returns whether a device has this statistic.
    pub(crate) fn has(&self, name: &str) -> bool {
        self.memory_stats
            .values()
            .any(|stats| stats.contains_key(name))
    }

    /// Bytes of the allocator at the end. If a library does not report them, those that the process
    /// held from the driver.
    pub(crate) fn allocated_at_end(&self) -> Option<u64> {
        self.figure("allocated_bytes.all.current")
            .or_else(|| self.figure("reserved_bytes.all.current"))
    }

    /// The out of memory errors; `None` if they are unknown.
    pub fn ooms(&self) -> Option<u64> {
        match &self.other_library {
            Some(library) => library.errors,
            None => self.figure("num_ooms"),
        }
    }

    /// A statistic, summed over the devices. `None` if a library other than torch does not publish
    /// it, or torch could not report.
    pub fn figure(&self, name: &str) -> Option<u64> {
        let has = |stats: &Map<String, Value>| stats.contains_key(name);
        let reports_all = self.other_library.is_none() && self.problem.is_none();
        let is_known = reports_all || self.memory_stats.values().any(has);
        is_known.then(|| self.sum(name))
    }

    pub fn sum(&self, name: &str) -> u64 {
        self.memory_stats
            .values()
            .filter_map(|stats| stats.get(name)?.as_u64())
            .sum()
    }
}
