//! `storm`: many requests and frees of random sizes and lifetimes.

use std::borrow::Cow;
use std::fmt;
use std::sync::Arc;

use harness_allocator::units::Bytes;
use harness_base::words::count;
use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::Deserialize;

use super::fields::StepFields;
use crate::checker::Checker;
use crate::metric::{ReportKey, StepName, StreamName};
use crate::trace::Trace;
use harness_language::error::Problem;
use harness_language::located::{ListOr, Located, Position};
use harness_language::text::{AmountText, CountText, NameText};
use harness_trace::trace::TraceEvent;

/// Most operations of one storm.
pub const MAX_OPERATIONS: u64 = 10_000_000;
/// Most threads of one storm.
pub const MAX_THREADS: u64 = 64;
/// Most sizes to choose from.
pub const MAX_SIZES: usize = 64;

/// What any step reports that makes requests and frees of its own.
pub(super) const OF_REQUESTS: [ReportKey; 10] = [
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
];

const AT_FAILURE: [ReportKey; 4] =
    [ReportKey::ReservedAtFailure, ReportKey::AllocatedAtFailure, ReportKey::LargestFreeAtFailure, ReportKey::DeviceFreeAtFailure];

/// What a storm in threads reports.
const OF_THREADS: [ReportKey; 4] = [ReportKey::Operations, ReportKey::Allocations, ReportKey::Frees, ReportKey::Ooms];

const REPORTS: [ReportKey; OF_REQUESTS.len() + AT_FAILURE.len()] = {
    let mut all = [ReportKey::Time; OF_REQUESTS.len() + AT_FAILURE.len()];
    let (of_requests, at_failure) = all.split_at_mut(OF_REQUESTS.len());
    of_requests.copy_from_slice(&OF_REQUESTS);
    at_failure.copy_from_slice(&AT_FAILURE);
    all
};

/// A storm, checked.
#[derive(Clone, Debug, PartialEq)]
#[allow(missing_docs, reason = "the names say what they are")]
pub struct Storm {
    pub id: StepName,
    /// Requests and frees together.
    pub operations: u64,
    /// What the requests ask for.
    pub sizes: StormSizes,
    /// Requested bytes that are live at most.
    pub live: Bytes,
    /// How many operations a block lives, both ends included.
    pub lifetime: (u64, u64),
    /// Which block goes first.
    pub order: FreeOrder,
    /// The streams of the requests, one chosen for each; never empty.
    pub streams: Vec<StreamName>,
    /// What ends it early.
    pub until: Option<Until>,
    /// Whether every block is filled when it is made and verified before it is freed.
    pub fill: bool,
    /// How many host threads do it at once; `None`: one, with the allocator of the arm.
    pub threads: Option<u64>,
}

/// What requests ask for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum StormSizes {
    /// One of these, all equally likely.
    Choices(Vec<Bytes>),
    /// Log-uniform: every doubling is equally likely. Both ends included, neither is 0.
    LogUniform {
        /// The smallest.
        min: Bytes,
        /// The largest.
        max: Bytes,
    },
    /// Every size between two is equally likely. Both ends included, neither is 0.
    Uniform {
        /// The smallest.
        min: Bytes,
        /// The largest.
        max: Bytes,
    },
    /// Small or large, equally likely: from `min` to twice that, or from half of `max` to `max`.
    Bimodal {
        /// The smallest.
        min: Bytes,
        /// The largest.
        max: Bytes,
    },
    /// Those of a recorded trace, as often as it has them; never empty.
    Recorded(Arc<[Bytes]>),
}

impl StormSizes {
    /// The smallest that can come.
    fn smallest(&self) -> Bytes {
        match self {
            Self::Choices(choices) => choices.iter().copied().min().unwrap_or_default(),
            Self::LogUniform { min, .. } | Self::Uniform { min, .. } | Self::Bimodal { min, .. } => *min,
            Self::Recorded(sizes) => sizes.iter().copied().min().unwrap_or_default(),
        }
    }
}

/// In which order blocks go.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
#[schemars(inline)]
pub enum FreeOrder {
    /// Each block has a lifetime of its own.
    #[default]
    Random,
    /// All blocks live equally long, `max`: the oldest goes first.
    Fifo,
    /// As many requests in a row as a lifetime has operations, then everything goes, the newest first, as in a forward and a backward pass.
    Lifo,
    /// Nine of ten blocks live at most a tenth of the way from `min` to `max`, the tenth one from there to `max`.
    Generational,
}

/// What ends a storm early. If it never comes, the step fails.
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
            StormSizes::Choices(choices) => {
                for (i, size) in choices.iter().enumerate() {
                    write!(f, "{}{size}", if i == 0 { "" } else { " or " })?;
                }
            }
            StormSizes::LogUniform { min, max } => write!(f, "{min} to {max}")?,
            StormSizes::Uniform { min, max } => write!(f, "{min} to {max}, uniform")?,
            StormSizes::Bimodal { min, max } => write!(f, "about {min} or about {max}")?,
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

/// Makes many requests and frees, with sizes, lifetimes and streams drawn from the run's seed. A request that would exceed `live` frees
/// the block due next instead; one that fails is counted, and the storm goes on. Its live blocks stay until `free` names the storm.
///
/// With `threads`, so many host threads do this at once, each with `operations` and `live` of its own. They ask one allocator, which is apart from that of the arm: PyTorch's with
/// the settings of the arm and a lock for each stream. What each thread asks for comes from the seed; how the threads meet does not. So what is checked holds however they
/// meet: no address is handed out while somebody has it, blocks hold what was written, when all threads have ended the structure and the counters are those of what they did
/// together, and when everything is freed and given back nothing is reserved. A request that fails is counted; where some do, how many depends on how the threads meet. Such a
/// storm frees all its blocks, reports `operations`, `allocations`, `frees` and `ooms`, and has neither `until` nor `meanwhile`. A scenario with one is not timed, not taken apart by `--every-fault`,
/// and skipped with an allocator that is not PyTorch's; its faults pass the storm over. A failure may take some runs to come again: `--repeat 20`.
#[derive(Clone, Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
#[schemars(rename = "storm")]
pub(crate) struct StormWire {
    /// Its name, for what it reports and for `free` and `pins`.
    id: NameText,
    /// Requests and frees together, from 1 to 10000000.
    operations: CountText,
    /// What the requests ask for.
    sizes: SizesWire,
    /// Requested bytes that are live at most.
    live: AmountText,
    /// How many operations a block lives.
    lifetime: LifetimeWire,
    /// The streams of the requests, one drawn for each: `default` if not given.
    streams: Option<Vec<NameText>>,
    /// `fragmented`: stop at the first request that fails although reserved less allocated is at least its size. The step fails if none does.
    until: Option<Until>,
    /// Whether every block is filled when it is made and verified before it is freed: yes, if not given.
    fill: Option<bool>,
    /// How many host threads do this at once, from 2 to 64: one, with the allocator of the arm, if not given.
    threads: Option<CountText>,
}

/// How many operations a block lives: drawn evenly from `min` to `max`, if `order` says nothing else.
#[derive(Clone, Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
#[schemars(rename = "storm_lifetime")]
struct LifetimeWire {
    /// The shortest, 1 or more.
    min: CountText,
    /// The longest, at most 10000000.
    max: CountText,
    /// Which block goes first. `random` (if not given): each has a lifetime of its own; `fifo`: the oldest, after `max` operations; `lifo`: the newest, after
    /// as many requests in a row as a lifetime has operations; `generational`: nine of ten live at most a tenth of the way from `min` to `max`.
    order: Option<FreeOrder>,
}

#[derive(Clone, Debug, Deserialize)]
#[serde(transparent)]
struct SizesWire(Located<ListOr<RangeWire>>);

/// Any size between two, or those of a recorded trace.
#[derive(Clone, Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
#[schemars(rename = "storm_size_range")]
struct RangeWire {
    /// The smallest, 1 B or more.
    min: Option<AmountText>,
    /// The largest.
    max: Option<AmountText>,
    /// `log_uniform` (if not given): every doubling equally likely; `uniform`: every size; `bimodal`: from `min` to twice that, or from half of `max` to
    /// `max`, equally likely.
    distribution: Option<Distribution>,
    /// Instead of a smallest and a largest: the file of an allocation trace, as `replay` takes it, whose requests are drawn from.
    trace: Option<Located<String>>,
}

#[derive(Clone, Copy, Debug, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
#[schemars(inline)]
enum Distribution {
    /// Every doubling is equally likely.
    LogUniform,
    /// Every size is equally likely.
    Uniform,
    /// Small or large.
    Bimodal,
}

impl JsonSchema for SizesWire {
    fn schema_name() -> Cow<'static, str> {
        "storm_sizes".into()
    }
    fn json_schema(generator: &mut SchemaGenerator) -> Schema {
        let size = generator.subschema_for::<AmountText>();
        let range = generator.subschema_for::<RangeWire>();
        json_schema!({
            "description": "Sizes to draw from, all equally likely, or a range.",
            "anyOf": [size, { "type": "array", "items": size, "minItems": 1, "maxItems": MAX_SIZES }, range]
        })
    }
}

impl StepFields for StormWire {
    type Checked = Storm;

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

    fn id(&self) -> Option<&NameText> {
        Some(&self.id)
    }

    fn check(&self, at: Position, checker: &mut Checker<'_>) -> Result<Storm, Problem> {
        checker.storm_may_start(&self.id)?;
        let threads = self.threads(checker)?;
        let operations = checker.whole(&self.operations, "operations", 1..=MAX_OPERATIONS)?;
        checker.count(at, operations.saturating_mul(threads.unwrap_or(1)))?;
        let sizes = sizes(&self.sizes.0, checker)?;
        let live = checker.positive_size(&self.live, "live")?;
        let smallest = sizes.smallest();
        if live < smallest {
            let message = format!("`live` is {live}, and the smallest size is {smallest}: no block fits");
            return Err(Problem::new(self.live.position(), message).help("raise `live` or lower `sizes`"));
        }
        Ok(Storm {
            operations,
            sizes,
            live,
            lifetime: lifetime(&self.lifetime, checker)?,
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
        let Some(threads) = &self.threads else { return Ok(None) };
        let count = checker.whole(threads, "threads", 2..=MAX_THREADS)?;
        if self.until.is_some() {
            let message = "a storm in threads does not end early: when its requests fail depends on how the threads meet";
            return Err(Problem::new(threads.position(), message).help("leave out `until`, or `threads`"));
        }
        Ok(Some(count))
    }

    fn declare(&self, threads: Option<u64>, checker: &mut Checker<'_>) -> Result<StepName, Problem> {
        if threads.is_none() {
            return checker.declare_storm(&self.id, Self::REPORTS);
        }
        let id = checker.declare_storm(&self.id, &OF_THREADS)?;
        checker.storm_has_freed(&id);
        Ok(id)
    }

    fn streams(&self, checker: &Checker<'_>) -> Result<Vec<StreamName>, Problem> {
        match &self.streams {
            Some(names) if !names.is_empty() => names.iter().map(|name| checker.stream(Some(name))).collect(),
            _ => Ok(vec![checker.stream(None)?]),
        }
    }
}

fn sizes(wire: &Located<ListOr<RangeWire>>, checker: &Checker<'_>) -> Result<StormSizes, Problem> {
    match wire.texts() {
        Ok(texts) if texts.is_empty() || texts.len() > MAX_SIZES => {
            Err(Problem::new(wire.position(), format!("`sizes` has {} entries", texts.len()))
                .help(format!("from 1 to {MAX_SIZES} sizes, or a range, as in `{{ min: 512B, max: 64MiB }}`")))
        }
        Ok(texts) => {
            let sizes: Result<_, _> = texts.into_iter().map(|text| checker.positive_size(&AmountText(text), "sizes")).collect();
            Ok(StormSizes::Choices(sizes?))
        }
        Err(range) => of_range(range, wire.position(), checker),
    }
}

fn of_range(range: &RangeWire, at: Position, checker: &Checker<'_>) -> Result<StormSizes, Problem> {
    const FORMS: &str = "either `{ min: 512B, max: 64MiB }`, or `{ trace: job.trace.gz }`";
    let (min, max) = match (&range.min, &range.max, &range.trace) {
        (Some(min), Some(max), None) => (min, max),
        (None, None, Some(trace)) if range.distribution.is_none() => return recorded(trace, checker),
        _ => return Err(Problem::new(at, "`sizes` is neither a range nor a trace").help(FORMS)),
    };
    let (at, min, max) = (min.position(), checker.positive_size(min, "min")?, checker.positive_size(max, "max")?);
    if min > max {
        return Err(Problem::new(at, format!("`min` is {min}, above `max`, {max}")).help("exchange the two"));
    }
    Ok(match range.distribution {
        None | Some(Distribution::LogUniform) => StormSizes::LogUniform { min, max },
        Some(Distribution::Uniform) => StormSizes::Uniform { min, max },
        Some(Distribution::Bimodal) => StormSizes::Bimodal { min, max },
    })
}

/// The sizes of the requests of a trace.
fn recorded(path: &Located<String>, checker: &Checker<'_>) -> Result<StormSizes, Problem> {
    let trace = Trace::read(&checker.folder().join(&path.value))
        .map_err(|(message, help)| Problem::new(path.position(), format!("{}: {message}", path.value)).help(help))?;
    let sizes = trace.events.iter().filter_map(|event| match event {
        TraceEvent::Allocate { size, .. } if *size > Bytes::ZERO => Some(*size),
        _ => None,
    });
    let sizes: Arc<[Bytes]> = sizes.collect();
    if sizes.is_empty() {
        return Err(Problem::new(path.position(), format!("{}: it has no requests", path.value)).help("name a trace with requests"));
    }
    Ok(StormSizes::Recorded(sizes))
}

fn lifetime(wire: &LifetimeWire, checker: &Checker<'_>) -> Result<(u64, u64), Problem> {
    let min = checker.whole(&wire.min, "min", 1..=MAX_OPERATIONS)?;
    let max = checker.whole(&wire.max, "max", 1..=MAX_OPERATIONS)?;
    if min > max {
        return Err(Problem::new(wire.min.position(), format!("`min` is {min}, above `max`, {max}")).help("exchange the two"));
    }
    Ok((min, max))
}
