//! Suites: YAML → wire types → a checked [`Suite`]. [`Suite::load`] reads a file, [`Suite::parse`] a text.
//!
//! What they return cannot be wrong in itself: every file that a suite refers to has been read and checked, every size fits in the memory
//! that the suite needs, and nothing is timed twice. What is wrong is answered with one [`FileError`] that names the place.

mod check;
mod text;
mod wire;

use std::path::{Path, PathBuf};

use harness_allocator::allocator::AllocatorSpec;
use harness_allocator::units::{Bytes, Nanos};
use harness_trace::trace::TraceEvent;
use schemars::generate::SchemaSettings;
use serde_json::Value;

use super::record::{Point, case_name};
use check::Refused;
use harness_scenario::{FileError, Scenario};

pub(super) use check::Pieces;

/// What is timed, with what, how often and how precisely; checked.
#[derive(Clone, Debug, PartialEq)]
pub struct Suite {
    /// The file's name without ending.
    pub name: String,
    /// The file, as the user named it.
    pub path: PathBuf,
    /// What a reader learns from it.
    pub about: String,
    /// The memory that the device has for it.
    pub memory: Bytes,
    /// A change smaller than this share is never flagged.
    pub threshold: f64,
    /// It may stop when half the width of each median's confidence interval is at most this share of the median.
    pub precision: f64,
    /// It stops when this time is used up.
    pub budget: Nanos,
    /// Rounds that are counted: at least, and at most.
    pub rounds: Rounds,
    /// What does each case.
    pub arms: Vec<AllocatorSpec>,
    /// What is timed, in the order of the file; never empty.
    pub cases: Vec<Case>,
}

/// How many rounds are counted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rounds {
    /// At least these, where the budget allows more than one.
    pub least: u32,
    /// At most these.
    pub most: u32,
}

/// One thing to time, at one point of its axis.
#[derive(Clone, Debug, PartialEq)]
pub struct Case {
    /// What kind of case it is, as in `hit`.
    pub group: String,
    /// Where on the group's axis, if the group has one.
    pub point: Option<Point>,
    /// What is done, and measured.
    pub measure: Measure,
    /// A hash of what is measured, as parsed: comments, other cases and how often it is measured do not change it.
    pub hash: String,
}

impl Case {
    /// Group and point, as in `hit, 2 MiB`.
    #[must_use]
    pub fn name(&self) -> String {
        case_name(&self.group, self.point.as_ref())
    }
}

/// What is done in a case. Sizes are those of single requests.
#[derive(Clone, Debug, PartialEq)]
#[allow(missing_docs, reason = "the fields are documented above and by their names")]
pub enum Measure {
    /// One allocation, in a state of the allocator.
    Latency { size: Bytes, case: LatencyCase },
    /// A pass over an allocation trace.
    Trace { events: Vec<TraceEvent> },
    /// A scenario, whole.
    Scenario(Box<Scenario>),
    /// From a failed request to the end of the next good step.
    Recovery { size: Bytes },
    /// Allocation, work on the memory and free in a loop, in the device's time.
    Pipeline { size: Bytes },
    /// `empty_cache` with so many segments in the cache.
    EmptyCache { segments: u64, size: Bytes },
    /// So many threads at one allocator.
    Threads { count: u64, size: Bytes },
    /// Memory that so many other streams use too.
    RecordStream { streams: u64, size: Bytes },
    /// The program and the device, from nothing.
    StartUp,
}

/// In what state an allocator is when its latency is taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "snake_case")]
#[schemars(inline)]
pub enum LatencyCase {
    /// A block of this size has just been freed: an allocation and its free are timed together.
    Hit,
    /// The allocator is fresh: its first allocation is timed.
    Miss,
    /// Everything was freed and the cache given back: the next allocation is timed.
    AfterEmptyCache,
}

impl LatencyCase {
    /// Its name in suites and records.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Hit => "hit",
            Self::Miss => "miss",
            Self::AfterEmptyCache => "after_empty_cache",
        }
    }
}

impl Suite {
    /// Reads and checks a file, and the files that it refers to.
    ///
    /// # Errors
    /// [`FileError`]: what is wrong with the file, or with what it says.
    pub fn load(path: &Path) -> Result<Self, FileError> {
        Self::parse(&harness_language::yaml::read(path, &wire::SUITE)?, path)
    }

    /// Checks a text. `path` is for messages, its file name names the suite, and files are looked for in its folder.
    ///
    /// # Errors
    /// [`FileError`]: what is wrong with the text, or with a file that it refers to.
    pub fn parse(source: &str, path: &Path) -> Result<Self, FileError> {
        let wire = harness_language::yaml::parse(source, path, &wire::SUITE).map_err(Refused::Here);
        wire.and_then(|wire| check::check(&wire, source, path)).map_err(|refused| match refused {
            Refused::Here(problem) => FileError::text(problem, path, source),
            Refused::InFile(error) => *error,
        })
    }
}

/// The JSON Schema of suites, as committed in `scenarios/bench/schema.json`. Editors find it by a first line such as
/// `# yaml-language-server: $schema=schema.json`.
#[must_use]
pub fn schema() -> Value {
    SchemaSettings::draft2020_12().for_deserialize().into_generator().into_root_schema_for::<wire::SuiteWire>().to_value()
}
