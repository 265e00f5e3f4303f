//! `storm`: many requests and frees with random sizes and lifetimes. `pins`: those of its blocks
//! that pin segments.

use std::{fmt, sync::Arc};

use harness_allocator::units::Bytes;
use harness_base::words::{count, joined};
use harness_language::schema::JsonSchema;
#[cfg(feature = "schema")]
use schemars::{Schema, SchemaGenerator, json_schema};
use serde::Deserialize;

use super::{StepWire, fields::StepFields};
use crate::checker::{Checker, in_order};
use crate::metric::{ReportKey, StepName, StreamName};
use crate::trace::Trace;
use harness_language::error::Problem;
use harness_language::located::{ListOr, Located, Position};
use harness_language::text::{AmountText, CountText, NameText};
use harness_trace::trace::TraceEvent;

pub const MAX_OPERATIONS: u64 = 10_000_000;
pub const MAX_THREADS: u64 = 64;
/// Most entries in a list of sizes.
pub const MAX_SIZES: usize = 64;

const REPORTS: [ReportKey; 14] = [
    ReportKey::Operations,
    ReportKey::Allocations,
    ReportKey::Frees,
    ReportKey::Ooms,
    ReportKey::FailedRequest,
    ReportKey::FailedOperation,
    ReportKey::LiveBlocks,
    ReportKey::LiveBytes,
    ReportKey::PeakLiveBytes,
    ReportKey::Time,
    ReportKey::ReservedAtFailure,
    ReportKey::AllocatedAtFailure,
    ReportKey::LargestFreeAtFailure,
    ReportKey::DeviceFreeAtFailure,
];

/// Figures of every step that makes many requests: all but those at the first failure.
pub(super) const OF_REQUESTS: &[ReportKey] = REPORTS.split_at(10).0;

const OF_THREADS: [ReportKey; 4] = [
    ReportKey::Operations,
    ReportKey::Allocations,
    ReportKey::Frees,
    ReportKey::Ooms,
];

#[derive(Clone, Debug, PartialEq)]
pub struct Storm {
    pub id: StepName,
    /// Requests and frees together.
    pub operations: u64,
    pub sizes: StormSizes,
    /// Most requested bytes that are live at the same time.
    pub live: Bytes,
    /// Operations between allocation and free of a block, both ends included.
    pub lifetime: (u64, u64),
    pub order: FreeOrder,
    /// One is drawn for each request. Never empty.
    pub streams: Vec<StreamName>,
    /// Condition that ends the storm.
    pub until: Option<Until>,
    pub fill: bool,
    /// Host threads. `None`: one thread with the scenario's allocator.
    pub threads: Option<u64>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum StormSizes {
    /// Each with the same probability.
    Choices(Vec<Bytes>),
    /// Both ends are included and above 0.
    Range {
        min: Bytes,
        max: Bytes,
        distribution: Distribution,
    },
    /// The sizes of a recorded trace, with their frequencies. Never empty.
    Recorded(Arc<[Bytes]>),
}

impl StormSizes {
    fn smallest(&self) -> Bytes {
        match self {
            Self::Choices(choices) => choices.iter().copied().min().unwrap_or_default(),
            Self::Range { min, .. } => *min,
            Self::Recorded(sizes) => sizes.iter().copied().min().unwrap_or_default(),
        }
    }
}

/// The order of frees.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
#[schemars(inline)]
pub enum FreeOrder {
    /// Each block has its own lifetime.
    #[default]
    Random,
    /// All blocks live `max` operations, so the oldest is freed first.
    Fifo,
    /// As many requests as a lifetime has operations, then frees of all blocks, newest first, as in
    /// a forward and a backward pass.
    Lifo,
    /// Nine of ten blocks have a lifetime in the first tenth of the range, the tenth block in the
    /// rest.
    Generational,
}

/// Condition that ends a storm. If it does not occur, the step fails.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
#[schemars(inline)]
pub enum Until {
    /// A request fails although reserved − allocated is at least its size.
    Fragmented,
}

impl fmt::Display for Storm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}, {}, ", self.id, count(self.operations, "operation"))?;
        match &self.sizes {
            StormSizes::Choices(choices) => f.write_str(&joined(choices, " or "))?,
            StormSizes::Range {
                min,
                max,
                distribution,
            } => match distribution {
                Distribution::LogUniform => write!(f, "{min} to {max}")?,
                Distribution::Uniform => write!(f, "{min} to {max}, uniform")?,
                Distribution::Bimodal => write!(f, "about {min} or about {max}")?,
            },
            StormSizes::Recorded(sizes) => f.write_str(&count(sizes.len(), "recorded size"))?,
        }
        write!(f, ", at most {} live", self.live)?;
        if let Some(threads) = self.threads {
            write!(f, ", in each of {threads} threads")?;
        }
        match self.until {
            Some(Until::Fragmented) => f.write_str(", until fragmented"),
            None => Ok(()),
        }
    }
}

/// Makes many requests and frees. Sizes, lifetimes and streams are drawn from the seed of the run.
/// If a request would exceed `live`, the storm frees the block that is due next instead. Failed
/// requests are counted, and the storm continues. Blocks stay live until `free` names the storm.
///
/// With `threads`, several host threads do this at the same time, each with its own `operations`
/// and `live`. They share one allocator, which is not the scenario's own: PyTorch's with the same
/// settings and one lock per stream. The seed determines the requests of each thread, but not how
/// the threads interleave. The checks hold for every interleaving: live blocks do not overlap,
/// blocks keep their contents, and the structure and the counters are correct after all threads
/// have ended. After all blocks are freed and the cache is released, nothing is reserved.
///
/// Such a storm frees all its blocks. It reports `operations`, `allocations`, `frees` and `ooms`,
/// and takes neither `until` nor `meanwhile`. Its scenario is not timed, not part of
/// `--every-fault`, and skipped with other allocators than PyTorch's. Faults do not apply to it. A
/// failure may need several runs to occur again: use `--repeat 20`.
#[derive(Clone, Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, rename = "storm")]
pub(crate) struct StormWire {
    /// A name for the step's figures, and for `free` and `pins`.
    id: NameText,
    /// Number of requests and frees, from 1 to 10000000.
    operations: CountText,
    /// Sizes of the requests.
    sizes: SizesWire,
    /// Most requested bytes that are live at the same time.
    live: AmountText,
    /// The number of operations from a block's allocation to its free.
    lifetime: LifetimeWire,
    /// Streams of the requests; one is drawn for each. Default: `default`.
    streams: Option<Vec<NameText>>,
    /// `fragmented` ends the storm at the first request that fails although reserved − allocated
    /// is at least its size. The step fails if no request does.
    until: Option<Until>,
    /// Fills every block, and verifies it before its free. Default: `true`.
    fill: Option<bool>,
    /// Number of host threads, from 2 to 64. Default: one thread with the scenario's allocator.
    threads: Option<CountText>,
}

/// The number of operations from a block's allocation to its free. Drawn uniformly from `min` to
/// `max` unless `order` says otherwise.
#[derive(Clone, Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, rename = "storm_lifetime")]
struct LifetimeWire {
    /// Shortest lifetime, 1 or more.
    min: CountText,
    /// Longest lifetime, at most 10000000.
    max: CountText,
    /// Order of frees. `random`: each block has its own lifetime. `fifo`: the oldest first, after
    /// `max` operations. `lifo`: the newest first, after as many requests as a lifetime has
    /// operations. `generational`: nine of ten blocks have a lifetime in the first tenth of the
    /// range. Default: `random`.
    order: Option<FreeOrder>,
}

/// A list of sizes with the same probability, or a range.
#[derive(Clone, Debug, Deserialize, JsonSchema)]
#[serde(transparent, rename = "storm_sizes")]
struct SizesWire(#[schemars(schema_with = "list_or_range")] Located<ListOr<AmountText, RangeWire>>);

#[cfg(feature = "schema")]
fn list_or_range(generator: &mut SchemaGenerator) -> Schema {
    let (size, range) = (
        generator.subschema_for::<AmountText>(),
        generator.subschema_for::<RangeWire>(),
    );
    json_schema!({ "anyOf": [
        size, { "type": "array", "items": size, "minItems": 1, "maxItems": MAX_SIZES }, range
    ] })
}

/// A range of sizes, or the sizes of a recorded trace.
#[derive(Clone, Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, rename = "storm_size_range")]
struct RangeWire {
    /// Smallest size, 1 B or more.
    min: Option<AmountText>,
    /// Largest size.
    max: Option<AmountText>,
    /// `log_uniform`: every doubling has the same probability. `uniform`: every size has.
    /// `bimodal`: from `min` to twice `min`, or from half of `max` to `max`. Default:
    /// `log_uniform`.
    distribution: Option<Distribution>,
    /// An allocation trace, as for `replay`. It replaces `min` and `max`. Sizes are drawn from its
    /// requests.
    trace: Option<Located<String>>,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
#[schemars(inline)]
pub enum Distribution {
    /// Every doubling has the same probability.
    #[default]
    LogUniform,
    /// Every size has the same probability.
    Uniform,
    /// Small or large with the same probability: from `min` to twice `min`, or from half of `max`
    /// to `max`.
    Bimodal,
}

impl StepFields<Storm> for StormWire {
    const EXAMPLE: &'static str = "\
- storm:
    id: churn
    operations: 20000
    sizes: { min: 512B, max: 64MiB }
    live: 600MiB
    lifetime: { min: 10, max: 2000 }
    streams: [default, side]
- free: churn";

    const REPORTS: &'static [ReportKey] = &REPORTS;

    const ID: fn(&Self) -> Option<&NameText> = |wire| Some(&wire.id);

    fn check(&self, step: &Located<StepWire>, checker: &mut Checker<'_>) -> Result<Storm, Problem> {
        checker.storm_may_start(&self.id)?;
        let threads = self.threads(checker)?;
        let operations = checker.whole(&self.operations, "operations", 1..=MAX_OPERATIONS)?;
        checker.count(step.at, operations.saturating_mul(threads.unwrap_or(1)))?;
        let sizes = sizes(&self.sizes.0, checker)?;
        let live = checker.positive_size(&self.live, "live")?;
        let smallest = sizes.smallest();
        if live < smallest {
            let message =
                format!("no block fits: `live` is {live}, but the smallest size is {smallest}");
            return Err(Problem::new(self.live.at, message).help("raise `live` or lower `sizes`"));
        }
        Ok(Storm {
            operations,
            sizes,
            live,
            lifetime: checker
                .range(&self.lifetime.min, &self.lifetime.max, 1..=MAX_OPERATIONS)?
                .into_inner(),
            order: self.lifetime.order.unwrap_or_default(),
            streams: self.streams(checker)?,
            until: self.until,
            fill: self.fill.unwrap_or(true),
            threads,
            id: self.declare(threads, checker)?,
        })
    }
}

impl StormWire {
    fn threads(&self, checker: &Checker<'_>) -> Result<Option<u64>, Problem> {
        let Some(threads) = &self.threads else {
            return Ok(None);
        };
        let count = checker.whole(threads, "threads", 2..=MAX_THREADS)?;
        if self.until.is_some() {
            let message = "a storm with threads cannot end early: the interleaving decides when \
                 its requests fail";
            return Err(Problem::new(threads.at, message).help("remove `until`, or `threads`"));
        }
        Ok(Some(count))
    }

    fn declare(
        &self,
        threads: Option<u64>,
        checker: &mut Checker<'_>,
    ) -> Result<StepName, Problem> {
        if threads.is_none() {
            return checker.declare_storm(&self.id, Self::REPORTS);
        }
        let id = checker.declare_storm(&self.id, &OF_THREADS)?;
        checker.storm_has_freed(&id);
        Ok(id)
    }

    fn streams(&self, checker: &Checker<'_>) -> Result<Vec<StreamName>, Problem> {
        match &self.streams {
            Some(names) if !names.is_empty() => names
                .iter()
                .map(|name| checker.stream(Some(name)))
                .collect(),
            _ => Ok(vec![checker.stream(None)?]),
        }
    }
}

fn sizes(
    wire: &Located<ListOr<AmountText, RangeWire>>,
    checker: &Checker<'_>,
) -> Result<StormSizes, Problem> {
    match wire.texts() {
        Ok(texts) if texts.is_empty() || texts.len() > MAX_SIZES => Err(Problem::new(
            wire.at,
            format!("`sizes` has {} entries", texts.len()),
        )
        .help(format!(
            "write 1 to {MAX_SIZES} sizes, or a range, as in `{{ min: 512B, max: 64MiB }}`"
        ))),
        Ok(texts) => {
            let sizes: Result<_, _> = texts
                .iter()
                .map(|text| checker.positive_size(text, "sizes"))
                .collect();
            Ok(StormSizes::Choices(sizes?))
        }
        Err(range) => of_range(range, wire.at, checker),
    }
}

fn of_range(range: &RangeWire, at: Position, checker: &Checker<'_>) -> Result<StormSizes, Problem> {
    const FORMS: &str = "write `{ min: 512B, max: 64MiB }`, or `{ trace: job.trace.gz }`";
    let (min, max) = match (&range.min, &range.max, &range.trace) {
        (Some(min), Some(max), None) => (min, max),
        (None, None, Some(trace)) if range.distribution.is_none() => {
            return recorded(trace, checker);
        }
        _ => return Err(Problem::new(at, "expected a range of sizes or a trace").help(FORMS)),
    };
    let (at, min, max) = (
        min.at,
        checker.positive_size(min, "min")?,
        checker.positive_size(max, "max")?,
    );
    in_order(&min, &max, at)?;
    Ok(StormSizes::Range {
        min,
        max,
        distribution: range.distribution.unwrap_or_default(),
    })
}

fn recorded(path: &Located<String>, checker: &Checker<'_>) -> Result<StormSizes, Problem> {
    let trace =
        Trace::read(&checker.declared.folder.join(&path.value)).map_err(|(message, help)| {
            Problem::new(path.at, format!("{}: {message}", path.value)).help(help)
        })?;
    let sizes = trace.events.iter().filter_map(|event| match event {
        TraceEvent::Allocate { size, .. } if *size > Bytes::ZERO => Some(*size),
        _ => None,
    });
    let sizes: Arc<[Bytes]> = sizes.collect();
    if sizes.is_empty() {
        return Err(Problem::new(
            path.at,
            format!("{}: the trace has no requests", path.value),
        )
        .help("name a trace with requests"));
    }
    Ok(StormSizes::Recorded(sizes))
}

/// Lists the live blocks of a storm that keep each segment from being released to the driver. The
/// report shows them as a table.
#[derive(Clone, Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, rename = "pins")]
pub(crate) struct PinsWire {
    /// The id of a storm with live blocks.
    storm: NameText,
    /// A name for the step's figures.
    id: Option<NameText>,
}

impl StepFields<StepName> for PinsWire {
    const EXAMPLE: &'static str = "\
- storm: { id: churn, operations: 1000, sizes: [1MiB, 3MiB], live: 64MiB,
      lifetime: { min: 1, max: 100 } }
- pins: { storm: churn, id: pinned }";

    const REPORTS: &'static [ReportKey] = &[
        ReportKey::PinnedSegments,
        ReportKey::PinningBlocks,
        ReportKey::PinningBytes,
        ReportKey::FreeInPinnedSegments,
        ReportKey::FreeSegments,
    ];

    const ID: fn(&Self) -> Option<&NameText> = |wire| wire.id.as_ref();

    fn check(&self, _: &Located<StepWire>, checker: &mut Checker<'_>) -> Result<StepName, Problem> {
        checker.live_storm(&self.storm)
    }
}
