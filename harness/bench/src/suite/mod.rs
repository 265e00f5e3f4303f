//! Suites: YAML → wire types → a checked [`Suite`]. [`Suite::load`] reads a file,
//! [`Suite::parse`] a text.
//!
//! A [`Suite`] is valid: every file it refers to was read and checked, every size fits in the
//! suite's memory, and nothing is timed twice. Errors are one [`FileError`] with a position.

mod check;
mod wire;

use std::path::{Path, PathBuf};

use harness_allocator::allocator::AllocatorSpec;
use harness_allocator::units::{Bytes, Nanos};
use harness_language::schema::JsonSchema;
use harness_trace::trace::TraceEvent;
#[cfg(feature = "schema")]
use schemars::generate::SchemaSettings;

use super::record::{Point, case_name};
use check::Refused;
use harness_scenario::{FileError, Scenario};

pub(super) use check::{hash_of, hash_text};

#[derive(Clone, Debug, PartialEq)]
pub struct Suite {
    pub name: String,
    pub path: PathBuf,
    pub about: String,
    pub memory: Bytes,
    /// Smaller relative changes are never flagged.
    pub threshold: f64,
    /// The suite may stop when half the width of each median's confidence interval is at most this
    /// share of the median.
    pub precision: f64,
    pub budget: Nanos,
    /// `true` if it is measured before other suites, and gets a larger share of a run's budget.
    pub headline: bool,
    pub rounds: Rounds,
    /// Never empty.
    pub arms: Vec<AllocatorSpec>,
    /// In the order of the file; never empty.
    pub cases: Vec<Case>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rounds {
    /// Minimum, if the budget allows more than one.
    pub least: u32,
    pub most: u32,
}

#[derive(Clone, Debug, PartialEq)]
pub struct Case {
    /// The kind of case, as in `hit`.
    pub group: String,
    pub point: Option<Point>,
    pub measure: Measure,
    /// Hash of the parsed work. Comments, other cases, precision and rounds do not change it.
    pub hash: String,
}

impl Case {
    /// Group and point, as in `hit, 2 MiB`.
    pub fn name(&self) -> String {
        case_name(&self.group, self.point.as_ref())
    }
}

/// The work of a case. Sizes are those of single requests.
#[derive(Clone, Debug, PartialEq)]
pub enum Measure {
    /// One allocation in a given state of the allocator.
    Latency {
        size: Bytes,
        case: LatencyCase,
    },
    /// A pass over an allocation trace.
    Trace {
        events: Vec<TraceEvent>,
    },
    Scenario(Box<Scenario>),
    /// From a failing request to the end of the next successful step.
    Recovery {
        size: Bytes,
    },
    /// A loop of allocation, work on the memory and free, in device time.
    Pipeline {
        size: Bytes,
    },
    /// `empty_cache` with `segments` segments in the cache.
    EmptyCache {
        segments: u64,
        size: Bytes,
    },
    Threads {
        count: u64,
        size: Bytes,
    },
    /// Memory used by `streams` other streams.
    RecordStream {
        streams: u64,
        size: Bytes,
    },
    /// Start of the program and the device.
    StartUp,
}

/// The allocator's state when its latency is measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
#[schemars(inline)]
pub enum LatencyCase {
    /// A block of this size was just freed; an allocation and its free are timed together.
    Hit,
    /// The allocator is fresh; its first allocation is timed.
    Miss,
    /// Everything was freed and released; the next allocation is timed.
    AfterEmptyCache,
}

impl LatencyCase {
    pub const fn name(self) -> &'static str {
        match self {
            Self::Hit => "hit",
            Self::Miss => "miss",
            Self::AfterEmptyCache => "after_empty_cache",
        }
    }
}

impl Suite {
    pub fn load(path: &Path) -> Result<Self, FileError> {
        Self::parse(&harness_language::yaml::read(path, &wire::SUITE)?, path)
    }

    /// Checks a text. `path` is for messages, names the suite, and its folder holds the referenced
    /// files.
    pub fn parse(source: &str, path: &Path) -> Result<Self, FileError> {
        let wire = harness_language::yaml::parse(source, path, &wire::SUITE).map_err(Refused::Here);
        wire.and_then(|wire| check::check(&wire, source, path))
            .map_err(|refused| match refused {
                Refused::Here(problem) => FileError::text(problem, path, source),
                Refused::InFile(error) => *error,
            })
    }
}

/// The JSON Schema of suites, as committed in `scenarios/bench/schema.json`. Editors find it
/// through a first line such as `# yaml-language-server: $schema=schema.json`.
#[cfg(feature = "schema")]
pub fn schema() -> serde_json::Value {
    SchemaSettings::draft2020_12()
        .for_deserialize()
        .into_generator()
        .into_root_schema_for::<wire::SuiteWire>()
        .to_value()
}

#[cfg(not(feature = "schema"))]
pub fn schema() -> serde_json::Value {
    serde_json::from_str(include_str!("../../../../scenarios/bench/schema.json"))
        .expect("tests compare the file with the types")
}
