//! What a suite's file says, before it is checked. The comments are the documentation of the language.

use std::fmt;

use schemars::JsonSchema;
use serde::Deserialize;
use serde::de::value::MapAccessDeserializer;
use serde::de::{self, Deserializer, MapAccess, Visitor};

use super::LatencyCase;
use super::text::{FileText, PercentText};
use harness_language::arms::ArmWire;
use harness_language::fields::NeedsWire;
use harness_language::located::Located;
use harness_language::text::{DurationText, SizeText};
use harness_language::yaml::Language;

/// Most rounds of a suite.
pub(super) const MAX_ROUNDS: u64 = 1000;
/// Most blocks that a case has live at once.
pub(super) const MAX_BLOCKS: u64 = 100_000;
/// Most threads at one allocator.
pub(super) const MAX_THREADS: u64 = 256;
/// Most other streams that use one block.
pub(super) const MAX_STREAMS: u64 = 64;

/// The language of suites.
pub(super) const SUITE: Language = Language {
    noun: "suite",
    example: "scenarios/bench/latency.yaml",
    shape: "a suite has the keys `about`, `needs`, `arms` and `time`, and may have `threshold`, `precision`, `budget` and `rounds`",
    required: &["about", "needs", "arms", "time"],
    shorter: "sizes and counts in lists",
    own: &["arms", "time"],
    foreign: &["steps"],
    renamed: &[],
    other: ("a scenario", "harness run"),
};

/// A suite: what is timed, with which allocators, how often and how precisely.
#[derive(Clone, Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
#[schemars(title = "suite")]
pub(crate) struct SuiteWire {
    /// What a reader learns from it.
    pub(super) about: Located<String>,
    /// What it needs to run.
    pub(super) needs: NeedsWire,
    /// A change smaller than this is never flagged: 5% if not given.
    pub(super) threshold: Option<PercentText>,
    /// It stops when half the width of each median's 95 % confidence interval is at most this share of the median: 2% if not given.
    pub(super) precision: Option<PercentText>,
    /// It stops when this time is used up: 10s if not given. The user may give another one for all suites together.
    pub(super) budget: Option<DurationText>,
    /// How many rounds are counted: from 10 to 200 if not given. On a virtual clock, two equal rounds are enough.
    pub(super) rounds: Option<RoundsWire>,
    /// The allocators that do it, at least one.
    #[schemars(length(min = 1))]
    pub(super) arms: Located<Vec<Located<ArmWire>>>,
    /// What is timed, at least one thing.
    #[schemars(with = "Vec<KindWire>", length(min = 1))]
    pub(super) time: Located<Vec<Located<MeasureWire>>>,
}

/// How many rounds are counted.
#[derive(Clone, Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
#[schemars(rename = "rounds")]
pub(super) struct RoundsWire {
    /// At least these, though the budget can end a suite after the first one.
    #[schemars(range(min = 1, max = MAX_ROUNDS))]
    pub(super) least: Located<u64>,
    /// At most these.
    #[schemars(range(min = 1, max = MAX_ROUNDS))]
    pub(super) most: Located<u64>,
}

/// One kind of thing to time.
#[derive(Clone, Debug, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
#[schemars(rename = "measure")]
pub(super) enum KindWire {
    /// One allocation, by size and by what the allocator has cached.
    Latency(LatencyWire),
    /// Passes over an allocation trace: the allocator's own path on the host, in the time of one operation. On a simulated device, calls
    /// to the driver cost next to nothing here. The memory reserved at most, and what of it was not allocated then, are told beside it.
    Trace(FileWire),
    /// A scenario, whole and without the audit: the time of its steps on the device's clock. An allocator that the scenario does not list
    /// is skipped. The memory reserved at most, and what of it was not allocated then, are told beside it.
    Scenario(FileWire),
    /// Out of memory and back: all memory is taken in requests of one size. Timed is from the start of the request that fails, over
    /// freeing everything and `empty_cache`, to the end of a step that makes half as many requests.
    Recovery(SizesWire),
    /// A loop of allocation, writing all of it, and free: the time of one turn on the device, between events on the stream.
    Pipeline(SizesWire),
    /// `empty_cache`, by the number of segments in the cache.
    EmptyCache(EmptyCacheWire),
    /// Allocations and frees by several threads at one allocator, which stands behind one lock; PyTorch's behind its shared front too, with a
    /// stream for each thread.
    Threads(ThreadsWire),
    /// Allocation, `record_stream` for other streams, and free: what it costs that memory may be used on other streams.
    RecordStream(RecordStreamWire),
    /// From nothing: the program with one small scenario, opening the device, and the device memory that is used before the first request.
    StartUp,
}

impl KindWire {
    /// Every one by its name.
    pub(super) const NAMES: &'static [&'static str] =
        &["latency", "trace", "scenario", "recovery", "pipeline", "empty_cache", "threads", "record_stream", "start_up"];
}

/// A measure, or the name of one without the fields that it needs, which the check answers with its place.
#[derive(Clone, Debug)]
pub(super) enum MeasureWire {
    /// A measure with its fields, or one that has none.
    Kind(KindWire),
    /// A name alone that is no measure by itself.
    Bare(String),
}

impl<'de> Deserialize<'de> for MeasureWire {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct MeasureVisitor;
        impl<'de> Visitor<'de> for MeasureVisitor {
            type Value = MeasureWire;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a measure, as in `latency: { sizes: [2MiB] }`")
            }
            fn visit_str<E: de::Error>(self, name: &str) -> Result<Self::Value, E> {
                Ok(if name == "start_up" { MeasureWire::Kind(KindWire::StartUp) } else { MeasureWire::Bare(name.to_owned()) })
            }
            fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<Self::Value, A::Error> {
                KindWire::deserialize(MapAccessDeserializer::new(map)).map(MeasureWire::Kind)
            }
        }
        deserializer.deserialize_any(MeasureVisitor)
    }
}

/// One allocation, by size and by what the allocator has cached.
#[derive(Clone, Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
#[schemars(rename = "latency")]
pub(super) struct LatencyWire {
    /// What is asked for, each of 1 B or more and within the memory that the suite needs.
    #[schemars(length(min = 1))]
    pub(super) sizes: Located<Vec<SizeText>>,
    /// `hit`: a block of this size has just been freed, and an allocation and its free are timed together. `miss`: the first allocation of
    /// a fresh allocator. `after_empty_cache`: the next allocation when everything was freed and the cache given back. All of them, if not
    /// given.
    #[schemars(length(min = 1))]
    pub(super) cases: Option<Located<Vec<LatencyCase>>>,
}

/// A file to go through.
#[derive(Clone, Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
#[schemars(rename = "through_file")]
pub(super) struct FileWire {
    /// Which.
    pub(super) file: FileText,
}

/// Sizes of requests.
#[derive(Clone, Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
#[schemars(rename = "by_size")]
pub(super) struct SizesWire {
    /// What each request asks for. At least two fit in the memory that the suite needs; for `recovery` at most 100000 do.
    #[schemars(length(min = 1))]
    pub(super) sizes: Located<Vec<SizeText>>,
}

/// `empty_cache`, by the number of segments in the cache.
#[derive(Clone, Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
#[schemars(rename = "by_segments")]
pub(super) struct EmptyCacheWire {
    /// How many requests are made and freed before: that many segments, where the allocator makes one for each.
    #[schemars(length(min = 1), inner(range(min = 1, max = MAX_BLOCKS)))]
    pub(super) segments: Located<Vec<Located<u64>>>,
    /// What each request asks for: 10MiB if not given, from which size on PyTorch's allocator gives each request a segment of its own.
    pub(super) size: Option<SizeText>,
}

/// Allocations and frees by several threads at one allocator.
#[derive(Clone, Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
#[schemars(rename = "by_threads")]
pub(super) struct ThreadsWire {
    /// How many threads.
    #[schemars(length(min = 1), inner(range(min = 1, max = MAX_THREADS)))]
    pub(super) counts: Located<Vec<Located<u64>>>,
    /// What each request asks for: 512B if not given.
    pub(super) size: Option<SizeText>,
}

/// Allocation, `record_stream` for other streams, and free.
#[derive(Clone, Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
#[schemars(rename = "by_streams")]
pub(super) struct RecordStreamWire {
    /// How many other streams use the memory; with 0, what the same costs without `record_stream`.
    #[schemars(length(min = 1), inner(range(min = 0, max = MAX_STREAMS)))]
    pub(super) streams: Located<Vec<Located<u64>>>,
    /// What each request asks for: 2MiB if not given.
    pub(super) size: Option<SizeText>,
}
