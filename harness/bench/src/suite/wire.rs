//! A suite's file before the check. The comments are the documentation of the language.

use std::fmt;

use harness_language::schema::JsonSchema;
use serde::Deserialize;
use serde::de::{self, Deserializer, MapAccess, Visitor, value::MapAccessDeserializer};

use super::LatencyCase;
use harness_language::text::{DurationText, SizeText};
use harness_language::yaml::{Language, ONE_DOCUMENT};
use harness_language::{arms::ArmWire, error::Problem, fields::NeedsWire, located::Located};

pub(super) const MAX_ROUNDS: u64 = 1000;
pub(super) const MAX_BLOCKS: u64 = 100_000;
pub(super) const MAX_THREADS: u64 = 256;
pub(super) const MAX_STREAMS: u64 = 64;

pub(super) const SUITE: Language = Language {
    noun: "suite",
    example: "scenarios/bench/latency.yaml",
    shape: "a suite has the keys `about`, `needs`, `arms` and `time`, and may have `version`, \
         `threshold`, `precision`, `budget`, `headline` and `rounds`",
    required: &["about", "needs", "arms", "time"],
    required_by: |_| Vec::new(),
    shorter: "sizes and counts in lists",
    own: &["arms", "time"],
    foreign: &["steps"],
    other: ("a scenario", "harness run"),
    advice: ONE_DOCUMENT,
};

/// A suite: what is timed, with which allocators, how often and how precisely.
#[derive(Clone, Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
#[schemars(title = "suite")]
pub(crate) struct SuiteWire {
    /// The version of the language: 1, which is the default.
    #[schemars(range(min = 1, max = 1))]
    pub(super) version: Option<Located<u64>>,
    /// One sentence about the question it answers.
    pub(super) about: Located<String>,
    /// Required memory.
    pub(super) needs: NeedsWire,
    /// Smaller relative changes are never flagged. Default: 5%.
    pub(super) threshold: Option<PercentText>,
    /// The suite may stop when half the width of each median's 95 % confidence interval is at most
    /// this share of the median. Default: 2%.
    pub(super) precision: Option<PercentText>,
    /// The suite stops when this time is used up. Default: 10s. `--budget` replaces it.
    pub(super) budget: Option<DurationText>,
    /// `true`: the suite is measured before others, and gets three times its share of `--budget`.
    /// Default: false.
    pub(super) headline: Option<bool>,
    /// Counted rounds. Default: 10 to 200. On a virtual clock, two equal rounds suffice.
    pub(super) rounds: Option<RoundsWire>,
    /// The allocators, at least one.
    #[schemars(length(min = 1))]
    pub(super) arms: Located<Vec<Located<ArmWire>>>,
    /// The cases, at least one.
    #[schemars(with = "Vec<KindWire>", length(min = 1))]
    pub(super) time: Located<Vec<Located<MeasureWire>>>,
}

/// Counted rounds.
#[derive(Clone, Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
#[schemars(rename = "rounds")]
pub(super) struct RoundsWire {
    /// Minimum, unless the budget is used up earlier.
    #[schemars(range(min = 1, max = MAX_ROUNDS))]
    pub(super) least: Located<u64>,
    /// Maximum.
    #[schemars(range(min = 1, max = MAX_ROUNDS))]
    pub(super) most: Located<u64>,
}

/// A share above 0 and at most 100 %, for example `5%` or `2.5%`.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(transparent)]
#[schemars(rename = "percent")]
pub(super) struct PercentText(#[schemars(regex(pattern = "^[0-9][0-9.]* ?%$"))] Located<String>);

/// 0.05 is 5 %.
pub(super) fn percent(given: &PercentText) -> Result<f64, Problem> {
    let text = &given.0;
    let number = text
        .value
        .strip_suffix('%')
        .map(str::trim_end)
        .filter(|digits| digits.chars().all(|c| c.is_ascii_digit() || c == '.'));
    match number.and_then(|digits| digits.parse::<f64>().ok()) {
        Some(share) if share > 0.0 && share <= 100.0 => Ok(share / 100.0),
        _ => Err(
            Problem::new(text.at, format!("`{}` is not a share", text.value))
                .label("a share")
                .help(
                    "write a number above 0 and at most 100, and a percent sign, as in `5%` or \
                 `2.5%`",
                ),
        ),
    }
}

/// A file name relative to the suite's folder, for example `traces/mixed.txt.gz`.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(transparent)]
#[schemars(rename = "file")]
pub(super) struct FileText(#[schemars(length(min = 1))] pub(super) Located<String>);

/// One kind of case.
#[derive(Clone, Debug, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
#[schemars(rename = "measure")]
pub(super) enum KindWire {
    /// One allocation, by size and by the state of the cache.
    Latency(LatencyWire),
    /// Passes over an allocation trace: host time per operation of the allocator's own code. Driver
    /// calls cost almost nothing on a simulated device here. Also records the peak of reserved
    /// memory, and the part of it that was not allocated then.
    Trace(FileWire),
    /// A whole scenario without the audit: the time of its steps on the device's clock. An
    /// allocator that the scenario does not list is skipped. Also records the peak of reserved
    /// memory, and the part of it that was not allocated then.
    Scenario(FileWire),
    /// Recovery from OOM. Requests of one size fill the memory. The time is measured from the start
    /// of the failing request, over freeing everything and `empty_cache`, to the end of a step with
    /// half as many requests.
    Recovery(SizesWire),
    /// A loop of allocation, writing all of it, and free: the device time of one turn, between
    /// events on the stream.
    Pipeline(SizesWire),
    /// `empty_cache`, by the number of segments in the cache.
    EmptyCache(EmptyCacheWire),
    /// Allocations and frees by several threads that share one allocator behind one lock.
    Threads(ThreadsWire),
    /// Allocation, `record_stream` for other streams, and free.
    RecordStream(RecordStreamWire),
    /// Start-up: the program with one small scenario, opening the device, and the device memory in
    /// use before the first request.
    StartUp,
}

impl KindWire {
    pub(super) const NAMES: &'static [&'static str] = &[
        "latency",
        "trace",
        "scenario",
        "recovery",
        "pipeline",
        "empty_cache",
        "threads",
        "record_stream",
        "start_up",
    ];
}

/// A measure, or its bare name, which the check rejects with its position.
#[derive(Clone, Debug)]
pub(super) enum MeasureWire {
    /// A measure with its fields, or one without fields.
    Kind(KindWire),
    /// A bare name that needs fields.
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
                Ok(if name == "start_up" {
                    MeasureWire::Kind(KindWire::StartUp)
                } else {
                    MeasureWire::Bare(name.to_owned())
                })
            }
            fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<Self::Value, A::Error> {
                KindWire::deserialize(MapAccessDeserializer::new(map)).map(MeasureWire::Kind)
            }
        }
        deserializer.deserialize_any(MeasureVisitor)
    }
}

/// One allocation, by size and by the state of the cache.
#[derive(Clone, Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
#[schemars(rename = "latency")]
pub(super) struct LatencyWire {
    /// Requested sizes, each at least 1 B and within the suite's memory.
    #[schemars(length(min = 1))]
    pub(super) sizes: Located<Vec<SizeText>>,
    /// `hit`: a block of this size was just freed; an allocation and its free are timed together.
    /// `miss`: the first allocation of a fresh allocator. `after_empty_cache`: the next allocation
    /// after everything was freed and released. Default: all of them.
    #[schemars(length(min = 1))]
    pub(super) cases: Option<Located<Vec<LatencyCase>>>,
}

/// A file to run.
#[derive(Clone, Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
#[schemars(rename = "through_file")]
pub(super) struct FileWire {
    /// The file, relative to the suite's folder.
    pub(super) file: FileText,
}

/// Request sizes.
#[derive(Clone, Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
#[schemars(rename = "by_size")]
pub(super) struct SizesWire {
    /// Requested sizes. At least two must fit in the suite's memory; for `recovery` at most 100000
    /// may fit.
    #[schemars(length(min = 1))]
    pub(super) sizes: Located<Vec<SizeText>>,
}

/// `empty_cache`, by the number of segments in the cache.
#[derive(Clone, Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
#[schemars(rename = "by_segments")]
pub(super) struct EmptyCacheWire {
    /// Number of requests made and freed before; an allocator with one segment per request then has
    /// this many segments.
    #[schemars(length(min = 1), inner(range(min = 1, max = MAX_BLOCKS)))]
    pub(super) segments: Located<Vec<Located<u64>>>,
    /// Size of each request. Default: 10MiB; from this size on PyTorch's allocator gives each
    /// request its own segment.
    pub(super) size: Option<SizeText>,
}

/// Allocations and frees by several threads on one allocator.
#[derive(Clone, Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
#[schemars(rename = "by_threads")]
pub(super) struct ThreadsWire {
    /// Numbers of threads.
    #[schemars(length(min = 1), inner(range(min = 1, max = MAX_THREADS)))]
    pub(super) counts: Located<Vec<Located<u64>>>,
    /// Size of each request. Default: 512B.
    pub(super) size: Option<SizeText>,
}

/// Allocation, `record_stream` for other streams, and free.
#[derive(Clone, Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
#[schemars(rename = "by_streams")]
pub(super) struct RecordStreamWire {
    /// Numbers of other streams that use the memory; 0 measures the same without `record_stream`.
    #[schemars(length(min = 1), inner(range(min = 0, max = MAX_STREAMS)))]
    pub(super) streams: Located<Vec<Located<u64>>>,
    /// Size of each request. Default: 2MiB.
    pub(super) size: Option<SizeText>,
}
