//! `pins`: lists the blocks that pin segments.

use std::fmt;

use schemars::JsonSchema;
use serde::Deserialize;

use super::fields::StepFields;
use crate::checker::Checker;
use crate::metric::{ReportKey, StepName};
use harness_language::error::Problem;
use harness_language::located::Position;
use harness_language::text::NameText;

#[derive(Clone, Debug, PartialEq)]
pub struct Pins {
    pub storm: StepName,
}

impl fmt::Display for Pins {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.storm.fmt(f)
    }
}

/// Lists the live blocks of a storm that keep each segment from being released to the driver. The report shows them as a table.
#[derive(Clone, Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
#[schemars(rename = "pins")]
pub(crate) struct PinsWire {
    /// The id of a storm with live blocks.
    storm: NameText,
    /// A name for the step's figures.
    id: Option<NameText>,
}

impl StepFields for PinsWire {
    type Checked = Pins;

    const EXAMPLE: &'static str = "\
- storm: { id: churn, operations: 1000, sizes: [1MiB, 3MiB], live: 64MiB, lifetime: { min: 1, max: 100 } }
- pins: { storm: churn, id: pinned }";

    const REPORTS: &'static [ReportKey] = &[
        ReportKey::PinnedSegments,
        ReportKey::PinningBlocks,
        ReportKey::PinningBytes,
        ReportKey::FreeInPinnedSegments,
        ReportKey::FreeSegments,
    ];

    fn id(&self) -> Option<&NameText> {
        self.id.as_ref()
    }

    fn check(&self, _: Position, checker: &mut Checker<'_>) -> Result<Pins, Problem> {
        Ok(Pins { storm: checker.live_storm(&self.storm)? })
    }
}
