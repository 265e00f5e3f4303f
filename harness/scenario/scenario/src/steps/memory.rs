use derive_more::Display;
use harness_allocator::allocator::MemoryFraction;
use harness_language::schema::JsonSchema;
use serde::Deserialize;

use super::{StepWire, fields::StepFields};
use crate::checker::Checker;
use crate::metric::{Amount, ReportKey};
use harness_language::text::{AmountText, NameText};
use harness_language::{error::Problem, located::Located};

/// A step that its name describes completely.
#[derive(Clone, Debug, PartialEq, Display)]
#[display("")]
pub struct NoOperand;

#[derive(Clone, Debug, PartialEq, Display)]
#[display("{}", fraction.get())]
pub struct SetMemoryFraction {
    pub fraction: MemoryFraction,
}

/// Releases all unused cached memory to the driver.
#[derive(Clone, Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, rename = "empty_cache")]
pub(crate) struct EmptyCacheWire {
    /// A name for the step's figures.
    id: Option<NameText>,
}

/// Resets every peak (`….peak`) to the current value.
#[derive(Clone, Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, rename = "reset_peak_stats")]
pub(crate) struct ResetPeakStatsWire {}

/// Limits the allocator to a share of `needs.memory`, from 0 to 1. 1 removes the limit. Memory that
/// is reserved already stays reserved.
#[derive(Clone, Debug, Deserialize, JsonSchema)]
#[serde(transparent, rename = "set_memory_fraction")]
pub(crate) struct SetMemoryFractionWire(#[schemars(range(min = 0, max = 1))] Located<f64>);

impl StepFields<NoOperand> for EmptyCacheWire {
    const EXAMPLE: &'static str = "\
- empty_cache
- empty_cache: { id: emptied }";

    const REPORTS: &'static [ReportKey] = &[ReportKey::FreedBytes, ReportKey::Time];

    fn bare() -> Option<Self> {
        Some(Self { id: None })
    }

    const ID: fn(&Self) -> Option<&NameText> = |wire| wire.id.as_ref();

    fn check(&self, _: &Located<StepWire>, _: &mut Checker<'_>) -> Result<NoOperand, Problem> {
        Ok(NoOperand)
    }
}

impl StepFields<NoOperand> for ResetPeakStatsWire {
    const EXAMPLE: &'static str = "- reset_peak_stats";

    fn bare() -> Option<Self> {
        Some(Self {})
    }

    fn check(&self, _: &Located<StepWire>, _: &mut Checker<'_>) -> Result<NoOperand, Problem> {
        Ok(NoOperand)
    }
}

impl StepFields<SetMemoryFraction> for SetMemoryFractionWire {
    const EXAMPLE: &'static str = "- set_memory_fraction: 0.5";

    fn check(
        &self,
        _: &Located<StepWire>,
        _: &mut Checker<'_>,
    ) -> Result<SetMemoryFraction, Problem> {
        let given = &self.0;
        MemoryFraction::new(given.value)
            .map(|fraction| SetMemoryFraction { fraction })
            .ok_or_else(|| {
                Problem::new(
                    given.at,
                    format!("`set_memory_fraction` cannot be {}", given.value),
                )
                .help("write a fraction from 0 to 1, as in `0.5`")
            })
    }
}

/// Sets how much memory of the device is in use by other processes, at most the free memory. `0B`
/// releases all of it.
#[derive(Clone, Debug, Deserialize, JsonSchema)]
#[serde(transparent, rename = "external_memory")]
pub(crate) struct ExternalMemoryWire(AmountText);

impl StepFields<Amount> for ExternalMemoryWire {
    const NOT_IN_PROCESSES: Option<&'static str> = Some("move it out of the process");

    const EXAMPLE: &'static str = "\
- external_memory: 200MiB
- external_memory: 0B";

    fn check(&self, _: &Located<StepWire>, checker: &mut Checker<'_>) -> Result<Amount, Problem> {
        checker.amount(&self.0)
    }
}
