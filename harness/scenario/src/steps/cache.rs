//! `empty_cache`, `reset_peak_stats` and `set_memory_fraction`.

use std::fmt;

use harness_allocator::allocator::MemoryFraction;
use schemars::JsonSchema;
use serde::Deserialize;

use super::fields::StepFields;
use crate::checker::Checker;
use crate::metric::ReportKey;
use harness_language::error::Problem;
use harness_language::located::{Located, Position};
use harness_language::text::NameText;

#[derive(Clone, Debug, PartialEq)]
pub struct EmptyCache;

#[derive(Clone, Debug, PartialEq)]
pub struct ResetPeakStats;

#[derive(Clone, Debug, PartialEq)]
pub struct SetMemoryFraction {
    pub fraction: MemoryFraction,
}

impl fmt::Display for EmptyCache {
    fn fmt(&self, _: &mut fmt::Formatter<'_>) -> fmt::Result {
        Ok(())
    }
}

impl fmt::Display for ResetPeakStats {
    fn fmt(&self, _: &mut fmt::Formatter<'_>) -> fmt::Result {
        Ok(())
    }
}

impl fmt::Display for SetMemoryFraction {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.fraction.get())
    }
}

/// Releases all unused cached memory to the driver.
#[derive(Clone, Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
#[schemars(rename = "empty_cache")]
pub(crate) struct EmptyCacheWire {
    /// A name for the step's figures.
    id: Option<NameText>,
}

/// Resets every peak (`….peak`) to the current value.
#[derive(Clone, Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
#[schemars(rename = "reset_peak_stats")]
pub(crate) struct ResetPeakStatsWire {}

/// Limits the allocator to a share of `needs.memory`, from 0 to 1. 1 removes the limit. Memory that is reserved already stays reserved.
#[derive(Clone, Debug, Deserialize, JsonSchema)]
#[serde(transparent)]
#[schemars(rename = "set_memory_fraction")]
pub(crate) struct SetMemoryFractionWire(#[schemars(range(min = 0, max = 1))] Located<f64>);

impl StepFields for EmptyCacheWire {
    type Checked = EmptyCache;

    const EXAMPLE: &'static str = "\
- empty_cache
- empty_cache: { id: emptied }";

    const REPORTS: &'static [ReportKey] = &[ReportKey::FreedBytes, ReportKey::Time];

    fn bare() -> Option<Self> {
        Some(Self { id: None })
    }

    fn id(&self) -> Option<&NameText> {
        self.id.as_ref()
    }

    fn check(&self, _: Position, _: &mut Checker<'_>) -> Result<EmptyCache, Problem> {
        Ok(EmptyCache)
    }
}

impl StepFields for ResetPeakStatsWire {
    type Checked = ResetPeakStats;

    const EXAMPLE: &'static str = "- reset_peak_stats";

    fn bare() -> Option<Self> {
        Some(Self {})
    }

    fn check(&self, _: Position, _: &mut Checker<'_>) -> Result<ResetPeakStats, Problem> {
        Ok(ResetPeakStats)
    }
}

impl StepFields for SetMemoryFractionWire {
    type Checked = SetMemoryFraction;

    const EXAMPLE: &'static str = "- set_memory_fraction: 0.5";

    fn check(&self, _: Position, _: &mut Checker<'_>) -> Result<SetMemoryFraction, Problem> {
        let given = &self.0;
        MemoryFraction::new(given.value).map(|fraction| SetMemoryFraction { fraction }).ok_or_else(|| {
            Problem::new(given.position(), format!("`set_memory_fraction` cannot be {}", given.value))
                .help("write a fraction from 0 to 1, as in `0.5`")
        })
    }
}
