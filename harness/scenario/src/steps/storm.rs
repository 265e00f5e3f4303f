//! `storm`: many requests and frees of random sizes and lifetimes.

use std::borrow::Cow;
use std::fmt;

use harness_allocator::units::Bytes;
use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::Deserialize;

use super::fields::StepFields;
use crate::checker::Checker;
use crate::metric::{ReportKey, StepName, StreamName};
use harness_language::error::Problem;
use harness_language::located::{ListOr, Located, Position};
use harness_language::text::{AmountText, CountText, NameText};

/// Most operations of one storm.
pub const MAX_OPERATIONS: u64 = 10_000_000;
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
    /// The streams of the requests, one chosen for each; never empty.
    pub streams: Vec<StreamName>,
    /// What ends it early.
    pub until: Option<Until>,
    /// Whether every block is filled when it is made and verified before it is freed.
    pub fill: bool,
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
        write!(f, "{}, {} operations, ", self.id, self.operations)?;
        match &self.sizes {
            StormSizes::Choices(choices) => {
                for (i, size) in choices.iter().enumerate() {
                    write!(f, "{}{size}", if i == 0 { "" } else { " or " })?;
                }
            }
            StormSizes::LogUniform { min, max } => write!(f, "{min} to {max}")?,
        }
        write!(f, ", at most {} live", self.live)?;
        match self.until {
            Some(Until::Fragmented) => f.write_str(", until fragmented"),
            None => Ok(()),
        }
    }
}

/// Makes many requests and frees, with sizes, lifetimes and streams drawn from the run's seed. A request that would exceed `live` frees
/// the block due next instead; one that fails is counted, and the storm goes on. Its live blocks stay until `free` names the storm.
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
}

/// How many operations a block lives: drawn evenly from `min` to `max`.
#[derive(Clone, Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
#[schemars(rename = "storm_lifetime")]
struct LifetimeWire {
    /// The shortest, 1 or more.
    min: CountText,
    /// The longest, at most 10000000.
    max: CountText,
}

#[derive(Clone, Debug, Deserialize)]
#[serde(transparent)]
struct SizesWire(Located<ListOr<RangeWire>>);

/// Any size between two, every doubling equally likely (log-uniform).
#[derive(Clone, Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
#[schemars(rename = "storm_size_range")]
struct RangeWire {
    /// The smallest, 1 B or more.
    min: AmountText,
    /// The largest.
    max: AmountText,
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
        let operations = checker.whole(&self.operations, "operations", 1..=MAX_OPERATIONS)?;
        checker.count(at, operations)?;
        let sizes = sizes(&self.sizes.0, checker)?;
        let live = checker.positive_size(&self.live, "live")?;
        let smallest = match &sizes {
            StormSizes::Choices(choices) => choices.iter().copied().min().unwrap_or_default(),
            StormSizes::LogUniform { min, .. } => *min,
        };
        if live < smallest {
            let message = format!("`live` is {live}, and the smallest size is {smallest}: no block fits");
            return Err(Problem::new(self.live.position(), message).help("raise `live` or lower `sizes`"));
        }
        Ok(Storm {
            operations,
            sizes,
            live,
            lifetime: lifetime(&self.lifetime, checker)?,
            streams: self.streams(checker)?,
            until: self.until,
            fill: self.fill.unwrap_or(true),
            id: checker.declare_storm(&self.id, Self::REPORTS)?,
        })
    }
}

impl StormWire {
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
        Err(range) => {
            let (min, max) = (checker.positive_size(&range.min, "min")?, checker.positive_size(&range.max, "max")?);
            if min > max {
                return Err(Problem::new(range.min.position(), format!("`min` is {min}, above `max`, {max}")).help("exchange the two"));
            }
            Ok(StormSizes::LogUniform { min, max })
        }
    }
}

fn lifetime(wire: &LifetimeWire, checker: &Checker<'_>) -> Result<(u64, u64), Problem> {
    let min = checker.whole(&wire.min, "min", 1..=MAX_OPERATIONS)?;
    let max = checker.whole(&wire.max, "max", 1..=MAX_OPERATIONS)?;
    if min > max {
        return Err(Problem::new(wire.min.position(), format!("`min` is {min}, above `max`, {max}")).help("exchange the two"));
    }
    Ok((min, max))
}
